"""RelocationPlan: which slot goes where, and by which rotation. And the checks of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvedit_kernels.errors import require
from kvedit_kernels.group import PoolGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RelocationPlan:
    """N tokens to move; many spans and many requests share one plan.

    src and dst are disjoint, or equal element by element (rotation in place).
    """

    src: Tensor  # [N] int64 slots of this group's pool; repeats allowed where disjoint from dst
    dst: Tensor  # [N] int64 slots, unique, never in page 0
    row: Tensor  # [N] int32 in [0, R): row of cos_sin
    cos_sin: Tensor  # [R, 2, rot/2] fp32, unit amplitude: cos then sin of delta_pos * inv_freq


def delta_rows(deltas: Sequence[int], inv_freq: Tensor) -> Tensor:
    """[R, 2, rot/2] fp32 rotation rows for R shifts in tokens; a shift of 0 is exactly (1, 0).

    inv_freq: [rot/2] fp64, radians per token. The angle is formed in fp64: at a shift of 100k an
    fp32 angle is already off by 1e-3 rad. No amplitude enters: cached keys carry it (YaRN).
    """
    require(inv_freq.dtype == torch.float64, "delta_rows", "inv_freq", "float64", inv_freq.dtype)
    require(inv_freq.dim() == 1, "delta_rows", "inv_freq", "1 dim", inv_freq.dim())
    shift = torch.tensor(list(deltas), dtype=torch.float64, device=inv_freq.device)
    angle = shift[:, None] * inv_freq[None, :]
    return torch.stack([angle.cos(), angle.sin()], dim=1).to(torch.float32).contiguous()


def still_rows(cos_sin: Tensor) -> Tensor:
    """[R] bool: rows that turn nothing. Their tokens are copied byte for byte.

    Multiplying by (1, 0) is no copy: it loses -0.0, and inf * 0 is nan.
    """
    return (cos_sin[:, 0] == 1).all(dim=1) & (cos_sin[:, 1] == 0).all(dim=1)


def check_slots(op: str, group: PoolGroup, src: Tensor, dst: Tensor) -> None:
    """Raises KernelArgumentError. Off the CPU only shape, dtype, device and contiguity are looked
    at (no sync)."""
    for name, slots in (("src", src), ("dst", dst)):
        _check_vector(op, name, slots, torch.int64, group.device)
    require(len(src) == len(dst), op, "dst", f"{len(src)} slots as src", len(dst))
    if group.device.type == "cpu" and len(dst):
        _check_slot_values(op, group, src, dst)


def check_plan(op: str, group: PoolGroup, plan: RelocationPlan) -> None:
    """As `check_slots`, for the rotation rows too."""
    check_slots(op, group, plan.src, plan.dst)
    _check_vector(op, "row", plan.row, torch.int32, group.device)
    require(len(plan.row) == len(plan.dst), op, "row", f"{len(plan.dst)} rows", len(plan.row))
    table = plan.cos_sin
    require(table.dtype == torch.float32, op, "cos_sin", "float32", table.dtype)
    require(table.device == group.device, op, "cos_sin", f"device {group.device}", table.device)
    shape = ("R", 2, group.rot_dim // 2)
    fits = table.dim() == 3 and tuple(table.shape[1:]) == shape[1:] and table.is_contiguous()
    require(not group.rotate or fits, op, "cos_sin", f"contiguous {shape}", tuple(table.shape))
    if group.device.type == "cpu" and len(plan.row):
        low, high = (int(bound) for bound in torch.aminmax(plan.row))
        expected = f"values in [0, {len(table)})"
        require(low >= 0 and high < len(table), op, "row", expected, f"[{low}, {high}]")


def _check_vector(
    op: str, name: str, values: Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    require(values.dim() == 1, op, name, "1 dim", f"{values.dim()} dims")
    require(values.dtype == dtype, op, name, dtype, values.dtype)
    require(values.device == device, op, name, f"device {device}", values.device)
    require(values.is_contiguous(), op, name, "contiguous", f"stride {values.stride()}")


def _check_slot_values(op: str, group: PoolGroup, src: Tensor, dst: Tensor) -> None:
    limit, first = group.num_slots, group.first_writable_slot
    low, high = (int(bound) for bound in torch.aminmax(src))
    require(low >= 0 and high < limit, op, "src", f"slots in [0, {limit})", f"[{low}, {high}]")
    low, high = (int(bound) for bound in torch.aminmax(dst))
    expected = f"slots in [{first}, {limit}) (page 0 is the sink)"
    require(first <= low and high < limit, op, "dst", expected, f"[{low}, {high}]")
    written = torch.zeros(high - low + 1, dtype=torch.bool)
    written[dst - low] = True
    num_unique = int(written.count_nonzero())
    require(num_unique == len(dst), op, "dst", f"{len(dst)} unique slots", num_unique)
    if torch.equal(src, dst):
        return
    read = src[(src >= low) & (src <= high)] - low
    num_shared = int(written[read].count_nonzero())
    expected = "disjoint from dst, or equal to it element by element"
    require(num_shared == 0, op, "src", expected, f"{num_shared} slots that dst also names")
