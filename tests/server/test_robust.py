"""Requests that could break a splice: odd boundaries, bad input on top of one, and races."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.canary import NUM_NEW, Canary, canary, heading, question
from tests.server.harness import (
    PAGED_SMALL_CHUNK,
    SMALL_CHUNK,
    HttpError,
    Server,
    ServerConfig,
    ServerPool,
    fresh_name,
    random_ids,
)
from tests.server.waiting import quiet, until

pytestmark = pytest.mark.real_server

CHUNK = 128


@pytest.fixture
def serves_on(base: Server) -> Iterator[Server]:
    yield base
    assert base.status_of("GET", "/health")[0] == 200
    assert base.healthy()


@pytest.fixture
def mine(base: Server) -> Canary:
    made = canary("robust")
    made.register(base, "robust")
    return made


# ---- chunk boundaries


@pytest.mark.parametrize("config", [SMALL_CHUNK, PAGED_SMALL_CHUNK], ids=["p1", "p16"])
@pytest.mark.parametrize(
    ("num_head", "where"),
    [
        (300, "inside what stands in front"),
        (CHUNK, "at the skill's start"),
        (CHUNK - 8, "inside the seam"),
        (CHUNK - 16, "at the seam's end"),
        (CHUNK - 17, "one token behind the seam's end"),
        (CHUNK + 1, "one token in front of the skill"),
        (0, "nothing in front"),
    ],
)
def test_a_chunk_may_end_anywhere(
    servers: ServerPool, config: ServerConfig, num_head: int, where: str
) -> None:
    server, page = servers.get(config), config.page_size
    made = canary(("chunks", page))
    made.register(server, f"chunks-{page}")
    head = random_ids((where, page), num_head)
    prompt = head + made.skill + question(where)
    answer = server.generate(prompt, num_new=NUM_NEW)
    assert made.answered(answer), (where, answer.text)
    start = -(-(num_head + 16) // page) * page
    stop = (num_head + len(made.skill) // page * page) // page * page
    assert [(s["start"], s["stop"]) for s in answer.report["spans"]] == [(start, stop)]
    assert answer.split == (0, stop - start, 0, len(prompt) - (stop - start))
    again = server.generate(prompt, num_new=NUM_NEW)
    assert again.token_ids == answer.token_ids and again.report["copied"] == 0


@pytest.mark.parametrize("num_tail", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_a_chunk_may_end_anywhere_behind_the_skill(servers: ServerPool, num_tail: int) -> None:
    server = servers.get(SMALL_CHUNK)
    made = canary(("chunks", 1))
    made.register(server, "chunks-1")
    tail = random_ids(num_tail, num_tail)
    answer = server.generate(heading(num_tail) + made.skill + tail, num_new=2)
    assert answer.report["composed"] == len(made.skill) - 16
    assert sum(answer.split) == answer.prompt_tokens
    assert not server.audit()


def test_two_requests_that_need_a_boundary_at_once(servers: ServerPool) -> None:
    """One chunked request at a time: the others wait, and their rest is kept free."""
    server = servers.get(SMALL_CHUNK)
    made = canary(("chunks", 1))
    made.register(server, "chunks-1")
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(
                lambda n: server.generate(made.prompt(("many", n), 150), num_new=NUM_NEW),
                range(6),
            )
        )
    assert all(made.answered(answer) for answer in answers)
    assert all(answer.report["composed"] == len(made.skill) - 16 for answer in answers)
    quiet(server)


# ---- bad input on top of a splice


@pytest.mark.parametrize("place", ["front", "first token", "inside", "last token", "behind"])
def test_input_logprobs_from_anywhere(serves_on: Server, mine: Canary, place: str) -> None:
    """They are those of exact KV: nothing is composed, in front of them neither."""
    prompt = mine.prompt(("logprobs", place))
    first = len(prompt) - len(question(0)) - len(mine.skill)
    start = {
        "front": 0,
        "first token": first,
        "inside": first + 100,
        "last token": first + len(mine.skill) - 1,
        "behind": len(prompt) - 2,
    }[place]
    answer = serves_on.generate(prompt, num_new=NUM_NEW, top=1, logprob_start_len=start)
    assert mine.answered(answer)
    assert len(answer.meta["input_token_logprobs"]) == len(prompt) - start
    assert (answer.report["spans"], answer.report["composed"]) == ([], 0)
    assert answer.report["refused"] == [{"skill": "", "reason": "exact"}]
    quiet(serves_on)


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "logprobs behind the prompt": {"return_logprob": True, "logprob_start_len": 1_000_000},
    "regex": {"sampling_params": {"regex": "((((", "max_new_tokens": 2}},
    "json schema": {"sampling_params": {"json_schema": '{"type": 5', "max_new_tokens": 2}},
    "ebnf": {"sampling_params": {"ebnf": "root ::= (", "max_new_tokens": 2}},
    "two grammars": {"sampling_params": {"regex": "a", "json_schema": "{}"}},
    "temperature": {"sampling_params": {"temperature": -1}},
    "embedding overrides": {"positional_embed_overrides": {"embeds": [[0.1]], "positions": [9]}},
    "list of overrides": {"positional_embed_overrides": [[1.0], "x"]},
}


@pytest.mark.parametrize("what", BAD_FIELDS)
def test_bad_fields_on_a_spliceable_prompt(serves_on: Server, mine: Canary, what: str) -> None:
    body = {"input_ids": mine.prompt(("bad", what)), **BAD_FIELDS[what]}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(mine.ask, serves_on, ("beside", what))
        status, message = serves_on.status_of("POST", "/generate", body)
        assert status == 400, message
        assert beside.result().report["composed"] > 200
    assert mine.ask(serves_on, ("bad", what)).report["composed"] > 200
    quiet(serves_on)


@pytest.mark.parametrize("num_words", [8_200, 20_000])
def test_a_prompt_that_is_too_long(serves_on: Server, mine: Canary, num_words: int) -> None:
    """Longer than the context, and longer than the pool."""
    prompt = random_ids("long", num_words) + mine.skill
    status, message = serves_on.status_of("POST", "/generate", {"input_ids": prompt})
    assert status == 400 and "context length" in message
    assert mine.ask(serves_on, ("long", num_words)).report["composed"] > 200


def test_a_grammar_on_a_spliced_prompt(serves_on: Server, mine: Canary) -> None:
    params = {"regex": f" ({mine.password}|nothing)\\.", "ignore_eos": False}
    answer = serves_on.generate(mine.prompt("regex"), num_new=4, sampling_params=params)
    assert answer.text.startswith(f" {mine.password}.")
    assert answer.report["composed"] > 200


# ---- races


def test_deleting_a_skill_while_requests_with_it_wait(serves_on: Server) -> None:
    """They are planned already. Each is served right, spliced or plainly."""
    for number, query in enumerate(("", "?purge=1")):
        made = canary(("delete", number))
        name = made.register(serves_on)
        with ThreadPoolExecutor(6) as pool:
            answers = [
                pool.submit(made.ask, serves_on, ("delete", number, n), 60) for n in range(5)
            ]
            pool.submit(serves_on.call, "DELETE", f"/kvedit/skills/{name}{query}").result()
            for answer in answers:
                report = answer.result().report
                reasons = {refusal["reason"] for refusal in report.get("refused", ())}
                assert reasons <= {"retired"}
        later = made.ask(serves_on, ("deleted", number))
        assert later.report.get("composed", 0) == 0
    quiet(serves_on)


def test_racing_registrations_of_one_name(serves_on: Server) -> None:
    """The same content: one compile, one segment. Other content: one of them wins, 409 else."""
    made, name = canary("race"), fresh_name()
    with ThreadPoolExecutor(4) as pool:
        views = list(pool.map(lambda _: serves_on.add_skill(name, made.skill), range(4)))
    assert len({view["segment"] for view in views}) == 1
    assert {view["state"] for view in views} == {"ready"}

    other_name = fresh_name()
    contents = [random_ids((other_name, n), 200) for n in range(4)]

    def register(ids: list[int]) -> int:
        try:
            serves_on.add_skill(other_name, ids)
        except HttpError as error:
            return error.status
        return 200

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(register, contents)) == [200, 409, 409, 409]
    assert made.ask(serves_on, "race").report["composed"] > 200


def test_racing_replacements_end_with_one_live_skill(serves_on: Server) -> None:
    name = fresh_name()
    versions = [canary(("version", n)) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda v: serves_on.add_skill(name, v.skill, replace=True), versions))
    view = serves_on.call("GET", f"/kvedit/skills/{name}")
    assert (view["state"], view["version"]) == ("ready", 4)
    spliced = [
        version.ask(serves_on, ("version", n)).report["composed"] > 200
        for n, version in enumerate(versions)
    ]
    assert spliced.count(True) == 1
    quiet(serves_on)


def test_a_skill_is_registered_while_prompts_with_it_run(serves_on: Server) -> None:
    """Before, during and after the compile: right each time, and spliced in the end."""
    made, name = canary("while"), fresh_name()
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(made.ask, serves_on, ("while", n)) for n in range(3)]
        registration = pool.submit(serves_on.add_skill, name, made.skill)
        answers += [pool.submit(made.ask, serves_on, ("while", n)) for n in range(3, 8)]
        for answer in answers:
            answer.result()
        assert registration.result()["state"] == "ready"
    until(lambda: made.ask(serves_on, fresh_name()).report["composed"] > 200, "a splice")
    quiet(serves_on)
