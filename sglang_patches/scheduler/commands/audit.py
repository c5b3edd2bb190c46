"""Who owns which slot right now, asked of the host's own structures."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

from kvedit.splice.ownership import ownership_problems
from sglang_patches.host.protocols import Allocator, Request, Scheduler


def audit_scheduler(scheduler: Scheduler) -> list[str]:
    """Problems with slot ownership between two scheduler steps; empty when all is well.

    free        allocator's free and released pages; of a hybrid pool, the full pool's
    tree        values of every tree node
    request     [cache_protected_len, kv_allocated_len) of every request that holds a row
    """
    allocator = scheduler.token_to_kv_pool_allocator
    problems = []
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        problems = _window_problems(allocator)
        allocator = allocator.full_attn_allocator
    page_size: int = allocator.page_size
    owners = {
        "free": _pages(_free_pages(allocator), page_size),
        "tree": scheduler.tree_cache.all_values_flatten().tolist(),
    }
    for req in _holders(scheduler):
        kv = req.kv
        row = scheduler.req_to_token_pool.req_to_token[kv.req_pool_idx]
        end = -(-kv.kv_allocated_len // page_size) * page_size
        held = row[kv.cache_protected_len : kv.kv_allocated_len].tolist()
        held += range(held[-1] + 1, held[-1] + 1 + end - kv.kv_allocated_len) if held else ()
        owners[f"request {req.rid}"] = held
    first = page_size  # page 0 is the host's sink
    return problems + ownership_problems(range(first, first + allocator.size), owners)


def _window_problems(allocator: SWATokenToKVPoolAllocator) -> list[str]:
    """A window slot is free, or stands for exactly one slot of the full pool."""
    own = allocator.swa_attn_allocator
    mapped = allocator.full_to_swa_index_mapping
    owners = {
        "free": _pages(_free_pages(own), own.page_size),
        "mapping": mapped[mapped > 0].tolist(),
    }
    first = own.page_size
    problems = ownership_problems(range(first, first + own.size), owners)
    return [f"window pool: {problem}" for problem in problems]


def _free_pages(allocator: Allocator) -> torch.Tensor:
    pages: torch.Tensor = allocator.get_all_free_pages()
    return pages.cpu()


def _pages(pages: torch.Tensor, page_size: int) -> list[int]:
    """Slots of pages; with page size 1 a page is a slot."""
    offsets = torch.arange(page_size)
    slots: list[int] = (pages[:, None] * page_size + offsets[None, :]).flatten().tolist()
    return slots


def _holders(scheduler: Scheduler) -> list[Request]:
    candidates = [*scheduler.running_batch.reqs, *scheduler.waiting_queue]
    if scheduler.last_batch is not None:
        candidates += scheduler.last_batch.reqs
    if scheduler.chunked_req is not None:
        candidates.append(scheduler.chunked_req)
    unique = {id(req): req for req in candidates if req.kv.holds_kv}
    return list(unique.values())
