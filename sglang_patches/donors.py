"""Donors: where a composed token's bytes come from. Looked up at the splice, never kept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.skills import Skill
from kvedit.spans import Piece

if TYPE_CHECKING:
    from sglang_patches.cache import KvEditCache


@dataclass(frozen=True, slots=True)
class Donor:
    """[start, stop): prompt positions; slots: int64 [stop - start]; lock: on the donor's node."""

    piece: Piece
    start: int
    stop: int
    slots: torch.Tensor
    lock: Any


def find_donor(cache: KvEditCache, piece: Piece, start: int, stop: int) -> Donor | None:
    """The locked donor of prompt tokens [start, stop) of ``piece``; None if it is not cached.

    A donor is a path that was prefilled, never one that was composed: no slot is the source of
    a second hop.
    """
    skill = cache.runtime.registry.by_number(piece.span.segment)
    if skill is None:
        return None
    node, num_cached = cached_path(cache, skill)
    low, high = piece.span.donor_interval(start, stop)
    if num_cached < high:
        return None
    lock = cache.lock(node)
    slots = cache.path_device_indices(node)[low:high].to(torch.int64)
    return Donor(piece, start, stop, slots, lock)


def cached_path(cache: KvEditCache, skill: Skill) -> tuple[Any, int]:
    """(last node, length) of what the tree still holds of the skill's own path."""
    segment = skill.segment
    ids: array[int] = segment.compile_prefix + segment.token_ids
    key = RadixKey(ids, cache.runtime.tree_namespace(segment.number))
    match = cache.match_prefix(MatchPrefixParams(key=key))
    return match.last_device_node, match.device_prefix_len
