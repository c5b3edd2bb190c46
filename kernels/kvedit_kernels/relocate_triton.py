"""relocate_triton, copy_slots_triton: checks, specialisation and the one launch."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvedit_kernels.errors import require
from kvedit_kernels.group import BASE_ALIGN_BYTES, PoolGroup
from kvedit_kernels.plan import RelocationPlan, check_plan, check_slots, still_rows
from kvedit_kernels.relocate_kernel import relocate_kernel

NUM_WARPS = 4
# Elements one program moves at most (one token, if that has more), padding included. At 4 warps:
# eight 16-byte loads a thread of bf16, all in flight at once; twice as many need 176 registers,
# eight times as many spill.
BLOCK_ELEMENTS = 10240
MAX_BLOCK_TOKENS = 64
_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
_BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
_FIRST_CAPABILITY_WITH_FP8 = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialisation:
    """The kernel's compile-time arguments; field names are the kernel's."""

    K_DTYPE: tl.dtype
    BITS: tl.dtype
    NUM_HEADS: int
    HEADS_PAD: int
    HEAD_DIM: int
    HALF_PAD: int
    ROT_OFFSET: int
    HEAD_PART_PAD: int
    ROT_DIM: int
    TAIL_PAD: int
    IS_NEOX: bool
    PAGE_SIZE: int
    K_ROWS: int
    K_ROWS_PAD: int
    K_ROW: int
    K_ROW_PAD: int
    V_ROWS: int
    V_ROWS_PAD: int
    V_ROW: int
    V_ROW_PAD: int
    SOFT: bool
    BASE_ALIGN: int
    BLOCK_TOKENS: int

    def as_kwargs(self) -> dict[str, object]:
        """As the kernel takes them, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def specialise(
    group: PoolGroup, *, rotate: bool, soft: bool, block_tokens: int | None = None
) -> Specialisation:
    """Compile-time arguments for a group; block_tokens overrides the size chosen here."""
    pad = triton.next_power_of_2
    rot_dim = group.rot_dim if rotate else 0
    rot_offset = group.rot_offset if rotate else 0
    k_rows, k_row = _dense_rows(group.num_heads, group.head_dim, group.k_stride[2])
    v_rows, v_row = 0, 0
    if group.v_row:
        v_rows, v_row = _dense_rows(group.num_heads, group.v_head_dim, group.v_stride[2])
    lanes = pad(group.num_heads) * sum(
        pad(part) for part in (rot_offset, rot_dim, group.head_dim - rot_offset - rot_dim) if part
    )
    return Specialisation(
        K_DTYPE=_TYPES[group.dtype],
        BITS=_BITS[group.dtype.itemsize],
        NUM_HEADS=group.num_heads,
        HEADS_PAD=pad(group.num_heads),
        HEAD_DIM=group.head_dim,
        HALF_PAD=pad(max(1, rot_dim // 2)),
        ROT_OFFSET=rot_offset,
        HEAD_PART_PAD=pad(max(1, rot_offset)),
        ROT_DIM=rot_dim,
        TAIL_PAD=pad(max(1, group.head_dim - rot_offset - rot_dim)),
        IS_NEOX=group.is_neox,
        PAGE_SIZE=group.page_size,
        K_ROWS=k_rows,
        K_ROWS_PAD=pad(k_rows),
        K_ROW=k_row,
        K_ROW_PAD=pad(k_row),
        V_ROWS=v_rows,
        V_ROWS_PAD=pad(max(1, v_rows)),
        V_ROW=v_row,
        V_ROW_PAD=pad(max(1, v_row)),
        SOFT=soft,
        BASE_ALIGN=BASE_ALIGN_BYTES,
        BLOCK_TOKENS=block_tokens
        or _block_tokens(lanes, pad(v_row) * pad(v_rows) if v_rows else 0),
    )


def relocate_triton(
    *,
    group: PoolGroup,
    plan: RelocationPlan,
    block_tokens: int | None = None,
    num_warps: int = NUM_WARPS,
) -> None:
    """As `relocate`, on CUDA, or on CPU tensors under TRITON_INTERPRET=1."""
    check_plan("relocate", group, plan)
    if not group.rotate:
        _launch(group, plan.src, plan.dst, None, block_tokens, num_warps)
        return
    _launch(group, plan.src, plan.dst, plan, block_tokens, num_warps)


def copy_slots_triton(*, group: PoolGroup, src: Tensor, dst: Tensor) -> None:
    """As `copy_slots`, on CUDA, or on CPU tensors under TRITON_INTERPRET=1."""
    check_slots("copy_slots", group, src, dst)
    _launch(group, src, dst, None, None, NUM_WARPS)


def _launch(
    group: PoolGroup,
    src: Tensor,
    dst: Tensor,
    plan: RelocationPlan | None,
    block_tokens: int | None,
    num_warps: int,
) -> None:
    interpreted = triton.knobs.runtime.interpret
    on_device = group.device.type == "cuda"
    require(on_device or interpreted, "relocate_triton", "group", "CUDA views", group.device)
    num_tokens = len(dst)
    if num_tokens == 0:
        return
    # A copy reads no table; any tensor stands in for its pointers.
    row = cos_sin = still = dst
    if plan is not None:
        row, cos_sin = plan.row, plan.cos_sin
        still = still_rows(cos_sin).to(torch.uint8)
    soft = interpreted or _needs_soft_fp8(group)
    chosen = specialise(group, rotate=plan is not None, soft=soft, block_tokens=block_tokens)
    grid = (triton.cdiv(num_tokens, chosen.BLOCK_TOKENS), group.num_layers)
    relocate_kernel[grid](
        group.k_ptrs,
        group.v_ptrs if group.v_ptrs is not None else group.k_ptrs,
        src,
        dst,
        row,
        cos_sin,
        still,
        num_tokens,
        *group.k_stride,
        *group.v_stride,
        **chosen.as_kwargs(),
        num_warps=num_warps,
        # Fused multiply-add would round differently from the reference.
        enable_fp_fusion=False,
    )


def _needs_soft_fp8(group: PoolGroup) -> bool:
    if group.dtype.itemsize != 1:
        return False
    capability: tuple[int, int] = torch.cuda.get_device_capability(group.device)
    return capability < _FIRST_CAPABILITY_WITH_FP8


def _dense_rows(num_heads: int, dim: int, head_stride: int) -> tuple[int, int]:
    """(rows, elements) of one token: heads that touch are one long row."""
    if head_stride == dim or num_heads == 1:
        return 1, num_heads * dim
    return num_heads, dim


def _block_tokens(*padded_elements: int) -> int:
    fitting = max(1, BLOCK_ELEMENTS // sum(padded_elements))
    return min(MAX_BLOCK_TOKENS, 1 << (fitting.bit_length() - 1))
