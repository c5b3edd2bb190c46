"""Random lives of conversations against a dumb model that knows text only.

Whatever happens (changes, branches, evictions, flushes, aborts, look-alikes): what is served says
the newest value of every field, shows nobody another conversation's values, copies only KV that
was computed for the very same tokens (the harness compares them one by one), and what that KV was
computed under keeps to the strategy: only ``edit`` leaves it unsaid that a value changed.
``Strangers`` says the same of ids and of KV where the texts, names and replies are all alike.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvedit.options import Options, Sealed
from sglang_patches.editing import strategy_in_force
from tests.unit.edit_harness import SALT, SUFFIX, FakeServer, Outcome, rendered

TEMPLATE = "[kvedit update] {name} is now {value}. This overrides what was said."
DECLARED = [
    {"name": "status", "pattern": "order_status: {value}"},
    {"name": "person", "pattern": "user_name: {value}", "base": "unknown"},
    {"name": "note", "pattern": "note= {value} ;", "where": {"role": "user", "occurrence": 2}},
    {"name": "news", "pattern": "news: {value}", "cross_request": True},
]
FIELDS = [{**declaration, "template": TEMPLATE} for declaration in DECLARED]
MIXED = ("edit+erratum", "erratum", "edit", "recompute")  # the strategies of the four fields
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
REPLY = "Sure here is all that I can say of it now and that is the end of it"


@dataclass
class Conversation:
    """``secret``: stands in every value that nobody else may see. ``proof``: the digest of its
    token, "" when one is asked for."""

    secret: str
    name: str | None = None
    proof: str | None = None
    salt: str | None = SALT
    values: dict[str, str] = field(default_factory=dict)
    turns: list[tuple[str, str]] = field(default_factory=list)  # (user, reply), then
    user: str = "hi"  # what is asked now

    def messages(self) -> list[tuple[str, str]]:
        values = {name: self.value(name) for name in NAMES}
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
        return {name: self.value(name) for name in names}

    def value(self, name: str) -> str:
        return self.values.get(name, f"first {self.own(name)}")

    def own(self, name: str) -> str:
        """The word that marks its values. Public ones are nobody's secret."""
        return f"public{self.secret}" if name == "news" else self.secret

    def claimed(self, how: Options, num_asked: int) -> Options:
        """``how`` with what it says of the conversation, as the HTTP process passes it on."""
        if self.proof is None:
            return dataclasses.replace(how, conversation=self.name)
        is_issued = not self.proof
        self.proof = self.proof or f"token {self.secret} {num_asked}"
        sealed = Sealed(proof=self.proof, is_issued=is_issued)
        return dataclasses.replace(how, conversation=self.proof, sealed=sealed)


def newest(text: str) -> dict[str, str]:
    """The last statement of each field in a served text."""
    parts = text.split("<|im_end|>")
    regions = {name: parts[0] for name in NAMES} | {"note": (parts + ["", "", ""])[3]}
    windows = {name: WINDOWS[name].search(regions[name]) for name in NAMES}
    values = {name: found[1] for name, found in windows.items() if found}
    return values | {match[1]: match[2] for match in LINE.finditer(text)}


def marks_in(text: str) -> list[tuple[int, tuple[str, str]]]:
    """(field, value) of each statement, at the first character that ends the value: up to there it
    may be the beginning of another one."""
    parts = text.split("<|im_end|>")
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part) + len("<|im_end|>"))
    marks = [(found.end(2), (found[1], found[2])) for found in LINE.finditer(text)]
    for name, pattern in WINDOWS.items():
        index = 3 if name == "note" else 0
        found = pattern.search(parts[index]) if index < len(parts) else None
        if found:
            marks.append((starts[index] + found.end(1), (name, found[1])))
    return marks


def check_kv(server: FakeServer, outcome: Outcome, strategies: dict[str, str]) -> None:
    """Each strategy's promise about the KV, wherever it was copied from."""
    ids = outcome.ids
    lines = {match[1] for match in LINE.finditer(outcome.text)}
    for name, strategy in strategies.items():
        if strategy == "recompute" and name in newest(outcome.text):
            assert name not in lines, f"a line about {name}, which is served as sent"
        unsaid = [
            (position, mark)
            for position, (seen, said) in enumerate(
                zip(outcome.seen[: len(ids)], server.said_at(ids), strict=False)
            )
            for mark in seen - said
            if mark[0] == name
        ]
        if strategy in ("recompute", "erratum"):
            assert not unsaid, f"{strategy}: KV of another value of {name}"
        if strategy == "edit+erratum" and unsaid:
            assert name in lines, f"composed behind another value of {name}, and no line says so"


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

    def change(self, who: Conversation, changes: dict[str, int]) -> None:
        for name, number in changes.items():
            words = [f"v{number}"] * (number % 3 + 1)
            who.values[name] = " ".join([who.own(name), *words])

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

    @rule(c=conversations, changes=changes, how=options, more=st.sampled_from(["", " my parcel"]))
    def amend(self, c: int, changes: dict[str, int], how: Options, more: str) -> None:
        """The newest message again, longer or not, before or after its answer came."""
        who = self.pick(c)
        if who.turns:
            who.user = who.turns.pop()[0] + more
        self.change(who, changes)
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

    @rule(c=who, at=servers, changes=Lives.changes, how=Lives.options, text=st.sampled_from(TEXTS))
    def chat(self, c: int, at: int, changes: dict[str, int], how: Options, text: str) -> None:
        who = self.all[c]
        who.user = text
        for name, number in changes.items():
            who.values[name] = " ".join([who.own(name), *[f"v{number}"] * (number % 3 + 1)])
        self.ask(who, at, how)

    @rule(c=who, at=servers, keep=st.integers(0, 2), how=Lives.options)
    def again(self, c: int, at: int, keep: int, how: Options) -> None:
        """From an earlier turn on, or the newest again."""
        who = self.all[c]
        if len(who.turns) > keep:
            who.user = who.turns[keep][0]
            del who.turns[keep:]
        self.ask(who, at, how)

    @rule(c=who, at=servers, user=st.sampled_from(TEXTS), how=Lives.options)
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


def check_answer(server: FakeServer, who: Conversation, prompt: str, outcome: Outcome) -> None:
    """What must hold of every answer."""
    text = outcome.text
    assert newest(text) == who.said()
    assert without_values(text) == without_values(prompt)
    assert text.endswith(SUFFIX)
    assert outcome.computed <= outcome.as_sent


def live(
    machine: type[RuleBasedStateMachine], num_lives: int, *, random: bool, shrinks: bool = True
) -> None:
    phases = [Phase.generate, *[Phase.shrink] * shrinks]
    run_state_machine_as_test(
        machine,
        settings=settings(
            phases=phases,
            report_multiple_bugs=False,
            max_examples=num_lives,
            stateful_step_count=25,
            derandomize=not random,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("machine", [Lives, LookAlikes, Strangers])
def test_what_is_served_says_the_newest_values_and_nobody_elses(machine):
    live(machine, 40, random=False)


@pytest.mark.parametrize("machine", [OnNames, OnReplies])
def test_strangers_are_shown_each_others_values_where_a_name_or_a_reply_proves(machine):
    """The control: the machine above sees what it is there to see."""
    with pytest.raises(AssertionError, match="stranger"):
        live(machine, 200, random=False, shrinks=False)


@pytest.mark.long
@pytest.mark.parametrize("machine", [Lives, LookAlikes, Strangers])
def test_many_more_lives(machine):
    live(machine, 1000, random=True)
