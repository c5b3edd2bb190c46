"""Cached paths that edits compose from, by number.

A derived stretch has no skill to stand for it: its donor is the path on which it was computed.
The path's number and a position spell the virtual ids of its copies. Numbers count down from the
top of the number space, where no segment of the registry will ever be, and are never used again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from kvedit.edit.masked import common_prefix
from kvedit.splice.virtual_ids import MAX_SEGMENT_NUMBER

TreeKey = tuple[str | None, str | None]  # (extra_key, cache_salt)
MAX_PATHS = 1024
MAX_TOKENS = 4_000_000


@dataclass(slots=True)
class DonorPath:
    """ids: as the tree spells the path, virtual where it was composed."""

    number: int
    key: TreeKey
    ids: array[int]


class PathBook:
    """The paths used last. One book per rank, fed with the same calls in the same order."""

    def __init__(self) -> None:
        self._paths: OrderedDict[int, DonorPath] = OrderedDict()
        self._next_number = MAX_SEGMENT_NUMBER
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._paths)

    def by_number(self, number: int) -> DonorPath | None:
        """None: never numbered, or no longer among the newest."""
        return self._paths.get(number)

    def number_of(self, key: TreeKey, ids: array[int]) -> int:
        """The number of the path ``ids``: that of a known path which it continues, or which
        continues it, so that equal positions of equal paths are spelled alike."""
        for path in reversed(self._paths.values()):
            shared = min(len(path.ids), len(ids))
            if path.key != key or path.ids[shared - 1] != ids[shared - 1]:
                continue  # mostly told by their last token alone
            if common_prefix(path.ids, ids) == shared:
                if len(ids) > len(path.ids):
                    self._num_tokens += len(ids) - len(path.ids)
                    path.ids = ids
                self._paths.move_to_end(path.number)
                self._trim()
                return path.number
        path = DonorPath(self._next_number, key, ids)
        self._next_number -= 1
        self._paths[path.number] = path
        self._num_tokens += len(ids)
        self._trim()
        return path.number

    def drop(self, number: int) -> None:
        """Forget a path, e.g. since its KV is gone. One already gone is no error."""
        path = self._paths.pop(number, None)
        if path is not None:
            self._num_tokens -= len(path.ids)

    def clear(self) -> None:
        """Forget all paths; their numbers stay used up."""
        self._paths.clear()
        self._num_tokens = 0

    def _trim(self) -> None:
        while len(self._paths) > MAX_PATHS or (
            self._num_tokens > MAX_TOKENS and len(self._paths) > 1
        ):
            self.drop(next(iter(self._paths)))
