"""Any order of requests, registrations, evictions, flushes and errors on a small pool: what is
cached of a request's path is KV of its prompt, and every slot has one owner."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvedit.errors import KvEditError
from sglang_patches import faults, guard
from tests.unit.small_host import FINISH_ABORT, Served, SmallHost

pytestmark = pytest.mark.small_host  # the host's settings are of a whole process

HOOKS = (
    "match_prefix",
    "init_load_back",
    "checkpoint",
    "donors",
    "realise",
    "hand_over",
    "cover",
    "record_turn",
    "finish_compile",
    "compiled",
    "relocate",
    "forward",
)
NUM_SLOTS = 160


class Life:
    def __init__(self, page_size: int, chunk: int) -> None:
        guard.errors.clear()
        faults.disarm()
        self.host = SmallHost(num_slots=NUM_SLOTS, page_size=page_size, chunk=chunk)
        self.num_composed = 0

    def text(self, rng: random.Random, number: int, num_tokens: int) -> list[int]:
        return [1_000 * (number + 1) + n for n in range(num_tokens)]

    def step(self, kind: str, seed: int) -> None:
        rng = random.Random(seed)
        number = rng.randrange(3)
        name = f"skill {number}"
        try:
            if kind == "register":
                ids = self.text(rng, number, rng.choice((20, 30)))
                self.host.register(name, ids, replace=True, pin=rng.random() < 0.3)
            elif kind == "ask":
                self.ask(rng)
            elif kind == "retire":
                self.host.rooms.desk.retire(name, "shared")
            elif kind == "purge":
                self.host.rooms.desk.purge(name, "shared")
            elif kind == "flush":
                self.host.flush()
            elif kind == "epoch":
                self.host.rooms.new_epoch("weights")
            else:
                faults.arm(rng.choice(HOOKS))
        except KvEditError:
            pass  # a name that is not registered, or a pin that does not fit
        assert self.host.problems() == []

    def ask(self, rng: random.Random) -> None:
        ids = [rng.randrange(10, 14) for _ in range(rng.randrange(1, 12))]
        for number in rng.sample(range(3), rng.randrange(1, 3)):
            ids += self.text(rng, number, rng.choice((10, 20, 30)))
            ids += [rng.randrange(10, 14) for _ in range(rng.randrange(3))]
        ids += [15]
        served = self.host.run(ids, salt=rng.choice((None, None, "tenant")))
        self.check(served, ids)

    def check(self, served: Served, ids: list[int]) -> None:
        if isinstance(served.req.finished_reason, FINISH_ABORT):  # its copies never ran
            return
        assert served.misread == []
        assert served.values == ids[: len(served.values)]
        if served.values:
            want = [self.host.key(token, at) for at, token in enumerate(served.values)]
            assert float((served.keys - torch.stack(want)).abs().max()) < 1e-3
        self.num_composed += served.report["composed"]


KINDS = ("ask", "ask", "ask", "ask", "register", "register", "retire", "purge", "flush", "epoch")
STEPS = st.lists(
    st.tuples(st.sampled_from((*KINDS, "fault")), st.integers(0, 2**16)), min_size=4, max_size=24
)


@settings(max_examples=40)
@given(steps=STEPS, page_size=st.sampled_from((1, 4)), chunk=st.sampled_from((16, 64)))
def test_any_life_is_right(steps: list[tuple[str, int]], page_size: int, chunk: int) -> None:
    life = Life(page_size, chunk)
    for kind, seed in [("register", 1), ("register", 2), *steps]:
        life.step(kind, seed)


@pytest.mark.long
@settings(max_examples=1_000)
@given(steps=STEPS, page_size=st.sampled_from((1, 4)), chunk=st.sampled_from((16, 64)))
def test_many_lives_are_right(steps: list[tuple[str, int]], page_size: int, chunk: int) -> None:
    test_any_life_is_right.hypothesis.inner_test(steps, page_size, chunk)


def test_lives_compose_something() -> None:
    """Without this the properties above could hold for want of splices."""
    life = Life(1, 64)
    for seed in range(60):
        life.step("register" if seed % 6 == 0 else "ask", seed)
    assert life.num_composed > 300
