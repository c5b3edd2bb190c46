"""After an error on one of several ranks: what its hook had done on some of them is undone on all.

A plain rule for a rare error; it costs everybody's cache once.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_patches.guard import contained, highest
from sglang_patches.host.protocols import Allocator
from sglang_patches.scheduler.edit.room import EditRoom
from sglang_patches.scheduler.skills.desk import SkillDesk


def level(edits: EditRoom, desk: SkillDesk, tree: Any) -> None:
    """Forget turns and paths as after a restart, and all of the tree that is not in use: looking
    a prompt up cuts nodes and makes them recent, and the ranks may not have looked alike."""
    edits.forget_everything(highest(edits.ledger.last_lineage))
    tree.evict(
        EvictParams(num_tokens=tree.full_evictable_size(), swa_num_tokens=tree.swa_evictable_size())
    )
    for skill in desk.registry.all():
        if skill.number in desk.pins:
            desk.own_path(skill)  # equally recent on every rank
    with contained("sort_free_slots"):  # slots keep the same numbers; nothing depends on it
        for allocator in _plain(tree.token_to_kv_pool_allocator):
            allocator.free_pages = torch.sort(allocator.free_pages).values


def _plain(allocator: Allocator) -> list[Any]:
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        return [allocator.full_attn_allocator, allocator.swa_attn_allocator]
    return [allocator]
