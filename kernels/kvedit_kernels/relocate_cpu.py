"""The compiled CPU kernel: finds the build for this processor and hands it raw addresses."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from kvedit_kernels.errors import KernelArgumentError
from kvedit_kernels.group import PoolGroup
from kvedit_kernels.plan import RelocationPlan, check_plan, check_slots, still_rows

# Best first; a processor takes the first build whose instruction set it has. setup.py names them.
_BUILDS_BY_CAPABILITY = {
    "AVX512": ("_relocate_cpu_v4", "_relocate_cpu_v3", "_relocate_cpu"),
    "AVX2": ("_relocate_cpu_v3", "_relocate_cpu"),
}
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MAX_FP16_ROT_DIM = 1024  # kMaxRotDim of relocate_cpu.cpp
# A thread costs tens of microseconds to start: about what it takes to copy this much.
_MIN_BYTES_PER_THREAD = 1 << 20


class _Layout(ctypes.Structure):
    """Mirrors Layout of relocate_cpu.cpp."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page_bytes", "token_bytes")),
        *((name, ctypes.c_int64) for name in ("head_bytes", "row_bytes")),
    ]


class _Job(ctypes.Structure):
    """Mirrors Job of relocate_cpu.cpp."""

    _fields_ = [
        ("k", _Layout),
        ("v", _Layout),
        *((name, ctypes.c_void_p) for name in ("src", "dst", "row", "cos_sin", "still")),
        *((name, ctypes.c_int64) for name in ("num_layers", "num_tokens", "num_heads")),
        *((name, ctypes.c_int64) for name in ("page_size", "rot_offset", "rot_dim", "dtype")),
        *((name, ctypes.c_int64) for name in ("is_neox", "num_threads")),
    ]


def runnable_builds() -> tuple[str, ...]:
    """Names of the builds whose instruction set this processor has, best first."""
    capability = torch.backends.cpu.get_cpu_capability()
    return _BUILDS_BY_CAPABILITY.get(capability, ("_relocate_cpu",))


def build_path(name: str) -> Path:
    """Where setup.py leaves a build; the file need not exist."""
    return Path(__file__).with_name(name + EXTENSION_SUFFIXES[0])


def open_build(path: Path) -> ctypes.CDLL:
    """Raises OSError where the library does not load."""
    library = ctypes.CDLL(str(path))
    library.kvedit_relocate.argtypes = [ctypes.POINTER(_Job)]
    library.kvedit_can_rotate.argtypes = [ctypes.c_int64]
    return library


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """(library or None, one line that says which build, or why none)."""
    capability = torch.backends.cpu.get_cpu_capability()
    for path in map(build_path, runnable_builds()):
        if not path.exists():
            continue
        try:
            return open_build(path), f"compiled: {path.name} ({capability})"
        except OSError as error:
            return None, f"reference: {path.name} does not load: {error}"
    missing = ", ".join(runnable_builds())
    return None, f"reference: none of {missing} was built at install ({capability})"


def cpu_kernel_status() -> str:
    """One line for `kvedit doctor`: starts with "compiled:" or with "reference:" and the reason."""
    return _load()[1]


def can_copy_cpu(group: PoolGroup) -> bool:
    """Whether the compiled kernel serves `copy_slots`; no arithmetic, so any dtype."""
    return _load()[0] is not None and group.device.type == "cpu"


def can_relocate_cpu(group: PoolGroup) -> bool:
    """Whether the compiled kernel serves `relocate`; fp8 is left to the reference."""
    library, _ = _load()
    if library is None or not can_copy_cpu(group):
        return False
    if not group.rotate:
        return True
    code = _DTYPE_CODES.get(group.dtype)
    if code is None or not library.kvedit_can_rotate(code):
        return False
    return group.dtype != torch.float16 or group.rot_dim <= _MAX_FP16_ROT_DIM


def relocate_cpu(*, group: PoolGroup, plan: RelocationPlan) -> None:
    """As `relocate_ref`, bit for bit; only for groups that `can_relocate_cpu` accepts."""
    check_plan("relocate", group, plan)
    if not can_relocate_cpu(group):
        raise KernelArgumentError(
            "relocate_cpu", "group", "float32, bfloat16, float16", group.dtype
        )
    if not group.rotate:
        _run(group, plan.src, plan.dst)
        return
    still = still_rows(plan.cos_sin).to(torch.uint8)
    _run(
        group,
        plan.src,
        plan.dst,
        row=plan.row.data_ptr(),
        cos_sin=plan.cos_sin.data_ptr(),
        still=still.data_ptr(),
        rot_offset=group.rot_offset,
        rot_dim=group.rot_dim,
        dtype=_DTYPE_CODES[group.dtype],
        is_neox=group.is_neox,
    )


def copy_slots_cpu(*, group: PoolGroup, src: Tensor, dst: Tensor) -> None:
    """As `copy_slots_ref`."""
    check_slots("copy_slots", group, src, dst)
    _run(group, src, dst)


def _run(group: PoolGroup, src: Tensor, dst: Tensor, **rotation: int) -> None:
    library, status = _load()
    if library is None:
        raise KernelArgumentError("relocate_cpu", "group", "a compiled CPU kernel", status)
    if len(dst) == 0:
        return
    num_bytes = len(dst) * group.bytes_per_token
    job = _Job(
        k=_layout(group, group.k_ptrs, group.k_stride, group.head_dim),
        v=_layout(group, group.v_ptrs, group.v_stride, group.v_head_dim),
        src=src.data_ptr(),
        dst=dst.data_ptr(),
        num_layers=group.num_layers,
        num_tokens=len(dst),
        num_heads=group.num_heads,
        page_size=group.page_size,
        num_threads=min(torch.get_num_threads(), 1 + num_bytes // _MIN_BYTES_PER_THREAD),
        **rotation,
    )
    if library.kvedit_relocate(ctypes.byref(job)):
        raise MemoryError("kvedit: relocate: the run list of the plan does not fit in memory")


def _layout(
    group: PoolGroup, pointers: Tensor | None, stride: tuple[int, int, int], row_elements: int
) -> _Layout:
    size = group.dtype.itemsize
    page, token, head = (elements * size for elements in stride)
    base = pointers.data_ptr() if pointers is not None else None
    return _Layout(base, page, token, head, row_elements * size)
