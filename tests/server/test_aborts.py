"""Aborted requests leave nothing behind, wherever the abort finds them.

The window is hit by many attempts with growing delays, through a client that leaves and through
/abort_request: waiting, between two chunks, between the splice and its copy, decoding. What is
asserted holds for every interleaving.
"""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.canary import NUM_NEW, canary, heading, question
from tests.server.harness import (
    SMALL_CHUNK,
    HttpError,
    Server,
    ServerConfig,
    ServerPool,
    fresh_name,
    random_ids,
)
from tests.server.small_pool import SMALL_POOL
from tests.server.waiting import flushed, quiet, until

pytestmark = pytest.mark.real_server

CONFIGS = pytest.mark.parametrize("config", [SMALL_CHUNK, SMALL_POOL], ids=["chunks", "pool"])
NUM_LONG = 30
DELAYS_S = (0.0, 0.01, 0.02, 0.04, 0.06, 0.09, 0.13, 0.2, 0.3, 0.5)


def leave_after(server: Server, body: dict[str, Any], delay_s: float) -> None:
    """Send a request and close the connection, whatever the server is doing by then."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    time.sleep(delay_s)
    connection.close()


def two_spans(seed: Any) -> list[int]:
    """Forwards and splices in turn: gap, span, gap, span, question."""
    first, second = canary("abort 1"), canary("abort 2")
    return (
        heading((seed, 1), 90) + first.skill + heading((seed, 2), 90) + second.skill
    ) + question(seed)


def prepared(servers: ServerPool, config: ServerConfig) -> Server:
    server = servers.get(config)
    flushed(server)
    for seed in ("abort 1", "abort 2"):
        canary(seed).register(server)
    return server


def assert_unharmed(server: Server) -> None:
    quiet(server)
    mine = canary("abort 1")
    until(lambda: mine.ask(server, fresh_name()).report["composed"] > 200, "a splice")
    prompt = two_spans(fresh_name())
    answer = server.generate(prompt, num_new=NUM_NEW)
    assert canary("abort 2").answered(answer), "the second skill is the nearer one"
    key = fresh_name()
    plain = server.generate(prompt, num_new=NUM_NEW, extra_key=key)
    assert plain.split == (0, 0, 0, len(prompt)) and plain.token_ids == answer.token_ids


@CONFIGS
def test_clients_that_leave(servers: ServerPool, config: ServerConfig) -> None:
    server = prepared(servers, config)
    for number, delay_s in enumerate(DELAYS_S):
        params = {"max_new_tokens": NUM_LONG, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": two_spans(("leave", number)), "sampling_params": params}
        leave_after(server, body, delay_s)
    assert_unharmed(server)


def send(server: Server, ids: list[int], **fields: Any) -> tuple[int, Any]:
    """(status, raw answer): an aborted one lacks most fields."""
    params = {"max_new_tokens": NUM_LONG, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params, **fields}
    return server.status_of("POST", "/generate", body)


def assert_ended(future: Future[tuple[int, Any]]) -> None:
    """With an error, with an abort or, when it was quicker, as usual; never with a hang."""
    status, answer = future.result(timeout=120)
    if status == 200:
        finish = answer["meta_info"]["finish_reason"]["type"]
        assert finish == "abort" or len(answer["output_ids"]) == NUM_LONG
    else:
        assert status in (400, 499, 500, 503), answer


@CONFIGS
def test_aborts_by_request_id(servers: ServerPool, config: ServerConfig) -> None:
    """Four at a time, so that some wait while another one is between its chunks."""
    server = prepared(servers, config)
    with ThreadPoolExecutor(4) as pool:
        for number, delay_s in enumerate(DELAYS_S[::2]):
            rids = [fresh_name() for _ in range(4)]
            running = [
                pool.submit(send, server, two_spans(("rid", number, rid)), rid=rid) for rid in rids
            ]
            time.sleep(delay_s)
            for rid in rids[1:]:
                server.call("POST", "/abort_request", {"rid": rid})
            status, answer = running[0].result()
            assert status == 200 and len(answer["output_ids"]) == NUM_LONG, "nobody aborted it"
            for future in running[1:]:
                assert_ended(future)
    assert_unharmed(server)


@CONFIGS
def test_abort_all_takes_compiles_along_and_they_can_be_repeated(
    servers: ServerPool, config: ServerConfig
) -> None:
    server = prepared(servers, config)
    for delay_s in DELAYS_S[1:6]:
        name, ids = fresh_name(), random_ids(fresh_name(), 500)
        with ThreadPoolExecutor(2) as pool:
            compile_request = pool.submit(server.add_skill, name, ids)
            other = pool.submit(send, server, two_spans(name))
            time.sleep(delay_s)
            server.call("POST", "/abort_request", {"rid": "", "abort_all": True})
            assert_ended(other)
            try:
                assert compile_request.result()["state"] == "ready"
            except HttpError as error:
                assert error.status == 503
                assert server.call("GET", f"/kvedit/skills/{name}")["state"] == "failed"
        assert server.add_skill(name, ids)["state"] == "ready"
    assert_unharmed(server)


def test_a_client_that_leaves_its_registration_does_not_stop_it(base: Server) -> None:
    name = fresh_name()
    address = urlsplit(base.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    body = json.dumps({"name": name, "input_ids": random_ids(name, 600)})
    connection.request("POST", "/kvedit/skills", body, {"content-type": "application/json"})
    until(lambda: base.status_of("GET", f"/kvedit/skills/{name}")[0] == 200, "the announcement")
    connection.close()
    until(
        lambda: base.call("GET", f"/kvedit/skills/{name}")["state"] == "ready", "the compile's end"
    )
    answer = base.generate([7, 8] + random_ids(name, 600) + [5])
    assert answer.report["composed"] == 600 - 16
