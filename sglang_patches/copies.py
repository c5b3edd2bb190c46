"""Queued copies: decided by the scheduler, run on the forward stream before the next forward.

Ownership of the slots: the donor's slots belong to the donor's tree node, the target's to the
node that the splice inserted. Both nodes stay locked until the copy has been launched, so
neither can be evicted and handed to somebody else in between.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kvedit_kernels import RelocationPlan, delta_rows, relocate, relocate_ref
from sglang_patches.guard import errors, trip
from sglang_patches.pools import GroupWithRope, translate

logger = logging.getLogger("kvedit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One span of one splice: by pool kind, (src, dst) int64 slots [N]; delta_pos in positions.

    target: int64 [N], the slots of the full pool that requests will name.
    """

    slots: dict[str, tuple[torch.Tensor, torch.Tensor]]
    target: torch.Tensor
    delta_pos: int
    segment: int


class CopyQueue:
    """The copies of one forward pass, launched as one relocation per pool group."""

    def __init__(
        self, groups: Sequence[GroupWithRope], pool: Any, unlock: Callable[[Any], None]
    ) -> None:
        self._groups = tuple(groups)
        self._pool = pool
        self._unlock = unlock
        self._pending: list[Copy] = []
        self._locks: list[Any] = []
        # Tensors of the last launches: the forward stream may still read them.
        self._in_flight: deque[tuple[Any, ...]] = deque(maxlen=8)
        self.num_launched = 0
        self.shift_error = 0  # positions; a testing operation sets it, for negative controls

    def __len__(self) -> int:
        return len(self._pending)

    def plan(self, src: torch.Tensor, dst: torch.Tensor, delta_pos: int, segment: int) -> Copy:
        """Translate full-pool slots for every pool. Raises LostWindowSlots when the donor's
        window slots are gone."""
        kinds = {group.pool_kind for group in self._groups}
        slots = {
            kind: (translate(self._pool, kind, src), translate(self._pool, kind, dst))
            for kind in kinds
        }
        delta_pos += self.shift_error
        return Copy(slots=slots, target=dst, delta_pos=delta_pos, segment=segment)

    def put(self, copies: Sequence[Copy], locks: Sequence[Any]) -> None:
        """Queue copies; the queue owns ``locks`` from now on."""
        self._pending += copies
        self._locks += locks

    def discard(self) -> None:
        """Forget everything, locks included: the tree they locked has been emptied."""
        self._pending, self._locks = [], []

    def release_pending(self) -> None:
        """Give up what is queued: unlock, write nothing."""
        locks, self._locks = self._locks, []
        self._pending = []
        for lock in locks:
            self._unlock(lock)

    def segments(self) -> set[int]:
        return {copy.segment for copy in self._pending}

    def targets(self) -> list[torch.Tensor]:
        """Full-pool slots that the queued copies write."""
        return [copy.target for copy in self._pending]

    def launch(self) -> None:
        """Run what is queued, in order on the current stream, without a host sync.

        Raises what the reference raises when both the fast path and the reference fail. The
        queue is empty then too: the caller must see to it that the targets are never read.
        """
        try:
            for group in self._groups:
                self._relocate(group, self._pending)
            self.num_launched += len(self._pending)
        finally:
            self.release_pending()

    def _relocate(self, group: GroupWithRope, pending: Sequence[Copy]) -> None:
        plan = _relocation_plan(group, pending)
        self._in_flight.append((plan, pending))
        try:
            trip("relocate")
            relocate(group=group.group, plan=plan)
        except Exception:  # the reference gives the same bytes, slower: nobody's answer changes
            errors["relocate"] += 1
            logger.exception("kvedit: relocate failed, running the reference instead")
            trip("relocate_ref")
            relocate_ref(group=group.group, plan=plan)


def _relocation_plan(group: GroupWithRope, pending: Sequence[Copy]) -> RelocationPlan:
    pairs = [copy.slots[group.pool_kind] for copy in pending]
    dst = torch.cat([dst for _, dst in pairs])
    deltas = sorted({copy.delta_pos for copy in pending})
    rows = [
        torch.full((len(dst),), deltas.index(copy.delta_pos), dtype=torch.int32)
        for copy, (_, dst) in zip(pending, pairs, strict=True)
    ]
    inv_freq = tuple(group.inv_freq.tolist())
    return RelocationPlan(
        src=torch.cat([src for src, _ in pairs]),
        dst=dst,
        row=torch.cat(rows).to(dst.device, non_blocking=True),
        cos_sin=_rows(tuple(deltas), inv_freq).to(dst.device, non_blocking=True),
    )


@lru_cache(maxsize=256)
def _rows(deltas: tuple[int, ...], inv_freq: tuple[float, ...]) -> torch.Tensor:
    """[R, 2, rot/2] fp32 on the CPU; agents repeat the same few shifts."""
    return delta_rows(deltas, torch.tensor(inv_freq, dtype=torch.float64))
