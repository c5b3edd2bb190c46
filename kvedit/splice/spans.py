"""Spans and plans: which prompt tokens may be composed, as half-open intervals.

A plan is a pure function of token ids, registry, namespace, options and limits. It holds positions,
names and numbers of sources; slots, nodes and locks belong to whoever executes it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvedit.reason import Reason
from kvedit.request.report import RefusalReport, SpanReport
from kvedit.splice.sources import Source
from kvedit.splice.virtual_ids import virtual_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Prompt tokens [start, stop) that ``source`` can supply, a skill or an earlier turn's path.

    match_start  first prompt position of the match; [match_start, start) is the seam, recomputed
    base         prompt position of the source's token 0 (negative when the match starts later)
    prefix_len   tokens compiled in front of a skill's segment and dropped; the donor's token 0 was
                 compiled at position ``prefix_len``
    """

    source: Source
    skill: str
    match_start: int
    start: int
    stop: int
    base: int
    prefix_len: int

    @property
    def seam(self) -> int:
        """Tokens of the match in front of the span: they are recomputed."""
        return self.start - self.match_start

    @property
    def delta_pos(self) -> int:
        """RoPE shift, in positions, from where the donor was compiled to where it is served."""
        return self.base - self.prefix_len

    def ids(self, start: int, stop: int) -> array[int]:
        """Virtual ids of prompt positions [start, stop)."""
        return virtual_ids(self.source.number, start - self.base, stop - self.base)

    def donor_interval(self, start: int, stop: int) -> tuple[int, int]:
        """Where the donor path (compile prefix + segment) holds prompt positions [start, stop)."""
        offset = self.prefix_len - self.base
        return start + offset, stop + offset

    def to_report(self) -> SpanReport:
        """As clients see it."""
        return SpanReport(
            skill=self.skill,
            start=self.start,
            stop=self.stop,
            seam=self.seam,
            delta=self.delta_pos,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a skill, or a part of it, is served plainly."""

    skill: str
    reason: Reason
    detail: tuple[tuple[str, int], ...] = ()

    def to_report(self) -> RefusalReport:
        """As clients see it."""
        return RefusalReport(skill=self.skill, reason=self.reason, **dict(self.detail))


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """When composing is worth it, in tokens.

    boundary    price of a forced chunk boundary: the run behind it must hold more tokens
    min_saving  tokens that must be saved before what is cached exactly is approximated
    """

    boundary: int = 0
    min_saving: int = 1


FREE = Worth()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Spans in ascending order, disjoint; the last one ends at least one token before the end.

    history: the same with retired skills recognised too, when that differs from ``spans``. It
    lets a running conversation find its cached path after its skill was replaced or deleted.
    older: the spans without segments that came later and overlap older ones, for the same reason.
    worth: what the choice among them has to weigh.
    """

    num_tokens: int
    registry_version: int
    spans: tuple[Span, ...] = ()
    history: tuple[Span, ...] = ()
    older: tuple[tuple[Span, ...], ...] = ()
    refused: tuple[Refusal, ...] = ()
    worth: Worth = FREE

    @property
    def alternatives(self) -> tuple[tuple[Span, ...], ...]:
        """The span lists to try, the preferred first; empty ones left out."""
        return tuple(spans for spans in (self.spans, self.history, *self.older) if spans)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part [start, stop) of a span that the served path spells with virtual ids."""

    span: Span
    start: int
    stop: int


Pieces = tuple[Piece, ...]


def served_ids(real: array[int], pieces: Pieces) -> array[int]:
    """``real`` with every piece that lies inside it respelled. Copies; O(len)."""
    ids = array("q", real)
    for piece in pieces:
        stop = min(piece.stop, len(ids))
        if piece.start < stop:
            ids[piece.start : stop] = piece.span.ids(piece.start, stop)
    return ids


def run_end(pieces: Pieces, position: int) -> int:
    """End of the unbroken composed run that contains ``position``; ``position`` if none does."""
    end = position
    for piece in pieces:
        if piece.start <= end < piece.stop:
            end = piece.stop
    return end


def next_start(pieces: Pieces, position: int) -> int | None:
    """Start of the first piece after ``position``."""
    return next((piece.start for piece in pieces if piece.start > position), None)


def cut(pieces: Pieces, position: int) -> Pieces:
    """The pieces as far as ``position``: what lies behind it is real again."""
    kept = []
    for piece in pieces:
        if piece.stop <= position:
            kept.append(piece)
        elif piece.start < position:
            kept.append(Piece(piece.span, piece.start, position))
    return tuple(kept)


def overlap(pieces: Pieces, start: int, stop: int) -> int:
    """Number of composed tokens in [start, stop)."""
    return sum(max(0, min(p.stop, stop) - max(p.start, start)) for p in pieces)
