"""Prompts with their fields masked: how two turns are the same text but for a field's value.

A field's window (the tokens that hold its value) becomes one marker, whatever its length, so a
changed value of another length moves nothing behind it. A turn is found by its masked ids, compared
one by one; the prefix hashes say where it is worth comparing. ``rivals`` goes by hashes alone.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

_MULTIPLIER = 0x9E3779B97F4A7C15 | 1
_POWERS = np.ones(1, dtype=np.uint64)


class Windowed(Protocol):
    """What a mask needs to know of a located field."""

    @property
    def number(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def around(self) -> str: ...


@dataclass(frozen=True)
class Masked:
    """``ids`` with each of ``windows`` (ascending, disjoint, not empty) as one marker."""

    real: array[int]
    windows: Sequence[Windowed]
    ids: array[int] = field(init=False)
    _real_stops: list[int] = field(init=False)  # by window
    _masked_stops: list[int] = field(init=False)

    def __post_init__(self) -> None:
        ids, position = array("q"), 0
        real_stops, masked_stops = [], []
        for window in self.windows:
            ids += self.real[position : window.start]
            ids.append(_marker(window))
            position = window.stop
            real_stops.append(position)
            masked_stops.append(len(ids))
        ids += self.real[position:]
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "_real_stops", real_stops)
        object.__setattr__(self, "_masked_stops", masked_stops)

    def to_masked(self, position: int) -> int:
        """The masked position of real ``position``, which no window holds inside."""
        passed = bisect_right(self._real_stops, position)
        if not passed:
            return position
        return position - self._real_stops[passed - 1] + self._masked_stops[passed - 1]

    def to_real(self, position: int) -> int:
        """The real position of masked ``position``; the inverse of ``to_masked``."""
        passed = bisect_right(self._masked_stops, position)
        if not passed:
            return position
        return position - self._masked_stops[passed - 1] + self._real_stops[passed - 1]

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """uint64 [len(ids) + 1]: a hash of each prefix."""
        return prefix_hashes(self.ids)


def prefix_hashes(ids: array[int]) -> npt.NDArray[np.uint64]:
    """Element i is a hash of ids[:i]; equal prefixes have equal hashes (sum of id_k * m^k)."""
    global _POWERS
    if len(_POWERS) < len(ids):
        _POWERS = _powers(max(len(ids), 2 * len(_POWERS)))
    terms = np.frombuffer(ids, dtype=np.uint64) if ids else np.zeros(0, dtype=np.uint64)
    hashes = np.zeros(len(ids) + 1, dtype=np.uint64)
    np.cumsum((terms + np.uint64(1)) * _POWERS[: len(ids)], out=hashes[1:])
    return hashes


def common_prefix(left: array[int], right: array[int]) -> int:
    """How many leading ids agree."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    a = np.frombuffer(left, dtype=np.int64)[:length]
    b = np.frombuffer(right, dtype=np.int64)[:length]
    return int((a != b).argmax())


def _marker(window: Windowed) -> int:
    """Negative, so no token id equals it: the field, and the text around its value inside."""
    return -1 - (window.number << 32 | zlib.crc32(window.around.encode()))


def _powers(count: int) -> npt.NDArray[np.uint64]:
    factors = np.full(count, _MULTIPLIER, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
