"""The JSON that clients send: which keys it has and of what type, declared once.

The parsers (``options``, ``kvedit.fields.declaration_parser``, the server's registrations) take
their keys from here (``options`` tells the first problem, the others all of them at once);
``/openapi.json`` shows these declarations.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvedit.request.strategy import Strategy

Mode = Literal["auto", "off", "require"]
Tokens = Annotated[int, Meta(ge=0)]


class NamespaceBody(msgspec.Struct, kw_only=True):
    """The cache salt and the extra key of the requests that shall find it."""

    cache_salt: str | None = None
    extra_key: str | None = None


class SkillBody(msgspec.Struct, kw_only=True):
    """Exactly one of ``text`` and ``input_ids``. namespace: a salt alone may be a string.
    seam: tokens recomputed at the front of a splice; null: the server's default. memory: the text
    may hold declared fields. replace: another content under the name is retired."""

    name: str
    text: str | None = None
    input_ids: list[int] | None = None
    namespace: NamespaceBody | str | None = None
    shared: bool = False
    pin: bool = False
    seam: Tokens | None = None
    replace: bool = False
    memory: bool = False


class WhereBody(msgspec.Struct, kw_only=True):
    """The ``occurrence``-th message of ``role``; or, for raw text, the first ``within`` tokens."""

    role: Literal["system", "user", "tool"] | None = None
    occurrence: Annotated[int, Meta(ge=1)] | None = None
    within: Annotated[int, Meta(ge=1)] | None = None


class FieldBody(msgspec.Struct, kw_only=True):
    """pattern: one line with one {value}. base: a value that prompts are compiled with. anchor:
    lines go directly before its last occurrence. cross_request: a value seen in one conversation
    may be the base of another."""

    name: str
    pattern: str
    strategy: Strategy = "auto"
    base: str | None = None
    where: WhereBody | None = None
    anchor: str | None = None
    template: str | None = None
    cross_request: bool = False
    namespace: NamespaceBody | str | None = None
    shared: bool = False
    replace: bool = False


class OptionsBody(msgspec.Struct, kw_only=True):
    """``custom_params.kvedit`` of a generate request. skills: only these; null: every skill that
    the prompt contains. exact: nothing composed, nothing rewritten. report: the last event of a
    stream carries the report. conversation: its name, or true for a token that proves it. repair,
    topk: tokens behind an edited field that are computed again."""

    conversation: str | Literal[True] | None = None
    edits: Mode = "auto"
    exact: bool = False
    repair: Tokens | None = None
    report: bool = False
    seam: Tokens | None = None
    skills: list[str] | None = None
    splice: Mode = "auto"
    strategy: Strategy | None = None
    topk: Tokens | None = None


def keys_of(body: type[msgspec.Struct]) -> tuple[str, ...]:
    """In the order they are declared."""
    return body.__struct_fields__
