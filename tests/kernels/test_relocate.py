"""relocate and copy_slots: every implementation against one expectation, Triton interpreted."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is decorated, so before its import

from dataclasses import replace

import pytest
import torch

from kvedit_kernels import copy_slots, copy_slots_ref, relocate, relocate_ref
from kvedit_kernels.contract import TWO_HOP_DRIFT
from kvedit_kernels.plan import RelocationPlan, delta_rows
from kvedit_kernels.relocate_cpu import can_relocate_cpu, copy_slots_cpu, relocate_cpu
from kvedit_kernels.relocate_triton import copy_slots_triton, relocate_triton
from kvedit_kernels.testing import Case, build, expect_moved, snapshot, token_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (BF16, FP16, FP32, E4M3, E5M2)
COMPILED_DTYPES = (BF16, FP16, FP32)
MLA = Case(
    num_heads=1, head_dim=576, v_head_dim=0, rot_offset=512, rot_dim=64, is_neox=False, num_tokens=9
)

CASES = [
    *(Case(dtype=dtype, is_neox=neox) for dtype in DTYPES for neox in (True, False)),
    *(Case(dtype=dtype, is_hnd=True) for dtype in DTYPES),
    *(Case(is_hnd=hnd, page_size=page) for hnd in (True, False) for page in (1, 64)),
    *(Case(head_dim=dim, v_head_dim=dim, rot_dim=dim) for dim in (80, 96, 128, 256)),
    *(Case(dtype=dtype, head_dim=80, rot_dim=20, rot_offset=4) for dtype in (BF16, FP16, FP32)),
    Case(head_dim=128, v_head_dim=128, rot_dim=64, is_neox=False),
    Case(head_dim=96, v_head_dim=32, rot_dim=48, rot_offset=16, is_hnd=True, is_neox=False),
    *(Case(num_heads=heads, num_tokens=21) for heads in (1, 3, 8)),
    *(replace(MLA, dtype=dtype) for dtype in (BF16, FP32, E4M3)),
    replace(MLA, is_hnd=True, page_size=64),
    *(Case(num_tokens=tokens, deltas=(5000,), num_layers=1) for tokens in (1, 16, 130)),
    *(Case(placement="scattered", dtype=dtype, deltas=(100000, 0, -3)) for dtype in DTYPES),
    *(Case(placement="in_place", is_neox=neox, deltas=(-300, 0)) for neox in (True, False)),
    Case(placement="in_place", is_hnd=True, head_dim=80, rot_dim=32, v_head_dim=48),
    Case(rotate=False),
    Case(rotate=False, is_hnd=True, dtype=E5M2, placement="scattered"),
    Case(num_layers=5, num_heads=3, deltas=(0,)),
]

RELOCATE = {
    "ref": relocate_ref,
    "cpu": relocate_cpu,
    "triton": relocate_triton,
    "dispatched": relocate,
}
COPY = {
    "ref": copy_slots_ref,
    "cpu": copy_slots_cpu,
    "triton": copy_slots_triton,
    "dispatched": copy_slots,
}


def serves(name: str, case: Case) -> bool:
    return name != "cpu" or not case.rotate or case.dtype in COMPILED_DTYPES


def over_implementations(*cases: Case) -> pytest.MarkDecorator:
    """Every case with every implementation that serves it; "ref" and "triton" serve all."""
    pairs = [
        pytest.param(name, case, id=f"{name}-{case}")
        for case in cases
        for name in RELOCATE
        if serves(name, case)
    ]
    return pytest.mark.parametrize(("name", "case"), pairs)


@over_implementations(*CASES)
def test_moves_what_the_contract_says_and_nothing_else(name: str, case: Case) -> None:
    group, plan = build(case)
    before = snapshot(group)
    RELOCATE[name](group=group, plan=plan)
    expect_moved(case, before, group, plan)


@pytest.mark.parametrize("name", COPY)
@pytest.mark.parametrize("case", [Case(), Case(is_hnd=True, v_head_dim=32), MLA], ids=str)
def test_copy_slots_copies_bytes(name: str, case: Case) -> None:
    group, plan = build(case)
    before = snapshot(group)
    COPY[name](group=group, src=plan.src, dst=plan.dst)
    expect_moved(replace(case, rotate=False), before, group, plan)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_implementations_agree_bit_for_bit(case: Case) -> None:
    results = []
    for name in ("ref", "cpu", "triton"):
        if serves(name, case):
            group, plan = build(case, seed=1)
            RELOCATE[name](group=group, plan=plan)
            results.append(snapshot(group))
    for other in results[1:]:
        for one, two in zip(results[0][0] + results[0][1], other[0] + other[1], strict=True):
            assert torch.equal(one, two)


@over_implementations(*(Case(dtype=dtype, deltas=(0, 17), num_tokens=34) for dtype in DTYPES))
def test_a_zero_shift_copies_every_bit_pattern(name: str, case: Case) -> None:
    """-0.0, inf, nan payloads and denormals survive, also beside tokens that do turn."""
    group, plan = build(case)
    generator = torch.Generator().manual_seed(7)
    still = plan.src[plan.row == 0]
    for view in group.k_views:
        bits = view.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()])
        info = torch.iinfo(bits.dtype)
        shape = bits[still].shape
        bits[still] = torch.randint(info.min, info.max, shape, generator=generator).to(bits.dtype)
        specials = torch.tensor([-0.0, float("inf"), -float("inf"), float("nan")]).to(case.dtype)
        bits[still[0], 0, :4] = specials.view(bits.dtype)
    before = snapshot(group)
    RELOCATE[name](group=group, plan=plan)
    expect_moved(case, before, group, plan)


@over_implementations(*(Case(dtype=dtype, deltas=(785,), num_tokens=8) for dtype in (E4M3, E5M2)))
def test_fp8_saturates_and_keeps_nan(name: str, case: Case) -> None:
    group, plan = build(case)
    dtype = case.dtype
    limit = torch.finfo(dtype).max
    for view in group.k_views:
        view.view(dtype).copy_(torch.full(view.shape, limit))
        view.view(dtype)[plan.src[0], 0, 0] = float("nan")
    RELOCATE[name](group=group, plan=plan)
    for view in group.k_views:
        rows = view.view(dtype)[plan.dst].float()
        assert rows.isnan().sum() == 2, "one nan turns into its pair, nothing else"
        assert rows.nan_to_num().abs().max() == limit


@over_implementations(
    *(Case(dtype=dtype, deltas=(700, -300, 400), num_tokens=48) for dtype in DTYPES)
)
def test_two_hops_stay_within_the_stated_drift(name: str, case: Case) -> None:
    dtype = case.dtype
    error = {}
    for hops in ((0, 1), (2,)):
        group, plan = build(case)
        given = token_rows(group.k_views[0], 0)[plan.src].view(dtype).double()
        at = plan.src
        for row in hops:
            step = replace(plan, src=at, dst=plan.dst, row=torch.full_like(plan.row, row))
            RELOCATE[name](group=group, plan=step)
            at = plan.dst
        got = token_rows(group.k_views[0], 0)[plan.dst].view(dtype).double()
        error[hops] = _relative_error(got, given, 400 * case.inv_freq)
    assert error[0, 1] <= TWO_HOP_DRIFT[dtype]
    assert error[2,] < error[0, 1], "a single hop from the pristine copy is the better one"


def _relative_error(got: torch.Tensor, given: torch.Tensor, angle: torch.Tensor) -> float:
    a, b = given.chunk(2, dim=-1)
    want = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", RELOCATE)
def test_an_empty_plan_does_nothing(name: str) -> None:
    case = Case()
    group, plan = build(case)
    empty = RelocationPlan(
        src=plan.src[:0], dst=plan.dst[:0], row=plan.row[:0], cos_sin=plan.cos_sin
    )
    before = snapshot(group)
    RELOCATE[name](group=group, plan=empty)
    expect_moved(case, before, group, empty)


def test_zero_shift_rows_are_exact() -> None:
    rows = delta_rows([0, 1], Case().inv_freq)
    assert torch.equal(rows[0, 0], torch.ones(32)) and not rows[0, 1].any()


def test_the_compiled_kernel_serves_what_it_should() -> None:
    served = {dtype for dtype in DTYPES if can_relocate_cpu(build(Case(dtype=dtype))[0])}
    assert served == set(COMPILED_DTYPES)
