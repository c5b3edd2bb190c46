"""kvedit installed, but not chosen as the cache: nothing of it shows."""

from __future__ import annotations

import pytest

from tests.server.harness import STOCK, Server, ServerPool, random_ids

pytestmark = pytest.mark.real_server
CONFIG = STOCK


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(CONFIG)


def test_answers_carry_no_report(server: Server) -> None:
    params = {"max_new_tokens": 1, "custom_params": {"kvedit": {"splice": "off"}}}
    body = {"input_ids": random_ids("stock", 9), "sampling_params": params}
    assert "kvedit" not in server.call("POST", "/generate", body)["meta_info"]
    chat = {"model": "default", "prompt": "Hi", "max_tokens": 1}
    assert "kvedit" not in server.call("POST", "/v1/completions", chat)["metadata"]


def test_there_are_no_routes_of_ours(server: Server) -> None:
    for method, path in (
        ("GET", "/kvedit/skills"),
        ("POST", "/kvedit/skills"),
        ("GET", "/kvedit/status"),
        ("POST", "/kvedit/testing"),
    ):
        body = {"op": "audit"} if method == "POST" else None
        assert server.status_of(method, path, body) == (404, '{"detail":"Not Found"}')
    assert "kvedit_" not in server.call("GET", "/metrics")
