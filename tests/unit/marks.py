"""What a text says, by token: marks of the statements in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

Marks = frozenset[Any]
MarksIn = Callable[[str], Sequence[tuple[int, Any]]]  # a text's marks: (character, mark)


def own_marks(tokens: Any, marks_in: MarksIn, ids: Sequence[int]) -> dict[int, Marks]:
    """By position, the marks of the token that ends there, where it has some."""
    text, stops = tokens.joined(ids)
    own: dict[int, Marks] = {}
    for character, mark in marks_in(text.decode()):
        position = bisect_right(stops, character)
        own[position] = own.get(position, frozenset()) | {mark}
    return own


def said_at(tokens: Any, marks_in: MarksIn, ids: Sequence[int]) -> list[Marks]:
    """By token, the marks of the text up to it: what exact KV has seen."""
    own = own_marks(tokens, marks_in, ids)
    marks = (own.get(position, frozenset()) for position in range(len(ids)))
    return list(accumulate(marks, frozenset.union))
