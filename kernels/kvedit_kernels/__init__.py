"""Relocation of KV-cache rows: K re-rotated by a shift in tokens, V copied. Tensors and ints only.

relocate      all layers of a pool group in one call; bf16, fp16, fp32, fp8; NHD, HND, MLA
copy_slots    the same move without rotation
rotate_rows         the rotation alone, in torch: what `relocate_ref` is made of
merge_states_ref    in torch, for later work; nothing here calls it
"""

from kvedit_kernels.errors import KernelArgumentError
from kvedit_kernels.group import PoolGroup
from kvedit_kernels.merge_states_ref import merge_states_ref
from kvedit_kernels.plan import RelocationPlan, delta_rows
from kvedit_kernels.relocate import copy_slots, relocate
from kvedit_kernels.relocate_cpu import cpu_kernel_status
from kvedit_kernels.relocate_ref import copy_slots_ref, relocate_ref
from kvedit_kernels.rotate_rows_ref import rotate_rows

__all__ = [
    "KernelArgumentError",
    "PoolGroup",
    "RelocationPlan",
    "copy_slots",
    "copy_slots_ref",
    "cpu_kernel_status",
    "delta_rows",
    "merge_states_ref",
    "relocate",
    "relocate_ref",
    "rotate_rows",
]
