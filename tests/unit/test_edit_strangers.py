"""Random lives of users whose texts, names and replies are all alike, on two servers.

Nobody is ever served a stranger's value: not as ids, and not as KV that was computed from it.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvedit.request.options import Options, Sealed
from tests.unit.edit_harness import FakeServer
from tests.unit.edit_lives import (
    CHANGES,
    FIELDS,
    OPTIONS,
    REPLY,
    SKILL,
    TEXTS,
    Conversation,
    check_answer,
    live,
    marks_in,
)


class Strangers(RuleBasedStateMachine):
    """Several users of two servers behind one address. Their texts, their names and the replies
    that they are given are all alike, they make up histories, and any server may forget. Nobody's
    values reach anybody else: not as ids, and not as what composed KV was computed under."""

    trust = "tokens"

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    @initialize(page_size=st.sampled_from([1, 4]), skill=st.booleans())
    def start(self, page_size: int, skill: bool) -> None:
        self.servers = [
            FakeServer(FIELDS, page_size=page_size, trust=self.trust, marks_in=marks_in)
            for _ in range(2)
        ]
        for server in self.servers if skill else ():
            server.add_skill(SKILL)
        self.all = [
            Conversation("xa", salt=None, proof=""),
            Conversation("xb", salt=None, proof=""),
            Conversation("xc", salt=None, name="chat"),
            Conversation("xd", salt=None, name="chat"),
            Conversation("xe", salt=None),
            Conversation("xf", salt=None),
            Conversation("xg", salt="g", name="chat"),
            Conversation("xh", salt="h", name="chat"),
            Conversation("xi", salt="i"),
        ]

    who = st.integers(0, 8)
    servers = st.integers(0, 1)

    @rule(c=who, at=servers, changes=CHANGES, how=OPTIONS, text=st.sampled_from(TEXTS))
    def chat(self, c: int, at: int, changes: dict[str, int], how: Options, text: str) -> None:
        who = self.all[c]
        who.user = text
        who.change(changes)
        self.ask(who, at, how)

    @rule(c=who, at=servers, keep=st.integers(0, 2), how=OPTIONS)
    def again(self, c: int, at: int, keep: int, how: Options) -> None:
        """From an earlier turn on, or the newest again."""
        who = self.all[c]
        if len(who.turns) > keep:
            who.user = who.turns[keep][0]
            del who.turns[keep:]
        self.ask(who, at, how)

    @rule(c=who, at=servers, user=st.sampled_from(TEXTS), how=OPTIONS)
    def make_up_a_turn(self, c: int, at: int, user: str, how: Options) -> None:
        """A turn that never was; the reply that others were given, learnt elsewhere."""
        who = self.all[c]
        who.turns.append((user, REPLY))
        self.ask(who, at, how)

    @rule(c=who)
    def ask_for_a_new_token(self, c: int) -> None:
        if self.all[c].proof is not None:
            self.all[c].proof = ""

    @rule(at=servers)
    def flush(self, at: int) -> None:
        self.servers[at].flush()

    @rule(at=servers)
    def restart(self, at: int) -> None:
        self.servers[at].restart()

    def ask(self, who: Conversation, at: int, how: Options) -> None:
        self.num_asked += 1
        server, prompt = self.servers[at], who.prompt()
        how = who.claimed(how, self.num_asked)
        outcome = server.ask(prompt, REPLY, how, salt=who.salt)
        check_answer(server, who, prompt, outcome)
        for other in self.all:
            if other is not who:
                assert not re.search(rf"\b{other.secret}", outcome.text), "shown to a stranger"
                seen = frozenset().union(*outcome.seen)
                notes = [value for _, value in seen if re.search(rf"\b{other.secret}", value)]
                assert not notes, "KV that a stranger's value was read for"
        if self.trust == "tokens" and who.salt is None and who.proof is None:
            base, reason = outcome.edit.chosen.base, outcome.edit.why_sent
            assert base in ("sent", "declared", "cross_request")
            assert reason in ("not_proven", "strategy")
        who.turns.append((who.user, REPLY))
        who.user = "and then?"


class OnNames(Strangers):
    trust = "names"


class OnReplies(Strangers):
    trust = "replies"


def test_nobody_is_served_a_stranger_s_words_or_what_was_computed_from_them():
    live(Strangers, 40, random=False)


USERS = {
    "adds the name": [None, "n"],
    "changes the name": ["m", "n"],
    "leaves the token out": [
        Options(conversation="d", sealed=Sealed(proof="d", is_issued=True)),
        "n",
    ],
    "leaves the name out": ["n", None],
}


@pytest.mark.parametrize("names", USERS.values(), ids=USERS.keys())
@pytest.mark.parametrize("edits", ["auto", "off"])
def test_one_who_comes_by_the_name_of_a_look_alike_is_not_proven(names, edits):
    """The look-alike is proven until somebody else is given the same reply."""
    server = FakeServer(FIELDS, marks_in=marks_in)
    theirs, mine = Conversation("xa"), Conversation("xb")
    known, (first, then) = names[1], names
    how = first if isinstance(first, Options) else Options(conversation=first)
    server.ask(theirs.prompt(), REPLY, Options(conversation=known))
    for one in (theirs, mine):
        one.turns.append((one.user, REPLY))
        one.user = "and then?"
    alone = server.ask(theirs.prompt(), "Another reply", Options(conversation=known))
    assert alone.edit.found.entries
    asked = Conversation("xb")
    server.ask(asked.prompt(), REPLY, dataclasses.replace(how, edits=edits))
    outcome = server.ask(mine.prompt(), REPLY, Options(conversation=then))
    assert (outcome.edit.found.entries, outcome.edit.why_sent) == ((), "not_proven")
    assert "xa" not in outcome.text


@pytest.mark.parametrize("machine", [OnNames, OnReplies])
def test_the_control_where_a_name_or_a_reply_proves_they_are(machine):
    with pytest.raises(AssertionError, match="stranger"):
        live(machine, 200, random=False, shrinks=False)


@pytest.mark.long
def test_many_more_lives_among_strangers():
    live(Strangers, 1000, random=True)
