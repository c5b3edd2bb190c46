"""Run the relocation once for every pool group while the pool is empty.

On a GPU the kernel is compiled at its first launch, which takes seconds: not while requests wait.
And a kernel that cannot run here refuses the start instead of the first splice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvedit.errors import Unsupported
from kvedit_kernels import RelocationPlan, relocate
from sglang_patches.pools import GroupWithRope
from sglang_patches.scheduler.splice.rotation import RotationRows

SHIFT = 1  # positions; one that turns something


def warm_up(groups: Sequence[GroupWithRope], device_module: Any) -> None:
    """Relocate one token of every group onto itself: nothing is in the pool yet, and a prefill
    writes a slot before anybody reads it. Waits for the device.

    Raises Unsupported with the groups that failed and how.
    """
    reasons = []
    for group in groups:
        try:
            relocate(group=group.group, plan=_plan(group))
            if group.group.device.type != "cpu":
                device_module.synchronize()
        except Exception as error:  # whatever it is, every splice would meet it
            reasons.append(
                f"relocation kernel: expected it to run on the {group.pool_kind} pool's layers "
                f"{group.layer_ids[0]}..{group.layer_ids[-1]}, got {type(error).__name__}: {error}"
            )
    if reasons:
        raise Unsupported(reasons)


def _plan(group: GroupWithRope) -> RelocationPlan:
    """One token, in place, by one position. Page 0 is no target, not even in place."""
    device = group.group.device
    slot = torch.full((1,), group.group.first_writable_slot, dtype=torch.int64, device=device)
    row = torch.zeros(1, dtype=torch.int32, device=device)
    table = RotationRows(group.inv_freq, device).table([SHIFT])
    return RelocationPlan(src=slot, dst=slot, row=row, cos_sin=table)
