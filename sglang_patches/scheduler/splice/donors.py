"""Donors: where a composed token's bytes come from. Looked up at the splice, never kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.edit.donor_paths import FIRST_PATH_NUMBER, PathBook
from kvedit.skills.segment import State
from kvedit.splice.spans import Piece, Span
from kvedit.splice.virtual_ids import count_virtual
from sglang_patches.scheduler.ports import Paths
from sglang_patches.scheduler.skills.desk import SkillDesk


@dataclass(frozen=True, slots=True)
class Donor:
    """[start, stop): prompt positions; slots: int64 [stop - start]; lock: on the donor's node."""

    piece: Piece
    start: int
    stop: int
    slots: torch.Tensor
    lock: Any


class Donors:
    """What a span's number stands for, a skill or a path of an earlier turn, and what the tree
    still holds of it."""

    def __init__(self, tree: Paths, desk: SkillDesk, paths: PathBook, page_size: int) -> None:
        self._tree = tree
        self._desk = desk
        self._paths = paths
        self._page_size = page_size

    def is_path(self, number: int) -> bool:
        """Whether a number names a path of an earlier turn instead of a skill."""
        return number >= FIRST_PATH_NUMBER

    def knows(self, span: Span) -> bool:
        """Whether the number still names something. A plan may be older than the registry; a
        segment may have a new number because its cached paths are not to be trusted."""
        if self.is_path(span.segment):
            return self._paths.by_number(span.segment) is not None
        return self._desk.registry.by_number(span.segment) is not None

    def state_of(self, span: Span) -> State:
        """READY: it could be composed now, as far as is known. Of a path, that is looked up."""
        if self.is_path(span.segment):
            return State.READY if self._is_cached(span) else State.EVICTED
        skill = self._desk.registry.by_number(span.segment)
        return State.RETIRED if skill is None else skill.state

    def find(self, piece: Piece, start: int, stop: int) -> Donor | None:
        """The locked donor of prompt tokens [start, stop) of ``piece``; None if it is not cached.

        A donor's slots were prefilled, never composed: no slot is the source of a second hop.
        """
        low, high = piece.span.donor_interval(start, stop)
        key = self._key(piece.span.segment, low, high)
        if key is None:
            return None
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        if match.device_prefix_len < high:
            return None
        path = self._tree.path_device_indices(match.last_device_node)
        slots = path[low:high].to(torch.int64)
        return Donor(piece, start, stop, slots, self._tree.lock(match.last_device_node))

    def lost(self, number: int) -> State:
        """A splice did not find this donor. RETIRED: its skill was purged since the match;
        EVICTED: its KV is gone, and if it is a skill's, the desk is told."""
        if self.is_path(number):
            return State.EVICTED
        if self._desk.registry.by_number(number) is None:
            return State.RETIRED
        self._desk.donor_lost(number)
        return State.EVICTED

    def distrust(self, number: int) -> None:
        """Paths composed from this donor may hold unwritten slots: never match them again."""
        if self.is_path(number):
            self._paths.drop(number)
        else:
            self._desk.distrust(number)

    def touch(self, number: int) -> None:
        """A request was given slots from this donor."""
        if not self.is_path(number):
            self._desk.registry.touch(number)

    def _is_cached(self, span: Span) -> bool:
        """Whether the whole donor of ``span`` could be copied now."""
        low, high = span.donor_interval(span.start, span.stop)
        key = self._key(span.segment, low, high)
        if key is None:
            return False
        num_cached: int = self._tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
        return num_cached >= high

    def _key(self, number: int, low: int, high: int) -> RadixKey | None:
        """The path whose tokens [low, high) are the donor: a skill's own, or an earlier turn's."""
        if not self.is_path(number):
            skill = self._desk.registry.by_number(number)
            return None if skill is None else self._desk.own_key(skill)
        path = self._paths.by_number(number)
        if path is None or len(path.ids) < high:
            return None
        num_copies = count_virtual(path.ids[low:high])
        if num_copies:
            raise RuntimeError(
                f"kvedit: donor: expected tokens that were computed, got {num_copies} copies"
            )
        extra_key, cache_salt = path.key
        stop = -(-high // self._page_size) * self._page_size  # the tree matches whole pages
        return RadixKey(path.ids[:stop], extra_key, cache_salt=cache_salt)
