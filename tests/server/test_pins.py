"""Pins hold skills in a small pool, within a budget, and yield before anybody starves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvedit.workbench.model_store import default_model_dir
from tests.server.canary import NUM_NEW, Canary, canary
from tests.server.harness import HttpError, Server, ServerPool, fresh_name, random_ids
from tests.server.small_pool import BUDGET, POOL, SMALL_POOL
from tests.server.waiting import flushed, quiet, until

CONFIG = SMALL_POOL
pytestmark = pytest.mark.real_server


@pytest.fixture
def server(servers: ServerPool) -> Iterator[Server]:
    """Nothing pinned before; slots add up and nothing stays locked afterwards."""
    server = servers.get(SMALL_POOL)
    flushed(server)
    yield server
    for view in server.call("GET", "/kvedit/skills?all=1")["skills"]:
        if view["state"] != "retired":
            server.call("DELETE", f"/kvedit/skills/{view['name']}?purge=1")
    quiet(server)
    assert server.status()["pool"]["pinned"] == 0


def state(server: Server, name: str) -> tuple[str, bool]:
    view = server.call("GET", f"/kvedit/skills/{name}")
    return view["state"], view["pinned"]


def fill_the_pool(server: Server, times: int = 4) -> None:
    for _ in range(times):
        server.generate(random_ids(fresh_name(), 900), kvedit={"splice": "off"})


def pin_three(server: Server) -> list[str]:
    names = [fresh_name() for _ in range(3)]
    for name in names:
        server.add_skill(name, random_ids(name, 480), pin=True)
    assert server.status()["pool"]["pinned"] == 1_440
    return names


def test_pins_beyond_the_budget_are_refused_with_the_figures(server: Server) -> None:
    names = pin_three(server)
    server.add_skill(names[0], random_ids(names[0], 480), pin=True)  # again: counts once
    pool = server.status()["pool"]
    assert (pool["pin_budget"], pool["protected"]) == (BUDGET, 1_440)
    with pytest.raises(HttpError) as refused:
        server.add_skill(fresh_name(), random_ids("over", 61), pin=True)
    assert refused.value.status == 507
    for figure in ("1500", "1440 held", "61 asked for"):
        assert figure in refused.value.message
    name = fresh_name()
    server.add_skill(name, random_ids("fits", 60), pin=True)
    assert state(server, name) == ("ready", True)


def test_deleting_or_replacing_a_pinned_skill_gives_its_budget_back(server: Server) -> None:
    names = pin_three(server)
    server.call("DELETE", f"/kvedit/skills/{names[0]}")
    server.add_skill(names[1], random_ids("other content", 100), replace=True)
    assert server.status()["pool"]["pinned"] == 480
    server.add_skill(names[2], random_ids(names[2], 480), pin=False)
    assert server.status()["pool"]["pinned"] == 0


@pytest.mark.parametrize("hook", ["finish_compile", "intake"])
def test_a_failed_compile_gives_the_promised_budget_back(server: Server, hook: str) -> None:
    server.fault(hook)
    with pytest.raises(HttpError):
        server.add_skill(fresh_name(), random_ids(hook, 1_000), pin=True)
    name = fresh_name()
    server.add_skill(name, random_ids((hook, 2), 1_000), pin=True)
    assert state(server, name) == ("ready", True)


def test_pinned_skills_survive_pressure_and_others_are_recompiled(server: Server) -> None:
    pinned, loose = canary("pinned"), canary("loose")
    pinned_name, loose_name = pinned.register(server, pin=True), loose.register(server)
    fill_the_pool(server)
    assert pinned.ask(server, "after").report["composed"] > 200
    missed = loose.ask(server, "after")
    assert missed.report["composed"] == 0
    assert missed.report["refused"] == [{"skill": loose_name, "reason": "evicted"}]
    until(lambda: state(server, loose_name) == ("ready", False), "the background recompile")
    assert loose.ask(server, "again").report["composed"] > 200
    assert state(server, pinned_name) == ("ready", True)


def test_a_flush_evicts_and_the_next_prompt_brings_the_pin_back(server: Server) -> None:
    mine = canary("flushed")
    name = mine.register(server, pin=True)
    mine.ask(server, "before")
    flushed(server)
    assert state(server, name) == ("evicted", False)
    assert mine.ask(server, "after").report["refused"] == [{"skill": name, "reason": "evicted"}]
    until(lambda: state(server, name) == ("ready", True), "the recompile and its pin")
    assert mine.ask(server, "again").report["composed"] > 200


def test_a_recompile_never_takes_the_pins_over_the_budget(server: Server) -> None:
    """A was pinned and lost its KV; meanwhile B took the budget. A comes back unpinned."""
    first, second = fresh_name(), fresh_name()
    ids = random_ids(first, 900)
    server.add_skill(first, ids, pin=True)
    flushed(server)
    server.add_skill(second, random_ids(second, 900), pin=True)
    server.generate(random_ids("ask", 20) + ids + [5, 6])
    until(lambda: state(server, first)[0] == "ready", "the recompile")
    assert (state(server, first), state(server, second)) == (("ready", False), ("ready", True))
    assert server.status()["pool"]["pinned"] == 900


def test_pins_yield_when_the_next_request_could_not_run_otherwise(server: Server) -> None:
    """Pool 3,000, 1,440 pinned, and a request of 2,000: oldest pins go first."""
    names = pin_three(server)
    answer = server.generate(random_ids("large", 2_000), num_new=4)
    assert len(answer.token_ids) == 4
    assert [state(server, name)[1] for name in names] == [False, True, True]


def test_a_request_of_the_whole_pool_answers(server: Server) -> None:
    names = pin_three(server)
    answer = server.generate(random_ids("huge", POOL - 100), num_new=4)
    assert len(answer.token_ids) == 4
    assert not any(state(server, name)[1] for name in names)


def test_the_last_running_request_is_not_aborted_to_keep_a_pin(server: Server) -> None:
    """It was admitted when the pool was empty; pins that came later would leave it no room."""
    params = {"min_new_tokens": 220, "ignore_eos": False}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            server.generate, random_ids("runs", 1_400), num_new=220, sampling_params=params
        )
        until(lambda: server.status()["pool"]["protected"] >= 1_400, "the request to run")
        for _ in range(3):
            with contextlib.suppress(HttpError):
                server.add_skill(fresh_name(), random_ids(fresh_name(), 480), pin=True)
        assert len(running.result().token_ids) == 220


def test_a_weight_update_that_keeps_the_tree_still_parts_the_paths(server: Server) -> None:
    mine = canary("weights")
    name = mine.register(server, pin=True)
    prompt = mine.prompt("weights")
    assert server.generate(prompt, num_new=NUM_NEW).report["composed"] > 200
    epoch = server.status()["weight_epoch"]
    update = {"model_path": str(default_model_dir()), "flush_cache": False}
    assert server.call("POST", "/update_weights_from_disk", update)["success"]
    status = server.status()
    assert (status["weight_epoch"], status["pool"]["pinned"]) == (epoch + 1, 0)
    after = server.generate(prompt, num_new=NUM_NEW)
    assert mine.answered(after)
    assert after.report["composed"] == after.report["derived"] == 0, "the old path is not hit"
    assert after.report["refused"] == [{"skill": name, "reason": "evicted"}]
    until(lambda: state(server, name) == ("ready", True), "the recompile")
    assert_composes(server, mine)


def assert_composes(server: Server, mine: Canary) -> None:
    answer = mine.ask(server, fresh_name())
    assert answer.report["composed"] > 200 and answer.report["copied"] > 200
