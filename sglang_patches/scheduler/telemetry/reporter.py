"""What is told of the scheduler's decisions: counters, events, a request's refusals."""

from __future__ import annotations

from collections.abc import Sequence

from kvedit.splice.spans import Refusal
from sglang_patches.scheduler.request_state import RequestState
from sglang_patches.scheduler.telemetry.events import EventPublisher
from sglang_patches.scheduler.telemetry.metrics import Metrics


class Reporter:
    """``metrics`` count on every rank; one rank at most has a ``publisher``."""

    def __init__(
        self,
        metrics: Metrics,
        publisher: EventPublisher | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self.metrics = metrics
        self.publisher = publisher
        self.warnings = tuple(warnings)

    def publish(self, kind: str, **fields: object) -> None:
        """Send an event where there is a publisher. Decides nothing."""
        if self.publisher is not None:
            self.publisher.publish(kind, **fields)

    def refuse(self, state: RequestState, refusals: Sequence[Refusal]) -> None:
        """Count and report spans that are served plainly; each refusal once a request."""
        for refusal in refusals:
            if refusal in state.split.refused:
                continue
            state.split.refuse((refusal,))
            if state.is_counted:
                reason = str(refusal.reason)
                self.metrics.count_splice("refused", reason)
                self.publish("splice_refused", skill=refusal.skill, reason=reason)

    def spliced(
        self, state: RequestState, *, skill: str, start: int, stop: int, delta: int
    ) -> None:
        """Prompt tokens [start, stop) were given slots, ``delta`` positions from their donor."""
        if state.is_counted:
            self.metrics.count_splice("realised")
            self.publish("splice_realised", skill=skill, start=start, stop=stop, delta=delta)
