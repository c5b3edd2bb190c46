"""Tensors that the device may still read: kept until it has passed the work that reads them.

A launch is only enqueued when it returns. Without a reference its tensors would be freed, and
their memory reused, while the forward before it still runs: the launch would then move slots of
somebody else. So each launch leaves an event behind it on its stream.

Memory: launches stand in line behind at most the forwards that the host has enqueued (two), and
the launches of one pass write each slot of the pool once, with about 40 bytes of indices each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

NewEvent = Callable[[], Any]  # an event recorded on the current stream; it has ``query()``


def event_maker(device_module: Any) -> NewEvent | None:
    """How to record an event on the device's current stream; None where it has no streams."""
    if device_module is None or not hasattr(device_module, "Event"):
        return None
    if not device_module.is_available() or device_module.__name__ == "torch.cpu":
        return None

    def recorded() -> Any:
        event = device_module.Event()
        event.record()
        return event

    return recorded


class InFlight:
    """Keeps tensors by launch, in the order of the launches. Never waits for the device."""

    def __init__(self, new_event: NewEvent | None) -> None:
        self._new_event = new_event
        self._kept: deque[tuple[Any, object]] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tensors: object) -> None:
        """What everything enqueued on the current stream so far may read."""
        if self._new_event is not None:
            self._kept.append((self._new_event(), tensors))

    def release_done(self) -> None:
        """Let go of what the device has passed."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
