"""The heart without a server: what a request composes, what its slots hold, what is left behind.

Every request's cached path is compared with its prompt: V names the token, K is the token's key at
its position, whether it was computed there or turned there. The audit follows each request.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvedit.config import Config
from kvedit.skills.segment import State
from tests.unit.small_host import Served, SmallHost

pytestmark = pytest.mark.small_host  # the host's settings are of a whole process

SKILL = list(range(100, 140))
HEAD, TAIL = [1, 2, 3, 4, 5, 6], [7, 8, 9]
SEAM = 4
KEY_ERROR = 1e-4  # fp32 rotation; a shift off by one is off by tenths


@pytest.fixture
def host() -> SmallHost:
    return SmallHost()


def key_error(host: SmallHost, served: Served) -> float:
    want = [host.key(token, position) for position, token in enumerate(served.values)]
    return float((served.keys - torch.stack(want)).abs().max())


def assert_right(host: SmallHost, served: Served, ids: list[int]) -> None:
    """What the request read, and what is cached of its path, is KV of its prompt."""
    assert served.misread == []
    assert served.values == ids[: len(served.values)] and len(served.values) >= len(ids) - 3
    assert key_error(host, served) < KEY_ERROR
    assert sum(served.split) == len(ids)


def ask(host: SmallHost, ids: list[int], **fields: Any) -> Served:
    served = host.run(ids, **fields)
    assert_right(host, served, ids)
    return served


# ---- a splice


def test_a_run_behind_a_forced_boundary(host: SmallHost) -> None:
    host.register("policy", SKILL)
    served = ask(host, HEAD + SKILL + TAIL)
    assert served.split == (0, len(SKILL) - SEAM, 0, len(HEAD) + SEAM + len(TAIL))
    assert served.num_passes == 2 and served.report["copied"] == len(SKILL) - SEAM


def test_a_run_behind_the_cached_prefix_is_a_load_back(host: SmallHost) -> None:
    host.register("policy", SKILL)
    host.run(HEAD + SKILL[:SEAM] + [50])
    served = ask(host, HEAD + SKILL + TAIL)
    assert served.split == (len(HEAD) + SEAM, len(SKILL) - SEAM, 0, len(TAIL))
    assert served.num_passes == 1


def test_the_next_turn_hits_the_path(host: SmallHost) -> None:
    host.register("policy", SKILL)
    first = ask(host, HEAD + SKILL + TAIL)
    assert host.rooms.desk.registry.get("policy", "shared").num_uses == 1
    second = ask(host, HEAD + SKILL + TAIL + [20, 21])
    assert second.report["copied"] == 0 and second.num_passes == 1
    assert second.report["composed"] == first.report["composed"]
    assert second.report["computed"] == 2


def test_composed_kv_answers_nobody_who_did_not_ask(host: SmallHost) -> None:
    host.register("policy", SKILL)
    host.run(HEAD + SKILL + TAIL)
    off = ask(host, HEAD + SKILL + TAIL, kvedit={"splice": "off"})
    assert off.report["composed"] == 0 and off.report["exact"] <= len(HEAD) + SEAM
    other = ask(host, HEAD + SKILL + TAIL, salt="another tenant")
    assert other.report["exact"] == 0


def test_a_wrong_shift_is_seen(host: SmallHost) -> None:
    """The control of every test in here."""
    host.register("policy", SKILL)
    host.rooms.copies.queue.shift_error = 1
    served = host.run(HEAD + SKILL + TAIL)
    assert served.values == (HEAD + SKILL + TAIL)[: len(served.values)]
    assert key_error(host, served) > 0.05
    first, stop = len(HEAD) + SEAM, len(HEAD + SKILL)
    assert f"KV of another position at {list(range(first, stop))}" in served.misread[0]


def test_pages() -> None:
    host = SmallHost(page_size=4, num_slots=512)
    host.register("policy", SKILL)
    ids = HEAD + SKILL + TAIL
    served = host.run(ids)
    assert served.values == ids[: len(served.values)] and key_error(host, served) < KEY_ERROR
    [span] = served.report["spans"]
    assert span["start"] % 4 == 0 and span["stop"] % 4 == 0 and served.report["composed"] >= 28


def test_a_prompt_longer_than_a_chunk() -> None:
    host = SmallHost(chunk=16)
    host.register("policy", SKILL)
    served = ask(host, list(range(300, 340)) + SKILL + TAIL)
    assert served.report["composed"] == len(SKILL) - SEAM


# ---- what is refused, and what becomes of the skill


def test_a_donor_that_is_gone(host: SmallHost) -> None:
    skill = host.register("policy", SKILL)
    host.evict()
    served = ask(host, HEAD + SKILL + TAIL)
    assert served.reasons == ["evicted"] and served.report["evicted"] == [skill.number]
    assert served.split == (0, 0, 0, len(HEAD + SKILL + TAIL))
    assert skill.state is State.EVICTED
    host.compile_again(skill)
    assert ask(host, [11, *HEAD, *SKILL, *TAIL]).report["composed"] == len(SKILL) - SEAM


def test_a_pin_keeps_its_donor_and_yields_to_whom_has_no_room() -> None:
    host = SmallHost(num_slots=128)
    skill = host.register("policy", SKILL, pin=True)
    host.evict()
    assert ask(host, HEAD + SKILL + TAIL).report["composed"] == len(SKILL) - SEAM
    ask(host, list(range(500, 500 + 110)))
    assert not skill.pinned and len(host.rooms.desk.pins._pins) == 0


def test_a_skill_that_is_purged_or_retired(host: SmallHost) -> None:
    host.register("policy", SKILL)
    host.rooms.desk.purge("policy", "shared")
    assert ask(host, HEAD + SKILL + TAIL).report["composed"] == 0


def test_a_compile_that_is_aborted_says_why(host: SmallHost) -> None:
    desk = host.rooms.desk
    skill = host.register("policy", SKILL)
    host.evict()
    desk.donor_lost(skill.number)
    desk.recompile(skill.number, "again")
    assert desk.compile_failed("again", "the client left") is skill
    assert skill.state is State.EVICTED and desk.compile_failed("again", "twice") is None


def test_a_short_run_is_not_worth_a_pass(host: SmallHost) -> None:
    host.register("note", SKILL[:12])
    served = ask(host, HEAD + SKILL[:12] + TAIL)
    assert served.reasons == ["not_worth_a_pass"] and served.num_passes == 1


def test_a_flush_and_a_new_epoch_leave_nothing_to_compose(host: SmallHost) -> None:
    for change in (host.flush, lambda: host.rooms.new_epoch("weights")):
        skill = host.register("policy", SKILL, replace=True)
        if skill.state is not State.READY:
            host.compile_again(skill)
        before = host.rooms.edits.weight_epoch
        change()
        assert host.rooms.edits.weight_epoch == before + 1
        assert ask(host, [change is None, *HEAD, *SKILL, *TAIL]).report["composed"] == 0


# ---- a required reuse


def test_require_is_met_or_refused_before_anything_runs(host: SmallHost) -> None:
    host.register("policy", SKILL)
    wanted = {"splice": "require", "skills": ["policy"]}
    assert ask(host, HEAD + SKILL + TAIL, kvedit=wanted).report["composed"] == len(SKILL) - SEAM
    host.rooms.desk.purge("policy", "shared")
    req = host.refused(HEAD + SKILL + TAIL, kvedit=wanted)
    assert req.to_finish.status_code == 400 and "policy" in req.to_finish.message


def test_settings_reach_the_plan() -> None:
    host = SmallHost(config=Config(boundary_tokens=8, min_span_tokens=4, seam=10))
    host.register("policy", SKILL)
    assert ask(host, HEAD + SKILL + TAIL).report["composed"] == len(SKILL) - 10
