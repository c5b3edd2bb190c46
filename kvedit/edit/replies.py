"""Whether a prompt goes on with a reply: what makes an earlier turn the caller's own."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from kvedit.edit.masked import common_prefix

WHOLE_REPLY = 8  # tokens: of a shorter reply, every token must come back
TAIL_TOKENS = 4  # of a longer one all but its end: a stop text, spaces, half a character

TextOf = Callable[["array[int]"], bytes]


def heard_part(reply: array[int]) -> array[int]:
    """The part of a reply that a request must hold to go on with it."""
    return reply[: max(WHOLE_REPLY, len(reply) - TAIL_TOKENS)]


def goes_on(
    tail: array[int],
    reply: array[int],
    *,
    is_trimmed: bool,
    text_of: TextOf,
    marks: frozenset[int],
) -> bool:
    """Whether ``tail`` begins with the message that the client of ``reply`` was shown: with all of
    it and nothing more, for a look-alike may have been given one that begins alike.

    is_trimmed: it was shown less of it, a stop text was cut off. text_of(ids): their bytes.
    marks: control tokens, one of which ends a message. Raw text has none, so nobody can tell where
    a reply ends in it. Text of O(len(reply)) is made; ``tail`` is at most looked through for marks.
    """
    message = tail[: 2 * len(reply) + TAIL_TOKENS]  # not longer, even if tokenised in another way
    if not _begins_with(message, reply, text_of):
        return False
    stop = _first_mark(message, marks)
    if stop == len(message):
        return marks.isdisjoint(tail)
    shown = _shown(text_of(message[:stop]))
    said = _shown(text_of(reply[: _first_mark(reply, marks)]))
    return shown == said or (is_trimmed and said.startswith(shown))


def _begins_with(message: array[int], reply: array[int], text_of: TextOf) -> bool:
    begin = heard_part(reply)
    if common_prefix(message, begin) == len(begin):
        return True
    said = text_of(begin).strip()  # the client's text may be tokenised in another way
    return bool(said) and text_of(message).lstrip().startswith(said)


def _first_mark(ids: array[int], marks: frozenset[int]) -> int:
    return next((i for i, token in enumerate(ids) if token in marks), len(ids))


def _shown(text: bytes) -> str:
    """Without half a character at the end, and spaces that a template trims."""
    return text.decode(errors="ignore").rstrip("\ufffd").strip()
