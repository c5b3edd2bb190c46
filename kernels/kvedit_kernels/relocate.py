"""relocate, copy_slots: the public ops; each picks the implementation for the pool's device."""

from __future__ import annotations

from torch import Tensor

from kvedit_kernels.group import PoolGroup
from kvedit_kernels.plan import RelocationPlan
from kvedit_kernels.relocate_ref import copy_slots_ref, relocate_ref


def relocate(*, group: PoolGroup, plan: RelocationPlan) -> None:
    relocate_ref(group=group, plan=plan)


def copy_slots(*, group: PoolGroup, src: Tensor, dst: Tensor) -> None:
    copy_slots_ref(group=group, src=src, dst=dst)
