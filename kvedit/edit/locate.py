"""Where a field's value stands in a prompt's token ids.

A value's window is chosen from the text around it, so that any value of a field should give the
same ids outside the window: a tokenizer may merge a value's first or last characters with what
stands next to them, and what it may merge belongs to the window. Which merges there are is a rule
of thumb here; ``window`` checks the ids of the one value that it puts in.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvedit.reason import Reason
from kvedit.text.chat import ChatForm, messages
from kvedit.text.tokens import Tokens

if TYPE_CHECKING:
    from kvedit.fields.book import Field

MAX_VALUE_TOKENS = 64
EDGE_BYTES = 256  # how far a run of mergeable characters behind a value is followed


@dataclass(frozen=True, slots=True)
class Located:
    """A field's value in a prompt: tokens [start, stop) spell before + value + after."""

    field: Field
    start: int
    stop: int
    value: str
    before: str  # spaces, or characters that a token shares with the value
    after: str


@dataclass(frozen=True, slots=True)
class _Region:
    """Tokens [start, stop) in which a field may stand; ``cut``: its text goes on behind them."""

    start: int
    stop: int
    cut: bool


def locate(
    field: Field, ids: Sequence[int], form: ChatForm | None, tokens: Tokens
) -> Located | Reason:
    """The first occurrence of ``field`` in its region of ``ids``, or why there is none."""
    region = _region(field, ids, form)
    if region is None:
        return Reason.ROLE_NOT_FOUND
    data, ends = tokens.joined(ids[region.start : region.stop])
    prefix = _utf8(field.prefix)
    begin = data.find(prefix)
    if begin < 0:
        return Reason.NOT_IN_PROMPT
    span = _value_span(data, begin + len(prefix), field.suffix, region.cut)
    if isinstance(span, Reason):
        return span
    start, stop = span
    first, last = _token_at(ends, start), _token_at(ends, stop - 1)
    if last - first + 1 > MAX_VALUE_TOKENS:
        return Reason.VALUE_TOO_LONG
    left = begin + _left_edge(data[begin:start])
    mark = _first_mark(ids, region.start + last + 1, region.stop, tokens) - region.start
    limit = int(ends[mark - 1])
    right = stop + _right_edge(data[stop : min(limit, stop + EDGE_BYTES)])
    if right == limit and region.cut and mark == len(ends):
        return Reason.TOKENS_MERGE  # what follows the region may take part in a merge
    return _window(field, region.start, data, ends, (left, start, stop, right))


def _region(field: Field, ids: Sequence[int], form: ChatForm | None) -> _Region | None:
    where = field.where
    if where.within is not None:
        stop = min(where.within, len(ids))
        return _Region(0, stop, cut=stop < len(ids))
    if form is None:
        return None
    seen = [m for m in messages(form, ids) if m.role == where.role]
    if len(seen) < where.occurrence:
        return None
    message = seen[where.occurrence - 1]
    return _Region(message.start, message.stop, cut=False)


def _value_span(data: bytes, start: int, suffix: str, cut: bool) -> tuple[int, int] | Reason:
    """Bytes [start, stop) of the value that begins at ``start``, spaces around it left out."""
    line_end = _line_end(data, start)
    if suffix:
        stop = data.find(_utf8(suffix), start)
        if not 0 <= stop <= line_end:
            return Reason.VALUE_OPEN
    elif line_end == len(data) and cut:
        return Reason.VALUE_OPEN
    else:
        stop = line_end
    text = decoded(data[start:stop])
    if text is None:
        return Reason.TOKENS_MERGE  # these ids are not the tokens of any text
    if not text.strip():
        return Reason.VALUE_EMPTY
    start += len(text[: len(text) - len(text.lstrip())].encode())
    return start, start + len(text.strip().encode())


def reads_back(value: str, suffix: str) -> bool:
    """Whether ``value``, written in front of ``suffix``, is found again as it is."""
    span = _value_span(_utf8(value + suffix), 0, suffix, cut=False)
    return span == (0, len(_utf8(value)))


def _line_end(data: bytes, start: int) -> int:
    found = [at for at in (data.find(b"\n", start), data.find(b"\r", start)) if at >= 0]
    return min(found, default=len(data))


def _left_edge(text: bytes) -> int:
    """Offset in prefix + spaces from which a value's first character may change the tokens."""
    chars = text.decode()
    kept = len(chars.rstrip())
    if kept == len(chars):  # a visible character touches the value
        kind = _kind(chars[-1])
        while kept and _kind(chars[kept - 1]) == kind:
            kept -= 1
        # one mark in front of a word can belong to the word's token
        if kind == "letter" and kept and chars[kept - 1] not in "\r\n":
            kept -= 1
    return len(chars[:kept].encode())


def _right_edge(text: bytes) -> int:
    """Offset in the text behind a value up to which its last character may change the tokens."""
    chars = text.decode(errors="ignore")  # the stretch may end inside a character
    length = 0
    if chars and _kind(chars[0]) != "space":
        kind = _kind(chars[0])
        length = _run(chars, 0, kind)
        if kind == "mark":
            length = _run(chars, length, "letter")
    blanks = chars[length : _run(chars, length, "space")]
    length += max(blanks.rfind("\n"), blanks.rfind("\r")) + 1
    return len(chars[:length].encode())


def _run(chars: str, start: int, kind: str) -> int:
    while start < len(chars) and _kind(chars[start]) == kind:
        start += 1
    return start


def _kind(char: str) -> str:
    if char.isspace():
        return "space"
    return {"L": "letter", "N": "digit"}.get(unicodedata.category(char)[0], "mark")


def _window(
    field: Field,
    offset: int,
    data: bytes,
    ends: NDArray[np.int64],
    edges: tuple[int, int, int, int],
) -> Located | Reason:
    """Widen to token edges, and on to edges that are also those of characters."""
    left, start, stop, right = edges
    first, last = _token_at(ends, left), _token_at(ends, right - 1)
    while first > 0 and _inside_char(data, int(ends[first - 1])):
        first -= 1
    while last + 1 < len(ends) and _inside_char(data, int(ends[last])):
        last += 1
    before = decoded(data[int(ends[first - 1]) if first else 0 : start])
    value = decoded(data[start:stop])
    after = decoded(data[stop : int(ends[last])])
    if before is None or value is None or after is None:
        return Reason.TOKENS_MERGE
    return Located(field, offset + first, offset + last + 1, value, before, after)


def _token_at(ends: NDArray[np.int64], position: int) -> int:
    """Index of the token that holds the byte at ``position``."""
    return int(np.searchsorted(ends, position, side="right"))


def _inside_char(data: bytes, position: int) -> bool:
    return position < len(data) and data[position] & 0xC0 == 0x80


def _first_mark(ids: Sequence[int], start: int, stop: int, tokens: Tokens) -> int:
    """First control token of [start, stop), for text does not merge across one; stop: none among
    the first EDGE_BYTES, farther than an edge is followed."""
    for i in range(start, min(stop, start + EDGE_BYTES)):
        if ids[i] in tokens.special_ids:
            return i
    return stop


def _utf8(text: str) -> bytes:
    """Bytes of ``text``; a lone surrogate gives bytes that are no UTF-8 and match nothing."""
    return text.encode(errors="surrogatepass")


def decoded(data: bytes) -> str | None:
    """The text of ``data``; None: it is no UTF-8, as where a token splits a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
