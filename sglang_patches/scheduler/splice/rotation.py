"""Rotation rows on the pool's device: made once for a shift, then stacked without the host.

A copy from pageable memory waits for the forward in flight, so new rows go through pinned memory.
So may the allocation of pinned memory: blocks are made at start, and the host's allocator keeps
them by size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from kvedit_kernels import delta_rows

MAX_ROWS = 4096  # of rot/2 pairs in fp32: 2 MiB at 128 rotated elements
PINNED_ROWS = tuple(1 << n for n in range(9))  # new shifts in one launch, by block size


class RotationRows:
    """Rows of one pool group. inv_freq: fp64 [rot/2] on the CPU, radians per position."""

    def __init__(self, inv_freq: torch.Tensor, device: torch.device) -> None:
        self._inv_freq = inv_freq
        self._device = device
        self._rows: OrderedDict[int, torch.Tensor] = OrderedDict()  # [2, rot/2] by shift
        if device.type != "cpu":
            for num_rows in PINNED_ROWS:
                torch.empty((num_rows, 2, len(inv_freq)), pin_memory=True)

    def table(self, deltas: Sequence[int]) -> torch.Tensor:
        """[R, 2, rot/2] fp32 for R different shifts. Agents repeat the same few."""
        new = [delta for delta in deltas if delta not in self._rows]
        if new:
            made = self._to_device(delta_rows(new, self._inv_freq))
            self._rows.update(zip(new, (row.clone() for row in made), strict=True))
        for delta in deltas:
            self._rows.move_to_end(delta)
        table = torch.stack([self._rows[delta] for delta in deltas])
        while len(self._rows) > MAX_ROWS:
            self._rows.popitem(last=False)
        return table

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return rows
        return rows.pin_memory().to(self._device, non_blocking=True)
