"""Random lives of conversations against a dumb model that knows text only.

Whatever happens (changes, branches, evictions, flushes, aborts, look-alikes): what is served says
the newest value of every field, shows nobody another conversation's values, and copies only KV
that was computed for the very same tokens (the harness compares them one by one).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvedit.options import Options
from tests.unit.edit_harness import SUFFIX, FakeServer, rendered

TEMPLATE = "[kvedit update] {name} is now {value}. This overrides what was said."
DECLARED = [
    {"name": "status", "pattern": "order_status: {value}"},
    {"name": "person", "pattern": "user_name: {value}", "base": "unknown"},
    {"name": "note", "pattern": "note= {value} ;", "where": {"role": "user", "occurrence": 2}},
    {"name": "news", "pattern": "news: {value}", "cross_request": True},
]
FIELDS = [{**declaration, "template": TEMPLATE} for declaration in DECLARED]
SKILL = "\n" + " ".join(f"rule{i}" for i in range(30)) + "\n"
MORE = " ".join(f"more{i}" for i in range(14))
LINE = re.compile(r"\n\[kvedit update\] (\w+) is now ([^.\n]*)\. This overrides what was said\.")
WINDOWS = {
    "status": re.compile(r"^order_status: (.*)$", re.M),
    "person": re.compile(r"^user_name: (.*)$", re.M),
    "note": re.compile(r"note= (.*?) ;"),
    "news": re.compile(r"^news: (.*)$", re.M),
}
TEXTS = ("hi", "tell me more", "order_status: typed\nby hand", "what now? note= typed")
NAMES = tuple(WINDOWS)


@dataclass
class Conversation:
    """``secret``: stands in every value that nobody else may see."""

    secret: str
    name: str | None
    values: dict[str, str] = field(default_factory=dict)
    turns: list[tuple[str, str]] = field(default_factory=list)  # (user, reply), then
    user: str = "hi"  # what is asked now

    def messages(self) -> list[tuple[str, str]]:
        values = {name: self.values.get(name, f"first {self.secret}") for name in NAMES}
        system = (
            f"You help.\norder_status: {values['status']}\n{SKILL}user_name: {values['person']}\n"
            f"{MORE}\nnews: {values['news']}\nBe brief."
        )
        users = [user for user, _ in self.turns] + [self.user]
        if len(users) > 1:
            users[1] += f"\nnote= {values['note']} ;"
        replies = [("assistant", reply) for _, reply in self.turns]
        asked = [("user", user) for user in users]
        pairs = zip(asked, [*replies, None], strict=True)
        return [("system", system), *(m for pair in pairs for m in pair if m is not None)]

    def prompt(self) -> str:
        return rendered(self.messages())

    def said(self) -> dict[str, str]:
        """The fields that the prompt holds, and what it says of them."""
        names = NAMES if self.turns else tuple(n for n in NAMES if n != "note")
        return {name: self.values.get(name, f"first {self.secret}") for name in names}


def newest(text: str) -> dict[str, str]:
    """The last statement of each field in a served text."""
    parts = text.split("<|im_end|>")
    regions = {name: parts[0] for name in NAMES} | {"note": (parts + ["", "", ""])[3]}
    windows = {name: WINDOWS[name].search(regions[name]) for name in NAMES}
    values = {name: found[1] for name, found in windows.items() if found}
    return values | {match[1]: match[2] for match in LINE.finditer(text)}


def without_values(text: str) -> str:
    """``text`` without lines and values: the same for the client's prompt and the served one."""
    text = LINE.sub("", text)
    parts = text.split("<|im_end|>")
    for name, pattern in WINDOWS.items():
        index = 3 if name == "note" else 0
        if len(parts) > index:
            found = pattern.search(parts[index])
            if found:
                parts[index] = parts[index][: found.start(1)] + parts[index][found.end(1) :]
    return "<|im_end|>".join(parts)


class Lives(RuleBasedStateMachine):
    same_replies = False

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    @initialize(
        page_size=st.sampled_from([1, 1, 4]),
        named=st.booleans(),
        skill=st.booleans(),
        only_errata=st.booleans(),
    )
    def start(self, page_size: int, named: bool, skill: bool, only_errata: bool) -> None:
        self.only_errata = only_errata
        self.server = FakeServer(FIELDS, page_size=page_size)
        if skill:
            self.server.add_skill(SKILL)
        self.all = [Conversation("xa", None), Conversation("xb", None)]
        if named:
            self.all.append(Conversation("xc", "by name"))

    # ---- asking, and what must hold of every answer

    def ask(self, who: Conversation, how: Options, **faults: int | None) -> None:
        self.num_asked += 1
        nonce = "" if self.same_replies else f" {who.secret}r{self.num_asked}"
        reply = f"Sure here is all that I can say of it now{nonce} and that is the end of it"
        how = dataclasses.replace(how, conversation=who.name)
        if self.only_errata:
            how = dataclasses.replace(how, strategy="erratum")
        prompt = who.prompt()
        outcome = self.server.ask(prompt, reply, how, **faults)
        text = outcome.text
        assert newest(text) == who.said()
        assert without_values(text) == without_values(prompt)
        assert text.endswith(SUFFIX)
        others = [other.secret for other in self.all if other is not who]
        private = re.sub(r"^news: .*$", "", text, flags=re.M)
        for other in others:
            assert not re.search(rf"\b{other}\w*", private), f"{other} is shown to {who.secret}"
        last = text.removesuffix(SUFFIX).rpartition("<|im_start|>")[2]
        named = [match[1] for match in LINE.finditer(last)]
        assert len(named) == len(set(named)), "two live lines of one field"
        if self.only_errata:
            stale = newest(text.removesuffix(SUFFIX).removesuffix(last) + LINE.sub("", last))
            fresh = [name for name in named if stale.get(name) == who.said().get(name)]
            assert not fresh, "a line that says what was said already"
        assert outcome.computed <= outcome.as_sent
        if faults.get("abort_at") is None:
            who.turns.append((who.user, reply))
            who.user = "and then?"

    def change(self, who: Conversation, changes: dict[str, int]) -> None:
        for name, number in changes.items():
            words = [f"v{number}"] * (number % 3 + 1)
            who.values[name] = " ".join([who.secret, *words])

    conversations = st.integers(0, 2)
    changes = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), max_size=3)
    options = st.builds(
        Options,
        strategy=st.sampled_from(["erratum", "edit", "edit+erratum", None, "recompute"]),
        repair=st.sampled_from([None, 3]),
        topk=st.sampled_from([None, 5]),
        splice=st.sampled_from(["auto", "auto", "auto", "off"]),
    )

    def pick(self, number: int) -> Conversation:
        return self.all[number % len(self.all)]

    @rule(c=conversations, text=st.sampled_from(TEXTS), changes=changes, how=options)
    def chat(self, c: int, text: str, changes: dict[str, int], how: Options) -> None:
        who = self.pick(c)
        who.user = text
        self.change(who, changes)
        self.ask(who, how)

    @rule(c=conversations, changes=changes, how=options)
    def regenerate(self, c: int, changes: dict[str, int], how: Options) -> None:
        who = self.pick(c)
        if who.turns:
            who.user = who.turns.pop()[0]
        self.change(who, changes)
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
        self.change(who, changes)
        self.ask(who, how)

    @rule(c=conversations, changes=changes, how=options, at=st.integers(0, 400))
    def abort(self, c: int, changes: dict[str, int], how: Options, at: int) -> None:
        who = self.pick(c)
        self.change(who, changes)
        self.ask(who, how, abort_at=at)

    @rule(c=conversations, changes=changes, how=options, at=st.integers(0, 3))
    def lose_a_donor(self, c: int, changes: dict[str, int], how: Options, at: int) -> None:
        who = self.pick(c)
        self.change(who, changes)
        self.ask(who, how, give_up_at=at)

    @rule(which=st.integers(0, 30), keep=st.integers(0, 250))
    def evict(self, which: int, keep: int) -> None:
        if self.server.tree.paths:
            self.server.tree.evict(which % len(self.server.tree.paths), keep)

    @precondition(lambda self: not self.same_replies)
    @rule()
    def flush(self) -> None:
        self.server.flush()

    @precondition(lambda self: not self.same_replies)
    @rule()
    def restart(self) -> None:
        self.server.restart()


class LookAlikes(Lives):
    """Both conversations are given the same replies: only their values differ. Neither loses its
    ledger or makes up a history, for then its text might be the other's in every word."""

    same_replies = True


def live(machine: type[Lives], num_lives: int, *, random: bool) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_lives,
            stateful_step_count=25,
            derandomize=not random,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("machine", [Lives, LookAlikes])
def test_what_is_served_says_the_newest_values_and_nobody_elses(machine):
    live(machine, 40, random=False)


@pytest.mark.long
@pytest.mark.parametrize("machine", [Lives, LookAlikes])
def test_many_more_lives(machine):
    live(machine, 1000, random=True)
