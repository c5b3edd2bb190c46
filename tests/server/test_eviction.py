"""Splices in a pool that is almost too small for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.canary import NUM_NEW, canaries, canary, heading
from tests.server.harness import Server, ServerPool, fresh_name, random_ids
from tests.server.small_pool import POOL, SMALL_POOL
from tests.server.waiting import flushed, quiet, until

CONFIG = SMALL_POOL
pytestmark = pytest.mark.real_server


@pytest.fixture
def server(servers: ServerPool) -> Iterator[Server]:
    server = servers.get(SMALL_POOL)
    flushed(server)
    yield server
    quiet(server)


@pytest.mark.parametrize(("num_skill", "num_tail"), [(1_200, 700), (1_000, 900), (1_300, 350)])
@pytest.mark.parametrize("is_prefix_cached", [False, True], ids=["fresh", "cached"])
def test_donor_copy_and_rest_need_not_fit_together(
    server: Server, num_skill: int, num_tail: int, is_prefix_cached: bool
) -> None:
    """Admission counts the donor as evictable. A queued copy that kept it locked until the
    forward would leave the forward no slots, and the scheduler would end."""
    skill = random_ids(fresh_name(), num_skill)
    head = random_ids(fresh_name(), 100)
    tail = random_ids("tight-tail", num_tail if not is_prefix_cached else min(num_tail, 500))
    server.add_skill(fresh_name(), skill)
    if is_prefix_cached:
        server.generate(head + skill[:16], kvedit={"splice": "off"})
    answer = server.generate(head + skill + tail, num_new=2)
    assert answer.report["composed"] == num_skill - 16
    assert len(answer.token_ids) == 2


def test_no_room_for_the_copy_means_plain_prefill(server: Server) -> None:
    """Donor 1,700 and copy 1,684 do not fit: the prompt is served, and says why not spliced."""
    skill = random_ids("wide", 1_700)
    name = fresh_name()
    server.add_skill(name, skill)
    prompt = random_ids("wide-head", 50) + skill + [5, 6]
    answer = server.generate(prompt, num_new=2)
    assert len(answer.token_ids) == 2
    assert answer.split == (0, 0, 0, len(prompt))
    assert answer.report["refused"] == [{"skill": name, "reason": "no_slots"}]


def test_concurrent_long_outputs_are_retracted_and_stay_right(server: Server) -> None:
    """Eight outputs that do not fit together: requests go back to the queue and find their
    composed paths, or splice anew, or are served plainly."""
    skills = canaries("retract", 4)
    for mine in skills:
        mine.register(server)
    params = {"min_new_tokens": 180, "ignore_eos": False}
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(
                server.generate,
                mine.prompt((mine.password, n)),
                num_new=180,
                sampling_params=params,
            )
            for n in range(2)
            for mine in skills
        ]
    for mine, answer in zip(skills * 2, answers, strict=True):
        result = answer.result()
        assert result.text.startswith(mine.answer), result.text[:40]
        assert sum(result.split) == result.prompt_tokens


def test_a_prompt_that_the_host_cuts_inside_its_span(server: Server) -> None:
    """--allow-auto-truncate: the plan is made for the prompt that is served."""
    mine = canary("cut")
    mine.register(server)
    for num_words in (1_200, 1_280, 1_350):  # cut behind the skill, inside it, in front of it
        head = heading(("cut", num_words), num_words * 2)[: num_words * 2 + 200]
        answer = server.generate(head + mine.skill + random_ids("cut", 400), num_new=2)
        assert sum(answer.split) == answer.prompt_tokens < POOL
        assert all(span["stop"] < answer.prompt_tokens for span in answer.report["spans"])
    until(lambda: mine.ask(server, fresh_name()).report["composed"] > 200, "the skill to be back")


def test_skills_push_each_other_out_and_come_back(server: Server) -> None:
    """Ten skills of 240 tokens and their copies in 3,000 slots."""
    skills = canaries("push", 10)
    for mine in skills:
        mine.register(server)
    seen = set()
    for number in range(2):
        for mine in skills:
            answer = mine.ask(server, ("push", number))
            seen |= {refusal["reason"] for refusal in answer.report["refused"]}
            if answer.report["composed"]:
                seen.add("composed")
    assert {"composed", "evicted"} <= seen
    assert len(server.generate(skills[0].prompt("end"), num_new=NUM_NEW).token_ids) == NUM_NEW
