"""The token classes of spliced requests, number by number (issue: report table)."""

from __future__ import annotations

import pytest

from tests.server.harness import (
    BASE,
    PAGED,
    PAGED_SMALL_CHUNK,
    SMALL_CHUNK,
    Server,
    ServerConfig,
    ServerPool,
    fresh_name,
    random_ids,
)

pytestmark = pytest.mark.real_server

CONFIGS = pytest.mark.parametrize(
    "config", [BASE, SMALL_CHUNK, PAGED, PAGED_SMALL_CHUNK], ids=["p1", "p1c", "p16", "p16c"]
)


def up(value: int, page: int) -> int:
    return -(-value // page) * page


def down(value: int, page: int) -> int:
    return value // page * page


@pytest.fixture
def skill(request: pytest.FixtureRequest) -> list[int]:
    return random_ids(("skill", request.node.name), 600)


@CONFIGS
def test_fresh_prefix_then_repeat_then_other_question(
    servers: ServerPool, config: ServerConfig, skill: list[int]
) -> None:
    server, page = servers.get(config), config.page_size
    server.add_skill(fresh_name(), skill)
    head, tail = random_ids("head", 100), random_ids("tail", 20)
    start, stop = up(116, page), down(min(700, 100 + down(600, page)), page)
    first = server.generate(head + skill + tail)
    assert first.split == (0, stop - start, 0, 720 - (stop - start))
    assert first.report["repaired"] == start - 100
    assert first.report["copied"] == stop - start
    assert first.report["refused"] == []
    [span] = first.report["spans"]
    assert (span["start"], span["stop"], span["seam"], span["delta"]) == (
        start,
        stop,
        start - 100,
        100,
    )
    again = server.generate(head + skill + tail)
    derived = down(719, page) - stop
    assert again.split == (start, stop - start, derived, 720 - stop - derived)
    assert again.report["copied"] == again.report["repaired"] == 0
    other = server.generate(head + skill + random_ids("tail2", 20))
    assert other.split == (start, stop - start, 0, 720 - stop)
    assert not server.audit()


@CONFIGS
def test_second_seam_is_another_path(
    servers: ServerPool, config: ServerConfig, skill: list[int]
) -> None:
    server, page = servers.get(config), config.page_size
    server.add_skill(fresh_name(), skill)
    head, tail = random_ids("head-seam", 64), random_ids("tail-seam", 20)
    server.generate(head + skill + tail, kvedit={"seam": 16})
    stop = down(64 + 600, page)
    answer = server.generate(head + skill + tail, kvedit={"seam": 0})
    assert answer.split == (64, stop - 64, 0, 684 - stop)
    assert answer.report["copied"] == stop - 64


def test_delta_zero(base: Server, skill: list[int]) -> None:
    base.add_skill(fresh_name(), skill)
    answer = base.generate(skill + random_ids("tail0", 20), kvedit={"seam": 0})
    assert answer.split == (0, 600, 0, 20)
    assert answer.report["copied"] == 600
    assert answer.report["spans"][0]["delta"] == 0


def test_two_skills_both_orders_and_adjacent(base: Server, skill: list[int]) -> None:
    second = random_ids(("second", tuple(skill[:4])), 300)
    base.add_skill(fresh_name(), skill)
    base.add_skill(fresh_name(), second)
    head, gap, tail = random_ids("h", 40), random_ids("g", 30), random_ids("t", 10)
    for order in ((skill, second), (second, skill)):
        prompt = head + order[0] + gap + order[1] + tail
        answer = base.generate(prompt)
        assert answer.report["composed"] == len(skill) + len(second) - 32
        assert answer.report["exact"] <= len(head), "the second order meets the first one's head"
        assert sum(answer.split) == len(prompt)
    answer = base.generate(head[::-1] + skill + second + tail)
    assert [s["seam"] for s in answer.report["spans"]] == [16, 0]
    assert answer.report["composed"] == len(skill) - 16 + len(second)


def test_same_skill_twice_in_one_prompt(base: Server, skill: list[int]) -> None:
    base.add_skill(fresh_name(), skill)
    answer = base.generate(random_ids("a", 9) + skill + random_ids("b", 9) + skill + [5])
    assert [s["delta"] for s in answer.report["spans"]] == [9, 9 + 600 + 9]
    assert answer.report["composed"] == 2 * (600 - 16)


def test_prompt_that_differs_gets_nothing_behind_the_difference(
    base: Server, skill: list[int]
) -> None:
    name = fresh_name()
    base.add_skill(name, skill)
    other = skill[:300] + [skill[300] + 1] + skill[301:]
    answer = base.generate(random_ids("d", 20) + other + [7, 8])
    assert answer.report["composed"] == 300 - 16
    assert answer.report["spans"][0]["stop"] == 20 + 300
    assert answer.report["refused"] == [
        {"skill": name, "reason": "differs_at", "index": 300, "position": 320}
    ]


def test_skill_at_the_very_end_leaves_the_last_token(base: Server, skill: list[int]) -> None:
    base.add_skill(fresh_name(), skill)
    answer = base.generate(random_ids("end", 30) + skill)
    assert answer.report["spans"][0]["stop"] == 629
    assert answer.split == (0, 629 - 46, 0, 47)
    assert answer.report["refused"] == []


def test_off_and_named_skills(base: Server, skill: list[int]) -> None:
    name = fresh_name()
    base.add_skill(name, skill)
    prompt = random_ids("off", 30) + skill + [3, 4]
    assert base.generate(prompt, kvedit={"splice": "off"}).report["composed"] == 0
    other = base.generate(prompt[::1], kvedit={"skills": ["nobody"]})
    assert other.report["composed"] == 0
    assert {"skill": "nobody", "reason": "unknown_skill"} in other.report["refused"]


def test_sum_of_classes_is_the_prompt_also_for_n_2(base: Server, skill: list[int]) -> None:
    base.add_skill(fresh_name(), skill)
    prompt = random_ids("n2", 30) + skill + random_ids("n2t", 8)
    raw = base.call(
        "POST",
        "/generate",
        {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 2, "temperature": 0.8, "n": 2},
        },
    )
    assert len(raw) == 2
    for sample in raw:
        [report] = sample["meta_info"]["kvedit"]
        total = sum(report[k] for k in ("exact", "composed", "derived", "computed"))
        assert total == len(prompt)
        assert report["composed"] == 600 - 16
        assert report["copied"] == 0, "the host's prefix warmer made the copy"


def test_retraction_does_not_revise_the_split(servers: ServerPool, skill: list[int]) -> None:
    """Retraction puts a running request back; its first admission's classes stand."""
    server = servers.get(
        ServerConfig(env=(("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "2")))
    )
    server.add_skill(fresh_name(), skill)
    prompt = random_ids("retract", 50) + skill + random_ids("retract-t", 10)
    answer = server.generate(prompt, num_new=12)
    assert len(answer.token_ids) == 12
    assert answer.split == (0, 584, 0, 76)
    assert not server.audit()
