"""The expectation itself: each way a kernel could be wrong must turn it red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvedit_kernels import relocate_ref
from kvedit_kernels.contract import OPS
from kvedit_kernels.plan import delta_rows, still_rows
from kvedit_kernels.testing import Case, build, expect_moved, snapshot

CASE = Case(rot_dim=32, deltas=(17, 0, 4096))


def add_to_bits(view: torch.Tensor, slot: int, dim: int, amount: int) -> None:
    bits = view.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()])
    bits[slot, 0, dim] += amount


def first_turned(plan) -> int:
    return int(plan.dst[~still_rows(plan.cos_sin)[plan.row.long()]][0])


def untouched_slot(plan) -> int:
    named = set(plan.src.tolist()) | set(plan.dst.tolist())
    return next(slot for slot in range(1, 10_000) if slot not in named)


FAULTS: dict[str, Callable] = {
    "two ulps off": lambda g, p: add_to_bits(g.k_views[1], first_turned(p), 3, 2),
    "pass-through element": lambda g, p: add_to_bits(g.k_views[0], first_turned(p), 40, 1),
    "V bit": lambda g, p: add_to_bits(g.v_views[1], int(p.dst[0]), 5, 1),
    "source overwritten": lambda g, p: add_to_bits(g.k_views[0], int(p.src[0]), 0, 1),
    "untouched slot": lambda g, p: add_to_bits(g.k_views[0], untouched_slot(p), 0, 1),
    "sink page": lambda g, p: add_to_bits(g.v_views[0], 0, 0, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_corrupted_result_fails(fault: str, dtype: torch.dtype) -> None:
    case = replace(CASE, dtype=dtype)
    group, plan = build(case)
    before = snapshot(group)
    relocate_ref(group=group, plan=plan)
    amount_needed = {torch.float32: 64}.get(dtype, 1)
    for _ in range(amount_needed):  # fp32: the bound is eight roundings wide
        FAULTS[fault](group, plan)
    with pytest.raises(AssertionError):
        expect_moved(case, before, group, plan)


WRONG_PLANS: dict[str, Callable] = {
    "no rotation": lambda case, plan: replace(plan, cos_sin=delta_rows([0, 0, 0], case.inv_freq)),
    "wrong sign": lambda case, plan: replace(plan, cos_sin=delta_rows([-17, 0, 2], case.inv_freq)),
    "off by one": lambda case, plan: replace(
        plan, cos_sin=delta_rows([18, 0, 4096], case.inv_freq)
    ),
    "other base": lambda case, plan: replace(
        plan, cos_sin=delta_rows(case.deltas, case.inv_freq * 0.99)
    ),
    "rows shifted": lambda case, plan: replace(plan, row=plan.row.roll(1)),
    "slots shifted": lambda case, plan: replace(plan, src=plan.src.roll(1)),
    "bf16 table": lambda case, plan: replace(plan, cos_sin=plan.cos_sin.to(torch.bfloat16).float()),
}


@pytest.mark.parametrize("wrong", WRONG_PLANS)
def test_a_wrong_rotation_fails(wrong: str) -> None:
    group, plan = build(CASE)
    before = snapshot(group)
    relocate_ref(group=group, plan=WRONG_PLANS[wrong](CASE, plan))
    with pytest.raises(AssertionError):
        expect_moved(CASE, before, group, plan)


def test_the_wrong_pairing_fails() -> None:
    group, plan = build(CASE)
    before = snapshot(group)
    relocate_ref(group=replace(group, is_neox=False), plan=plan)
    with pytest.raises(AssertionError):
        expect_moved(CASE, before, group, plan)


def test_truncation_instead_of_rounding_fails() -> None:
    """What the interpreter's own bf16 cast does."""
    group, plan = build(replace(CASE, deltas=(17,)))
    before = snapshot(group)
    wide, wide_plan = build(replace(CASE, deltas=(17,), dtype=torch.float32))
    for narrow_view, wide_view in zip(group.k_views, wide.k_views, strict=True):
        wide_view.copy_(narrow_view)
    relocate_ref(group=group, plan=plan)
    relocate_ref(group=wide, plan=wide_plan)
    for narrow_view, wide_view in zip(group.k_views, wide.k_views, strict=True):
        cut = (wide_view.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
        narrow_view[plan.dst] = cut[plan.dst]
    with pytest.raises(AssertionError, match="times the bound"):
        expect_moved(replace(CASE, deltas=(17,)), before, group, plan)


def test_losing_minus_zero_in_an_unturned_row_fails() -> None:
    case = replace(CASE, deltas=(0,))
    group, plan = build(case)
    group.k_views[0][plan.src[0], 0, 0] = -0.0
    before = snapshot(group)
    relocate_ref(group=group, plan=plan)
    group.k_views[0][plan.dst[0], 0, 0] = 0.0
    with pytest.raises(AssertionError):
        expect_moved(case, before, group, plan)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_axis_of_a_contract_is_explained(op) -> None:
    shapes = " ".join([*op.inputs.values(), *op.outputs.values()])
    inside = [part.split("]")[0] for part in shapes.split("[")[1:]]
    used = {axis.split("/")[0].strip() for shape in inside for axis in shape.split(",")}
    symbols = {axis for axis in used if axis.isalpha() and axis not in ("page", "in")}
    assert symbols <= set(op.axes), f"unexplained: {symbols - set(op.axes)}"
    assert op.tolerance and op.why and callable(op.reference)


def test_the_public_ops_are_the_ones_under_contract() -> None:
    import kvedit_kernels

    assert {"relocate", "copy_slots", "rotate_rows"} <= set(kvedit_kernels.__all__)
    assert set(OPS) == {"relocate", "copy_slots", "rotate_rows", "merge_states"}
