"""What a client may ask for in ``custom_params["kvedit"]``, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from kvedit.checks import MAX_NAME_CHARS
from kvedit.errors import BadRequest
from kvedit.namespace import is_unicode
from kvedit.request.bodies import OptionsBody, keys_of
from kvedit.request.strategy import STRATEGIES, Strategy

Splice = Literal["auto", "off", "require"]
Edits = Literal["auto", "off", "require"]

PATH = "custom_params.kvedit"
MAX_NAMES = 256
MAX_CONVERSATION_CHARS = 128
MAX_RECOMPUTED = 4096  # tokens
_MODES = ("auto", "off", "require")
_KEYS = keys_of(OptionsBody)


_SEALED = "sealed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """What only the HTTP process knows of a request. A client that spells it gets a 400.

    proof         digest of the token that proves the conversation; None: no token was sent
    is_issued     the token was made for this very request: it proves nothing earlier
    wants_nothing the client itself asked for zero new tokens (the host's n > 1 warmer does too)
    samples       names the samples of one prompt that all want nothing: the first to come is the
                  host's warmer
    unasked       the client sent no options: while nothing is registered, nothing is reported
    """

    proof: str | None = None
    is_issued: bool = False
    wants_nothing: bool = False
    samples: str | None = None
    unasked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A request's options, parsed; the defaults are those of a request that says nothing."""

    splice: Splice = "auto"
    skills: tuple[str, ...] | None = None  # only these; None: every skill the prompt contains
    seam: int | None = None  # tokens; None: the skill's, else the server's
    edits: Edits = "auto"  # whether declared fields are looked for
    strategy: Strategy | None = None  # for every field; None: each field's own
    # a name; True asks for a token that proves the conversation; None: its text tells it
    conversation: str | Literal[True] | None = None
    repair: int | None = None  # tokens recomputed behind an edited field
    topk: int | None = None  # positions behind an edited field that are run again
    exact: bool = False  # nothing composed, nothing rewritten: the prompt as sent, exact KV only
    report: bool = False  # the last event of a stream carries the report
    sealed: Sealed = Sealed()  # what no client can say

    def to_json(self) -> str:
        """What the HTTP process sends to the scheduler. Canonical: equal options give equal
        strings, and ``from_wire`` reads them back."""
        fields = {key: getattr(self, key) for key in _KEYS}
        fields[_SEALED] = dataclasses.asdict(self.sealed)
        return json.dumps(fields, separators=(",", ":"))


DEFAULT = Options()


def from_wire(value: object) -> Options:
    """Options as ``to_json`` wrote them, or None (the default). Raises BadRequest.

    For the scheduler only: every request passes the HTTP process, which reads what the client
    said with ``parse_options`` and writes it anew.
    """
    if isinstance(value, str):
        value = _load(value)
    if not isinstance(value, Mapping) or _SEALED not in value:
        return parse_options(value)
    said = {key: item for key, item in value.items() if key != _SEALED}
    sealed = Sealed(**cast(dict[str, Any], value[_SEALED]))
    return dataclasses.replace(parse_options(said), sealed=sealed)


def parse_options(value: object) -> Options:
    """Options from an object, a JSON string of one, or None (the default).

    Raises BadRequest that names the path of the first bad key.
    """
    if value is None:
        return DEFAULT
    if isinstance(value, str):
        value = _load(value)
    if not isinstance(value, Mapping):
        if isinstance(value, str):
            _refuse_untold("", "an object", "JSON text of a string")
        _refuse("", "an object", value)
    for key in value:
        if key not in _KEYS:
            _refuse_untold("", f"only the keys {', '.join(_KEYS)}", _key(key))
    splice = cast(Splice, _mode(".splice", value.get("splice", "auto")))
    edits = cast(Edits, _mode(".edits", value.get("edits", "auto")))
    exact = _flag(".exact", value.get("exact"))
    if exact and "require" in (splice, edits):
        _refuse(".exact", 'false with "require"', True)
    skills = _skills(value.get("skills"))
    if splice == "require" and not skills:
        raise BadRequest(
            f'{PATH}.skills: expected at least one name with splice "require", got nothing'
        )
    return Options(
        splice=splice,
        skills=skills,
        seam=_seam(value.get("seam")),
        edits=edits,
        strategy=_strategy(value.get("strategy")),
        conversation=_conversation(value.get("conversation")),
        repair=_recomputed(".repair", value.get("repair")),
        topk=_recomputed(".topk", value.get("topk")),
        exact=exact,
        report=_flag(".report", value.get("report")),
    )


def _load(text: str) -> object:
    try:
        return cast(object, json.loads(text))
    except (ValueError, RecursionError):  # too deep a nesting is the caller's mistake as well
        _refuse_untold("", "an object or JSON text of one", "text that is no JSON")


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
        if not is_unicode(name):
            _refuse(f".skills[{i}]", "valid Unicode", "a lone surrogate")
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


def _flag(where: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        _refuse(where, "true or false", value)
    return bool(value)


def _conversation(value: object) -> str | Literal[True] | None:
    if value is None or value is True:
        return value
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CONVERSATION_CHARS:
        expected = f"true or a string of 1 to {MAX_CONVERSATION_CHARS} characters"
        got = f"one of {len(value)}" if isinstance(value, str) else type(value).__name__
        _refuse_untold(".conversation", expected, got)
    if not is_unicode(value):
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


def _refuse_untold(where: str, expected: str, got: str) -> NoReturn:
    """Where a token may stand in what was sent: errors are logged, so ``got`` only describes it."""
    raise BadRequest(f"{PATH}{where}: expected {expected}, got {got}")


def _key(key: object) -> str:
    """A misspelt key is told, but for one that may be a token."""
    is_told = not isinstance(key, str) or (key.isidentifier() and len(key) <= 20)
    return _short(key) if is_told else "another one"


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge integer"
    text = json.dumps(value) if isinstance(value, (str, int, float)) else type(value).__name__
    return text if len(text) <= 60 else text[:60] + "..."
