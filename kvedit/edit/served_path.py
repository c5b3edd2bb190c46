"""What was served: a prompt's path through the tree, where fields stand in it and what it says.

An edit turns the path of one turn into the plan of the next: the changed windows are new text,
everything behind them is composed from where it was computed, shifted by the change of length.
A composed part is taken again from its own segment, never from its copy: no slot is the source
of a second hop.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvedit.splice.sources import PathSource
from kvedit.splice.spans import Piece, Pieces, Span, cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Tokens [start, stop) that hold field ``number``'s value. around: the other text in them."""

    number: int
    start: int
    stop: int
    value: str
    around: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Tokens [start, stop): an erratum that says ``value`` of field ``number``."""

    number: int
    start: int
    stop: int
    value: str


EDIT = "kvedit/edit"  # in place of a skill's name, which holds no "/"
MAX_NOTES = 2  # values a field: of two, one at least is not the value of now, whatever that is
Placed = TypeVar("Placed", Window, Line)
Notes = Mapping[int, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPath:
    """ids: real, as served. pieces: how the tree spells them. windows, lines: ascending.

    notes: by field number, values that KV behind the field's window was computed under while the
    window said them. Some of it may still stand there; what an edit never moved has none.
    """

    ids: array[int]
    pieces: Pieces = ()
    windows: tuple[Window, ...] = ()
    lines: tuple[Line, ...] = ()
    notes: Notes = field(default_factory=dict)

    def upto(self, position: int) -> ServedPath:
        """Its first ``position`` tokens; pieces are cut there, windows and lines across it go."""
        return ServedPath(
            ids=self.ids[:position],
            pieces=cut(self.pieces, position),
            windows=tuple(w for w in self.windows if w.stop <= position),
            lines=tuple(line for line in self.lines if line.stop <= position),
            notes=self.notes,
        ).with_live_notes()

    def with_live_notes(self) -> ServedPath:
        """Without the notes of fields behind which nothing stands that was composed under what
        their windows said."""
        live = {w.number for w in self.windows if any(_is_under(p, w) for p in self.pieces)}
        notes = {number: values for number, values in self.notes.items() if number in live}
        return dataclasses.replace(self, notes=notes)

    def plain(self) -> ServedPath:
        """The same text with nothing composed."""
        return dataclasses.replace(self, pieces=(), notes={})

    def says(self) -> dict[int, str]:
        """The value in force of each field: its last line's, else its window's."""
        return {w.number: w.value for w in self.windows} | {x.number: x.value for x in self.lines}


def _is_under(piece: Piece, window: Window) -> bool:
    """Whether something of ``piece`` was computed behind what stood in ``window``: it comes from
    the path of an earlier turn, or from a segment that holds the window itself (a memory)."""
    span = piece.span
    return window.stop < piece.stop and (span.skill == EDIT or span.base < window.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How an edit may be composed. Lengths in tokens.

    donor        the path that the derived stretches are taken from
    donor_stop   tokens of that path that the tree can hold: whole pages
    repair       tokens behind each changed window that are computed again
    topk         tokens at the end of the downstream that are computed again: the paper finds what
                 prefill concluded concentrated there (the last fifth recovers .82)
    """

    donor: PathSource
    donor_stop: int
    page_size: int
    min_span_tokens: int
    repair: int = 0
    topk: int = 0


@dataclass(frozen=True, slots=True)
class New:
    """The ids and the value that replace a window."""

    ids: array[int]
    value: str


def kept_spans(path: ServedPath) -> tuple[Span, ...]:
    """The composed parts of ``path`` as spans of the same prompt."""
    return tuple(_moved(piece, piece.start, piece.stop, 0) for piece in path.pieces)


def edit(
    path: ServedPath, new: Mapping[int, New], limits: Cut
) -> tuple[ServedPath, tuple[Span, ...]]:
    """``path`` with the windows of ``new`` (by field number) replaced, and the spans that compose
    what lies behind the first of them."""
    return _Editor(path, new, limits).run()


class _Editor:
    def __init__(self, path: ServedPath, new: Mapping[int, New], limits: Cut) -> None:
        self._path, self._new, self._limits = path, new, limits
        self._ids = array("q")
        self._spans: list[Span] = []
        self._windows: list[Window] = []
        self._lines: list[Line] = []

    def run(self) -> tuple[ServedPath, tuple[Span, ...]]:
        position, shift = 0, 0
        kept: tuple[Span, ...] = ()
        changed = [w for w in self._path.windows if w.number in self._new]
        for index, window in enumerate(changed):
            self._keep(position, window.start, shift)
            if index == 0:
                kept = kept_spans(self._path.upto(window.start))
            else:
                self._compose(position + self._limits.repair, window.start, shift)
            start = len(self._ids)
            new = self._new[window.number]
            self._ids += new.ids
            self._windows.append(
                dataclasses.replace(window, start=start, stop=len(self._ids), value=new.value)
            )
            position = window.stop
            shift = len(self._ids) - position
        end = len(self._path.ids)
        self._keep(position, end, shift)
        self._compose(position + self._limits.repair, end - self._limits.topk, shift)
        edited = ServedPath(
            ids=self._ids,
            windows=tuple(self._windows),
            lines=tuple(self._lines),
            notes=dict(self._path.notes) | {w.number: self._noted(w) for w in changed},
        )
        return edited, (*kept, *self._fitting())

    def _noted(self, window: Window) -> frozenset[str]:
        known = self._path.notes.get(window.number, frozenset())
        return known if len(known) >= MAX_NOTES else known | {window.value}

    def _fitting(self) -> Iterator[Span]:
        return fit_to_pages(self._spans, self._limits.page_size, self._limits.min_span_tokens)

    def _keep(self, start: int, stop: int, shift: int) -> None:
        """Copy the text [start, stop) and what stands in it."""
        self._ids += self._path.ids[start:stop]
        for window in self._path.windows:
            if start <= window.start and window.stop <= stop:
                self._windows.append(_shifted(window, shift))
        for line in self._path.lines:
            if start <= line.start and line.stop <= stop:
                self._lines.append(_shifted(line, shift))

    def _compose(self, start: int, stop: int, shift: int) -> None:
        """Spans for path tokens [start, stop), cut where the path is composed itself."""
        position = start
        for piece in self._path.pieces:
            first, last = max(piece.start, start), min(piece.stop, stop)
            if first < last:
                self._derive(position, first, shift)
                self._spans.append(_moved(piece, first, last, shift))
                position = last
        self._derive(position, stop, shift)

    def _derive(self, start: int, stop: int, shift: int) -> None:
        stop = min(stop, self._limits.donor_stop)
        if start < stop:
            self._spans.append(
                Span(
                    source=self._limits.donor,
                    skill=EDIT,
                    match_start=start + shift,
                    start=start + shift,
                    stop=stop + shift,
                    base=shift,
                    prefix_len=0,
                )
            )


def _moved(piece: Piece, start: int, stop: int, shift: int) -> Span:
    span = piece.span
    return dataclasses.replace(
        span,
        match_start=start + shift,
        start=start + shift,
        stop=stop + shift,
        base=span.base + shift,
    )


def _shifted(item: Placed, shift: int) -> Placed:
    return dataclasses.replace(item, start=item.start + shift, stop=item.stop + shift)


def fit_to_pages(spans: Sequence[Span], page_size: int, min_span_tokens: int) -> Iterator[Span]:
    """Each span cut to whole pages, for its neighbour's donor may be gone when it is composed;
    unbroken runs of them that are too short to be worth it are left out."""
    run: list[Span] = []
    for span in spans:
        start, stop = -(-span.start // page_size) * page_size, span.stop // page_size * page_size
        if start >= stop:
            continue
        if run and run[-1].stop != start:
            yield from _if_worth_it(run, min_span_tokens)
            run = []
        run.append(dataclasses.replace(span, match_start=start, start=start, stop=stop))
    yield from _if_worth_it(run, min_span_tokens)


def _if_worth_it(run: Sequence[Span], min_span_tokens: int) -> Sequence[Span]:
    return run if run and run[-1].stop - run[0].start >= min_span_tokens else ()
