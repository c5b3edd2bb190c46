"""The prompts that could be served instead of the one that was sent.

On a base (``bases``), each changed field is served by its strategy. Which prompt is served is
decided at admission, by the tokens it saves.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvedit.edit.bases import Base, Tools, of_turn, with_values
from kvedit.edit.client_prompt import ClientPrompt
from kvedit.edit.ledger import Found
from kvedit.edit.served_path import (
    Cut,
    Line,
    New,
    ServedPath,
    Window,
    edit,
    fit_to_pages,
    kept_spans,
)
from kvedit.request.strategy import Strategy
from kvedit.splice.spans import Plan, Span

MAX_SUBSTITUTIONS = 6
MAX_ENTRIES = 3  # earlier turns that variants are built on; one that none can be built on is free


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One prompt that may be served.

    base       sent | conversation | declared | cross_request
    path       its ids, windows and lines; how the tree spells it is chosen at admission
    anchor     where the lines of this turn begin; lines_end: where they end
    edited     fields whose window was replaced in place
    """

    base: str
    path: ServedPath
    plan: Plan
    anchor: int
    lines_end: int
    edited: tuple[int, ...] = ()

    @property
    def new_lines(self) -> tuple[Line, ...]:
        """The lines of this turn, at the end of the prompt."""
        return tuple(x for x in self.path.lines if self.anchor <= x.start < self.lines_end)


def as_sent(client: ClientPrompt, plan: Plan) -> Variant:
    """The client's prompt itself, without a line; ``plan`` is that of its ids."""
    path = ServedPath(ids=client.ids, windows=client.windows)
    return Variant(base="sent", path=path, plan=plan, anchor=client.anchor, lines_end=client.anchor)


def on_conversation(client: ClientPrompt, found: Found, tools: Tools) -> Iterator[Variant]:
    """Variants on earlier turns of the same conversation, on the newest that will do."""
    seen: set[bytes] = set()
    at, num_used = client.masked.to_real(found.length), 0
    for entry in found.entries:
        bases = of_turn(client, entry, at)
        variants = [v for b in bases if (v := _variant(client, b, tools)) is not None]
        num_used += bool(variants)
        for variant in variants:
            if (key := variant.path.ids.tobytes()) not in seen:
                seen.add(key)
                yield variant
        if num_used == MAX_ENTRIES:
            return


def on_values(
    client: ClientPrompt, kind: str, values: Sequence[tuple[int, Sequence[str]]], tools: Tools
) -> Iterator[Variant]:
    """Variants on the prompt with candidate values (by field number) put in place."""
    numbers = [number for number, _ in values]
    combinations = itertools.product(*(candidates for _, candidates in values))
    for chosen in itertools.islice(combinations, MAX_SUBSTITUTIONS):
        base = with_values(client, kind, dict(zip(numbers, chosen, strict=True)), tools)
        if base is None:
            continue
        variant = _variant(client, base, tools)
        if variant is not None:
            yield variant


def _variant(client: ClientPrompt, base: Base, tools: Tools) -> Variant | None:
    """The client's prompt on ``base``; None where the strategies do not allow it."""
    if not tools.may_compose:
        base = dataclasses.replace(base, path=base.path.plain())
    wanted = {w.number: w.value for w in client.windows}
    said = {line.number: line.value for line in base.path.lines}  # the last one of each field
    with_line, in_place = [], []
    for window in base.path.windows:
        number = window.number
        noted = bool(base.path.notes.get(number, frozenset()) - {wanted[number]})
        needs = _needs(
            tools.strategy_of(number), window, wanted[number], said.get(number), noted=noted
        )
        if needs is None:
            return None
        with_line += [number] * needs.line
        in_place += [number] * needs.edit
    if with_line:
        if base.turn is not None and base.turn[0] < base.turn[1]:
            return None  # the lines of this very turn are replaced, not added to
        base = base.upto(client.anchor)
    return _finish(client, base, with_line, in_place, tools)


@dataclass(frozen=True, slots=True)
class _Needs:
    """line: a new one that says the value. edit: the window is replaced in place."""

    line: bool
    edit: bool


def _needs(
    strategy: Strategy, window: Window, wanted: str, said: str | None, *, noted: bool
) -> _Needs | None:
    """What a field takes on a base to be served with the value ``wanted``; None: it cannot.

    said: by the last line about it. noted: KV behind its window was computed under another value;
    then the text alone may say the value of now, and what follows may not know it.
    """
    moved = window.value != wanted
    is_said = (window.value if said is None else said) == wanted
    if strategy == "recompute":  # the prompt as sent
        return None if moved or noted or said is not None else _Needs(line=False, edit=False)
    if strategy == "erratum":  # exact KV of the text that is served
        return None if noted else _Needs(line=not is_said, edit=False)
    if strategy == "edit":  # no line, so none may say something else
        return None if said is not None and not is_said else _Needs(line=False, edit=moved)
    composed = moved or noted or said is not None
    return _Needs(line=composed and said != wanted, edit=moved)


def _edited(
    client: ClientPrompt, base: Base, in_place: Sequence[int], tools: Tools
) -> tuple[ServedPath, tuple[Span, ...]]:
    """The base with the windows of ``in_place`` replaced, and the spans that serve it."""
    new = {
        w.number: New(client.ids[w.start : w.stop], w.value)
        for w in client.windows
        if w.number in in_place
    }
    if not new:
        return base.path, kept_spans(base.path)
    page = tools.page_size
    limits = Cut(
        donor=tools.donor_of(base.path),
        donor_stop=len(base.path.ids) // page * page,
        page_size=page,
        min_span_tokens=tools.min_span_tokens,
        repair=tools.repair,
        topk=tools.topk,
    )
    return edit(base.path, new, limits)


def _finish(
    client: ClientPrompt,
    base: Base,
    with_line: Sequence[int],
    in_place: Sequence[int],
    tools: Tools,
) -> Variant:
    """Put the rest of the client's text and the new lines behind the edited base."""
    path, spans = _edited(client, base, in_place, tools)
    shift = len(path.ids) - base.rest
    anchor = client.anchor + shift
    tail_start = max(base.rest, client.anchor)
    ids = path.ids + client.ids[base.rest : tail_start]
    lines = list(path.lines)
    for number in sorted(with_line):
        value = next(w.value for w in client.windows if w.number == number)
        start = len(ids)
        ids = ids + tools.line_ids(number, value)
        lines.append(Line(number=number, start=start, stop=len(ids), value=value))
    lines_end = len(ids) if with_line else anchor
    if base.turn is not None and not with_line:
        moved = len(path.ids) - len(base.path.ids)
        anchor, lines_end = base.turn[0] + moved, base.turn[1] + moved
    ids = ids + client.ids[tail_start:]
    windows = path.windows + tuple(
        dataclasses.replace(w, start=w.start + shift, stop=w.stop + shift)
        for w in client.windows
        if w.start >= base.rest
    )
    return Variant(
        base=base.kind,
        path=ServedPath(ids=ids, windows=windows, lines=tuple(lines), notes=path.notes),
        plan=_with_spans(tools.plan_of(ids), spans, len(path.ids), tools.page_size),
        anchor=anchor,
        lines_end=lines_end,
        edited=tuple(sorted(in_place)),
    )


def _with_spans(plan: Plan, spans: Sequence[Span], base_end: int, page_size: int) -> Plan:
    """``plan`` of a whole prompt with ``spans`` for its first ``base_end`` tokens; the plan's own
    spans are still tried, for the tree may hold the prompt by those."""
    last = (plan.num_tokens - 1) // page_size * page_size
    inside = [dataclasses.replace(s, stop=min(s.stop, last)) for s in spans if s.start < last]
    # a base may end, or its window begin, in the middle of a composed page
    kept = fit_to_pages(inside, page_size, min_span_tokens=1)
    behind = [span for span in plan.spans if span.match_start >= base_end]
    mine = (*kept, *behind)
    others = tuple(a for a in plan.alternatives if a != mine)
    return dataclasses.replace(
        plan,
        spans=mine,
        history=others[0] if others else (),
        older=others[1:],
    )
