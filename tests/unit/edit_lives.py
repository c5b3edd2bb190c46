"""Conversations of random lives, what their texts say, and what must hold of every answer."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvedit.request.options import Options, Sealed
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
CHANGES = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), max_size=3)
OPTIONS = st.builds(
    Options,
    strategy=st.sampled_from(["erratum", "edit", "edit+erratum", None, "recompute"]),
    repair=st.sampled_from([None, 3]),
    topk=st.sampled_from([None, 5]),
    splice=st.sampled_from(["auto", "auto", "auto", "off"]),
)


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

    def change(self, changes: dict[str, int]) -> None:
        for name, number in changes.items():
            words = [f"v{number}"] * (number % 3 + 1)
            self.values[name] = " ".join([self.own(name), *words])

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
    said = server.said_at(outcome.ids)
    seen = outcome.seen[: len(said)]  # the reply comes behind, an abort may come before
    unsaid = frozenset().union(*(a - b for a, b in zip(seen, said, strict=False) if a is not b))
    lines = {match[1] for match in LINE.finditer(outcome.text)}
    names = {name for name, _ in unsaid}
    for name, strategy in strategies.items():
        if strategy == "recompute" and name in newest(outcome.text):
            assert name not in lines, f"a line about {name}, which is served as sent"
        if strategy in ("recompute", "erratum"):
            assert name not in names, f"{strategy}: KV of another value of {name}"
        if strategy == "edit+erratum" and name in names:
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
