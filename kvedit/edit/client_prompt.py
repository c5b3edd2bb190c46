"""A client's prompt as editing sees it: where the fields stand, and where a line would go."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvedit.edit.locate import Located, locate
from kvedit.edit.masked import Masked
from kvedit.edit.served_path import Window
from kvedit.fields.book import Field, value_problem
from kvedit.reason import Reason
from kvedit.text.chat import ChatForm, find_anchor, literal_anchor, raw_anchor
from kvedit.text.tokens import Tokens

# of fields that the prompt does not have
ABSENT = (Reason.NOT_IN_PROMPT, Reason.ROLE_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class Unedited:
    """Why a field takes no part."""

    field: str
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class ClientPrompt:
    """ids: as the client sent them. anchor: where lines go; no window ends behind it.

    own_line: the line follows a line break of the text (raw text), else it needs its own in front
    """

    ids: array[int]
    anchor: int
    own_line: bool
    fields: dict[int, Field]
    located: dict[int, Located]
    windows: tuple[Window, ...]
    unedited: tuple[Unedited, ...]

    @cached_property
    def masked(self) -> Masked:
        """``ids`` with each window as one marker; made once."""
        return Masked(self.ids, self.windows)

    @property
    def refused(self) -> tuple[Unedited, ...]:
        """What the client should know: fields in its prompt that take no part, or why it has
        none at all."""
        present = tuple(item for item in self.unedited if item.reason not in ABSENT)
        return present if self.windows or present else self.unedited

    @property
    def is_public(self) -> bool:
        """Whether every value in it may be shown to anybody in the namespace."""
        return all(field.cross_request for field in self.fields.values())


def read_prompt(
    ids: array[int], fields: Sequence[Field], form: ChatForm | None, tokens: Tokens
) -> ClientPrompt:
    """Locate ``fields``; those that cannot be edited are listed with the reason."""
    unedited: list[Unedited] = []
    found: list[Located] = []
    for field in fields:
        located = locate(field, ids, form, tokens)
        problem = located if isinstance(located, Reason) else _problem(located, fields, tokens)
        if problem is not None:
            unedited.append(Unedited(field.name, problem))
        elif isinstance(located, Located):
            found.append(located)
    found.sort(key=lambda located: located.start)
    _drop(found, unedited, _overlapping(found), Reason.OVERLAPPING)
    anchor, own_line = _anchor(ids, found, form, tokens)
    if anchor is None:
        _drop(found, unedited, set(range(len(found))), Reason.ANCHOR_NOT_FOUND)
    else:
        specs = [located.field.anchor == found[0].field.anchor for located in found]
        _drop(found, unedited, {i for i, same in enumerate(specs) if not same}, Reason.OTHER_ANCHOR)
        behind = {i for i, located in enumerate(found) if located.stop > anchor}
        _drop(found, unedited, behind, Reason.BEHIND_ANCHOR)
    return ClientPrompt(
        ids=ids,
        anchor=len(ids) if anchor is None else anchor,
        own_line=own_line,
        fields={located.field.number: located.field for located in found},
        located={located.field.number: located for located in found},
        windows=tuple(_window(located) for located in found),
        unedited=tuple(unedited),
    )


def _problem(located: Located, fields: Sequence[Field], tokens: Tokens) -> Reason | None:
    return value_problem(located.value, fields, tokens.special_texts)


def _overlapping(found: Sequence[Located]) -> set[int]:
    pairs = [i for i in range(1, len(found)) if found[i].start < found[i - 1].stop]
    return {*pairs, *(i - 1 for i in pairs)}


def _drop(found: list[Located], unedited: list[Unedited], which: set[int], reason: Reason) -> None:
    unedited += [Unedited(found[i].field.name, reason) for i in sorted(which)]
    found[:] = [located for i, located in enumerate(found) if i not in which]


def _anchor(
    ids: array[int], found: Sequence[Located], form: ChatForm | None, tokens: Tokens
) -> tuple[int | None, bool]:
    """(where lines go or None, whether they follow a line break of the text)."""
    if not found:
        return None, False
    field = found[0].field
    if field.anchor is not None:
        return literal_anchor(ids, tokens, field.anchor), True
    anchor = None if form is None else find_anchor(form, ids)
    if anchor is None and field.where.within is not None:
        return raw_anchor(ids, tokens), True
    return anchor, False


def _window(located: Located) -> Window:
    return Window(
        number=located.field.number,
        start=located.start,
        stop=located.stop,
        value=located.value,
        around=f"{located.before}\0{located.after}",
    )
