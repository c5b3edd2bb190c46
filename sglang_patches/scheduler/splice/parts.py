"""What the tree is given to splice with, once the rooms are built."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_patches.scheduler.ports import Listener
from sglang_patches.scheduler.skills.pins import PinBook
from sglang_patches.scheduler.splice.copy_runner import CopyRunner
from sglang_patches.scheduler.splice.donors import Donors
from sglang_patches.scheduler.telemetry.reporter import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """``listener`` is told what has happened; the tree asks nothing of it."""

    donors: Donors
    copies: CopyRunner
    pins: PinBook
    reporter: Reporter
    listener: Listener
