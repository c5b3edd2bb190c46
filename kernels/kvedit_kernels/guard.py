"""Buffers between forbidden pages: an access beyond an end of one (behind it by up to
16 bytes) ends the process.

For tests, run as a child process: python -m kvedit_kernels.guard IMPLEMENTATION FLUSH [overrun]
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from kvedit_kernels.testing import Allocate, Case, build, expect_moved, snapshot

PAGE = mmap.PAGESIZE
ALIGN = 16  # pools promise this alignment, so a buffer ends at most 15 bytes before its guard
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(flush: str) -> Allocate:
    """Allocator of tensors that touch the forbidden page behind ("end") or before ("start")."""

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        inside = -(-num_bytes // PAGE) * PAGE
        mapping = mmap.mmap(-1, inside + 2 * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        for page in (base, base + PAGE + inside):
            _forbid(page)
        start = PAGE if flush == "start" else PAGE + inside - num_bytes
        start -= start % ALIGN
        return torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=start).view(
            shape
        )

    return allocate


def _forbid(address: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), _PROT_NONE):
        raise OSError(ctypes.get_errno(), "kvedit: mprotect: expected a guard page, got an error")


def _implementation(name: str) -> Callable[..., None]:
    if name == "cpu":
        from kvedit_kernels.relocate_cpu import relocate_cpu

        return relocate_cpu
    if name == "triton":
        from kvedit_kernels.relocate_triton import relocate_triton

        return relocate_triton
    from kvedit_kernels.relocate_ref import relocate_ref

    return relocate_ref


def probe(name: str, flush: str, case: Case) -> None:
    """One move in buffers that lie at a forbidden page; the slots are those that ``case`` draws,
    seldom the pool's last. Raises AssertionError for a wrong result."""
    group, plan = build(case, allocate=guarded(flush))
    before = snapshot(group)
    _implementation(name)(group=group, plan=plan)
    expect_moved(case, before, group, plan)


def overrun(flush: str) -> None:
    """Touches one byte beyond a guarded buffer, as a faulty kernel would."""
    buffer = guarded(flush)((ALIGN,), torch.uint8)
    ctypes.string_at(buffer.data_ptr() + (ALIGN if flush == "end" else -1), 1)


# Odd head counts, padded dims and blocks that are not full: where masks are needed.
_SHAPES = (
    Case(num_heads=3, head_dim=80, rot_dim=20, rot_offset=4, v_head_dim=48, num_tokens=45),
    Case(num_heads=3, head_dim=96, v_head_dim=96, rot_dim=96, is_hnd=True, num_tokens=45),
    Case(num_heads=1, head_dim=576, v_head_dim=0, rot_offset=512, is_neox=False, num_tokens=13),
    Case(num_heads=5, head_dim=64, rot_dim=48, dtype=torch.float16, is_neox=False, num_tokens=45),
    Case(num_heads=3, dtype=torch.float32, page_size=1, placement="scattered", num_tokens=45),
)


def main(name: str, flush: str, *fault: str) -> None:
    """Probe the implementation ``name`` ("cpu", "triton", else the reference) on all shapes; any
    ``fault`` overruns a buffer first, which ends the process if the guard works."""
    if fault:
        overrun(flush)
    for case in _SHAPES:
        probe(name, flush, case)
    print(f"kvedit: guard: {len(_SHAPES)} shapes moved")


if __name__ == "__main__":
    main(*sys.argv[1:])
