"""relocate_ref, copy_slots_ref: the torch implementations that define the result."""

from __future__ import annotations

import torch
from torch import Tensor

from kvedit_kernels.group import PoolGroup
from kvedit_kernels.plan import RelocationPlan, check_plan, check_slots, still_rows
from kvedit_kernels.rotate_rows_ref import rotate_rows

CHUNK_TOKENS = 1024  # bounds the fp32 temporaries
# Bytes move as integers: no dtype's copy may quiet a nan.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def relocate_ref(*, group: PoolGroup, plan: RelocationPlan) -> None:
    """K of every layer rotated from src to dst, V copied; same contract as `relocate`.

    K is computed in fp32 without fused multiply-add and rounded once, to nearest even.
    """
    check_plan("relocate", group, plan)
    if not group.rotate:
        _copy(group, plan.src, plan.dst)
        return
    still = still_rows(plan.cos_sin)
    for start in range(0, len(plan.dst), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        src, dst, row = plan.src[chunk], plan.dst[chunk], plan.row[chunk]
        keep = still[row.long()][:, None, None]
        for k in group.k_views:
            bits = _gather(k, src, group.page_size)
            turned = rotate_rows(
                bits.view(group.dtype),
                row,
                plan.cos_sin,
                rot_offset=group.rot_offset,
                is_neox=group.is_neox,
            )
            _scatter(k, dst, torch.where(keep, bits, turned.view(bits.dtype)), group.page_size)
        _copy_views(group.v_views, src, dst, group.page_size)


def copy_slots_ref(*, group: PoolGroup, src: Tensor, dst: Tensor) -> None:
    """K and V of every layer copied byte for byte; same contract as `copy_slots`."""
    check_slots("copy_slots", group, src, dst)
    _copy(group, src, dst)


def _copy(group: PoolGroup, src: Tensor, dst: Tensor) -> None:
    for start in range(0, len(dst), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        _copy_views((*group.k_views, *group.v_views), src[chunk], dst[chunk], group.page_size)


def _copy_views(views: tuple[Tensor, ...], src: Tensor, dst: Tensor, page_size: int) -> None:
    for view in views:
        _scatter(view, dst, _gather(view, src, page_size), page_size)


def _gather(view: Tensor, slots: Tensor, page_size: int) -> Tensor:
    """[N, heads, dim] bits of the rows at `slots`."""
    bits = view.view(_BITS[view.element_size()])
    if page_size:
        return bits[slots // page_size, :, slots % page_size]
    return bits[slots]


def _scatter(view: Tensor, slots: Tensor, rows: Tensor, page_size: int) -> None:
    bits = view.view(_BITS[view.element_size()])
    if page_size:
        bits[slots // page_size, :, slots % page_size] = rows
    else:
        bits[slots] = rows
