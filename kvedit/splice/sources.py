"""What a span's tokens are copied from: a skill, or the path of an earlier turn.

Both have numbers of one space, for a number is all that a virtual id has room for: skills count up
from its start, paths down from its end, and neither half is ever used up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvedit.splice.virtual_ids import MAX_SEGMENT_NUMBER

FIRST_PATH_NUMBER = MAX_SEGMENT_NUMBER // 2 + 1


@dataclass(frozen=True, slots=True)
class SkillSource:
    """The skill whose segment has this number."""

    number: int

    def __post_init__(self) -> None:
        _check(self.number, 1, FIRST_PATH_NUMBER - 1)


@dataclass(frozen=True, slots=True)
class PathSource:
    """The path that an earlier turn was served, by its number in the book of paths."""

    number: int

    def __post_init__(self) -> None:
        _check(self.number, FIRST_PATH_NUMBER, MAX_SEGMENT_NUMBER)


Source = SkillSource | PathSource


def in_order(sources: Iterable[Source]) -> list[Source]:
    """The same order on every rank."""
    return sorted(sources, key=lambda source: source.number)


def _check(number: int, first: int, last: int) -> None:
    if not first <= number <= last:
        raise ValueError(f"kvedit: source: expected a number in [{first}, {last}], got {number}")
