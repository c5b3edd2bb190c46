"""GET /kvedit/requests/{id}: the report of a request after its answer has left."""

from __future__ import annotations

import urllib.parse
from typing import Any

import pytest

from tests.server.harness import BASE, Server, ServerPool, fresh_name, random_ids

pytestmark = pytest.mark.real_server


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(BASE)


@pytest.fixture(scope="module")
def skill(server: Server) -> list[int]:
    name = fresh_name()
    ids = random_ids(name, 80)
    server.add_skill(name, ids)
    return ids


def report_of(server: Server, rid: str, query: str = "") -> tuple[int, Any]:
    return server.status_of("GET", f"/kvedit/requests/{urllib.parse.quote(rid, safe='')}{query}")


def test_every_sample_and_every_item_of_a_batch_has_its_own(
    server: Server, skill: list[int]
) -> None:
    body: dict[str, Any] = {
        "input_ids": [[5, 6, *skill, 7], random_ids("plain", 9)],
        "sampling_params": {"max_new_tokens": 1, "n": 2, "temperature": 1},
    }
    answers = server.call("POST", "/generate", body)
    assert len(answers) == 4
    for answer in answers:
        meta = answer["meta_info"]
        assert report_of(server, meta["id"]) == (200, meta["kvedit"][0])
    assert [answer["meta_info"]["kvedit"][0]["composed"] for answer in answers] == [64, 64, 0, 0]


def test_an_id_means_something_only_in_its_namespace(server: Server, skill: list[int]) -> None:
    rid = "again/" + fresh_name() + "?#%"
    first = server.generate([5, *skill, 7], rid=rid)
    assert report_of(server, rid) == (200, first.report)
    second = server.generate([6, *skill, 7], rid=rid, extra_key="k")
    assert second.report["composed"] == 0
    assert report_of(server, rid) == (200, first.report)
    assert report_of(server, rid, "?extra_key=k") == (200, second.report)
    newest = server.generate([5, 6, *skill, 7], rid=rid)
    assert report_of(server, rid) == (200, newest.report) != (200, first.report)


def test_an_empty_salt_is_no_salt(server: Server, skill: list[int]) -> None:
    rid = fresh_name()
    answer = server.generate([9, 5, *skill, 7], rid=rid, cache_salt="", extra_key="")
    assert answer.report["composed"] == 64
    assert report_of(server, rid) == (200, answer.report)
    assert report_of(server, rid, "?cache_salt=&extra_key=") == (200, answer.report)


def test_a_refused_request_and_a_compile_have_none(server: Server) -> None:
    rid = fresh_name()
    wants = {"kvedit": {"splice": "require", "skills": ["nobody"]}}
    body = {"input_ids": [5, 6], "rid": rid, "sampling_params": {"custom_params": wants}}
    assert server.status_of("POST", "/generate", body)[0] == 400
    assert report_of(server, rid)[0] == 404
    assert report_of(server, "kvedit-compile-")[0] == 404


def test_require_of_a_deleted_skill_is_refused_with_and_without_its_text(server: Server) -> None:
    name, skill = fresh_name(), random_ids("retired-require", 200)
    server.add_skill(name, skill)
    server.call("DELETE", f"/kvedit/skills/{name}")
    errors = server.status()["counters"]["hook_errors"]
    for prompt in (random_ids("none of it", 20), random_ids("around", 20) + skill + [7]):
        options = {"splice": "require", "skills": [name]}
        status, message = server.status_of(
            "POST",
            "/generate",
            {
                "input_ids": prompt,
                "sampling_params": {
                    "max_new_tokens": 1,
                    "custom_params": {"kvedit": options},
                },
            },
        )
        assert (status, f"{name}: retired" in message) == (400, True), message
    plain = server.generate(random_ids("around", 20) + skill + [7], kvedit={"skills": [name]})
    assert plain.report["composed"] == 0
    assert server.status()["counters"]["hook_errors"] == errors


def test_a_request_id_used_by_two_namespaces_shows_each_its_own_report(server: Server) -> None:
    name, skill, rid = fresh_name(), random_ids("rid-clash", 200), fresh_name()
    salt = fresh_name()
    server.add_skill(name, skill, namespace=salt)
    server.generate([3, 4] * 10 + skill + [7], cache_salt=salt, rid=rid)
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 1, "rid": rid, "cache_salt": "other"}
    answer = server.call("POST", "/v1/completions", body)
    assert name not in str(answer)
    mine = server.call("GET", f"/kvedit/requests/{rid}?cache_salt={salt}")
    assert mine["spans"][0]["skill"] == name
