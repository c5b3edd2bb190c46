"""What an answer says of its prompts: ``metadata.kvedit``, ``meta_info.kvedit``, ``sglext.kvedit``
and GET /kvedit/requests/{id}."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from kvedit.reason import Reason


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of the prompt. exact + composed + derived + computed is all of them; copied is part
    of composed, repaired and erratum are parts of computed."""

    exact: int
    composed: int
    derived: int
    computed: int
    repaired: int
    erratum: int
    copied: int


class SpanReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens [start, stop), composed from ``skill`` shifted by ``delta`` positions behind
    ``seam`` recomputed ones."""

    skill: str
    start: int
    stop: int
    seam: int
    delta: int


class RefusalReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a skill, or a part of it, was served plainly. skill: "" for the whole request. index,
    position: where the prompt leaves the skill's text, as tokens of the skill and of the prompt.
    limit: what stood in the way, the price in tokens or the number of boundaries."""

    skill: str
    reason: Reason
    seam: int | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET
    index: int | UnsetType = UNSET
    position: int | UnsetType = UNSET
    limit: int | UnsetType = UNSET


class LineReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of prompt tokens [start, stop) that tells a field's current value. text: only in the
    answer itself."""

    field: str
    start: int
    stop: int
    text: str | UnsetType = UNSET


class UneditedReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a declared field was not looked for, or not read, in this prompt."""

    field: str
    reason: Reason


class PromptReport(Counts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one prompt. From ``client_prompt_tokens`` on: where fields are declared. base: what was
    served, ``sent`` as it came. conversation: the token that was asked for, in its answer only."""

    spans: list[SpanReport]
    refused: list[RefusalReport]
    client_prompt_tokens: int | UnsetType = UNSET
    base: str | UnsetType = UNSET
    as_sent_because: Reason | None | UnsetType = UNSET
    as_sent_hint: str | None | UnsetType = UNSET
    errata: list[LineReport] | UnsetType = UNSET
    edited: list[str] | UnsetType = UNSET
    unedited: list[UneditedReport] | UnsetType = UNSET
    conversation: str | UnsetType = UNSET


class BatchReport(Counts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of several prompts in one call: counts added up, and each prompt's own."""

    prompts: list[PromptReport]
