"""What fails on one of two ranks ends alike on both, and nobody else notices.

Each hook is made to fail on one rank only. The other one would splice on, the next collective
would mismatch, and the server would end. The skill is pinned: after such an error all that is not
in use leaves the cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.canary import encode
from tests.server.harness import HttpError, Server, ServerConfig, ServerPool, fresh_name, random_ids
from tests.server.test_tp import TWO_RANKS, TWO_RANKS_ENV, ranks
from tests.server.texts import english
from tests.server.tiny_models import tiny_model
from tests.server.waiting import until

RUN_LAST = True  # the server of test_tp
pytestmark = pytest.mark.real_server

SEAM, NUM_SKILL = 16, 120
SKILL = random_ids("tp-fault", NUM_SKILL)
PLAIN = random_ids("tp-fault plain", 40)
Ask = Callable[[Server], Any]


@pytest.fixture(scope="module")
def server(
    servers: ServerPool, default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Server:
    model = str(tiny_model("qwen3", default_model_dir, tmp_path_factory.getbasetemp()))
    server = servers.get(ServerConfig(model=model, flags=TWO_RANKS, env=TWO_RANKS_ENV))
    field = {"name": "tpf", "pattern": "state: {value}", "where": {"within": 64}}
    server.call("POST", "/kvedit/fields", {**field, "strategy": "edit"})
    return server


def outcome(ask: Callable[[], Any]) -> Any:
    """An answer's report, or the status of an error: never a hang."""
    try:
        return ask().report
    except HttpError as error:
        return error.status


def fresh(server: Server) -> Any:
    """A splice at a forced boundary."""
    prompt = random_ids(fresh_name(), 20) + SKILL + [5, 6, 7]
    return outcome(lambda: server.generate(prompt, num_new=2))


def cached(server: Server) -> Any:
    """A splice as a load-back."""
    head = random_ids(fresh_name(), 20) + SKILL[:SEAM]
    server.generate(head, kvedit={"splice": "off"})
    return outcome(lambda: server.generate(head + SKILL[SEAM:] + [5, 6, 7], num_new=2))


def edited(server: Server) -> Any:
    value = fresh_name()
    prompt = encode(f"state: {value}\n{english('tp fault', 20)}\nAnd now?\n")
    return outcome(lambda: server.generate(prompt, num_new=2, kvedit={"conversation": "tpf"}))


def compiled(server: Server) -> Any:
    try:
        return server.add_skill(fresh_name(), random_ids(fresh_name(), 40))["state"]
    except HttpError as error:
        return error.status


def composed(report: Any) -> bool:
    return isinstance(report, dict) and report["composed"] == NUM_SKILL - SEAM


def plainly(report: Any) -> bool:
    return isinstance(report, dict) and report.get("composed", 0) == 0


def is_status(status: int) -> Callable[[Any], bool]:
    return lambda answer: bool(answer == status)


# hook, request, what its answer is, error counted under
CASES: list[tuple[str, Ask, Callable[[Any], bool], str]] = [
    ("intake", fresh, plainly, "intake"),
    ("match_prefix", fresh, plainly, "match_prefix"),
    ("init_load_back", cached, plainly, "init_load_back"),
    ("checkpoint", fresh, plainly, "checkpoint"),
    ("realise", fresh, plainly, "checkpoint"),
    ("realise", cached, plainly, "init_load_back"),
    ("hand_over", fresh, plainly, "checkpoint"),
    ("hand_over", cached, plainly, "init_load_back"),
    ("cover", fresh, lambda report: isinstance(report, dict), "cover"),
    ("forward", fresh, is_status(500), "forward"),
    ("forward", cached, is_status(500), "forward"),
    ("choose_prompt", edited, plainly, "choose_prompt"),
    ("record_turn", edited, lambda report: isinstance(report, dict), "record_turn"),
    ("finish_compile", compiled, is_status(503), "finish_compile"),
    ("intake", compiled, is_status(503), "intake"),
    ("rpc", compiled, is_status(500), "rpc"),
]
LOCAL = ("relocate", "events", "metrics")  # what one rank has alone: the splice is done


def spliceable(server: Server) -> None:
    server.add_skill("tp-fault", SKILL, pin=True)
    until(lambda: composed(fresh(server)), "a splice")
    server.generate(PLAIN, kvedit={"splice": "off"})


def assert_in_step(server: Server, path: Path, hook: str) -> None:
    first, second = ranks(server, path, 2)
    for what in ("skills", "registry_version", "copies", "cached_slots"):
        assert first[what] == second[what], (hook, what)
    for what in ("tokens", "edits"):
        assert first["counters"][what] == second["counters"][what], (hook, what)
    assert first["audit"] == second["audit"] == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("hook", "ask", "expected", "counted"), CASES, ids=[f"{c[0]}-{c[1].__name__}" for c in CASES]
)
def test_a_hook_that_fails_on_one_rank(
    server: Server,
    tmp_path: Path,
    rank: int,
    hook: str,
    ask: Ask,
    expected: Callable[[Any], bool],
    counted: str,
) -> None:
    spliceable(server)
    plain = server.generate(PLAIN, num_new=3, kvedit={"splice": "off"}).token_ids
    before = errors_by_rank(server, tmp_path / "before.json", counted)
    server.testing(op="fault", hook=hook, times=1, rank=rank)
    answer = ask(server)
    assert expected(answer), answer
    after = errors_by_rank(server, tmp_path / "after.json", counted)
    assert after == [count + 1 for count in before], "both ranks count it"
    assert_in_step(server, tmp_path / "step.json", hook)
    assert server.generate(PLAIN, num_new=3, kvedit={"splice": "off"}).token_ids == plain


def errors_by_rank(server: Server, path: Path, hook: str) -> list[int]:
    return [rank["hook_errors"].get(hook, 0) for rank in ranks(server, path, 2)]


@pytest.mark.parametrize("hook", LOCAL)
def test_what_only_one_rank_has_decides_nothing(server: Server, tmp_path: Path, hook: str) -> None:
    spliceable(server)
    rank = 1 if hook == "relocate" else 0  # events and metrics are on rank 0 only
    before = errors_by_rank(server, tmp_path / "before.json", hook)
    server.testing(op="fault", hook=hook, times=1, rank=rank)
    assert composed(fresh(server))
    after = errors_by_rank(server, tmp_path / "after.json", hook)
    before[rank] += 1
    assert after == before
    assert_in_step(server, tmp_path / "step.json", hook)


def test_a_lone_surrogate_in_a_name_is_an_answer(server: Server, tmp_path: Path) -> None:
    """It cannot be written as an event, and only rank 0 writes events."""
    spliceable(server)
    options = json.loads('{"skills": ["tp-fault", "\\ud800"]}')
    prompt = random_ids("surrogate", 20) + SKILL + [5]
    outcome(lambda: server.generate(prompt, kvedit=options))
    outcome(lambda: server.generate(prompt, kvedit=json.dumps(options)))
    assert_in_step(server, tmp_path / "step.json", "surrogate")
    assert composed(fresh(server))
