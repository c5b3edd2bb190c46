"""One wrong argument, one error that names it with expected and got; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvedit_kernels import (
    KernelArgumentError,
    PoolGroup,
    copy_slots,
    delta_rows,
    relocate,
    relocate_ref,
)
from kvedit_kernels.relocate_cpu import relocate_cpu
from kvedit_kernels.testing import Case, build, snapshot

CASE = Case()


def poked(tensor: torch.Tensor, index: int, value: int) -> torch.Tensor:
    out = tensor.clone()
    out[index] = value
    return out


WRONG: dict[str, tuple[str, Callable]] = {
    "int32 slots": ("src", lambda p: replace(p, src=p.src.int())),
    "two dims": ("src", lambda p: replace(p, src=p.src[None])),
    "strided slots": ("dst", lambda p: replace(p, dst=p.dst.repeat_interleave(2)[::2])),
    "fewer targets": ("dst", lambda p: replace(p, dst=p.dst[:-1])),
    "negative source": ("src", lambda p: replace(p, src=poked(p.src, 3, -1))),
    "source past the end": ("src", lambda p: replace(p, src=poked(p.src, 3, CASE.num_slots))),
    "target past the end": ("dst", lambda p: replace(p, dst=poked(p.dst, 3, CASE.num_slots))),
    "target in page 0": ("dst", lambda p: replace(p, dst=poked(p.dst, 0, 0))),
    "target named twice": ("dst", lambda p: replace(p, dst=poked(p.dst, 0, int(p.dst[1])))),
    "partial overlap": ("src", lambda p: replace(p, src=poked(p.src, 0, int(p.dst[5])))),
    "shifted overlap": ("src", lambda p: replace(p, src=p.dst.roll(1))),
    "int64 rows": ("row", lambda p: replace(p, row=p.row.long())),
    "fewer rows": ("row", lambda p: replace(p, row=p.row[:-1])),
    "row past the table": ("row", lambda p: replace(p, row=poked(p.row, 0, 4))),
    "negative row": ("row", lambda p: replace(p, row=poked(p.row, 0, -1))),
    "fp64 table": ("cos_sin", lambda p: replace(p, cos_sin=p.cos_sin.double())),
    "other rot_dim": ("cos_sin", lambda p: replace(p, cos_sin=p.cos_sin[..., :16].contiguous())),
    "strided table": (
        "cos_sin",
        lambda p: replace(p, cos_sin=p.cos_sin.repeat_interleave(2, dim=2)[..., ::2]),
    ),
}


@pytest.mark.parametrize("move", [relocate, relocate_ref], ids=["dispatched", "ref"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_plan_is_refused_and_nothing_is_written(wrong: str, move: Callable) -> None:
    argument, change = WRONG[wrong]
    group, plan = build(CASE)
    before = snapshot(group)
    with pytest.raises(
        KernelArgumentError, match=rf"^kvedit: relocate: {argument}: expected .* got"
    ):
        move(group=group, plan=change(plan))
    after = snapshot(group)
    for old, new in zip(before[0] + before[1], after[0] + after[1], strict=True):
        assert torch.equal(old, new)


def test_hnd_page_0_is_never_a_target() -> None:
    group, plan = build(Case(is_hnd=True))
    with pytest.raises(KernelArgumentError, match="page 0 is the sink"):
        relocate(group=group, plan=replace(plan, dst=poked(plan.dst, 0, 15)))


def test_copy_slots_checks_its_slots_too() -> None:
    group, plan = build(CASE)
    with pytest.raises(KernelArgumentError, match="^kvedit: copy_slots: dst"):
        copy_slots(group=group, src=plan.src, dst=poked(plan.dst, 0, 0))


def test_the_compiled_kernel_refuses_what_it_does_not_serve() -> None:
    group, plan = build(Case(dtype=torch.float8_e4m3fn))
    with pytest.raises(KernelArgumentError, match="group: expected .*bfloat16.* got .*float8"):
        relocate_cpu(group=group, plan=plan)


def views(*shape: int, dtype: torch.dtype = torch.bfloat16, count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


NHD = (32, 2, 64)
BAD_GROUPS: dict[str, tuple[str, Callable]] = {
    "no layer": ("k_views", lambda: ([], [], {})),
    "other V count": ("v_views", lambda: (views(*NHD), views(*NHD, count=1), {})),
    "flat rows": ("k_views", lambda: (views(32, 128), [], {})),
    "one layer differs": (
        "k_views[1]",
        lambda: ([*views(*NHD, count=1), *views(32, 2, 32, count=1)], [], {}),
    ),
    "element stride": ("k_views[0]", lambda: (views(32, 64, 2), [], {"transpose": True})),
    "page mismatch": ("k_views", lambda: (views(4, 2, 8, 64), [], {"page_size": 16})),
    "unknown dtype": ("dtype", lambda: (views(*NHD, dtype=torch.int8), [], {})),
    "uint8 as bf16": (
        "k_views",
        lambda: (views(*NHD, dtype=torch.uint8), [], {"dtype": torch.bfloat16}),
    ),
    "other V heads": ("v_views", lambda: (views(*NHD), views(32, 4, 64), {})),
    "other V slots": ("v_views", lambda: (views(*NHD), views(33, 2, 64), {})),
    "odd rot_dim": ("rot_dim", lambda: (views(*NHD), [], {"rot_dim": 33})),
    "rotation past the row": (
        "rot_offset + rot_dim",
        lambda: (views(*NHD), [], {"rot_offset": 16}),
    ),
    "unaligned base": ("k_views[0]", lambda: (views(*NHD), [], {"shift": True})),
}


@pytest.mark.parametrize("bad", BAD_GROUPS)
def test_a_wrong_layout_is_refused(bad: str) -> None:
    argument, make = BAD_GROUPS[bad]
    k, v, options = make()
    if options.pop("transpose", False):
        k = [view.transpose(1, 2) for view in k]
    if options.pop("shift", False):
        k = [torch.zeros(32 * 128 + 1, dtype=torch.bfloat16)[1:].view(NHD)]
    with pytest.raises(KernelArgumentError) as refused:
        PoolGroup.from_views(k, v, **{"rot_dim": 64, "is_neox": True, **options})
    assert refused.value.argument == argument
    assert str(refused.value).startswith(f"kvedit: PoolGroup: {argument}: expected ")


def test_angles_need_fp64() -> None:
    with pytest.raises(KernelArgumentError, match="inv_freq: expected float64"):
        delta_rows([1], torch.ones(4))


def test_a_group_counts_its_bytes() -> None:
    group, _ = build(Case(v_head_dim=32))
    assert group.bytes_per_token == 2 * (2 * 64 + 2 * 32) * 2
