"""What an administrator says when declaring a field: parsed strictly, refused with all reasons."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvedit.checks import check_name
from kvedit.errors import BadRequest
from kvedit.namespace import parse_namespace
from kvedit.request.strategy import STRATEGIES, Strategy

ROLES = ("system", "user", "tool")
VALUE, NAME, LABEL = "{value}", "{name}", "{label}"
# Says it as the prompt does. A sentence about overriding is what small models then talk about; a
# larger one may do better with it.
DEFAULT_TEMPLATE = "[update, current value] {label}{value}"
MAX_PATTERN_CHARS = 500
MAX_TEMPLATE_CHARS = 500
MAX_ANCHOR_CHARS = 200
MAX_VALUE_CHARS = 4096
MIN_PREFIX_CHARS = 3  # visible ones; a shorter text stands everywhere in a prompt
MIN_MARKER_CHARS = 8  # visible ones; a shorter marker would forbid innocent values
_LARGEST = 2**31  # keeps every later sum of token counts in int64
_KEYS = (
    "name",
    "pattern",
    "strategy",
    "base",
    "where",
    "anchor",
    "template",
    "cross_request",
    "namespace",
    "shared",
    "replace",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The region of a prompt in which a field is looked for.

    Content of the ``occurrence``-th (from 1) message of ``role``; or, for raw text, ``role`` None
    and the first ``within`` tokens of the prompt.
    """

    role: str | None = "system"
    occurrence: int = 1
    within: int | None = None

    def to_json(self) -> dict[str, Any]:
        if self.role is None:
            return {"within": self.within}
        return {"role": self.role, "occurrence": self.occurrence}

    def may_meet(self, other: Where) -> bool:
        """Whether some prompt has a text that lies in both regions."""
        if self.role is None or other.role is None:
            return True
        return (self.role, self.occurrence) == (other.role, other.occurrence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A parsed POST /kvedit/fields. ``anchor`` None: the host's chat form says where."""

    name: str
    pattern: str
    strategy: Strategy
    base: str | None
    where: Where
    anchor: str | None
    template: str
    cross_request: bool
    cache_salt: str | None
    extra_key: str | None
    shared: bool
    replace: bool

    def to_json(self) -> dict[str, Any]:
        """The object that ``parse_declaration`` reads back, without the namespace."""
        return {
            "name": self.name,
            "pattern": self.pattern,
            "strategy": self.strategy,
            "base": self.base,
            "where": self.where.to_json(),
            "anchor": self.anchor,
            "template": self.template,
            "cross_request": self.cross_request,
            "shared": self.shared,
            "replace": self.replace,
        }


def parse_declaration(body: object) -> Declaration:
    """Raises BadRequest with every problem, each naming its key."""
    if not isinstance(body, Mapping):
        raise BadRequest(f"kvedit: body: expected an object, got {_kind(body)}")
    parser = _Parser(body)
    declaration = parser.declaration()
    if parser.problems:
        raise BadRequest("; ".join(parser.problems))
    return declaration


def text_problem(value: str) -> str | None:
    """Why a text cannot be the value of any field: "value_empty", "value_too_long" or
    "value_markup" (a line break, another control character, no Unicode)."""
    if not value.strip():
        return "value_empty"
    if len(value) > MAX_VALUE_CHARS:
        return "value_too_long"
    return None if is_one_line(value) else "value_markup"


def is_one_line(text: str) -> bool:
    """No control characters (line breaks are some), line or paragraph separators, surrogates."""
    return not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text)


def filled(template: str, name: str, pattern: str) -> tuple[str, str]:
    """The text of a line before and behind the value; {label} is the pattern's text before its
    own value, and {label}{value} the whole pattern."""
    head, _, tail = template.partition(VALUE)  # split first: a name may hold "{value}"
    label, _, unit = pattern.partition(VALUE)
    if head.endswith(LABEL):
        tail = unit + tail
    texts = [text.replace(LABEL, label).replace(NAME, name) for text in (head, tail)]
    return texts[0], texts[1]


def marker_of(template: str, name: str, pattern: str) -> str | None:
    """The literal text by which a line of this template is recognised, folded; None if it has no
    part of at least ``MIN_MARKER_CHARS`` visible characters to tell it by.

    Its beginning; with name and label filled in when that is too short; else what follows the
    value.
    """
    beginning = template.partition(VALUE)[0].partition(NAME)[0].partition(LABEL)[0]
    for literal in (beginning, *filled(template, name, pattern)):
        folded = fold(literal)
        if num_visible(folded) >= MIN_MARKER_CHARS:
            return folded
    return None


def fold(text: str) -> str:
    """For comparing texts that look alike: compatibility forms, case, white space and characters
    without width make no difference."""
    shown = (c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return " ".join("".join(shown).casefold().split())


def num_visible(text: str) -> int:
    return sum(not char.isspace() for char in text)


class _Parser:
    """Reads one key at a time and goes on behind a problem, so that all are told at once."""

    def __init__(self, body: Mapping[Any, Any]) -> None:
        self._body = body
        self.problems = [
            f"kvedit: {str(key)[:40]}: expected one of {', '.join(_KEYS)}, got an unknown field"
            for key in body
            if key not in _KEYS
        ]

    def declaration(self) -> Declaration:
        name, pattern = self._name(), self._pattern()
        cache_salt, extra_key, bad_namespace = parse_namespace(self._body.get("namespace"))
        self.problems += bad_namespace
        shared = self._flag("shared")
        if shared and self._body.get("namespace") is not None:
            self._expect("namespace", "null for a shared field", "a namespace")
        return Declaration(
            name=name,
            pattern=pattern,
            strategy=self._strategy(),
            base=self._base(pattern),
            where=self._where(),
            anchor=self._anchor(),
            template=self._template(name, pattern),
            cross_request=self._flag("cross_request"),
            cache_salt=cache_salt,
            extra_key=extra_key,
            shared=shared,
            replace=self._flag("replace"),
        )

    def _name(self) -> str:
        try:
            return check_name(self._body.get("name"))
        except BadRequest as error:
            self.problems.append(str(error))
            return ""

    def _pattern(self) -> str:
        pattern = self._text("pattern", MAX_PATTERN_CHARS)
        if pattern is None:
            if self._body.get("pattern") is None:
                self._expect("pattern", f"a text with one {VALUE}", "nothing")
            return ""
        if pattern.count(VALUE) != 1:
            self._expect("pattern", f"exactly one {VALUE}", str(pattern.count(VALUE)))
        if not is_one_line(pattern) or pattern != pattern.strip():
            self._expect("pattern", "one line without spaces at its ends", repr(pattern[:40]))
        prefix = pattern.partition(VALUE)[0]
        if num_visible(prefix) < MIN_PREFIX_CHARS:
            expected = f"at least {MIN_PREFIX_CHARS} visible characters before {VALUE}"
            self._expect("pattern", expected, repr(prefix))
        return pattern

    def _strategy(self) -> Strategy:
        value = self._body.get("strategy")
        if value is None:
            return "auto"
        for strategy in STRATEGIES:
            if strategy == value:
                return strategy
        self._expect("strategy", "one of " + ", ".join(STRATEGIES), _short(value))
        return "auto"

    def _base(self, pattern: str) -> str | None:
        base = self._body.get("base")
        if base is None:
            return None
        if not isinstance(base, str):
            self._expect("base", "a string", _kind(base))
            return None
        problem = text_problem(base)
        if problem is not None:
            self._expect("base", f"1 to {MAX_VALUE_CHARS} characters on one line", problem)
        elif base != base.strip():
            self._expect("base", "no spaces at its ends", repr(base[:40]))
        suffix = pattern.partition(VALUE)[2]
        if suffix and suffix in base:
            self._expect("base", f"no {suffix[:40]!r}, where the value ends", repr(base[:40]))
        return base

    def _where(self) -> Where:
        where = self._body.get("where")
        if where is None:
            return Where()
        if not isinstance(where, Mapping):
            self._expect("where", "an object", _kind(where))
            return Where()
        for key in where:
            if key not in ("role", "occurrence", "within"):
                self._expect(f"where.{str(key)[:40]}", "role, occurrence or within", "another key")
        if where.get("within") is not None:
            if where.get("role") is not None or where.get("occurrence") is not None:
                self._expect("where", "either within or role and occurrence", "both")
            return Where(role=None, within=self._count("where.within", where["within"]))
        role = where.get("role")
        if role is not None and role not in ROLES:
            self._expect("where.role", "one of " + ", ".join(ROLES), _short(role))
        occurrence = where.get("occurrence")
        return Where(
            role="system" if role is None else role,
            occurrence=1 if occurrence is None else self._count("where.occurrence", occurrence),
        )

    def _anchor(self) -> str | None:
        return self._text("anchor", MAX_ANCHOR_CHARS)

    def _template(self, name: str, pattern: str) -> str:
        template = self._text("template", MAX_TEMPLATE_CHARS)
        if template is None:
            return DEFAULT_TEMPLATE
        if not is_one_line(template) or template != template.strip():
            self._expect("template", "one line without spaces at its ends", repr(template[:40]))
        if template.count(VALUE) != 1:
            self._expect("template", f"exactly one {VALUE}", str(template.count(VALUE)))
        for placeholder in (NAME, LABEL):
            if template.count(placeholder) > 1:
                count = str(template.count(placeholder))
                self._expect("template", f"at most one {placeholder}", count)
        if marker_of(template, name, pattern) is None:
            expected = f"at least {MIN_MARKER_CHARS} visible characters on one side of {VALUE}"
            self._expect("template", expected, repr(template[:40]))
        return template

    def _text(self, key: str, max_chars: int) -> str | None:
        value = self._body.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            self._expect(key, "a string", _kind(value))
            return None
        if not 1 <= len(value) <= max_chars:
            self._expect(key, f"1 to {max_chars} characters", str(len(value)))
            return None
        if any(unicodedata.category(char) == "Cs" for char in value):
            self._expect(key, "valid Unicode", "a lone surrogate")
            return None
        return value

    def _count(self, key: str, value: object) -> int:
        if type(value) is int and 1 <= value < _LARGEST:
            return value
        self._expect(key, "an integer >= 1", _short(value))
        return 1

    def _flag(self, key: str) -> bool:
        value = self._body.get(key)
        if value is not None and not isinstance(value, bool):
            self._expect(key, "a boolean", _kind(value))
        return value is True

    def _expect(self, key: str, expected: str, got: str) -> None:
        self.problems.append(f"kvedit: {key}: expected {expected}, got {got}")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge integer"
    return repr(value)[:40] if isinstance(value, (str, int, float)) else _kind(value)
