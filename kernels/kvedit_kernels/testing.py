"""Cases, buffers and the one expectation that every implementation of `relocate` is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvedit_kernels.contract import arithmetic_bound
from kvedit_kernels.group import PoolGroup
from kvedit_kernels.plan import RelocationPlan, delta_rows, still_rows

ROPE_BASE = 10000.0
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pool and one plan over it. Defaults: a small grouped-query pool, NHD, page 16."""

    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64  # 0: no V (MLA)
    rot_offset: int = 0
    rot_dim: int = 64
    is_neox: bool = True
    rotate: bool = True
    page_size: int = 16  # slots are handed out in pages of this size
    is_hnd: bool = False
    num_layers: int = 2
    num_tokens: int = 37
    deltas: tuple[int, ...] = (17, 0, 4096, -40)
    placement: str = "pages"  # "pages" | "scattered" | "in_place"

    def __str__(self) -> str:
        rope = f"{'neox' if self.is_neox else 'gptj'}{self.rot_dim}+{self.rot_offset}"
        rope = rope if self.rotate else "norope"
        layout = f"{'hnd' if self.is_hnd else 'nhd'}{self.page_size}-{self.placement}"
        shape = f"L{self.num_layers}xH{self.num_heads}xD{self.head_dim}+{self.v_head_dim}"
        dtype = str(self.dtype).removeprefix("torch.")
        shifts = "_".join(map(str, self.deltas))
        return f"{dtype}-{shape}-{rope}-{layout}-n{self.num_tokens}-by{shifts}"

    @property
    def num_slots(self) -> int:
        """Slots of its pool: page 0, twice the pages of its tokens, and two pages to spare."""
        num_pages = -(-self.num_tokens // self.page_size)
        return self.page_size * (2 * num_pages + 3)

    @property
    def inv_freq(self) -> Tensor:
        """[rot/2] fp64."""
        half = self.rot_dim // 2
        return ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)


def allocate_plain(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU, from torch."""
    return torch.empty(shape, dtype=dtype)


def build(
    case: Case, *, seed: int = 0, allocate: Allocate = allocate_plain, device: str = "cpu"
) -> tuple[PoolGroup, RelocationPlan]:
    """(group, plan) of a case, filled with normal values times 3; buffers and the plan's tensors
    come from `allocate`, and are copied where `device` is another."""
    generator = torch.Generator().manual_seed(seed)

    def view(dim: int) -> Tensor:
        tensor = allocate(_shape(case, dim), _store_dtype(case.dtype))
        values = torch.randn(tensor.shape, generator=generator) * 3
        tensor.copy_(values.to(case.dtype).view(tensor.dtype))
        return tensor.to(device)

    k_views = [view(case.head_dim) for _ in range(case.num_layers)]
    v_views = [view(case.v_head_dim) for _ in range(case.num_layers if case.v_head_dim else 0)]
    group = PoolGroup.from_views(
        k_views,
        v_views,
        dtype=case.dtype,
        page_size=case.page_size if case.is_hnd else 0,
        rot_offset=case.rot_offset,
        rot_dim=case.rot_dim,
        is_neox=case.is_neox,
        rotate=case.rotate,
    )
    return group, draw_plan(case, seed=seed, allocate=allocate, device=device)


def draw_plan(
    case: Case, *, seed: int = 0, allocate: Allocate = allocate_plain, device: str = "cpu"
) -> RelocationPlan:
    """The case's slots and shifts; fits every pool of at least `case.num_slots` slots."""
    src, dst = _slots(case, torch.Generator().manual_seed(seed))
    row = (torch.arange(case.num_tokens) * len(case.deltas) // case.num_tokens).to(torch.int32)
    fields = {"src": src, "dst": dst, "row": row, "cos_sin": delta_rows(case.deltas, case.inv_freq)}
    placed = {name: _placed(tensor, allocate).to(device) for name, tensor in fields.items()}
    return RelocationPlan(**placed)


def snapshot(group: PoolGroup) -> tuple[list[Tensor], list[Tensor]]:
    """Bits of K and of V, [num_slots, heads, dim] per layer, on the CPU."""
    k_rows = [token_rows(view, group.page_size) for view in group.k_views]
    return k_rows, [token_rows(view, group.page_size) for view in group.v_views]


def token_rows(view: Tensor, page_size: int) -> Tensor:
    """Copy of a view as integer bits, [num_slots, heads, dim]."""
    bits = view.cpu().clone().view(_BITS[view.element_size()])
    if page_size:
        return bits.permute(0, 2, 1, 3).reshape(-1, view.shape[1], view.shape[3])
    return bits


def expect_moved(
    case: Case,
    before: tuple[list[Tensor], list[Tensor]],
    group: PoolGroup,
    plan: RelocationPlan,
) -> None:
    """Raises AssertionError unless `group` holds exactly what the contract says."""
    after = snapshot(group)
    src, dst, row = plan.src.cpu(), plan.dst.cpu(), plan.row.cpu().long()
    turned = ~still_rows(plan.cos_sin.cpu())[row] if case.rotate else torch.zeros_like(row).bool()
    for layer, (old, new) in enumerate(zip(before[1], after[1], strict=True)):
        _expect_copied(f"V of layer {layer}", old, new, src, dst)
    span = slice(case.rot_offset, case.rot_offset + case.rot_dim)
    for layer, (old, new) in enumerate(zip(before[0], after[0], strict=True)):
        name = f"K of layer {layer}"
        got = new[dst][turned][..., span].view(case.dtype).double()
        given = old[src][turned][..., span].view(case.dtype).double()
        # What is left after the rotated part is undone must be a plain copy.
        masked = new.clone()
        index = dst[turned]
        masked[index, :, span] = old[src[turned], :, span]
        _expect_copied(name, old, masked, src, dst)
        expect_rotated(name, case, given, got, row[turned])


def expect_rotated(name: str, case: Case, given: Tensor, got: Tensor, row: Tensor) -> None:
    """got [T, H, rot] is the rounded rotation of given by case.deltas[row]."""
    angle = torch.tensor(case.deltas, dtype=torch.float64)[row, None, None] * case.inv_freq
    half = case.rot_dim // 2
    first, second = slice(0, half), slice(half, None)
    if not case.is_neox:
        first, second = slice(0, None, 2), slice(1, None, 2)
    a, b = given[..., first], given[..., second]
    length = torch.maximum(a.abs(), b.abs())
    want, pair = torch.empty_like(given), torch.empty_like(given)
    want[..., first] = a * angle.cos() - b * angle.sin()
    want[..., second] = b * angle.cos() + a * angle.sin()
    pair[..., first], pair[..., second] = length, length
    if case.dtype.itemsize == 1:
        want = want.clamp(-torch.finfo(case.dtype).max, torch.finfo(case.dtype).max)
    excess = (got - want).abs() / arithmetic_bound(case.dtype, want, pair)
    worst = float(excess.nan_to_num(nan=float("inf")).max()) if excess.numel() else 0.0
    assert worst <= 1, f"{name}: {worst:.3f} times the bound"


def _expect_copied(name: str, old: Tensor, new: Tensor, src: Tensor, dst: Tensor) -> None:
    want = old.clone()
    want[dst] = old[src]
    wrong = (want != new).any(dim=2).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, f"{name}: slots {wrong[:8]} differ, targets are {sorted(dst.tolist())[:8]}..."


def _shape(case: Case, dim: int) -> tuple[int, ...]:
    if case.is_hnd:
        return case.num_slots // case.page_size, case.num_heads, case.page_size, dim
    return case.num_slots, case.num_heads, dim


def _store_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype.itemsize == 1 else dtype


def _slots(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Source and target slots, disjoint or equal, none in page 0."""
    num_pages = case.num_slots // case.page_size
    if case.placement == "scattered":
        free = torch.randperm(case.num_slots - case.page_size, generator=generator)
        free = free + case.page_size
    else:
        pages = torch.randperm(num_pages - 1, generator=generator) + 1
        free = (pages[:, None] * case.page_size + torch.arange(case.page_size)).flatten()
    src = free[: case.num_tokens]
    if case.placement == "in_place":
        return src, src.clone()
    return src, free[-case.num_tokens :]


def _placed(tensor: Tensor, allocate: Allocate) -> Tensor:
    return allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)
