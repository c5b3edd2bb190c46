"""Which path of the tree serves a planned prompt: the pure half of admission.

Every span can be spelled with real ids (exact) or with virtual ids (composed). The tree may hold
both, or a mixture made by an earlier turn under another registry, or one in which runs that did
not pay stand real between composed ones. The cheapest spelling wins: tokens to compute, and the
price of each forced chunk boundary. What is cached exactly is approximated only where that saves
a minimum; a tie goes to the spelling with fewer composed tokens.

The search follows only spellings that the tree really continues. First it walks along the longest
cached one, one look into the tree for each change between real and composed: a conversation makes
some in every turn, and a path that is not found is computed anew. Then it branches. All walks of a
search make at most MAX_WALK steps, one look each and one more for the first; branching makes at
most MAX_BRANCHING looks. A look costs O(length of the prompt).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvedit.splice.pass_price import Afforded, Lost, afford
from kvedit.splice.spans import FREE, Piece, Pieces, Span, Worth, cut, overlap

MAX_BRANCHING = 24
MAX_WALK = 512
MAX_MATCHES = MAX_BRANCHING + MAX_WALK


@dataclass(frozen=True, slots=True)
class Choice:
    """pieces: the served spelling. matched: cached tokens of it. computed: tokens to forward.
    lost: spans that this spelling would have composed further, were they composable. unpaid:
    what was not worth its forced boundaries, of which num_boundaries are left. deepest: the most
    cached tokens that any look of the search found."""

    pieces: Pieces
    matched: int
    computed: int
    deepest: int
    lost: tuple[Span, ...] = ()
    num_boundaries: int = 0
    unpaid: tuple[Lost, ...] = ()

    @property
    def exact(self) -> int:
        """Cached tokens in front of the first composed one."""
        return min(self.matched, min((p.start for p in self.pieces), default=self.matched))

    def cost(self, worth: Worth, exact_elsewhere: int) -> int:
        """In tokens. exact_elsewhere: tokens that could be served exactly from the cache; giving
        some of them up must save worth.min_saving tokens."""
        gives_up = self.exact < exact_elsewhere
        price = self.num_boundaries * worth.boundary
        return self.computed + price + (worth.min_saving - 1) * gives_up


def choose_path(
    alternatives: Sequence[Sequence[Span]],
    *,
    num_tokens: int,
    match: Callable[[Pieces], int],
    composable: Callable[[Span], bool],
    worth: Worth = FREE,
) -> Choice:
    """Best spelling of a request of ``num_tokens`` tokens (prompt plus outputs so far).

    alternatives      span lists to try, the preferred first (live skills; then retired ones too)
    match(pieces)     length of the cached prefix of that spelling
    composable(span)  whether new tokens of the span may still be composed (a retired skill's may
                      not: its cached paths serve, but nothing is spliced from it)
    """
    search = _Search(num_tokens, match, composable, worth)
    for spans in alternatives:
        search.walk(tuple(spans))
    for spans in alternatives:
        search.explore(tuple(spans), (), 0)
    exact = search.consider(())  # last: where nothing can be composed, who names why wins
    chosen = min(
        search.found,
        key=lambda c: (c.cost(worth, exact), overlap(c.pieces, 0, num_tokens)),
    )
    return dataclasses.replace(chosen, deepest=search.deepest)


class _Search:
    def __init__(
        self,
        num_tokens: int,
        match: Callable[[Pieces], int],
        composable: Callable[[Span], bool],
        worth: Worth,
    ) -> None:
        self._num_tokens = num_tokens
        self._match = match
        self._composable = composable
        self._worth = worth
        self._steps_left, self._branches_left = MAX_WALK, MAX_BRANCHING
        self._measured: dict[Pieces, int] = {}
        self.found: list[Choice] = []
        self.deepest = 0  # cached tokens

    def consider(self, pieces: Pieces) -> int:
        """Measure one spelling and remember what it would cost; returns its cached length."""
        if pieces in self._measured:
            return self._measured[pieces]
        matched = self._measured[pieces] = self._match(pieces)
        self.deepest = max(self.deepest, matched)
        served, lost = self._without_uncomposable(pieces, matched)
        afforded = afford(served, matched, self._worth.boundary)
        self.found.append(self._choice(afforded, matched, lost))
        return matched

    def _choice(self, afforded: Afforded, matched: int, lost: tuple[Span, ...]) -> Choice:
        ahead = overlap(afforded.pieces, matched, self._num_tokens)
        return Choice(
            pieces=afforded.pieces,
            matched=matched,
            computed=self._num_tokens - matched - ahead,
            deepest=self.deepest,
            lost=lost,
            num_boundaries=afforded.num_boundaries,
            unpaid=afforded.lost,
        )

    def walk(self, spans: tuple[Span, ...]) -> None:
        """Along the longest cached spelling: where one way to spell the next spans ends, the
        other may go on. One look for each change between real and composed."""
        decided: Pieces = ()
        first = 0
        while first < len(spans) and self._steps_left > 0:
            self._steps_left -= 1
            rest = tuple(Piece(s, s.start, s.stop) for s in spans[first:])
            composed, real = self.consider(decided + rest), self.consider(decided)
            reached = max(composed, real)
            passed = sum(span.start < reached for span in spans[first:])
            if not passed:
                return
            if composed > real:
                decided += rest[:passed]
            first += passed

    def _branch(self, pieces: Pieces) -> int:
        self._branches_left -= pieces not in self._measured
        return self.consider(pieces)

    def explore(self, spans: tuple[Span, ...], decided: Pieces, next_span: int) -> None:
        """Spell every span from ``next_span`` on as composed, then branch where real continues."""
        if next_span >= len(spans) or self._branches_left <= 0:
            return
        rest = tuple(Piece(s, s.start, s.stop) for s in spans[next_span:])
        matched = self._branch(decided + rest)
        for i, span in enumerate(spans[next_span:], next_span):
            if self._branches_left <= 0:
                return
            before = decided + rest[: i - next_span]
            if self._branch(before) > span.start:  # the tree goes on with the real spelling
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
