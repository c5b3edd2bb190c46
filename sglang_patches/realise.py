"""Realise a composed run: slots into the tree now, bytes queued for the next forward.

Ownership through a splice of prompt tokens [start, stop):
    alloc()      free list           -> here
    insert()     here                -> one tree node (evictable, shared, counted once)
    on refusal   here                -> free list
The donor's path is looked up and locked here, never earlier, so no plan holds a stale slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.spans import Piece, Refusal, served_ids
from sglang_patches.copies import Copy
from sglang_patches.donors import Donor, find_donor
from sglang_patches.guard import trip
from sglang_patches.pools import LostWindowSlots
from sglang_patches.state import RequestState

if TYPE_CHECKING:
    from sglang_patches.cache import KvEditCache
    from sglang_patches.runtime import Runtime


def realise(
    cache: KvEditCache, req: Any, state: RequestState, node: Any, start: int, stop: int
) -> Any | None:
    """Splice prompt tokens [start, stop), all composed, behind ``node`` (a path of ``start``).

    Returns the new tree node. Returns None, with the reason counted and the request's spelling
    real from ``start`` on, when a donor is gone or the pool has no room. All or nothing.
    """
    path_lock = cache.lock(node)
    donors: list[Donor] = []
    try:
        if not _collect_donors(cache, state, start, stop, donors):
            return None
        evict_from_tree_cache(cache, stop - start)
        slots = cache.token_to_kv_pool_allocator.alloc(stop - start)
        if slots is None:
            _refuse(cache, state, donors[0].piece, start, "no_slots")
            return None
        return _hand_over(cache, req, state, node, donors, slots.to(torch.int64), start)
    except LostWindowSlots:
        _refuse(cache, state, donors[0].piece, start, "window_lost")
        return None
    finally:
        for donor in donors:
            cache.unlock(donor.lock)
        cache.unlock(path_lock)


def _collect_donors(
    cache: KvEditCache, state: RequestState, start: int, stop: int, donors: list[Donor]
) -> bool:
    """Lock the donor of every piece in [start, stop); False (and refused) if one is gone."""
    for piece in state.pieces:
        first, last = max(piece.start, start), min(piece.stop, stop)
        if first >= last:
            continue
        donor = find_donor(cache, piece, first, last)
        if donor is None:
            _refuse(cache, state, piece, start, _lost(cache, state, piece.span.segment))
            return False
        donors.append(donor)
    return True


def _lost(cache: KvEditCache, state: RequestState, segment: int) -> str:
    """Why a donor is not there: its skill was purged since the match, or its KV was evicted."""
    if cache.runtime.is_path(segment):
        return "evicted"
    if cache.runtime.registry.by_number(segment) is None:
        return "retired"
    cache.runtime.donor_lost(segment)
    state.evicted.add(segment)
    return "evicted"


def _hand_over(
    cache: KvEditCache,
    req: Any,
    state: RequestState,
    node: Any,
    donors: list[Donor],
    slots: torch.Tensor,
    start: int,
) -> Any:
    """Slots to the tree, copies to the queue, donors' locks with them (``donors`` is emptied)."""
    stop = start + len(slots)
    runtime = cache.runtime
    try:
        trip("realise")
        copies = [_copy(runtime, donor, slots, start) for donor in donors]
        insertion = _insertion(cache, req, state, node, slots, start)
    except BaseException:
        cache.token_to_kv_pool_allocator.free(slots)
        raise
    try:
        result = cache.insert(insertion)
        if result.prefix_len != start:
            raise RuntimeError(
                f"kvedit: insert: expected {start} tokens on the path, got {result.prefix_len}"
            )
        trip("hand_over")
        new_node = result.last_device_node
        runtime.copies.put(copies, [*(d.lock for d in donors), cache.lock(new_node)])
    except BaseException:
        # The tree may hold slots whose bytes will never be written: make their path unreachable.
        for donor in donors:
            runtime.distrust(donor.piece.span.segment)
        raise
    donors.clear()
    _count(cache, state, start, stop)
    return new_node


def _copy(runtime: Runtime, donor: Donor, slots: torch.Tensor, start: int) -> Copy:
    span = donor.piece.span
    dst = slots[donor.start - start : donor.stop - start]
    return runtime.copies.plan(donor.slots, dst, span.delta_pos, span.segment)


def _insertion(
    cache: KvEditCache, req: Any, state: RequestState, node: Any, slots: torch.Tensor, start: int
) -> InsertParams:
    """The slots as the continuation of ``node``'s path of ``start`` tokens."""
    path = cache.path_device_indices(node)[:start].to(torch.int64)
    ids = served_ids(req.full_untruncated_fill_ids[: start + len(slots)], state.pieces)
    return InsertParams(
        key=RadixKey(ids, req.extra_key, cache_salt=req.cache_salt),
        value=torch.cat([path, slots]),
        prev_prefix_len=start,
        inserted_len=start,
        priority=req.priority or 0,
    )


def _count(cache: KvEditCache, state: RequestState, start: int, stop: int) -> None:
    state.realised.append((start, stop))
    for piece in state.pieces:
        if piece.start < stop and piece.stop > start:
            if not cache.runtime.is_path(piece.span.segment):
                cache.runtime.registry.touch(piece.span.segment)
            if state.is_counted:
                cache.runtime.metrics.count_splice("realised")
                cache.runtime.publish(
                    "splice_realised",
                    skill=piece.span.skill,
                    start=max(piece.start, start),
                    stop=min(piece.stop, stop),
                    delta=piece.span.delta_pos,
                )


def _refuse(
    cache: KvEditCache, state: RequestState, piece: Piece, position: int, reason: str
) -> None:
    state.give_up(position)
    cache.runtime.refuse(state, (Refusal(skill=piece.span.skill, reason=reason),))
