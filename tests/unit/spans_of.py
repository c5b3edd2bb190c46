"""Short spellings of spans and pieces for the tests of pure logic."""

from __future__ import annotations

from kvedit.splice.sources import SkillSource
from kvedit.splice.spans import Piece, Span


def span(start: int, stop: int, segment: int = 1, *, seam: int = 0, prefix_len: int = 0) -> Span:
    """A span whose skill begins ``seam`` tokens in front of it."""
    return Span(
        source=SkillSource(segment),
        skill=f"skill{segment}",
        match_start=start - seam,
        start=start,
        stop=stop,
        base=start - seam,
        prefix_len=prefix_len,
    )


def whole(*spans: Span) -> tuple[Piece, ...]:
    return tuple(Piece(s, s.start, s.stop) for s in spans)
