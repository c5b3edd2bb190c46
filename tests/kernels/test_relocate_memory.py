"""Where relocation may read and write: guard pages, and offsets past 2^31 elements."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is decorated, so before its import

import mmap
import signal
import subprocess
import sys

import pytest
import torch

from kvedit_kernels import relocate_ref
from kvedit_kernels.group import PoolGroup
from kvedit_kernels.plan import RelocationPlan, delta_rows
from kvedit_kernels.relocate_cpu import relocate_cpu
from kvedit_kernels.relocate_triton import relocate_triton
from kvedit_kernels.rotate_rows_ref import rotate_rows

IMPLEMENTATIONS = {"ref": relocate_ref, "cpu": relocate_cpu, "triton": relocate_triton}
MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13
HEAD_DIM = 64
NUM_SLOTS = 2**31 // HEAD_DIM + 64  # one head: the last 64 slots lie past 2^31 elements


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvedit_kernels.guard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("flush", ["start", "end"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_access_outside_any_buffer(name: str, flush: str) -> None:
    result = probe(name, flush)
    assert result.returncode == 0, result.stderr
    assert "shapes moved" in result.stdout


@pytest.mark.parametrize("flush", ["start", "end"])
def test_the_guard_pages_bite(flush: str) -> None:
    assert probe("ref", flush, "overrun").returncode == -signal.SIGSEGV


def virtual_pool(shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros that take memory only where they are touched."""
    elements = torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    mapping = mmap.mmap(-1, elements * 2, flags=flags)
    return torch.frombuffer(mapping, dtype=torch.bfloat16).view(shape)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_offsets_past_2_to_the_31_elements(name: str, page_size: int) -> None:
    shape = (NUM_SLOTS, 1, HEAD_DIM)
    if page_size:
        shape = (NUM_SLOTS // page_size, 1, page_size, HEAD_DIM)
    k, v = virtual_pool(shape), virtual_pool(shape)
    group = PoolGroup.from_views([k], [v], page_size=page_size, rot_dim=HEAD_DIM, is_neox=True)
    num_tokens = 20
    low = torch.arange(32, 32 + num_tokens)
    high = torch.arange(NUM_SLOTS - num_tokens, NUM_SLOTS)
    inv_freq = 10000.0 ** (-torch.arange(HEAD_DIM // 2, dtype=torch.float64) / (HEAD_DIM // 2))
    rows = {
        "row": torch.zeros(num_tokens, dtype=torch.int32),
        "cos_sin": delta_rows([123], inv_freq),
    }
    given = torch.randn(num_tokens, 1, HEAD_DIM).to(torch.bfloat16)
    k_rows, v_rows = (view.view(NUM_SLOTS, 1, HEAD_DIM) for view in (k, v))
    k_rows[low], v_rows[low] = given, given
    move = IMPLEMENTATIONS[name]
    move(group=group, plan=RelocationPlan(src=low, dst=high, **rows))
    want = rotate_rows(given, rows["row"], rows["cos_sin"])
    assert torch.equal(k_rows[high], want) and torch.equal(v_rows[high], given)
    move(group=group, plan=RelocationPlan(src=high, dst=low + 64, **rows))
    assert torch.equal(k_rows[low + 64], rotate_rows(want, rows["row"], rows["cos_sin"]))
    assert torch.equal(k_rows[low], given), "a wrapped offset would have landed near slot 0"
