"""Random lives of conversations against a dumb model that knows text only.

Whatever happens (changes, branches, evictions, flushes, aborts, look-alikes): what is served says
the newest value of every field, shows nobody another conversation's values, copies only KV that
was computed for the very same tokens (the harness compares them one by one), and what that KV was
computed under keeps to the strategy: only ``edit`` leaves it unsaid that a value changed.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvedit.request.options import Options
from sglang_patches.scheduler.edit.read import strategy_in_force
from tests.unit.edit_harness import SUFFIX, FakeServer
from tests.unit.edit_lives import (
    CHANGES,
    FIELDS,
    LINE,
    MIXED,
    NAMES,
    OPTIONS,
    SKILL,
    TEXTS,
    Conversation,
    check_answer,
    check_kv,
    live,
    marks_in,
    newest,
)


class Lives(RuleBasedStateMachine):
    """One user, and so one salt, with several conversations: replies tell them apart."""

    same_replies = False

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    @initialize(
        page_size=st.sampled_from([1, 1, 4]),
        named=st.sampled_from(["nothing", "a name", "a token"]),
        skill=st.booleans(),
        only_errata=st.booleans(),
        mixed=st.booleans(),
    )
    def start(
        self, page_size: int, named: str, skill: bool, only_errata: bool, mixed: bool
    ) -> None:
        self.only_errata = only_errata
        self.declared = dict(zip(NAMES, MIXED if mixed else ("auto",) * 4, strict=True))
        fields = [{**field, "strategy": self.declared[field["name"]]} for field in FIELDS]
        self.server = FakeServer(fields, page_size=page_size, marks_in=marks_in)
        if skill:
            self.server.add_skill(SKILL)
        self.all = [Conversation("xa"), Conversation("xb")]
        if named != "nothing":
            proof = "" if named == "a token" else None
            self.all.append(Conversation("xc", "by name", proof))

    # ---- asking, and what must hold of every answer

    def ask(self, who: Conversation, how: Options, **faults: int | None) -> None:
        self.num_asked += 1
        nonce = "" if self.same_replies else f" {who.secret}r{self.num_asked}"
        reply = f"Sure here is all that I can say of it now{nonce} and that is the end of it"
        how = who.claimed(how, self.num_asked)
        if self.only_errata:
            how = dataclasses.replace(how, strategy="erratum")
        prompt = who.prompt()
        outcome = self.server.ask(prompt, reply, how, salt=who.salt, **faults)
        check_answer(self.server, who, prompt, outcome)
        strategies = {
            name: strategy_in_force(declared, how)  # type: ignore[arg-type]
            for name, declared in self.declared.items()
        }
        check_kv(self.server, outcome, strategies)
        if how.splice == "off":
            assert not outcome.state.pieces
        text = outcome.text
        others = [other.secret for other in self.all if other is not who]
        for other in others:
            assert not re.search(rf"\b{other}", text), f"{other} is shown to {who.secret}"
        last = text.removesuffix(SUFFIX).rpartition("<|im_start|>")[2]
        named = [match[1] for match in LINE.finditer(last)]
        assert len(named) == len(set(named)), "two live lines of one field"
        if self.only_errata:
            stale = newest(text.removesuffix(SUFFIX).removesuffix(last) + LINE.sub("", last))
            fresh = [name for name in named if stale.get(name) == who.said().get(name)]
            assert not fresh, "a line that says what was said already"
        if faults.get("abort_at") is None:
            who.turns.append((who.user, reply))
            who.user = "and then?"

    conversations = st.integers(0, 2)
    changes, options = CHANGES, OPTIONS

    def pick(self, number: int) -> Conversation:
        return self.all[number % len(self.all)]

    @rule(c=conversations, text=st.sampled_from(TEXTS), changes=changes, how=options)
    def chat(self, c: int, text: str, changes: dict[str, int], how: Options) -> None:
        who = self.pick(c)
        who.user = text
        who.change(changes)
        self.ask(who, how)

    @rule(c=conversations, changes=changes, how=options)
    def regenerate(self, c: int, changes: dict[str, int], how: Options) -> None:
        who = self.pick(c)
        if who.turns:
            who.user = who.turns.pop()[0]
        who.change(changes)
        self.ask(who, how)

    @rule(c=conversations, changes=changes, how=options, more=st.sampled_from(["", " my parcel"]))
    def amend(self, c: int, changes: dict[str, int], how: Options, more: str) -> None:
        """The newest message again, longer or not, before or after its answer came."""
        who = self.pick(c)
        if who.turns:
            who.user = who.turns.pop()[0] + more
        who.change(changes)
        self.ask(who, how)
        if who.turns:
            who.user = who.turns.pop()[0] + more
        self.ask(who, how)

    @rule(c=conversations, keep=st.integers(0, 3), text=st.sampled_from(TEXTS), how=options)
    def branch(self, c: int, keep: int, text: str, how: Options) -> None:
        who = self.pick(c)
        del who.turns[keep:]
        who.user = text
        self.ask(who, how)

    @precondition(lambda self: not self.same_replies)
    @rule(c=conversations, at=st.integers(0, 3), text=st.sampled_from(TEXTS), how=options)
    def edit_an_old_message(self, c: int, at: int, text: str, how: Options) -> None:
        who = self.pick(c)
        if at < len(who.turns):
            who.turns[at] = text, who.turns[at][1]
        self.ask(who, how)

    @precondition(lambda self: not self.same_replies)
    @rule(c=conversations, at=st.integers(0, 2), changes=changes, how=options)
    def drop_a_turn(self, c: int, at: int, changes: dict[str, int], how: Options) -> None:
        """The head (0) or one in the middle."""
        who = self.pick(c)
        del who.turns[at : at + 1]
        who.change(changes)
        self.ask(who, how)

    @rule(c=conversations, changes=changes, how=options, at=st.integers(0, 400))
    def abort(self, c: int, changes: dict[str, int], how: Options, at: int) -> None:
        who = self.pick(c)
        who.change(changes)
        self.ask(who, how, abort_at=at)

    @rule(c=conversations, changes=changes, how=options, at=st.integers(0, 3))
    def lose_a_donor(self, c: int, changes: dict[str, int], how: Options, at: int) -> None:
        who = self.pick(c)
        who.change(changes)
        self.ask(who, how, give_up_at=at)

    @rule(which=st.integers(0, 30), keep=st.integers(0, 250))
    def evict(self, which: int, keep: int) -> None:
        if self.server.tree.paths:
            self.server.tree.evict(which % len(self.server.tree.paths), keep)

    @precondition(lambda self: not self.same_replies)
    @rule()
    def flush(self) -> None:
        self.server.flush()
        self.forget_tokens()

    @precondition(lambda self: not self.same_replies)
    @rule()
    def restart(self) -> None:
        self.server.restart()
        self.forget_tokens()

    def forget_tokens(self) -> None:
        for who in self.all:
            who.proof = None if who.proof is None else ""


class LookAlikes(Lives):
    """Both conversations are given the same replies: only their values differ. Neither loses its
    ledger or makes up a history, for then its text might be the other's in every word."""

    same_replies = True


@pytest.mark.parametrize("machine", [Lives, LookAlikes])
def test_what_is_served_says_the_newest_values_and_nobody_elses(machine):
    live(machine, 40, random=False)


@pytest.mark.long
@pytest.mark.parametrize("machine", [Lives, LookAlikes])
def test_many_more_lives(machine):
    live(machine, 1000, random=True)
