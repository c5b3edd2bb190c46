"""Fields: places in prompts whose value may change without a re-prefill, and the book of them.

Each tensor parallel rank holds one book and feeds it the same calls in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvedit.errors import BadRequest, Conflict, NotFound, QuotaExceeded
from kvedit.fields.declaration import (
    VALUE,
    Declaration,
    Terms,
    filled,
    fold,
    marker_of,
    text_problem,
)
from kvedit.namespace import SHARED, may_meet
from kvedit.reason import Reason

MAX_FIELDS = 32  # per namespace
Key = tuple[str, str]  # (namespace, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field(Terms):
    """One declared field. ``number`` names it in ledgers and is never used again."""

    number: int  # from 1
    namespace: str  # a namespace tag, or SHARED

    @property
    def prefix(self) -> str:
        """The text right before the value; at least 3 visible characters."""
        return self.pattern.partition(VALUE)[0]

    @property
    def suffix(self) -> str:
        """The text that ends the value; empty: the end of the line does."""
        return self.pattern.partition(VALUE)[2]

    @property
    def marker(self) -> str:
        """The folded literal text by which a line of this field is recognised."""
        marker = marker_of(self.template, self.name, self.pattern)
        assert marker is not None, "a declaration without a marker is refused"
        return marker

    def line(self, value: str) -> str:
        """The erratum line that says ``value``; no line break in it or at its end."""
        before, behind = filled(self.template, self.name, self.pattern)
        return before + value + behind

    def says(self, declaration: Declaration) -> bool:
        """Whether ``declaration`` declares this very field."""
        return self == _field(declaration, self.number, self.namespace)

    def overlaps(self, other: Field) -> bool:
        """Whether wherever one of the two matches, the other may match as well."""
        mine, theirs = self.prefix.strip(), other.prefix.strip()
        return self.where.may_meet(other.where) and (mine in theirs or theirs in mine)


class FieldBook:
    """The fields of one server."""

    def __init__(self) -> None:
        self.version = 0  # changes with the set of fields
        self._fields: dict[Key, Field] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._fields)

    # ---- reading

    def all(self) -> tuple[Field, ...]:
        """In order of number."""
        return tuple(sorted(self._fields.values(), key=lambda f: f.number))

    def get(self, name: str, namespace: str) -> Field:
        """The namespace's own field of that name, else the shared one. Raises NotFound."""
        for owner in (namespace, SHARED):
            field = self._fields.get((owner, name))
            if field is not None:
                return field
        raise _unknown(name)

    def listed(self, namespace: str) -> tuple[Field, ...]:
        """The namespace's own fields and the shared ones, shadowed or not, by number."""
        return tuple(f for f in self.all() if f.namespace in (namespace, SHARED))

    def visible(self, namespace: str) -> tuple[Field, ...]:
        """What prompts of ``namespace`` are searched for: its own fields, then the shared ones
        whose name it does not have itself; each by number."""
        listed = self.listed(namespace)
        own = [f for f in listed if f.namespace == namespace]
        names = {f.name for f in own}
        shared = [f for f in listed if f.namespace == SHARED and f.name not in names]
        return (*own, *shared) if namespace != SHARED else tuple(own)

    # ---- changing

    def declare(
        self, declaration: Declaration, namespace: str, special_texts: Collection[str] = ()
    ) -> tuple[Field, bool]:
        """The field and whether it is new; the same declaration again changes nothing.

        ``special_texts``: texts of the model's control tokens. Raises Conflict (other content
        under the name and no ``replace``; a field that would match at the same place),
        QuotaExceeded, BadRequest (a base or template that may not enter a prompt).
        """
        current, field = self.preview(declaration, namespace, special_texts)
        if current is field:
            return field, False
        self._last_number = field.number
        self._fields[namespace, field.name] = field
        self.version += 1
        return field, True

    def preview(
        self, declaration: Declaration, namespace: str, special_texts: Collection[str] = ()
    ) -> tuple[Field | None, Field]:
        """(the field that has the name, the field that ``declare`` would leave); the errors of
        ``declare``. Changes nothing."""
        current = self._fields.get((namespace, declaration.name))
        if current is not None and current.says(declaration):
            return current, current
        if current is not None and not declaration.replace:
            raise Conflict(
                f"kvedit: field {current.name!r}: expected the declared content or replace=true, "
                "got other content"
            )
        if current is None and self._num_of(namespace) >= MAX_FIELDS:
            raise QuotaExceeded(
                f"kvedit: fields: expected at most {MAX_FIELDS} in a namespace, got one more"
            )
        field = _field(declaration, self._last_number + 1, namespace)
        rivals = self._rivals(field)
        self._check_overlaps(field, rivals)
        _check_texts(field, rivals, special_texts)
        return current, field

    def remove(self, name: str, namespace: str) -> Field:
        """Forget the field of exactly this name and namespace. Raises NotFound."""
        field = self._fields.pop((namespace, name), None)
        if field is None:
            raise _unknown(name)
        self.version += 1
        return field

    # ---- inside

    def _num_of(self, namespace: str) -> int:
        return sum(owner == namespace for owner, _ in self._fields)

    def _rivals(self, field: Field) -> list[Field]:
        """Fields that some request sees together with this one."""
        return [f for f in self.all() if f.name != field.name and share_requests(f, field)]

    @staticmethod
    def _check_overlaps(field: Field, rivals: Sequence[Field]) -> None:
        names = [repr(rival.name) for rival in rivals if field.overlaps(rival)]
        if names:
            raise Conflict(
                f"kvedit: field {field.name!r}: expected a pattern that no other field matches "
                f"at the same place, got an overlap with {', '.join(names)}"
            )


def value_problem(
    value: str, fields: Sequence[Field], special_texts: Collection[str]
) -> Reason | None:
    """Why ``value`` may not enter a prompt's line, or None.

    VALUE_EMPTY, VALUE_TOO_LONG (characters; tokens are counted where it is located) or
    VALUE_MARKUP: a line break or control character, the text of a control token, the text by
    which a line of one of ``fields`` is recognised, or the text before the value of one.
    """
    problem = text_problem(value)
    if problem is not None:
        return problem
    folded = fold(value)
    spelled = (value, *(field.line(value) for field in fields))  # merged with what stands around it
    forged = (
        any(text and text in line for text in special_texts for line in spelled)
        or any(field.marker in folded for field in fields)
        or any(fold(field.prefix) in folded for field in fields)
    )
    return Reason.VALUE_MARKUP if forged else None


def share_requests(one: Field, other: Field) -> bool:
    """Whether a request's namespace can see both."""
    return may_meet(one.namespace, other.namespace)


def _check_texts(field: Field, rivals: Sequence[Field], special_texts: Collection[str]) -> None:
    """What is put into prompts must not pass for anything else. Raises BadRequest."""
    problems = []
    special = [text for text in special_texts if text and text in field.line("")]
    if special:
        expected = "no text of a control token"
        problems.append(f"kvedit: template: expected {expected}, got {sorted(special)[0]!r}")
    if field.base is not None:
        problem = value_problem(field.base, [field, *rivals], special_texts)
        if problem is not None:
            problems.append(f"kvedit: base: expected a legal value, got {problem}")
    if problems:
        raise BadRequest("; ".join(problems))


def _field(declaration: Declaration, number: int, namespace: str) -> Field:
    terms = {term.name: getattr(declaration, term.name) for term in dataclasses.fields(Terms)}
    return Field(number=number, namespace=namespace, **terms)


def _unknown(name: str) -> NotFound:
    return NotFound(f"kvedit: field {name[:200]!r}: expected a declared name, got an unknown one")
