"""The compiled CPU kernel: every build, every thread count, and life without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvedit_kernels import cpu_kernel_status, relocate, relocate_cpu
from kvedit_kernels.relocate_cpu import build_path, open_build, runnable_builds
from kvedit_kernels.testing import Case, build, expect_moved, snapshot

# Vector tails: half rows below, at and between the vector widths of every build.
ROT_DIMS = (2, 10, 16, 34, 64, 128, 130)
CASES = [
    Case(dtype=dtype, head_dim=132, rot_dim=rot_dim, is_neox=is_neox, num_layers=1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for rot_dim in ROT_DIMS
    for is_neox in (True, False)
]


@pytest.fixture
def force_build(monkeypatch: pytest.MonkeyPatch):
    def force(library, status: str) -> None:
        monkeypatch.setattr(relocate_cpu, "_load", lambda: (library, status))

    return force


def test_the_best_build_is_the_one_in_use() -> None:
    """Also red where no compiler was at hand: then every splice here runs the slow reference."""
    assert cpu_kernel_status().startswith(f"compiled: {build_path(runnable_builds()[0]).name}")


@pytest.mark.parametrize("name", runnable_builds())
def test_every_build_meets_the_contract(name: str, force_build) -> None:
    library = open_build(build_path(name))
    force_build(library, name)
    for case in CASES:
        if case.dtype == torch.float16 and not library.kvedit_can_rotate(2):
            continue  # the baseline instruction set has no fp16 conversion
        group, plan = build(case)
        before = snapshot(group)
        relocate_cpu.relocate_cpu(group=group, plan=plan)
        expect_moved(case, before, group, plan)


@pytest.mark.parametrize("is_hnd", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_threads_share_layers_and_runs_without_gaps(
    num_threads: int, is_hnd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(relocate_cpu, "_MIN_BYTES_PER_THREAD", 1)
    case = Case(num_layers=3, num_tokens=101, is_hnd=is_hnd)
    group, plan = build(case)
    before = snapshot(group)
    relocate_cpu.relocate_cpu(group=group, plan=plan)
    expect_moved(case, before, group, plan)


def test_without_a_build_the_reference_serves_and_says_so(force_build) -> None:
    force_build(None, "reference: none of _relocate_cpu was built at install (AVX2)")
    case = Case()
    group, plan = build(case)
    before = snapshot(group)
    relocate(group=group, plan=plan)
    expect_moved(case, before, group, plan)
    assert cpu_kernel_status().startswith("reference: none of")


def test_a_file_that_is_no_library_is_reported(monkeypatch, tmp_path: Path) -> None:
    broken = tmp_path / "_relocate_cpu.so"
    broken.write_text("not a library")
    monkeypatch.setattr(relocate_cpu, "build_path", lambda name: broken)
    relocate_cpu._load.cache_clear()
    try:
        assert cpu_kernel_status().startswith("reference: _relocate_cpu.so does not load")
    finally:
        monkeypatch.undo()
        relocate_cpu._load.cache_clear()
