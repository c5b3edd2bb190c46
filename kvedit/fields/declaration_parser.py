"""Reading a declaration: parsed strictly, refused with all reasons at once."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from kvedit.checks import check_name
from kvedit.errors import BadRequest
from kvedit.fields.declaration import (
    DEFAULT_TEMPLATE,
    LABEL,
    MAX_ANCHOR_CHARS,
    MAX_PATTERN_CHARS,
    MAX_TEMPLATE_CHARS,
    MAX_VALUE_CHARS,
    MIN_MARKER_CHARS,
    MIN_PREFIX_CHARS,
    NAME,
    ROLES,
    VALUE,
    Declaration,
    Where,
    is_one_line,
    marker_of,
    num_visible,
    text_problem,
)
from kvedit.namespace import parse_namespace
from kvedit.request.bodies import FieldBody, keys_of
from kvedit.request.strategy import STRATEGIES, Strategy

_LARGEST = 2**31  # keeps every later sum of token counts in int64
_KEYS = keys_of(FieldBody)


def parse_declaration(body: object) -> Declaration:
    """A declaration from the JSON of a request. Raises BadRequest with the problems of all keys,
    each naming its own."""
    if not isinstance(body, Mapping):
        raise BadRequest(f"kvedit: body: expected an object, got {_kind(body)}")
    parser = _Parser(body)
    declaration = parser.declaration()
    if parser.problems:
        raise BadRequest("; ".join(parser.problems))
    return declaration


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
