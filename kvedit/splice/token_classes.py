"""Token classes of one request: what each prompt token cost.

Every token gets one class, at the admission that first covers it; chunks, retraction and
preemption never revise it. exact + composed + derived + computed == prompt tokens.

    exact     from the cache, everything before it real
    composed  from the cache, spelled with a virtual id (copied: in this request)
    derived   from the cache, real itself but a composed token stands before it
    computed  forwarded for this request (repaired: a seam token of a spliced span; erratum: a
              token of a line that an edit appended)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvedit.request.report import PromptReport
from kvedit.splice.spans import Pieces, Refusal, Span, overlap

CLASSES = ("exact", "composed", "derived", "computed")
COUNTS = (*CLASSES, "repaired", "erratum", "copied")


@dataclass(slots=True)
class TokenSplit:
    """Running split of one prompt of ``num_tokens`` tokens; ``covered`` of them have a class."""

    num_tokens: int
    covered: int = 0
    exact: int = 0
    composed: int = 0
    derived: int = 0
    computed: int = 0
    repaired: int = 0
    erratum: int = 0
    copied: int = 0
    spans: dict[int, Span] = field(default_factory=dict)  # by start
    refused: list[Refusal] = field(default_factory=list)

    def copy(self) -> TokenSplit:
        """One that may be changed apart from this one, its lists too."""
        return replace(self, spans=dict(self.spans), refused=list(self.refused))

    def cover(
        self,
        pieces: Pieces,
        *,
        prefix_len: int,
        extend_end: int,
        copied: Iterable[tuple[int, int]] = (),
        lines: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Class the tokens that an admission of [0, prefix_len) cached, [prefix_len, extend_end)
        forwarded, covers first. ``copied``: intervals realised for this request; ``lines``:
        intervals of appended lines."""
        start, prefix_len = self.covered, min(prefix_len, self.num_tokens)
        if start < prefix_len:
            self._cover_cached(pieces, start, prefix_len, copied)
        forwarded = max(start, prefix_len), min(extend_end, self.num_tokens)
        if forwarded[0] < forwarded[1]:
            self.computed += forwarded[1] - forwarded[0]
            self.repaired += sum(
                max(0, min(p.span.start, forwarded[1]) - max(p.span.match_start, forwarded[0]))
                for p in pieces
            )
            self.erratum += sum(
                max(0, min(stop, forwarded[1]) - max(first, forwarded[0])) for first, stop in lines
            )
        self.covered = max(start, forwarded[1], prefix_len)

    def _cover_cached(
        self, pieces: Pieces, start: int, stop: int, copied: Iterable[tuple[int, int]]
    ) -> None:
        composed = overlap(pieces, start, stop)
        first_virtual = min((p.start for p in pieces), default=self.num_tokens)
        exact = max(0, min(first_virtual, stop) - start)
        self.exact += exact
        self.composed += composed
        self.derived += stop - start - exact - composed
        self.copied += sum(max(0, min(b, stop) - max(a, start)) for a, b in copied)
        for piece in pieces:
            if piece.start < stop and piece.stop > start:
                self.spans[piece.span.start] = piece.span

    def refuse(self, refusals: Iterable[Refusal]) -> None:
        """Add refusals, equal ones once (one of another detail is another)."""
        for refusal in refusals:
            if refusal not in self.refused:
                self.refused.append(refusal)

    def counts(self) -> dict[str, int]:
        """Tokens by name, for each of COUNTS."""
        return {name: getattr(self, name) for name in COUNTS}

    def to_report(self) -> PromptReport:
        """As clients see it, of a prompt without fields."""
        return PromptReport(
            exact=self.exact,
            composed=self.composed,
            derived=self.derived,
            computed=self.computed,
            repaired=self.repaired,
            erratum=self.erratum,
            copied=self.copied,
            spans=[span.to_report() for _, span in sorted(self.spans.items())],
            refused=[refusal.to_report() for refusal in self.refused],
        )


def joined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report for an answer with one or several prompts.

    ``reports``: one each, in order. Of several, counts are added up; what has a place in one
    prompt (spans, lines, reasons) stays in its own report under ``prompts``.
    """
    if len(reports) == 1:
        return reports[0]
    counts = {name: sum(report[name] for report in reports) for name in COUNTS}
    return {**counts, "prompts": list(reports)}


def without_values(report: dict[str, Any]) -> dict[str, Any]:
    """A report for somebody who names its request: nothing in it was said in the prompt, and
    nothing proves a conversation."""
    kept = {key: value for key, value in report.items() if key != "conversation"}
    if "errata" in kept:
        errata = kept["errata"]
        kept["errata"] = [{k: v for k, v in line.items() if k != "text"} for line in errata]
    if "prompts" in kept:
        kept["prompts"] = [without_values(one) for one in kept["prompts"]]
    return kept
