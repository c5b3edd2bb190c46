"""Prometheus counters in the scheduler process.

prometheus_client decides between single and multi process values when it is imported, so it is
imported at first use, after the host has set its environment.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from kvedit.splice.token_classes import COUNTS, TokenSplit
from kvedit.wire.views import Counters, EditCount, SpliceCount
from sglang_patches.guard import contained

MAX_SAMPLES = 1024  # names remembered; more n > 1 requests for zero tokens at once are miscounted


class Metrics:
    """Counts for GET /kvedit/status, mirrored to Prometheus where the host exports metrics.

    Every tensor-parallel rank counts; only one may export, so an export that fails is counted and
    changes nothing.
    """

    def __init__(self, *, export: bool, model_name: str) -> None:
        self._export = export
        self._model_name = model_name
        self._prometheus: tuple[Any, Any, Any] | None = None
        self.tokens: Counter[str] = Counter()
        self.splices: Counter[tuple[str, str]] = Counter()
        self.edits: Counter[tuple[str, str]] = Counter()
        self._samples: OrderedDict[str, None] = OrderedDict()

    def count_tokens(self, before: dict[str, int], split: TokenSplit) -> None:
        """Add what one admission changed in a request's split."""
        for kind, value in split.counts().items():
            added = value - before[kind]
            if added:
                self.tokens[kind] += added
                self._add(0, added, kind=kind)

    def is_first(self, samples: str) -> bool:
        """Whether no request of this name came before."""
        is_first = samples not in self._samples
        self._samples[samples] = None
        while len(self._samples) > MAX_SAMPLES:
            self._samples.popitem(last=False)
        return is_first

    def count_splice(self, outcome: str, reason: str = "") -> None:
        self.splices[outcome, reason] += 1
        self._add(1, 1, outcome=outcome, reason=reason)

    def count_edit(self, kind: str, base: str) -> None:
        """A prompt with fields was admitted: what was done, on which base."""
        self.edits[kind, base] += 1
        self._add(2, 1, kind=kind, base=base)

    def _add(self, family: int, amount: int, **labels: str) -> None:
        if self._export:
            with contained("metrics"):
                counter = self._counters()[family]
                counter.labels(model_name=self._model_name, **labels).inc(amount)

    def _counters(self) -> tuple[Any, Any, Any]:
        if self._prometheus is None:
            from prometheus_client import Counter as PrometheusCounter

            self._prometheus = (
                PrometheusCounter(
                    "kvedit_tokens",
                    "Prompt tokens by class (computed holds repaired and erratum, composed copied)",
                    ["kind", "model_name"],
                ),
                PrometheusCounter(
                    "kvedit_splices",
                    "Spans by outcome",
                    ["outcome", "reason", "model_name"],
                ),
                PrometheusCounter(
                    "kvedit_edits",
                    "Prompts with fields, by what was done",
                    ["kind", "base", "model_name"],
                ),
            )
        return self._prometheus

    def counters(self, *, hook_errors: dict[str, int]) -> Counters:
        """As GET /kvedit/status shows them, with the errors that others have counted."""
        return Counters(
            tokens={kind: self.tokens[kind] for kind in COUNTS},
            splices=[
                SpliceCount(outcome=outcome, reason=reason, count=count)
                for (outcome, reason), count in sorted(self.splices.items())
            ],
            edits=[
                EditCount(kind=kind, base=base, count=count)
                for (kind, base), count in sorted(self.edits.items())
            ],
            hook_errors=hook_errors,
        )
