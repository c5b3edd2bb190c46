"""A copy queue whose launches fail when told to, before they have written anything.

A boundary that fails at its end has launched the copies: the targets hold the right bytes, and
who reads them all the same is not caught.
"""

from __future__ import annotations

from kvedit_kernels import RelocationPlan
from sglang_patches import guard
from sglang_patches.pools import GroupWithRope
from sglang_patches.scheduler.splice.copies import CopyQueue


class FaultyQueue(CopyQueue):
    def launch(self) -> None:
        guard.fail_point("forward")
        super().launch()

    def run_kernel(self, group: GroupWithRope, plan: RelocationPlan) -> None:
        guard.fail_point("relocate")
        super().run_kernel(group, plan)

    def run_reference(self, group: GroupWithRope, plan: RelocationPlan) -> None:
        guard.fail_point("relocate_ref")
        super().run_reference(group, plan)
