"""The heart without a server, with faults: each costs the request its plan, and nothing else. What
is cached is right all the same, and every slot has one owner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvedit.skills.segment import State
from sglang_patches import faults, guard
from tests.unit.small_host import SmallHost
from tests.unit.test_heart import HEAD, SEAM, SKILL, TAIL, ask

pytestmark = pytest.mark.small_host  # the host's settings are of a whole process


@pytest.fixture
def host() -> SmallHost:
    return SmallHost()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    guard.errors.clear()
    yield
    guard.errors.clear()
    faults.disarm()


# hook -> what the error is counted under, and whether the tree may hold unwritten slots by then
HOOKS = {
    "intake": ("intake", False),
    "match_prefix": ("match_prefix", False),
    "donors": ("checkpoint", False),
    "realise": ("checkpoint", False),
    "checkpoint": ("checkpoint", True),
    "hand_over": ("checkpoint", True),
    "cover": ("cover", False),
    "record_turn": ("record_turn", False),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_a_hook_costs_a_request_its_plan(host: SmallHost, hook: str) -> None:
    host.register("policy", SKILL)
    faults.arm(hook)
    ask(host, HEAD + SKILL + TAIL)
    counted, is_doubtful = HOOKS[hook]
    assert guard.errors == {counted: 1}
    after = ask(host, [12, *HEAD, *SKILL, *TAIL])
    if is_doubtful:  # the segment has another number
        assert after.reasons == ["evicted"]
    else:
        assert after.report["composed"] == len(SKILL) - SEAM


@pytest.mark.parametrize("hook", ["init_load_back", "hand_over", "donors", "realise"])
def test_an_error_in_a_load_back(host: SmallHost, hook: str) -> None:
    host.register("policy", SKILL)
    host.run(HEAD + SKILL[:SEAM] + [50])
    faults.arm(hook)
    served = ask(host, HEAD + SKILL + TAIL)
    assert served.report["composed"] == 0 and served.reasons == ["internal_error"]
    assert guard.errors == {"init_load_back": 1}


def test_an_error_between_the_tree_and_the_request(
    host: SmallHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The splice is in the tree, and does not learn its node."""
    from sglang_patches.scheduler.splice import realise

    host.register("policy", SKILL)
    planned, insert = realise.Splice._insertion, host.tree.insert
    mine: list[Any] = []

    def noted(splice: Any, slots: torch.Tensor) -> Any:
        mine.append(planned(splice, slots))
        return mine[-1]

    def inserted(params: Any) -> Any:
        result, is_mine = insert(params), any(params is one for one in mine)
        return dataclasses.replace(result, prefix_len=-1) if is_mine else result

    monkeypatch.setattr(realise.Splice, "_insertion", noted)
    monkeypatch.setattr(host.tree, "insert", inserted)
    ask(host, HEAD + SKILL + TAIL)
    assert mine and guard.errors == {"checkpoint": 1}
    assert ask(host, [12, *HEAD, *SKILL, *TAIL]).reasons == ["evicted"]


def test_the_reference_steps_in_for_a_kernel(host: SmallHost) -> None:
    host.register("policy", SKILL)
    faults.arm("relocate")
    assert ask(host, HEAD + SKILL + TAIL).report["composed"] == len(SKILL) - SEAM
    assert guard.errors == {"relocate": 1}


def test_copies_that_never_ran_are_never_read(host: SmallHost) -> None:
    host.register("policy", SKILL)
    faults.arm("forward")
    ids = HEAD + SKILL + TAIL
    served = host.run(ids)
    assert served.req.finished_reason.status_code == 500
    assert len(served.values) == len(HEAD + SKILL), "its own tokens enter no tree"
    assert guard.errors["forward"] == 1
    after = ask(host, ids)  # what the splice left in the tree is under a number nobody has
    assert after.report["composed"] == 0 and after.reasons == ["evicted"]


@pytest.mark.parametrize("hook", ["compiled", "finish_compile"])
def test_a_compile_that_breaks_at_its_end(host: SmallHost, hook: str) -> None:
    """Before anything is noted, and when its skill was ready and pinned already."""
    faults.arm(hook)
    skill = host.register("policy", SKILL, pin=True)
    assert skill.state is State.FAILED and guard.errors == {"finish_compile": 1}
    assert not skill.pinned and skill.failed_reason == "internal error, see the server's log"
    assert host.rooms.desk.pins._held(but=None) == 0
    assert ask(host, HEAD + SKILL + TAIL).report["composed"] == 0
    assert host.register("policy", SKILL, pin=True).state is State.READY and skill.pinned
    assert ask(host, [12, *HEAD, *SKILL, *TAIL]).report["composed"] == len(SKILL) - SEAM


def test_a_later_compile_that_breaks_at_its_end_is_repeated(host: SmallHost) -> None:
    skill = host.register("policy", SKILL)
    host.evict()
    host.rooms.desk.donor_lost(skill.number)
    for rid, state in (("breaks", State.EVICTED), ("again", State.READY)):
        if rid == "breaks":
            faults.arm("finish_compile")
        assert host.rooms.desk.recompile(skill.number, rid) == "compile"
        host.run(SKILL, rid=rid, num_new=1)
        assert skill.state is state
    assert ask(host, HEAD + SKILL + TAIL).report["composed"] == len(SKILL) - SEAM
