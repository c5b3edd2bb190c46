"""The prompts that could be served instead of the one that was sent.

A base is a path that says something else of a field, or says it elsewhere: an earlier turn of the
conversation, or the prompt with declared values put in. On a base, each changed field is served
by its strategy. Which prompt is served is decided at admission, by the tokens it saves.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvedit.clientprompt import ClientPrompt
from kvedit.fields import Strategy
from kvedit.ledger import Entry, Found
from kvedit.masks import common_prefix
from kvedit.served import Cut, Line, New, ServedPath, edit, fit_to_pages, kept_spans
from kvedit.spans import Plan, Span

MAX_SUBSTITUTIONS = 6
MAX_ENTRIES = 3


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
        return tuple(x for x in self.path.lines if self.anchor <= x.start < self.lines_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What building needs from the executor; all of it reads, nothing is changed by it.

    plan_of(ids)          skills in a prompt
    cached(ids, plan)     the path that the tree holds of a prompt: (path, cached tokens)
    donor_of(path)        number of a path as a donor
    line_ids(number, v)   ids of a field's line
    window_ids(number, v) ids of the client's window with another value, or None
    strategy_of(number)   never "auto"
    """

    plan_of: Callable[[array[int]], Plan]
    cached: Callable[[array[int], Plan], tuple[ServedPath, int]]
    donor_of: Callable[[ServedPath], int]
    line_ids: Callable[[int, str], array[int]]
    window_ids: Callable[[int, str], array[int] | None]
    strategy_of: Callable[[int], Strategy]
    page_size: int
    min_span_tokens: int
    repair: int
    topk: int


@dataclass(frozen=True, slots=True)
class Base:
    """``path`` stands for the client's tokens [0, rest); [rest, ...) follow as they were sent.

    turn: [anchor, lines_end) in ``path`` when its lines stand at the client's own anchor
    """

    kind: str
    path: ServedPath
    rest: int
    turn: tuple[int, int] | None = None


def as_sent(client: ClientPrompt, plan: Plan) -> Variant:
    path = ServedPath(ids=client.ids, windows=client.windows)
    return Variant(base="sent", path=path, plan=plan, anchor=client.anchor, lines_end=client.anchor)


def on_conversation(client: ClientPrompt, found: Found, tools: Tools) -> Iterator[Variant]:
    """Variants on earlier turns of the same conversation."""
    seen: set[bytes] = set()
    for entry in found.entries[:MAX_ENTRIES]:
        at = client.masked.to_real(found.length)
        for position in _line_ends(client, entry, at):
            variant = _variant(client, _continued(client, entry, at, position), tools)
            if variant is not None and (key := variant.path.ids.tobytes()) not in seen:
                seen.add(key)
                yield variant


def _line_ends(client: ClientPrompt, entry: Entry, at: int) -> tuple[int, ...]:
    """Where the entry's path may be left: with the lines of its turn, without them, or either.
    Lines that turns follow stay; lines that nothing follows yet may be replaced."""
    if entry.lines_end == entry.anchor:
        return (entry.anchor,)
    if at == client.anchor:
        return entry.lines_end, entry.anchor
    return (entry.lines_end if _keeps_lines(client, entry, at) else entry.anchor,)


def _keeps_lines(client: ClientPrompt, entry: Entry, at: int) -> bool:
    """Whether the entry's lines still end what they ended: a message that now goes on behind
    them would run into their text."""
    behind = entry.path.ids[entry.lines_end : entry.reply_start]
    return len(behind) > 0 and client.ids[at : at + len(behind)] == behind


def on_values(
    client: ClientPrompt, kind: str, values: Sequence[tuple[int, Sequence[str]]], tools: Tools
) -> Iterator[Variant]:
    """Variants on the prompt with candidate values (by field number) put in place."""
    numbers = [number for number, _ in values]
    combinations = itertools.product(*(candidates for _, candidates in values))
    for chosen in itertools.islice(combinations, MAX_SUBSTITUTIONS):
        base = _substituted(client, kind, dict(zip(numbers, chosen, strict=True)), tools)
        if base is None:
            continue
        variant = _variant(client, base, tools)
        if variant is not None:
            yield variant


def _continued(client: ClientPrompt, entry: Entry, at: int, position: int) -> Base:
    """The entry's path up to ``position``, and as far behind it as the client's text from ``at``
    on is what the path goes on with."""
    agreed = common_prefix(entry.path.ids[position:], client.ids[at:])
    for window in client.windows:
        if window.start < at + agreed < window.stop:
            agreed = window.start - at
    path = entry.path.upto(position + agreed)
    shift = position - at
    windows = [w for w in path.windows if w.stop <= position]
    windows += [
        dataclasses.replace(w, start=w.start + shift, stop=w.stop + shift)
        for w in client.windows
        if at <= w.start and w.stop <= at + agreed
    ]
    turn = (entry.anchor, position) if at == client.anchor else None
    # what a client writes like a line is a text of its own
    lines = tuple(line for line in path.lines if line.stop <= position)
    path = dataclasses.replace(path, windows=tuple(windows), lines=lines)
    return Base("conversation", path, at + agreed, turn)


def _substituted(
    client: ClientPrompt, kind: str, values: dict[int, str], tools: Tools
) -> Base | None:
    new: dict[int, New] = {}
    for window in client.windows:
        value = values.get(window.number, window.value)
        if value != window.value:
            ids = tools.window_ids(window.number, value)
            if ids is None:
                return None
            new[window.number] = New(ids, value)
    if not new:
        return None
    head = ServedPath(ids=client.ids, windows=client.windows)
    nothing = Cut(donor=1, donor_stop=0, page_size=1, min_span_tokens=1)
    whole, _ = edit(head, new, nothing)
    path, num_cached = tools.cached(whole.ids, tools.plan_of(whole.ids))
    shift = len(whole.ids) - len(client.ids)
    path = dataclasses.replace(path, windows=whole.windows)
    if all(tools.strategy_of(number) == "erratum" for number in new):
        return Base(kind, path.upto(client.anchor + shift), client.anchor)
    end = min(num_cached, client.anchor + shift)
    if end <= max(w.stop for w in whole.windows):
        return None  # nothing behind the fields to compose from
    return Base(kind, path.upto(end), end - shift)


def _variant(client: ClientPrompt, base: Base, tools: Tools) -> Variant | None:
    """The client's prompt on ``base``; None where the strategies do not allow it."""
    says = base.path.says()
    wanted = {w.number: w for w in client.windows}
    changed = [n for n, value in says.items() if n in wanted and value != wanted[n].value]
    strategies = {number: tools.strategy_of(number) for number in changed}
    with_line = [n for n in changed if strategies[n] in ("erratum", "edit+erratum")]
    in_place = [
        w.number
        for w in base.path.windows  # an older line may say the value of now, its window does not
        if w.number in wanted
        and w.value != wanted[w.number].value
        and tools.strategy_of(w.number) in ("edit", "edit+erratum")
    ]
    without_line = {n for n in changed if strategies[n] == "edit"}
    if "recompute" in strategies.values() or without_line & {x.number for x in base.path.lines}:
        return None
    if with_line:
        if base.turn is not None and base.turn[0] < base.turn[1]:
            return None  # the lines of this very turn are replaced, not added to
        base = _cut_to(base, client.anchor)
    return _finish(client, base, with_line, in_place, tools)


def _cut_to(base: Base, position: int) -> Base:
    """The base up to client position ``position``: no line before a token already served."""
    if base.rest <= position:
        return base
    path = base.path.upto(len(base.path.ids) - (base.rest - position))
    return dataclasses.replace(base, path=path, rest=position)


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
        path=ServedPath(ids=ids, windows=windows, lines=tuple(lines)),
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
