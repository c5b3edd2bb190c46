"""Which path of the tree serves a planned prompt: the pure half of admission.

Every span can be spelled with real ids (exact) or with virtual ids (composed). The tree may hold
both, or a mixture made by an earlier turn under another registry. The choice that leaves the
fewest tokens to compute wins; a tie goes to the one with fewer composed tokens, so exact KV is
preferred. The search follows only spellings that the tree really continues, hence its cost is
the number of cached branches, bounded by MAX_MATCHES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvedit.spans import Piece, Pieces, Span, cut, overlap

MAX_MATCHES = 24


@dataclass(frozen=True, slots=True)
class Choice:
    """pieces: the served spelling. matched: cached tokens of it. computed: tokens to forward.
    lost: spans that this spelling would have composed further, were they composable."""

    pieces: Pieces
    matched: int
    computed: int
    lost: tuple[Span, ...] = ()


def choose_path(
    alternatives: Sequence[Sequence[Span]],
    *,
    num_tokens: int,
    match: Callable[[Pieces], int],
    composable: Callable[[Span], bool],
) -> Choice:
    """Best spelling of a request of ``num_tokens`` tokens (prompt plus outputs so far).

    alternatives      span lists to try, the preferred first (live skills; then retired ones too)
    match(pieces)     length of the cached prefix of that spelling
    composable(span)  whether new tokens of the span may still be composed (a retired skill's may
                      not: its cached paths serve, but nothing is spliced from it)
    """
    search = _Search(num_tokens, match, composable)
    for spans in alternatives:
        search.explore(tuple(spans), (), 0)
    search.consider(())  # last: where nothing can be composed, the choice that names why wins
    return min(search.found, key=lambda c: (c.computed, overlap(c.pieces, 0, num_tokens)))


class _Search:
    def __init__(
        self,
        num_tokens: int,
        match: Callable[[Pieces], int],
        composable: Callable[[Span], bool],
    ) -> None:
        self._num_tokens = num_tokens
        self._match = match
        self._composable = composable
        self._matches_left = MAX_MATCHES
        self._measured: dict[Pieces, int] = {}
        self.found: list[Choice] = []

    def consider(self, pieces: Pieces) -> int:
        """Measure one spelling and remember what it would cost; returns its cached length."""
        if pieces in self._measured:
            return self._measured[pieces]
        self._matches_left -= 1
        matched = self._measured[pieces] = self._match(pieces)
        served, lost = self._without_uncomposable(pieces, matched)
        ahead = overlap(served, matched, self._num_tokens)
        self.found.append(Choice(served, matched, self._num_tokens - matched - ahead, lost))
        return matched

    def explore(self, spans: tuple[Span, ...], decided: Pieces, next_span: int) -> None:
        """Spell every span from ``next_span`` on as composed, then branch where real continues."""
        if next_span >= len(spans) or self._matches_left <= 0:
            return
        rest = tuple(Piece(s, s.start, s.stop) for s in spans[next_span:])
        matched = self.consider(decided + rest)
        for i, span in enumerate(spans[next_span:], next_span):
            if self._matches_left <= 0:
                return
            before = decided + rest[: i - next_span]
            if self.consider(before) > span.start:  # the tree goes on with the real spelling
                self.explore(spans, before, i + 1)
            if matched <= span.start:
                return  # the tree ends in front of this span: later spellings cannot matter

    def _without_uncomposable(
        self, pieces: Pieces, matched: int
    ) -> tuple[Pieces, tuple[Span, ...]]:
        kept: list[Piece] = []
        lost: list[Span] = []
        for piece in pieces:
            if piece.stop <= matched or self._composable(piece.span):
                kept.append(piece)
            else:
                kept.extend(cut((piece,), matched))
                lost.append(piece.span)
        return tuple(kept), tuple(lost)
