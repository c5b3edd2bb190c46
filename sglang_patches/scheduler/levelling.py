"""After an error on one of several ranks: what its hook had done on some of them is undone on all.

A plain rule for a rare error; it costs everybody's cache once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_patches.guard import contained, highest
from sglang_patches.scheduler.splice.donors import cached_path

if TYPE_CHECKING:
    from sglang_patches.scheduler.runtime import Runtime
    from sglang_patches.scheduler.splice.tree import KvEditCache


def level(runtime: Runtime, cache: KvEditCache) -> None:
    """Forget turns and paths as after a restart, and all of the tree that is not in use: looking
    a prompt up cuts nodes and makes them recent, and the ranks may not have looked alike."""
    runtime.ledger.forget_everything(highest(runtime.ledger.last_lineage))
    runtime.conversations.clear()
    runtime.paths.clear()
    runtime.seen_values.clear()
    cache.evict(
        EvictParams(
            num_tokens=cache.full_evictable_size(), swa_num_tokens=cache.swa_evictable_size()
        )
    )
    for skill in runtime.registry.all():
        if skill.number in runtime.pins:
            cached_path(cache, skill)  # equally recent on every rank
    with contained("sort_free_slots"):  # slots keep the same numbers; nothing depends on it
        for allocator in _plain(cache.token_to_kv_pool_allocator):
            allocator.free_pages = torch.sort(allocator.free_pages).values


def _plain(allocator: Any) -> list[Any]:
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        return [allocator.full_attn_allocator, allocator.swa_attn_allocator]
    return [allocator]
