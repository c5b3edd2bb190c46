"""Compiles on a real server: recompiles of evicted skills, races, and clients that leave."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.harness import BASE, Server, ServerPool, fresh_name, random_ids
from tests.server.waiting import until

pytestmark = pytest.mark.real_server

NUM_TOKENS = 100


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(BASE)


@pytest.fixture
def evicted(server: Server) -> str:
    """A skill whose KV a flush has dropped; ``random_ids(name)`` are its tokens."""
    name = fresh_name()
    server.add_skill(name, random_ids(name, NUM_TOKENS))
    server.flush()
    assert state(server, name) == "evicted"
    return name


def state(server: Server, name: str) -> str:
    found: str = server.call("GET", f"/kvedit/skills/{name}")["state"]
    return found


def prompt(name: str, seed: int = 0) -> list[int]:
    return [*random_ids((name, seed), 20), *random_ids(name, NUM_TOKENS), 5]


def require(name: str) -> dict[str, Any]:
    return {"splice": "require", "skills": [name]}


def test_an_evicted_skill_is_served_plainly_and_comes_back(server: Server, evicted: str) -> None:
    before = server.call("GET", f"/kvedit/skills/{evicted}")
    plain = server.generate(prompt(evicted))
    assert plain.split == (0, 0, 0, len(prompt(evicted)))
    assert plain.report["refused"] == [{"skill": evicted, "reason": "evicted"}]
    assert "evicted" not in plain.report, "segment numbers to recompile are not the client's"
    until(lambda: state(server, evicted) == "ready", "a recompile in the background")
    after = server.call("GET", f"/kvedit/skills/{evicted}")
    assert (after["segment"], after["version"]) == (before["segment"], before["version"])
    spliced = server.generate(prompt(evicted, 1))
    assert spliced.report["composed"] == NUM_TOKENS - 16 and spliced.report["refused"] == []


def test_require_waits_for_the_recompile(server: Server, evicted: str) -> None:
    answer = server.generate(prompt(evicted), kvedit=require(evicted))
    assert answer.report["composed"] == NUM_TOKENS - 16
    assert answer.report["refused"] == []
    assert state(server, evicted) == "ready"
    assert not server.audit()


@pytest.mark.parametrize("stream", [False, True])
def test_require_waits_on_the_openai_routes_too(server: Server, evicted: str, stream: bool) -> None:
    body = {
        "model": "default",
        "prompt": prompt(evicted),
        "max_tokens": 1,
        "stream": stream,
        "custom_params": {"kvedit": {**require(evicted), "report": True}},
    }
    answer = server.call("POST", "/v1/completions", body)
    if stream:
        *_, last, done, _ = answer.split("\n\n")
        assert done == "data: [DONE]"
        report = json.loads(last.removeprefix("data: "))["sglext"]["kvedit"]
    else:
        report = answer["metadata"]["kvedit"]
    assert report["composed"] == NUM_TOKENS - 16


def test_many_that_wait_share_one_recompile(server: Server, evicted: str) -> None:
    def ask(seed: int) -> int:
        answer = server.generate(prompt(evicted, seed), kvedit=require(evicted))
        return int(answer.report["composed"])

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [NUM_TOKENS - 16] * 6
    assert not server.audit()


def test_a_batch_does_not_wait_but_starts_the_recompile(server: Server, evicted: str) -> None:
    params = {"max_new_tokens": 1, "custom_params": {"kvedit": require(evicted)}}
    body = {"input_ids": [prompt(evicted, i) for i in range(2)], "sampling_params": params}
    status, message = server.status_of("POST", "/generate", body)
    assert (status, message) == (400, f"kvedit: require: {evicted}: evicted")
    until(lambda: state(server, evicted) == "ready", "a recompile in the background")
    assert len(server.call("POST", "/generate", body)) == 2


def test_registering_an_evicted_skill_again_compiles_it(server: Server, evicted: str) -> None:
    view = server.add_skill(evicted, random_ids(evicted, NUM_TOKENS))
    assert (view["state"], view["version"]) == ("ready", 1)


def test_racing_registrations_of_one_content_give_one_skill(server: Server) -> None:
    name = fresh_name()
    ids = random_ids(name, NUM_TOKENS)
    with ThreadPoolExecutor(4) as pool:
        views = list(pool.map(lambda _: server.add_skill(name, ids), range(4)))
    assert all(view == views[0] for view in views) and views[0]["state"] == "ready"


def test_of_racing_registrations_of_other_contents_one_wins(server: Server) -> None:
    name = fresh_name()

    def add(seed: int) -> int:
        body = {"name": name, "input_ids": random_ids((name, seed), NUM_TOKENS)}
        return server.status_of("POST", "/kvedit/skills", body)[0]

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(add, range(4))) == [200, 409, 409, 409]


def test_a_client_that_leaves_does_not_end_the_compile(server: Server) -> None:
    name = fresh_name()
    body = json.dumps({"name": name, "input_ids": random_ids(name, 1_500)})
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
    connection.request("POST", "/kvedit/skills", body)
    until(lambda: server.status_of("GET", f"/kvedit/skills/{name}")[0] == 200, "the registration")
    connection.close()
    until(lambda: state(server, name) == "ready", "the compile that nobody waits for")


def test_a_skill_removed_while_it_compiles_stays_removed(server: Server) -> None:
    name = fresh_name()
    body = {"name": name, "input_ids": random_ids(name, 2_500)}
    with ThreadPoolExecutor(1) as pool:
        registration = pool.submit(server.status_of, "POST", "/kvedit/skills", body)
        path = f"/kvedit/skills/{name}"
        # Asked without a pause: it arrives with the compile, which takes two forwards.
        while server.status_of("DELETE", path + "?purge=1")[0] != 200:
            assert not registration.done()
        status, message = registration.result()
    assert status == 409 and "removal while it compiled" in message
    assert server.status_of("GET", path)[0] == 404
    assert server.healthy()
