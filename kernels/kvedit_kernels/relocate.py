"""relocate, copy_slots: the public ops; each picks the implementation for the pool's device."""

from __future__ import annotations

from torch import Tensor

from kvedit_kernels.group import PoolGroup
from kvedit_kernels.plan import RelocationPlan
from kvedit_kernels.relocate_cpu import (
    can_copy_cpu,
    can_relocate_cpu,
    copy_slots_cpu,
    relocate_cpu,
)
from kvedit_kernels.relocate_ref import copy_slots_ref, relocate_ref


def relocate(*, group: PoolGroup, plan: RelocationPlan) -> None:
    """Move plan's N tokens from src to dst in every layer of the group; on CUDA in one launch.

    for each layer, token i:
        K[dst[i]] = K[src[i]] turned by cos_sin[row[i]] in [rot_offset, rot_offset + rot_dim)
        V[dst[i]] = V[src[i]]

    Zero shift: a row of cos_sin that is exactly (1, 0) is a byte copy: -0.0, inf and nan survive.
    No rope (`group.rotate` False): everything is a byte copy.
    Rounding: fp32 arithmetic without fused multiply-add, one rounding to nearest even; fp8
    saturates. All implementations agree bit for bit, apart from which nan a nan becomes.
    Order: runs on the current stream and does not wait for the device; fit for graph capture once
    the kernel of this group is compiled.
    Raises KernelArgumentError before anything is written. On CUDA the slot values are not read: a
    caller there vouches for range, uniqueness of dst, and src disjoint from dst or equal to it.
    """
    if group.device.type == "cuda":
        # Triton is no dependency of a CPU host.
        from kvedit_kernels.relocate_triton import relocate_triton

        relocate_triton(group=group, plan=plan)
    elif can_relocate_cpu(group):
        relocate_cpu(group=group, plan=plan)
    else:
        relocate_ref(group=group, plan=plan)


def copy_slots(*, group: PoolGroup, src: Tensor, dst: Tensor) -> None:
    """K and V of N slots ([N] int64 each) copied byte for byte; rules of `relocate` otherwise."""
    if group.device.type == "cuda":
        from kvedit_kernels.relocate_triton import copy_slots_triton

        copy_slots_triton(group=group, src=src, dst=dst)
    elif can_copy_cpu(group):
        copy_slots_cpu(group=group, src=src, dst=dst)
    else:
        copy_slots_ref(group=group, src=src, dst=dst)
