"""Donors: where a composed token's bytes come from. Looked up at the splice, never kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.edit.donor_paths import PathBook
from kvedit.skills.segment import State
from kvedit.splice.sources import PathSource, SkillSource, Source
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
    """What a span's source is, and what the tree still holds of it."""

    def __init__(self, tree: Paths, desk: SkillDesk, paths: PathBook, page_size: int) -> None:
        self._tree = tree
        self._desk = desk
        self._paths = paths
        self._page_size = page_size

    def knows(self, span: Span) -> bool:
        """Whether its source is still there. A plan may be older than the registry; a segment
        may have a new number because its cached paths are not to be trusted."""
        if isinstance(span.source, PathSource):
            return self._paths.by_number(span.source.number) is not None
        return self._desk.registry.by_number(span.source.number) is not None

    def state_of(self, span: Span) -> State:
        """READY: it could be composed now, as far as is known. Of a path, that is looked up."""
        if isinstance(span.source, PathSource):
            return State.READY if self._is_cached(span) else State.EVICTED
        skill = self._desk.registry.by_number(span.source.number)
        return State.RETIRED if skill is None else skill.state

    def find(self, piece: Piece, start: int, stop: int) -> Donor | None:
        """The locked donor of prompt tokens [start, stop) of ``piece``; None if it is not cached.

        A donor's slots were prefilled, never composed: no slot is the source of a second hop.
        """
        low, high = piece.span.donor_interval(start, stop)
        key = self._key(piece.span.source, low, high)
        if key is None:
            return None
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        if match.device_prefix_len < high:
            return None
        path = self._tree.path_device_indices(match.last_device_node)
        slots = path[low:high].to(torch.int64)
        return Donor(piece, start, stop, slots, self._tree.lock(match.last_device_node))

    def lost(self, source: Source) -> State:
        """A splice did not find this donor. RETIRED: its skill was purged since the match;
        EVICTED: its KV is gone, and if it is a skill's, the desk is told."""
        if isinstance(source, PathSource):
            return State.EVICTED
        if self._desk.registry.by_number(source.number) is None:
            return State.RETIRED
        self._desk.donor_lost(source.number)
        return State.EVICTED

    def distrust(self, source: Source) -> None:
        """Paths composed from this donor may hold unwritten slots: never match them again."""
        if isinstance(source, PathSource):
            self._paths.drop(source.number)
        else:
            self._desk.distrust(source.number)

    def touch(self, source: Source) -> None:
        """A request was given slots from this donor."""
        if isinstance(source, SkillSource):
            self._desk.registry.touch(source.number)

    def _is_cached(self, span: Span) -> bool:
        """Whether the whole donor of ``span`` could be copied now."""
        low, high = span.donor_interval(span.start, span.stop)
        key = self._key(span.source, low, high)
        if key is None:
            return False
        num_cached: int = self._tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
        return num_cached >= high

    def _key(self, source: Source, low: int, high: int) -> RadixKey | None:
        """The path whose tokens [low, high) are the donor: a skill's own, or an earlier turn's."""
        if isinstance(source, SkillSource):
            skill = self._desk.registry.by_number(source.number)
            return None if skill is None else self._desk.own_key(skill)
        path = self._paths.by_number(source.number)
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
