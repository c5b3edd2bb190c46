"""Running what is queued: on the stream that forwards run on, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvedit.splice.sources import Source
from sglang_patches import guard
from sglang_patches.scheduler.splice.copies import CopyQueue, PendingCopies


class CopyRunner:
    """Launches a queue's copies.

    device: the torch module of the device; forward_stream: where forwards go, None for the
    current stream. on_unwritten: told the sources of a launch that did not run on every rank.
    """

    def __init__(
        self,
        queue: CopyQueue,
        device: Any,
        forward_stream: Any,
        on_unwritten: Callable[[frozenset[Source]], None],
    ) -> None:
        self.queue = queue
        self._device = device
        self._forward_stream = forward_stream
        self._on_unwritten = on_unwritten
        self._unwritten: list[PendingCopies] = []
        self.num_failed = 0  # launches that did not run on every rank

    def run(self) -> None:
        """Launch what is queued.

        If it cannot be run on every rank, no rank trusts it: every path composed from those
        sources becomes unreachable, and ``take_unwritten`` has the slots whose requests the next
        forward ends.
        """
        with guard.contained("release_done"):
            self.queue.release_done()
        if not len(self.queue):
            return
        batch = self.queue.pending()
        boundary = guard.boundary("forward", lambda: self._never_written(batch))
        with boundary as hook, self._on_forward_stream():
            self.queue.launch()
        if hook.is_well:
            self.queue.num_launched += batch.num_copies

    def take_unwritten(self) -> list[PendingCopies]:
        """Launches that failed since the last call."""
        failed, self._unwritten = self._unwritten, []
        return failed

    def _never_written(self, batch: PendingCopies) -> None:
        self.queue.release_pending()
        self._unwritten.append(batch)
        self.num_failed += 1
        self._on_unwritten(batch.sources)

    @contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        stream = self._forward_stream
        if stream is None:
            yield
            return
        stream.wait_stream(self._device.current_stream())
        with self._device.stream(stream):
            yield
