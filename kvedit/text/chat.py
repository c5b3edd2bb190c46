"""How a chat template frames messages, as token ids, and what a prompt holds by that form.

Roles are told by control tokens and the role's name behind them. A user's text can spell a control
token, and the host makes a real one of it, so a forged user or tool message cannot be told from a
sent one. What such a text cannot become is the first message, and only the first is taken for a
system message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvedit.text.tokens import Tokens

Ids = tuple[int, ...]
Marks = tuple[tuple[str, Ids], ...]  # (role, ids); a role may have several


@dataclass(frozen=True, slots=True)
class Message:
    """Content of one message: tokens [start, stop) of the prompt."""

    role: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The ids that a template puts around contents, by role; found by ``chat_probe``."""

    openers: Marks  # what stands before a message's content
    closers: Marks  # what stands right behind it (a form without any ends it at the next opener)
    suffixes: tuple[Ids, ...]  # from behind the last content to the prompt's end, longest first
    leads: Marks = ()  # text of the template between opener and content, where it is constant
    heads: tuple[Ids, ...] = ((),)  # what may stand before the first message
    lacking: tuple[tuple[str, str], ...] = ()  # (role, why it cannot be told)

    @property
    def roles(self) -> frozenset[str]:
        """Roles whose messages can be told."""
        return frozenset(role for role, _ in self.openers)


def messages(form: ChatForm, ids: Sequence[int]) -> list[Message]:
    """Content intervals in order. A system message that is not the first is left out."""
    found: list[Message] = []
    row = np.asarray(ids, dtype=np.int64)
    marks = np.flatnonzero(np.isin(row, _first_ids(form))).tolist()
    position = 0  # behind the content of the message before
    for i, mark in enumerate(marks):
        opener = _longest_at(form.openers, ids, mark) if mark >= position else None
        if opener is None:
            continue
        role, opener_ids = opener
        start = _skip_lead(form, role, ids, mark + len(opener_ids))
        position = _content_stop(form, role, ids, start, marks, i + 1)
        if role != "system" or _is_head(form, ids, mark):
            found.append(Message(role, start, position))
    return found


def find_anchor(form: ChatForm, ids: Sequence[int]) -> int | None:
    """Where a line at the end of the last non-assistant message goes; None: no known suffix."""
    for suffix in form.suffixes:
        if len(suffix) <= len(ids) and tuple(ids[len(ids) - len(suffix) :]) == suffix:
            return len(ids) - len(suffix)
    return None


def raw_anchor(ids: Sequence[int], tokens: Tokens) -> int:
    """Where a line goes in raw text: the start of the last line, as a token edge at or before it.

    Line breaks at the very end begin no line. Never in front of leading control tokens (BOS).
    """
    first = next((i for i, token in enumerate(ids) if token not in tokens.special_ids), len(ids))
    num_tokens = 256
    while True:
        begin = max(first, len(ids) - num_tokens)
        data, ends = tokens.joined(ids[begin:])
        text = data.rstrip(b"\r\n")
        line = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if line > 0:
            return begin + int(np.searchsorted(ends, line, side="right"))
        if begin == first:
            return first
        num_tokens *= 4


def literal_anchor(ids: Sequence[int], tokens: Tokens, text: str) -> int | None:
    """Token edge at or before the last occurrence of ``text``; None: it does not occur."""
    data, ends = tokens.joined(ids)
    position = data.rfind(text.encode(errors="surrogatepass"))
    return None if position < 0 else int(np.searchsorted(ends, position, side="right"))


def _first_ids(form: ChatForm) -> list[int]:
    return sorted({ids[0] for _, ids in (*form.openers, *form.closers)})


def _longest_at(marks: Marks, ids: Sequence[int], position: int) -> tuple[str, Ids] | None:
    fitting = [
        (role, mark) for role, mark in marks if tuple(ids[position : position + len(mark)]) == mark
    ]
    return max(fitting, key=lambda pair: len(pair[1]), default=None)


def _skip_lead(form: ChatForm, role: str, ids: Sequence[int], start: int) -> int:
    own = tuple(pair for pair in form.leads if pair[0] == role)
    lead = _longest_at(own, ids, start)
    return start if lead is None else start + len(lead[1])


def _is_head(form: ChatForm, ids: Sequence[int], stop: int) -> bool:
    return any(len(head) == stop and tuple(ids[:stop]) == head for head in form.heads)


def _content_stop(
    form: ChatForm, role: str, ids: Sequence[int], start: int, marks: Sequence[int], first: int
) -> int:
    ends = tuple(pair for pair in form.closers if pair[0] == role) + form.openers
    for i in range(first, len(marks)):
        mark = marks[i]
        if mark >= start and _longest_at(ends, ids, mark) is not None:
            return mark
    return len(ids)
