"""Queued copies: decided by the scheduler, run on the forward stream before the next forward.

Ownership of the slots: the donor's slots belong to the donor's tree node, the target's to the
node that the splice inserted. Both nodes stay locked until the copy has been launched, so
neither can be evicted and handed to somebody else in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvedit.splice.sources import Source
from kvedit_kernels import RelocationPlan, relocate, relocate_ref
from sglang_patches.guard import contained
from sglang_patches.pools import GroupWithRope, translate
from sglang_patches.pools.layout import PoolKind
from sglang_patches.scheduler.splice.in_flight import InFlight, NewEvent
from sglang_patches.scheduler.splice.rotation import RotationRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One span of one splice: by pool kind, (src, dst) int64 slots [N]; delta_pos in positions.

    target: int64 [N], the slots of the full pool that requests will name.
    """

    slots: dict[PoolKind, tuple[torch.Tensor, torch.Tensor]]
    target: torch.Tensor
    delta_pos: int
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCopies:
    """What one launch is about. targets: slots of the full pool, int64 [N] each; holders: the
    requests that the copies were decided for."""

    num_copies: int
    sources: frozenset[Source]
    targets: tuple[torch.Tensor, ...]
    holders: tuple[Any, ...]


class CopyQueue:
    """The copies of one forward pass, launched as one relocation per pool group.

    new_event: records an event on the current stream; None on a host without streams.
    """

    def __init__(
        self,
        groups: Sequence[GroupWithRope],
        pool: Any,
        unlock: Callable[[Any], None],
        new_event: NewEvent | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._rows = [RotationRows(group.inv_freq, group.group.device) for group in self._groups]
        self._pool = pool
        self._unlock = unlock
        self._pending: list[Copy] = []
        self._locks: list[Any] = []
        self._holders: list[Any] = []
        self.in_flight = InFlight(new_event)
        self.num_launched = 0  # copies that ran, on every rank
        self.shift_error = 0  # positions; a testing operation sets it, for negative controls

    def __len__(self) -> int:
        return len(self._pending)

    def plan(self, src: torch.Tensor, dst: torch.Tensor, delta_pos: int, source: Source) -> Copy:
        """Translate full-pool slots for every pool. Raises LostWindowSlots when the donor's
        window slots are gone."""
        kinds = {group.pool_kind for group in self._groups}
        slots = {
            kind: (translate(self._pool, kind, src), translate(self._pool, kind, dst))
            for kind in kinds
        }
        delta_pos += self.shift_error
        return Copy(slots=slots, target=dst, delta_pos=delta_pos, source=source)

    def put(self, copies: Sequence[Copy], locks: Sequence[Any], holder: Any = None) -> None:
        """Queue copies for the request ``holder``; the queue owns ``locks`` from now on."""
        self._pending += copies
        self._locks += locks
        self._holders.append(holder)

    def discard(self) -> None:
        """Forget everything, locks included: the tree they locked has been emptied."""
        self._pending, self._locks, self._holders = [], [], []

    def release_pending(self) -> None:
        """Give up what is queued: unlock, write nothing."""
        locks, self._locks = self._locks, []
        self._pending, self._holders = [], []
        for lock in locks:
            self._unlock(lock)

    def release_done(self) -> None:
        """Let go of the tensors of launches that the device has run. Never waits."""
        self.in_flight.release_done()

    def pending(self) -> PendingCopies:
        return PendingCopies(
            num_copies=len(self._pending),
            sources=frozenset(copy.source for copy in self._pending),
            targets=tuple(copy.target for copy in self._pending),
            holders=tuple(holder for holder in self._holders if holder is not None),
        )

    def launch(self) -> None:
        """Run what is queued, in order on the current stream, without a host sync.

        Raises what the reference raises when both the fast path and the reference fail. The
        queue is empty then too: the caller must see to it that the targets are never read.
        """
        read: list[object] = [self._pending]  # by what is enqueued from here on
        try:
            for group, rows in zip(self._groups, self._rows, strict=True):
                plan = _relocation_plan(group, rows, self._pending)
                read.append(plan)
                self._relocate(group, plan)
        finally:
            self.in_flight.keep(read)
            self.release_pending()

    def _relocate(self, group: GroupWithRope, plan: RelocationPlan) -> None:
        with contained("relocate") as fast:
            self.run_kernel(group, plan)
        if not fast.is_well:  # the reference gives the same bytes, slower: no answer changes
            self.run_reference(group, plan)

    def run_kernel(self, group: GroupWithRope, plan: RelocationPlan) -> None:
        relocate(group=group.group, plan=plan)

    def run_reference(self, group: GroupWithRope, plan: RelocationPlan) -> None:
        relocate_ref(group=group.group, plan=plan)


def _relocation_plan(
    group: GroupWithRope, rows_of: RotationRows, pending: Sequence[Copy]
) -> RelocationPlan:
    """Made on the device: indices on the host would wait for the forward in flight."""
    pairs = [copy.slots[group.pool_kind] for copy in pending]
    dst = torch.cat([dst for _, dst in pairs])
    deltas = sorted({copy.delta_pos for copy in pending})
    row_of = {delta: row for row, delta in enumerate(deltas)}
    rows = [
        torch.full((len(dst),), row_of[copy.delta_pos], dtype=torch.int32, device=dst.device)
        for copy, (_, dst) in zip(pending, pairs, strict=True)
    ]
    return RelocationPlan(
        src=torch.cat([src for src, _ in pairs]),
        dst=dst,
        row=torch.cat(rows),
        cos_sin=rows_of.table(deltas),
    )
