"""Slot numbers of the window pool."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvedit.errors import Unsupported
from sglang_patches.pools.layout import PoolKind


class LostWindowSlots(Unsupported):
    """Some tokens have left the sliding window: their keys are gone from the window pool."""


def translate(kv_pool: Any, pool_kind: PoolKind, slots: torch.Tensor) -> torch.Tensor:
    """The slots of one sub-pool for slots of a request.

    slots  int64 [num_tokens], slots as the request's row holds them
    Returns int64 [num_tokens] on the same device; the same tensor for pool kind "full".
    Reads one flag back from the device: call it when a plan is made, not in the forward.
    Raises LostWindowSlots if the window pool no longer holds one of the tokens.
    """
    if pool_kind == "full":
        return slots
    if type(kv_pool) is not SWAKVPool:
        raise Unsupported(
            [f"kvedit: KV pool: expected SWAKVPool for window slots, got {type(kv_pool).__name__}"]
        )
    window_slots = kv_pool.translate_loc_from_full_to_swa(slots.long()).long()
    # The host writes 0, its dummy slot, where a token has left the window.
    num_lost = int((window_slots <= 0).sum())
    if num_lost:
        raise LostWindowSlots(
            [
                f"kvedit: window slots: expected {slots.numel()} live, "
                f"got {slots.numel() - num_lost} ({num_lost} left the sliding window)"
            ]
        )
    return window_slots
