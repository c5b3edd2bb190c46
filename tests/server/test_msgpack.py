"""Messages between the processes as msgpack: stock SGLang ends at one nested custom_params."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import RIGHTS, Server, ServerPool, fresh_name, random_ids

pytestmark = pytest.mark.real_server
CONFIG = RIGHTS


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(CONFIG)


@pytest.fixture(autouse=True)
def serves_on(server: Server) -> Iterator[None]:
    yield
    assert server.healthy()


def spell_object(options: dict[str, Any]) -> Any:
    return options


@pytest.mark.parametrize("spell", [spell_object, json.dumps], ids=["object", "string"])
@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
def test_options_arrive_whole(server: Server, spell: Any, route: str) -> None:
    names, ids = [fresh_name(), fresh_name()], [random_ids((route, i), 60) for i in range(2)]
    for name, tokens in zip(names, ids, strict=True):
        server.add_skill(name, tokens)
    prompt = random_ids((route, spell), 9) + ids[0] + [7, 8] + ids[1] + [9]
    custom = {"kvedit": spell({"skills": names, "seam": 4, "splice": "require"})}
    report = ask(server, route, prompt, custom)
    assert [(span["skill"], span["seam"]) for span in report["spans"]] == [
        (names[0], 4),
        (names[1], 4),
    ]
    off = ask(server, route, prompt, {"kvedit": spell({"splice": "off"})})
    assert off["composed"] == 0 and off["spans"] == []


def ask(server: Server, route: str, prompt: list[int], custom: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any]
    if route == "/generate":
        params = {"max_new_tokens": 1, "temperature": 0, "custom_params": custom}
        body = {"input_ids": prompt, "sampling_params": params}
        [report] = server.call("POST", route, body)["meta_info"]["kvedit"]
        return report
    body = {"model": "default", "prompt": prompt, "max_tokens": 1, "custom_params": custom}
    report = server.call("POST", route, body)["metadata"]["kvedit"]
    return report


def test_refusals_keep_their_message(server: Server) -> None:
    wants = {"splice": "require", "skills": ["nobody"]}
    for route in ("/generate", "/v1/completions"):
        params = {"kvedit": wants}
        body = {"input_ids": [5, 6], "sampling_params": {"custom_params": params}}
        if route != "/generate":
            body = {"model": "default", "prompt": [5, 6], "custom_params": params}
        assert server.status_of("POST", route, body) == (
            400,
            "kvedit: require: nobody: unknown_skill",
        )


def test_what_clients_nest_beside_our_options_is_theirs(server: Server) -> None:
    """Only our own key is flattened; lists and flat objects pass as in stock."""
    custom = {"mine": {"a": 1}, "list": [1, 2], "kvedit": {"skills": ["nobody"]}}
    report = ask(server, "/generate", random_ids("beside", 9), custom)
    assert {"skill": "nobody", "reason": "unknown_skill"} in report["refused"]
