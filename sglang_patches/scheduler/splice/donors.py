"""Donors: where a composed token's bytes come from. Looked up at the splice, never kept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.skills.registry import Skill
from kvedit.splice.spans import Piece, Span
from kvedit.splice.virtual_ids import count_virtual

if TYPE_CHECKING:
    from sglang_patches.scheduler.splice.tree import KvEditCache


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

    A donor's slots were prefilled, never composed: no slot is the source of a second hop.
    """
    low, high = piece.span.donor_interval(start, stop)
    key = _key(cache, piece.span.segment, low, high)
    if key is None:
        return None
    match = cache.match_prefix(MatchPrefixParams(key=key))
    if match.device_prefix_len < high:
        return None
    slots = cache.path_device_indices(match.last_device_node)[low:high].to(torch.int64)
    return Donor(piece, start, stop, slots, cache.lock(match.last_device_node))


def is_cached(cache: KvEditCache, span: Span) -> bool:
    """Whether the whole donor of ``span`` could be copied now."""
    low, high = span.donor_interval(span.start, span.stop)
    key = _key(cache, span.segment, low, high)
    if key is None:
        return False
    return cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len >= high


def cached_path(cache: KvEditCache, skill: Skill) -> tuple[Any, int]:
    """(last node, length) of what the tree still holds of the skill's own path."""
    match = cache.match_prefix(MatchPrefixParams(key=_skill_key(cache, skill)))
    return match.last_device_node, match.device_prefix_len


def _skill_key(cache: KvEditCache, skill: Skill) -> RadixKey:
    segment = skill.segment
    ids: array[int] = segment.compile_prefix + segment.token_ids
    return RadixKey(ids, cache.runtime.tree_namespace(segment.number))


def _key(cache: KvEditCache, segment: int, low: int, high: int) -> RadixKey | None:
    """The path whose tokens [low, high) are the donor: a skill's own, or one of an earlier turn."""
    runtime = cache.runtime
    if not runtime.is_path(segment):
        skill = runtime.registry.by_number(segment)
        return None if skill is None else _skill_key(cache, skill)
    path = runtime.paths.by_number(segment)
    if path is None or len(path.ids) < high:
        return None
    num_copies = count_virtual(path.ids[low:high])
    if num_copies:
        raise RuntimeError(
            f"kvedit: donor: expected tokens that were computed, got {num_copies} copies"
        )
    extra_key, cache_salt = path.key
    stop = -(-high // runtime.page_size) * runtime.page_size  # the tree matches whole pages
    return RadixKey(path.ids[:stop], extra_key, cache_salt=cache_salt)
