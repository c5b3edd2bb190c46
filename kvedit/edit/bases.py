"""Bases: cached paths that a prompt may be served on, and how far each stands for the prompt.

A base says something else of a field than the client's prompt, or says it elsewhere: an earlier
turn of the conversation, or the prompt with declared values put in.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvedit.edit.client_prompt import ClientPrompt
from kvedit.edit.ledger import Entry
from kvedit.edit.masked import common_prefix
from kvedit.edit.served_path import Cut, New, ServedPath, edit
from kvedit.request.strategy import Strategy
from kvedit.splice.sources import FIRST_PATH_NUMBER, PathSource
from kvedit.splice.spans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What building needs from the executor. Nothing of it computes or drops KV; a look into the
    tree (``cached``) may cut nodes and makes them recent, ``donor_of`` gives a path its number.

    plan_of(ids)          skills in a prompt
    cached(ids, plan)     the path that the tree holds of a prompt: (path, cached tokens)
    donor_of(path)        a path as a donor
    line_ids(number, v)   ids of a field's line
    window_ids(number, v) ids of the client's window with another value, or None
    strategy_of(number)   never "auto"
    may_compose           whether composed KV may be served at all
    """

    plan_of: Callable[[array[int]], Plan]
    cached: Callable[[array[int], Plan], tuple[ServedPath, int]]
    donor_of: Callable[[ServedPath], PathSource]
    line_ids: Callable[[int, str], array[int]]
    window_ids: Callable[[int, str], array[int] | None]
    strategy_of: Callable[[int], Strategy]
    may_compose: bool
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

    def upto(self, position: int) -> Base:
        """The base up to client position ``position``: no line before a token already served."""
        if self.rest <= position:
            return self
        path = self.path.upto(len(self.path.ids) - (self.rest - position))
        return dataclasses.replace(self, path=path, rest=position)


def of_turn(client: ClientPrompt, entry: Entry, at: int) -> Iterator[Base]:
    """An earlier turn, by each of the ways in which its lines may be left.

    at: the client's position at which the entry's text ends, behind its last word.
    """
    for position in _line_ends(client, entry, at):
        yield _continued(client, entry, at, position)


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


def with_values(
    client: ClientPrompt, kind: str, values: dict[int, str], tools: Tools
) -> Base | None:
    """The prompt with ``values`` (by field number) in place; None where it is no base."""
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
    # donor_stop 0: no span takes anything of the donor
    nothing = Cut(donor=PathSource(FIRST_PATH_NUMBER), donor_stop=0, page_size=1, min_span_tokens=1)
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
