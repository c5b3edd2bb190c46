"""The ids of another value in a field's window, checked against the tokens that stand there."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvedit.edit.locate import Located, decoded, reads_back
from kvedit.text.tokens import Tokens

MAX_CONTEXT_TOKENS = 128  # on each side of a window, when another value is tried
MIN_AGREEING = 4  # tokens beside the window that must come out as they are


def window_ids(
    located: Located, ids: Sequence[int], value: str, tokens: Tokens
) -> array[int] | None:
    """int64 ids of ``located``'s window with ``value`` in it; None: it does not fit there.

    Checked by encoding the text around the window twice: the present value must give the
    present ids of the window and of MIN_AGREEING tokens on each side (fewer where the stretch
    ends), and the new one must leave all ids of the stretch outside the window. Spaces around
    ``value`` are not part of it, as in ``locate``.
    """
    value = value.strip()
    if not reads_back(value, located.field.suffix):
        return None
    start, stop = _context(located, ids, tokens)
    ahead = decoded(tokens.joined(ids[start : located.start])[0])
    behind = decoded(tokens.joined(ids[located.stop : stop])[0])
    if ahead is None or behind is None:
        return None
    for text in _as_written(ahead, tokens.token_bytes(ids[start]).decode(errors="ignore")):
        now = tokens.encode(text + located.before + located.value + located.after + behind)
        edges = _find_window(now, len(text.encode()), located, ids, (start, stop), tokens)
        if edges is not None:
            left, right = now[: edges[0]], now[edges[1] :]
            new = tokens.encode(text + located.before + value + located.after + behind)
            return _between(left, new, right, located.before + value + located.after, tokens)
    return None


def _context(located: Located, ids: Sequence[int], tokens: Tokens) -> tuple[int, int]:
    """Tokens [start, stop): the window, the line before it and the line behind it.

    A control token ends the stretch and belongs to it: a tokenizer starts afresh behind one.
    """
    before = reversed(ids[max(0, located.start - MAX_CONTEXT_TOKENS) : located.start])
    behind = ids[located.stop : located.stop + MAX_CONTEXT_TOKENS]
    start = located.start - _num_to_line_edge(before, tokens)
    stop = located.stop + _num_to_line_edge(behind, tokens)
    # White space at an end of the stretch would be cut into tokens in another way than inside.
    while start > 0 and (
        _begins_inside_char(tokens.token_bytes(ids[start])) or _is_space(ids[start], tokens)
    ):
        start -= 1
    while stop < len(ids) and (
        _begins_inside_char(tokens.token_bytes(ids[stop])) or _is_space(ids[stop - 1], tokens)
    ):
        stop += 1
    return start, stop


def _num_to_line_edge(ids: Iterable[int], tokens: Tokens) -> int:
    num_tokens = num_breaks = 0
    for token_id in ids:
        num_tokens += 1
        num_breaks += b"\n" in tokens.token_bytes(token_id)
        if token_id in tokens.special_ids or num_breaks == 2:
            break
    return num_tokens


def _is_space(token_id: int, tokens: Tokens) -> bool:
    return token_id not in tokens.special_ids and not tokens.token_bytes(token_id).strip()


def _begins_inside_char(piece: bytes) -> bool:
    return bool(piece) and piece[0] & 0xC0 == 0x80


def _as_written(text: str, mark: str) -> Iterator[str]:
    """``text`` as it stands in the tokens, and without the space a tokenizer may have added."""
    yield text
    for mark_text in ("", mark):
        if text.startswith(mark_text + " "):
            yield mark_text + text[len(mark_text) + 1 :]


def _find_window(
    now: array[int],
    num_bytes_ahead: int,
    located: Located,
    ids: Sequence[int],
    context: tuple[int, int],
    tokens: Tokens,
) -> tuple[int, int] | None:
    """Where the window's tokens are in ``now``, if they and those next to them are the prompt's.

    Far from the window the two may differ: the stretch was cut out of a longer text.
    """
    window = ids[located.start : located.stop]
    num_ahead = min(MIN_AGREEING, located.start - context[0])
    num_behind = min(MIN_AGREEING, context[1] - located.stop)
    near = ids[located.start - num_ahead : located.stop + num_behind]
    ends = tokens.joined(now)[1]
    for added in (0, 1):  # a tokenizer may put a space in front of every text
        at = int(np.searchsorted(ends, num_bytes_ahead + added, side="right"))
        first = at - num_ahead
        if first >= 0 and list(now[first : first + len(near)]) == list(near):
            return at, at + len(window)
    return None


def _between(
    left: array[int], new: array[int], right: array[int], text: str, tokens: Tokens
) -> array[int] | None:
    """The ids of ``new`` between ``left`` and ``right``, if these are kept and spell ``text``."""
    stop = len(new) - len(right)
    window = new[len(left) : stop]
    kept = stop > len(left) and new[: len(left)] == left and new[stop:] == right
    if not kept or tokens.joined(window)[0] != text.encode():
        return None
    return window if tokens.special_ids.isdisjoint(window) else None
