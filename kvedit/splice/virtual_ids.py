"""Virtual token ids: how a composed token is spelled in a tree key.

A composed token must never answer a look-up for the real one, so its key carries an id that no
vocabulary has: bit 60 set, the number of its segment, its index in the segment. Numbers are
allocated and never reused within a server start (a 32-bit hash would collide at 65k segments).
The ids live in the tree's keys; the host's cache events, which would publish them, are refused.
"""

from __future__ import annotations

from array import array

import numpy as np

VIRTUAL_BIT = 1 << 60
INDEX_BITS = 20
MAX_SEGMENT_TOKENS = 1 << INDEX_BITS
MAX_SEGMENT_NUMBER = (1 << (60 - INDEX_BITS)) - 1


def virtual_ids(segment: int, start: int, stop: int) -> array[int]:
    """Ids of tokens [start, stop) of ``segment``.

    Raises ValueError when the segment number or the token range cannot be spelled.
    """
    if not 0 < segment <= MAX_SEGMENT_NUMBER:
        raise ValueError(
            f"kvedit: segment: expected a number in [1, {MAX_SEGMENT_NUMBER}], got {segment}"
        )
    if not 0 <= start <= stop <= MAX_SEGMENT_TOKENS:
        raise ValueError(
            f"kvedit: token range: expected 0 <= start <= stop <= {MAX_SEGMENT_TOKENS}, "
            f"got [{start}, {stop})"
        )
    base = VIRTUAL_BIT | segment << INDEX_BITS
    return array("q", np.arange(base + start, base + stop, dtype=np.int64).tobytes())


def is_virtual(token_id: int) -> bool:
    """Whether an id of a tree key spells a composed token; ids of vocabularies are below bit 60."""
    return token_id >= VIRTUAL_BIT


def count_virtual(ids: array[int]) -> int:
    """How many of ``ids`` (int64) spell composed tokens."""
    return int((np.frombuffer(ids, dtype=np.int64) >= VIRTUAL_BIT).sum()) if ids else 0


def segment_of(token_id: int) -> tuple[int, int]:
    """(segment number, token index) that a virtual id stands for."""
    payload = token_id ^ VIRTUAL_BIT
    return payload >> INDEX_BITS, payload & (MAX_SEGMENT_TOKENS - 1)
