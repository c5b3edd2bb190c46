"""Finding a server's chat form: render sentinel conversations and read what is around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvedit.errors import Unsupported
from kvedit.text.chat import (
    ChatForm,
    Ids,
    Marks,
    Message,
    find_anchor,
    literal_anchor,
    messages,
    raw_anchor,
)
from kvedit.text.tokens import Tokens

__all__ = [
    "ChatForm",
    "Message",
    "derive_chat_form",
    "find_anchor",
    "literal_anchor",
    "messages",
    "raw_anchor",
]

Render = Callable[[list[dict[str, str]], bool], Sequence[int]]

SENTINEL = "Kvqz{}wxyj"  # survives trimming, and no template contains it
CONVERSATIONS = (
    ("user",),
    ("user", "assistant"),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "tool"),
    ("user", "assistant", "tool", "assistant", "user"),
)
OPTIONAL = ("tool", "system")  # a template may do without


@dataclass(frozen=True, slots=True)
class Gap:
    """What the template puts between the contents of two messages (None: an end of the prompt)."""

    before: str | None
    after: str | None
    marked: Ids  # from the first control token on; empty: there is none
    text: str  # in front of that
    roles: frozenset[str]  # of the whole conversation


@dataclass(slots=True)
class _Findings:
    gaps: list[Gap] = field(default_factory=list)  # without generation prompt
    ends: list[Gap] = field(default_factory=list)  # with it: behind the last content
    refused: dict[str, str] = field(default_factory=dict)  # role -> why; it may work elsewhere
    lacking: dict[str, str] = field(default_factory=dict)

    def drop(self, role: str, why: str) -> None:
        self.lacking.setdefault(role, f"kvedit: chat template, {role} message: {why}")
        self.gaps = [gap for gap in self.gaps if role not in gap.roles]
        self.ends = [gap for gap in self.ends if role not in gap.roles]


def derive_chat_form(render: Render, tokens: Tokens) -> ChatForm:
    """The form of the template behind ``render(messages, add_generation_prompt) -> ids``.

    ``render`` raises ValueError for a conversation that the template refuses.
    A role that the template refuses, or whose marks plain text could imitate, is left out and
    named in ``lacking``. Raises Unsupported when not even a user's message can be told.
    """
    findings = _Findings()
    for roles in CONVERSATIONS:
        _render(roles, render, tokens, findings)
    for role in (*OPTIONAL, "user"):
        _drop_unmarked(role, findings)
    for role in (*OPTIONAL, "user"):
        _drop_unless_own(role, findings, tokens)
    if "user" in findings.lacking:
        raise Unsupported(list(findings.lacking.values()))
    openers = _openers(findings.gaps, tokens)
    cuts = {role: [_cut(mark, tokens) for mark in marks] for role, marks in openers.items()}
    bos = () if tokens.bos_id is None else ((tokens.bos_id,),)
    return ChatForm(
        openers=_flat({role: [opener for opener, _ in cut] for role, cut in cuts.items()}),
        leads=_flat({role: [lead for _, lead in cut if lead] for role, cut in cuts.items()}),
        closers=_flat(_closers(findings.gaps, openers, tokens)),
        suffixes=tuple(sorted({gap.marked for gap in findings.ends}, key=lambda s: (-len(s), s))),
        heads=((), *bos),
        lacking=tuple(findings.lacking.items()),
    )


def _render(roles: Sequence[str], render: Render, tokens: Tokens, findings: _Findings) -> None:
    texts = [SENTINEL.format(chr(ord("A") + i)) for i in range(len(roles))]
    conversation = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    blamed = next((role for role in OPTIONAL if role in roles), "user")
    try:
        plain, prompt = render(conversation, False), render(conversation, True)
    except ValueError as error:
        findings.refused[blamed] = f"expected it to be rendered, got {str(error)[:200]!r}"
        return
    gaps, prompt_gaps = _gaps(roles, texts, plain, tokens), _gaps(roles, texts, prompt, tokens)
    if not gaps or not prompt_gaps:
        findings.drop(blamed, f"expected {', '.join(roles)} in this order, got other content")
    elif not set(roles) & set(findings.lacking):
        findings.gaps += gaps
        if roles[-1] != "assistant":
            findings.ends.append(prompt_gaps[-1])


def _gaps(
    roles: Sequence[str], texts: Sequence[str], ids: Sequence[int], tokens: Tokens
) -> list[Gap]:
    """The gaps of one rendered conversation; [] unless each text stands in it once, in order."""
    data, ends = tokens.joined(ids)
    starts = [data.find(text.encode()) for text in texts]
    if (
        min(starts) < 0
        or starts != sorted(starts)
        or any(data.count(t.encode()) > 1 for t in texts)
    ):
        return []
    stops = [start + len(text) for start, text in zip(starts, texts, strict=True)]
    edges = zip([0, *stops], [*starts, len(data)], strict=True)
    names = [None, *roles, None]
    gaps = []
    for before, after, (start, stop) in zip(names, names[1:], edges, strict=False):
        # a content may share its first or last token with the template's text
        first = int(np.searchsorted(ends, start, side="left")) + 1 if before else 0
        last = int(np.searchsorted(ends, stop, side="right"))
        marks = [i for i in range(first, last) if ids[i] in tokens.special_ids]
        mark = marks[0] if marks else last
        text_stop = int(ends[mark]) - len(tokens.token_bytes(ids[mark])) if marks else stop
        text = data[start:text_stop].decode(errors="replace")
        gaps.append(Gap(before, after, tuple(ids[mark:last]), text, frozenset(roles)))
    return gaps


def _drop_unmarked(role: str, findings: _Findings) -> None:
    """Take out a role that no control token sets apart."""
    if not any(role in gap.roles for gap in findings.gaps):
        findings.drop(role, findings.refused.get(role, "expected it to be rendered, got nothing"))
    for gap in [gap for gap in findings.gaps + findings.ends if role in (gap.before, gap.after)]:
        if not gap.marked and gap.after is not None:
            findings.drop(role, f"expected a control token next to it, got {gap.text[:40]!r}")
        elif gap.before == role == "user" and gap.text.strip():  # a line would go behind it
            findings.drop(role, f"expected a control token behind it, got {gap.text[:40]!r}")
    for end in findings.ends:
        if end.before == role and not end.marked:
            findings.drop(role, "expected a generation prompt with a control token, got none")


def _drop_unless_own(role: str, findings: _Findings, tokens: Tokens) -> None:
    """Take out a role whose messages begin like another role's."""
    found = _openers(findings.gaps, tokens)
    cut = {name: {_cut(mark, tokens)[0] for mark in marks} for name, marks in found.items()}
    others = {mark for name, marks in cut.items() if name != role for mark in marks}
    if not others.isdisjoint(cut.get(role, ())):
        findings.drop(role, "expected control tokens of its own, got another role's")


def _openers(gaps: Sequence[Gap], tokens: Tokens) -> dict[str, set[Ids]]:
    """Per role, the ids between what closes the message before and the content."""
    tails = {gap.before: gap.marked for gap in gaps if gap.after is None}
    found: dict[str, set[Ids]] = {}
    for gap in gaps:
        if gap.after is not None:
            shared = _num_shared(gap.marked, tails.get(gap.before, ()))
            opener = _from_mark(gap.marked[shared:], tokens) or gap.marked
            if gap.before is None and opener[0] == tokens.bos_id:
                opener = _from_mark(opener[1:], tokens) or opener
            found.setdefault(gap.after, set()).add(opener)
    return {
        role: {mark for mark in marks if not _ends_in(mark, marks)} for role, marks in found.items()
    }


def _closers(
    gaps: Sequence[Gap], openers: Mapping[str, set[Ids]], tokens: Tokens
) -> dict[str, set[Ids]]:
    """Per role, the control tokens that follow a content directly."""
    found: dict[str, set[Ids]] = {}
    for gap in gaps:
        if gap.before is not None and gap.marked:
            next_openers = openers.get(gap.after or "", set())
            rest = [gap.marked[: -len(o)] for o in next_openers if gap.marked[-len(o) :] == o]
            closer = max(rest, key=len, default=()) or gap.marked
            found.setdefault(gap.before, set()).add(_leading_marks(closer, tokens))
    return found


def _cut(opener: Ids, tokens: Tokens) -> tuple[Ids, Ids]:
    """(marks and role name, the text behind them): the text may merge with a content's start."""
    stop = max(i for i, token_id in enumerate(opener) if token_id in tokens.special_ids) + 1
    while stop < len(opener) and not any(map(str.isspace, _text(opener[stop], tokens))):
        stop += 1
    return opener[:stop], opener[stop:]


def _text(token_id: int, tokens: Tokens) -> str:
    return tokens.token_bytes(token_id).decode(errors="replace")


def _from_mark(ids: Ids, tokens: Tokens) -> Ids:
    """``ids`` from the first control token on."""
    return tuple(itertools.dropwhile(lambda token_id: token_id not in tokens.special_ids, ids))


def _leading_marks(ids: Ids, tokens: Tokens) -> Ids:
    return tuple(itertools.takewhile(lambda token_id: token_id in tokens.special_ids, ids))


def _num_shared(left: Ids, right: Ids) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in pairs)


def _ends_in(mark: Ids, marks: set[Ids]) -> bool:
    """Whether another one of ``marks`` is the end of ``mark``."""
    return any(len(other) < len(mark) and mark[-len(other) :] == other for other in marks)


def _flat(marks: Mapping[str, Iterable[Ids]]) -> Marks:
    return tuple((role, mark) for role, own in marks.items() for mark in sorted(set(own)))
