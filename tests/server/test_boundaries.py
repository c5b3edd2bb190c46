"""What a request may cost in forced chunk boundaries, and what is worth approximating."""

from __future__ import annotations

import pytest

from kvedit.splice.pass_price import MAX_BOUNDARIES
from tests.server.harness import HttpError, Server, fresh_name, random_ids

NUM_STORM_TOKENS = 500


@pytest.fixture
def price(base: Server) -> int:
    status = base.status()["boundary"]
    assert status["max_per_request"] == MAX_BOUNDARIES
    tokens: int = status["price_tokens"]
    return tokens


def repeated(seed: object, unit: list[int], num_tokens: int = NUM_STORM_TOKENS) -> list[int]:
    ids = random_ids(seed, 5)
    while len(ids) < num_tokens:
        ids += unit
    return ids[:num_tokens]


def num_passes(server: Server) -> int:
    return server.log_path.read_text(errors="replace").count("Prefill batch")


@pytest.mark.parametrize("head, options", [(16, {"seam": 0}), (32, None)])
def test_a_prompt_that_repeats_a_skills_head_is_not_cut_to_pieces(base, price, head, options):
    """Each repetition could be spliced behind a boundary of its own; none of them pays."""
    assert price >= 16
    skill, name = random_ids(("storm", head), 200), fresh_name()
    base.add_skill(name, skill)
    ids = repeated(("storm prompt", head), [*skill[:head], 7])
    before = num_passes(base)
    answer = base.generate(ids, kvedit=options)
    after_spliced = num_passes(base)
    assert answer.split == (0, 0, 0, NUM_STORM_TOKENS)
    reasons = [r for r in answer.report["refused"] if r["reason"] == "not_worth_a_pass"]
    assert reasons == [
        {"skill": name, "reason": "not_worth_a_pass", "num_tokens": 16, "limit": price}
    ]
    base.generate(repeated(("plainly", head), [*skill[:head], 7]), kvedit={"splice": "off"})
    assert after_spliced - before == num_passes(base) - after_spliced


def test_require_pays_any_price_for_a_limited_number_of_boundaries(base):
    skill, name = random_ids("required", 24), fresh_name()
    base.add_skill(name, skill)
    require = {"splice": "require", "skills": [name], "seam": 0}
    few = repeated("required few", [*skill, 7], 5 + 25 * MAX_BOUNDARIES) + [8]
    answer = base.generate(few, kvedit=require)
    assert answer.split[1] == 24 * MAX_BOUNDARIES
    many = repeated("required many", [*skill, 7], 5 + 25 * (MAX_BOUNDARIES + 1)) + [8]
    with pytest.raises(HttpError, match="too_many_runs") as refused:
        base.generate(many, kvedit=require)
    assert refused.value.status == 400


def test_a_cached_path_and_a_load_back_are_free(base, price):
    skill, name = random_ids("short", price), fresh_name()
    base.add_skill(name, skill)
    head, tail = random_ids("short head", 40), [5, 6, 7]
    dear = base.generate(head + skill + tail, kvedit={"seam": 0})
    assert dear.split[1] == 0
    assert [r["reason"] for r in dear.report["refused"]] == ["not_worth_a_pass"]
    head = random_ids("another short head", 40)
    base.generate(head)
    free = base.generate(head + skill + tail, kvedit={"seam": 0})
    assert free.split == (40, len(skill), 0, 3)
    assert base.generate(head + skill + [9, *tail], kvedit={"seam": 0}).split[1] == len(skill)


def test_exact_kv_is_not_given_up_for_one_token(base):
    skill, name = random_ids("exact", 260), fresh_name()
    base.add_skill(name, skill)
    head, tail = random_ids("exact head", 120), random_ids("exact tail", 12)
    base.generate([*head, *skill[:-1], 11, 12], kvedit={"splice": "off"})
    kept = base.generate(head + skill + tail)
    assert kept.split == (len(head) + len(skill) - 1, 0, 0, 1 + len(tail))
    head = random_ids("another exact head", 120)
    base.generate([*head, *skill[:30], 11, 12], kvedit={"splice": "off"})
    saved = base.generate(head + skill + tail, kvedit={"seam": 0})
    assert saved.split == (len(head), len(skill), 0, len(tail))
