"""What a client may ask for in ``custom_params["kvedit"]``, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, cast

from kvedit.checks import MAX_NAME_CHARS
from kvedit.declaration import STRATEGIES, Strategy
from kvedit.errors import BadRequest

Splice = Literal["auto", "off", "require"]
Edits = Literal["auto", "off", "require"]

PATH = "custom_params.kvedit"
MAX_NAMES = 256
MAX_CONVERSATION_CHARS = 128
MAX_RECOMPUTED = 4096  # tokens
_MODES = ("auto", "off", "require")
_KEYS = ("conversation", "edits", "repair", "seam", "skills", "splice", "strategy", "topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    splice: Splice = "auto"
    skills: tuple[str, ...] | None = None  # only these; None: every skill the prompt contains
    seam: int | None = None  # tokens; None: the skill's, else the server's
    edits: Edits = "auto"  # whether declared fields are looked for
    strategy: Strategy | None = None  # for every field; None: each field's own
    conversation: str | None = None  # names the conversation; None: its text does
    repair: int | None = None  # tokens recomputed behind an edited field
    topk: int | None = None  # positions behind an edited field that are run again

    def to_json(self) -> str:
        """Canonical: equal options give equal strings, and ``parse_options`` reads them back."""
        fields = {key: getattr(self, key) for key in _KEYS}
        return json.dumps(fields, separators=(",", ":"))


DEFAULT = Options()


def parse_options(value: object) -> Options:
    """Options from an object, a JSON string of one, or None (the default).

    Raises BadRequest that names the path of the first bad key.
    """
    if value is None:
        return DEFAULT
    if isinstance(value, str):
        value = _load(value)
    if not isinstance(value, Mapping):
        _refuse("", "an object", value)
    for key in value:
        if key not in _KEYS:
            _refuse("", f"only the keys {', '.join(_KEYS)}", key)
    splice = cast(Splice, _mode(".splice", value.get("splice", "auto")))
    skills = _skills(value.get("skills"))
    if splice == "require" and not skills:
        raise BadRequest(
            f'{PATH}.skills: expected at least one name with splice "require", got nothing'
        )
    return Options(
        splice=splice,
        skills=skills,
        seam=_seam(value.get("seam")),
        edits=cast(Edits, _mode(".edits", value.get("edits", "auto"))),
        strategy=_strategy(value.get("strategy")),
        conversation=_conversation(value.get("conversation")),
        repair=_recomputed(".repair", value.get("repair")),
        topk=_recomputed(".topk", value.get("topk")),
    )


def _load(text: str) -> object:
    try:
        return cast(object, json.loads(text))
    except (ValueError, RecursionError):  # too deep a nesting is the caller's mistake as well
        _refuse("", "an object or JSON text of one", text)


def _mode(where: str, value: object) -> str:
    if not isinstance(value, str) or value not in _MODES:
        _refuse(where, "one of " + ", ".join(_MODES), value)
    return value


def _skills(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        _refuse(".skills", "a list of names", value)
    if len(value) > MAX_NAMES:
        _refuse(".skills", f"at most {MAX_NAMES} names", len(value))
    for i, name in enumerate(value):
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
            _refuse(f".skills[{i}]", f"a name of 1 to {MAX_NAME_CHARS} characters", name)
    return tuple(value)


def _seam(value: object) -> int | None:
    if value is None:
        return None
    # a bound keeps every later sum of token counts in int64
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        _refuse(".seam", "an integer >= 0", value)
    return value


def _strategy(value: object) -> Strategy | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in STRATEGIES:
        _refuse(".strategy", "one of " + ", ".join(STRATEGIES), value)
    return value


def _conversation(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CONVERSATION_CHARS:
        _refuse(".conversation", f"a string of 1 to {MAX_CONVERSATION_CHARS} characters", value)
    if any("\ud800" <= char <= "\udfff" for char in value):
        _refuse(".conversation", "valid Unicode", "a lone surrogate")
    return value


def _recomputed(where: str, value: object) -> int | None:
    if value is None:
        return None
    in_range = type(value) is int and 0 <= value <= MAX_RECOMPUTED
    if not in_range:
        _refuse(where, f"an integer in [0, {MAX_RECOMPUTED}]", value)
    return cast(int, value)


def _refuse(where: str, expected: str, got: object) -> NoReturn:
    raise BadRequest(f"{PATH}{where}: expected {expected}, got {_short(got)}")


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge integer"
    text = json.dumps(value) if isinstance(value, (str, int, float)) else type(value).__name__
    return text if len(text) <= 60 else text[:60] + "..."
