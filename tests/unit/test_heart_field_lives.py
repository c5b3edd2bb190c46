"""Random lives of a small pool with skills and fields: conversations that change values, plain
requests, flushes, evictions at any time, retractions, strangers.

After each step every slot has one owner, and no token was served from KV of another token or
position. What is spelled as exact was computed behind the very same tokens; what was computed under
another value of a field is behind a line that says the value of now, where the strategy wants one.
"""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvedit.edit import variants
from kvedit.request.options import Options
from sglang_patches.scheduler.edit.read import strategy_in_force
from tests.unit.edit_lives import (
    FIELDS,
    MIXED,
    NAMES,
    SKILL,
    TEXTS,
    Conversation,
    check_answer,
    check_kv,
)
from tests.unit.small_host_fields import Answer, FieldHost

pytestmark = pytest.mark.small_host  # the host's settings are of a whole process

STRATEGIES = dict(zip(NAMES, MIXED, strict=True))
NUM_SLOTS = 600
MAX_TURNS = 4
KINDS = (*["chat"] * 6, *["again"] * 3, "plain", "skill", "evict", "flush", "weights")


class Life:
    def __init__(self, page_size: int, chunk: int) -> None:
        fields = [{**field, "strategy": STRATEGIES[field["name"]]} for field in FIELDS]
        self.host = FieldHost(fields, num_slots=NUM_SLOTS, page_size=page_size, chunk=chunk)
        self.all = [Conversation("xa"), Conversation("xb", proof=""), Conversation("xc", salt="c")]
        self.num_asked = 0
        self.counts = {"composed": 0, "erratum": 0, "exact": 0}

    def step(self, kind: str, seed: int) -> None:
        rng = random.Random(seed)
        who, host = rng.choice(self.all), self.host
        if kind == "skill":
            self.register(rng)
        elif kind == "evict":
            host.evict(rng.choice((20, 100, None)))
        elif kind in ("flush", "weights"):
            host.flush() if kind == "flush" else host.rooms.new_epoch("weights")
            self.forget_tokens()
        elif kind == "plain":
            self.ask(who, Options(splice="off", edits="off"), rng)
        else:
            if kind == "again" and who.turns:
                who.user = who.turns.pop()[0]
            elif len(who.turns) == MAX_TURNS:
                del who.turns[:]
            changed = rng.sample(NAMES, rng.choice((0, 1, 1, 2)))
            who.change({name: rng.randrange(4) for name in changed})
            self.ask(who, self.options(rng), rng)
        assert host.problems() == []

    def register(self, rng: random.Random) -> None:
        """The skill's text, anew, compiled again, or gone; it never holds a field."""
        desk = self.host.rooms.desk
        skills = desk.registry.listed("shared")
        if not skills or rng.random() < 0.3:
            self.host.register_text(SKILL, replace=True, pin=rng.random() < 0.3)
        elif rng.random() < 0.3:
            desk.purge("skill", "shared")
        else:
            self.host.compile_again(skills[0])

    def forget_tokens(self) -> None:
        """As clients do when a report says that their token has expired."""
        for who in self.all:
            who.proof = None if who.proof is None else ""

    def options(self, rng: random.Random) -> Options:
        strategy: Any = rng.choice((None, None, "edit", "edit+erratum", "erratum"))
        return Options(strategy=strategy, repair=rng.choice((None, 3)), topk=rng.choice((None, 5)))

    def ask(self, who: Conversation, how: Options, rng: random.Random) -> None:
        self.num_asked += 1
        reply = f"Now {who.secret}r{self.num_asked} is all that I can say"
        how, prompt = who.claimed(how, self.num_asked), who.prompt()
        self.host.between_passes = self.meanwhile(rng)
        retract_at = rng.choice((None, None, None, 1, 4))
        req = self.host.send(prompt, how, salt=who.salt)
        if rng.random() < 0.15:
            self.step(rng.choice(("evict", "weights", "skill")), rng.randrange(2**16))
        answer = self.host.answer(req, reply, retract_at=retract_at)
        self.check(who, how, prompt, answer)
        who.turns.append((who.user, reply))
        who.user = rng.choice(TEXTS)

    def meanwhile(self, rng: random.Random) -> Any:
        """Others may take the room of a donor while the request has not come that far."""
        evicts = rng.random() < 0.2
        return self.host.evict if evicts else lambda: None

    def check(self, who: Conversation, how: Options, prompt: str, answer: Answer) -> None:
        assert answer.served.misread == []
        assert sum(answer.served.split) == len(answer.ids)
        if not answer.served.reasons:  # a donor that goes while a prompt is computed costs more
            check_answer(self.host, who, prompt, answer)
        if how.edits == "off":
            assert answer.text == prompt and answer.report["composed"] == 0
            assert answer.seen[: len(answer.ids)] == self.host.said_at(answer.ids)
        strategies = {
            name: "recompute" if how.edits == "off" else strategy_in_force(declared, how)
            for name, declared in STRATEGIES.items()
        }
        check_kv(self.host, answer, strategies)
        for other in self.all:
            if other is not who:
                assert not re.search(rf"\b{other.secret}", answer.text)
        for kind in self.counts:
            self.counts[kind] += answer.report[kind]


STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**16)), min_size=4, max_size=14)
SIZES = {"page_size": st.sampled_from((1, 4)), "chunk": st.sampled_from((32, 128))}


@settings(max_examples=15)
@given(steps=STEPS, **SIZES)
def test_any_life_is_right(steps: list[tuple[str, int]], page_size: int, chunk: int) -> None:
    life = Life(page_size, chunk)
    for kind, seed in [("skill", 1), ("chat", 2), *steps]:
        life.step(kind, seed)


@pytest.mark.long
@settings(max_examples=500)
@given(steps=STEPS, **SIZES)
def test_many_lives_are_right(steps: list[tuple[str, int]], page_size: int, chunk: int) -> None:
    test_any_life_is_right.hypothesis.inner_test(steps, page_size, chunk)


def some_life() -> Life:
    life = Life(1, 128)
    for seed in range(60):
        life.step("skill" if seed % 12 == 0 else ("chat", "again")[seed % 2], seed)
    return life


def test_lives_compose_and_say_something() -> None:
    """Without this the properties above could hold for want of edits."""
    counts = some_life().counts
    assert counts["composed"] > 500 and counts["erratum"] > 50 and counts["exact"] > 500


def test_a_wrong_shift_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: one position too far."""
    made = FieldHost.__init__

    def turned_too_far(self: FieldHost, *args: Any, **sizes: Any) -> None:
        made(self, *args, **sizes)
        self.rooms.copies.queue.shift_error = 1

    monkeypatch.setattr(FieldHost, "__init__", turned_too_far)
    with pytest.raises(AssertionError, match="another position"):
        some_life()


def test_an_edit_without_its_line_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one: what is edited in place is never said."""
    needs = variants._needs

    def silent(*args: Any, **fields: Any) -> Any:
        found = needs(*args, **fields)
        return found and dataclasses.replace(found, line=found.line and not found.edit)

    monkeypatch.setattr(variants, "_needs", silent)
    with pytest.raises(AssertionError, match="no line says so"):
        some_life()
