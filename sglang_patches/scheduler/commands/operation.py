"""What a command does, and how that is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_patches.host.protocols import Scheduler
from sglang_patches.scheduler.wiring.rooms import Rooms


@dataclass(frozen=True, slots=True)
class Operation:
    """run(scheduler, rooms, command) gives the answer, or raises the KvEditError that it is.

    undo(rooms, command): on every rank, after an internal error on one of them, wherever ``run``
    stopped. A plain rule for a rare error: what the command names is dropped. It may raise
    KvEditError where there is nothing to undo.
    """

    run: Callable[[Scheduler, Rooms, Any], object]
    undo: Callable[[Rooms, Any], object] = lambda rooms, command: None
