"""Which composed runs of a spelling pay for the forward pass that they cost.

A run of composed tokens is spliced where the cached prefix ends (a load-back: free) or at the end
of a chunk that was cut for it: a forced boundary, one more forward pass. A prompt that repeats
the first tokens of a skill would be cut hundreds of times, so each forced boundary has a price in
tokens, the same on every rank, and a request has a limited number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvedit.reason import Reason
from kvedit.splice.sources import Source
from kvedit.splice.spans import Piece, Pieces, Refusal

MAX_BOUNDARIES = 16  # forced chunk boundaries, each time a request is admitted
Lost = tuple[Source, Refusal]  # and why nothing is composed from it


@dataclass(frozen=True, slots=True)
class Afforded:
    """pieces: what is left of a spelling. num_boundaries: forced ones it needs. lost: the rest."""

    pieces: Pieces
    num_boundaries: int
    lost: tuple[Lost, ...] = ()


def afford(pieces: Pieces, matched: int, price_tokens: int) -> Afforded:
    """Drop the runs behind ``matched`` cached tokens that hold no more than ``price_tokens``
    tokens, and of the others all but the MAX_BOUNDARIES longest. O(n log n) in pieces."""
    forced = [run for run in _runs(pieces) if run[0].start > matched]
    cheap = [run for run in forced if _length(run) <= price_tokens]
    paying = [run for run in forced if _length(run) > price_tokens]
    longest_first = sorted(paying, key=_length, reverse=True)  # stable: earlier runs first
    too_many = longest_first[MAX_BOUNDARIES:]
    dropped = {id(piece) for run in (*cheap, *too_many) for piece in run}
    return Afforded(
        pieces=tuple(piece for piece in pieces if id(piece) not in dropped),
        num_boundaries=len(paying) - len(too_many),
        lost=(
            *_lost(cheap, Reason.NOT_WORTH_A_PASS, price_tokens),
            *_lost(too_many, Reason.TOO_MANY_RUNS, MAX_BOUNDARIES),
        ),
    )


def _runs(pieces: Pieces) -> list[list[Piece]]:
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and runs[-1][-1].stop == piece.start:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _length(run: Sequence[Piece]) -> int:
    return run[-1].stop - run[0].start


def _lost(runs: Sequence[Sequence[Piece]], reason: Reason, limit: int) -> list[Lost]:
    """One refusal for each source, with the longest of its runs."""
    longest: dict[Source, tuple[str, int]] = {}
    for run in runs:
        for piece in run:
            span = piece.span
            _, known = longest.get(span.source, ("", 0))
            longest[span.source] = span.skill, max(known, _length(run))
    return [
        (
            source,
            Refusal(
                skill=skill, reason=reason, detail=(("num_tokens", num_tokens), ("limit", limit))
            ),
        )
        for source, (skill, num_tokens) in longest.items()
    ]
