"""Who may do what on a server with both keys, and what clients see of each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import (
    ADMIN_KEY,
    API_KEY,
    RIGHTS,
    Server,
    ServerPool,
    fresh_name,
    random_ids,
)

pytestmark = pytest.mark.real_server
CONFIG = RIGHTS

IDS = random_ids("rights", 24)
KEYS = {
    "none": "",
    "client": f"Bearer {API_KEY}",
    "admin": f"Bearer {ADMIN_KEY}",
    "wrong": "Bearer wrong",
    "prefix": f"Bearer {ADMIN_KEY[:-1]}",
    "basic": f"Basic {ADMIN_KEY}",
    "non-ascii": "Bearer cl\u00e9",
}
OWN = {"namespace": "salt-of-a-client"}

# method, path, fields of the body -> status for an ordinary client, for an admin
TABLE: list[tuple[str, str, dict[str, Any] | None, int, int]] = [
    ("GET", "/kvedit/skills", None, 200, 200),
    ("GET", "/kvedit/skills?all=1", None, 403, 200),
    ("GET", "/kvedit/skills?all=yes", None, 400, 400),
    ("GET", "/kvedit/skills/nobody", None, 404, 404),
    ("GET", "/kvedit/fields", None, 200, 200),
    ("GET", "/kvedit/fields/nobody", None, 404, 404),
    ("POST", "/kvedit/fields", {"name": "own-field", "pattern": "mine: {value}", **OWN}, 403, 200),
    ("DELETE", "/kvedit/fields/own-field?cache_salt=salt-of-a-client", None, 403, 200),
    ("DELETE", "/kvedit/fields/nobody?shared=1", None, 403, 404),
    ("GET", "/kvedit/status", None, 200, 200),
    ("GET", "/kvedit/requests/nobody", None, 404, 404),
    ("GET", "/kvedit/tree", None, 403, 200),
    ("GET", "/kvedit/audit", None, 403, 200),
    ("GET", "/kvedit/nothing-here", None, 404, 404),
    ("PUT", "/kvedit/skills", {}, 405, 405),
    ("DELETE", "/kvedit/skills/nobody", None, 403, 404),
    ("DELETE", "/kvedit/skills/nobody?shared=1", None, 403, 404),
    ("DELETE", "/kvedit/skills/nobody?purge=1", None, 403, 404),
    ("DELETE", "/kvedit/skills/nobody?cache_salt=mine", None, 404, 404),
    ("POST", "/kvedit/skills", {"name": "default-namespace"}, 403, 200),
    ("POST", "/kvedit/skills", {"name": "key-only", "namespace": {"extra_key": "k"}}, 403, 200),
    ("POST", "/kvedit/skills", {"name": "of-all", "shared": True}, 403, 200),
    ("POST", "/kvedit/skills", {"name": "own-shared", "shared": True, **OWN}, 400, 400),
    ("POST", "/kvedit/skills", {"name": "own-pinned", "pin": True, **OWN}, 403, 200),
    ("POST", "/kvedit/skills", {"name": "own", **OWN}, 200, 200),
    ("POST", "/kvedit/testing", {"op": "fault", "hook": "rpc", "times": 0}, 403, 200),
    ("POST", "/kvedit/testing", {"op": "fault", "hook": "misspelt", "times": 1}, 403, 400),
]


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(CONFIG)


@pytest.fixture(scope="module", autouse=True)
def nothing_shared_stays(server: Server) -> Iterator[None]:
    yield
    server.call("DELETE", "/kvedit/skills/of-all?shared=1&purge=1")


@pytest.mark.parametrize("key", KEYS)
def test_every_route_answers_each_key_as_the_table_says(server: Server, key: str) -> None:
    got, wanted = {}, {}
    for method, path, fields, client_status, admin_status in TABLE:
        is_skill = (method, path) == ("POST", "/kvedit/skills")
        body = {**fields, "input_ids": IDS} if is_skill and fields is not None else fields
        row = f"{method} {path} {json.dumps(fields)}"
        got[row] = server.status_of(method, path, body, {"authorization": KEYS[key]})[0]
        wanted[row] = {"client": client_status, "admin": admin_status}.get(key, 401)
    assert got == wanted


def test_a_refusal_says_what_is_missing_and_shows_no_key(server: Server) -> None:
    body = {"name": "x", "input_ids": IDS, "shared": True, "pin": True}
    status, message = as_client(server, "POST", "/kvedit/skills", body)
    assert status == 403
    for part in ("namespace.cache_salt", "shared", "pin"):
        assert part in message
    assert ADMIN_KEY not in message and API_KEY not in message


def as_client(server: Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    return server.status_of(method, path, body, {"authorization": f"Bearer {API_KEY}"})


def add(server: Server, name: str, salt: str, seed: Any, num_tokens: int = 40) -> tuple[int, Any]:
    body = {"name": name, "namespace": salt, "input_ids": random_ids(seed, num_tokens)}
    return as_client(server, "POST", "/kvedit/skills", body)


@pytest.fixture
def salt() -> str:
    return "salt-" + fresh_name()


def test_only_an_admin_is_told_where_events_come_out(server: Server) -> None:
    assert "events" not in as_client(server, "GET", "/kvedit/status")[1]
    assert server.status()["events"].startswith("ipc://")


def test_a_client_may_hold_three_skills(server: Server, salt: str) -> None:
    assert [add(server, f"s{i}", salt, (salt, i))[0] for i in range(3)] == [200] * 3
    status, message = add(server, "s3", salt, (salt, 3))
    assert status == 429 and "skills: expected at most 3, got 4" in message
    assert as_client(server, "DELETE", f"/kvedit/skills/s0?cache_salt={salt}")[0] == 200
    assert add(server, "s3", salt, (salt, 3))[0] == 200


def test_a_client_may_hold_600_tokens_under_all_extra_keys(server: Server, salt: str) -> None:
    assert add(server, "a", salt, (salt, "a"), 400)[0] == 200
    body = {
        "name": "b",
        "namespace": {"cache_salt": salt, "extra_key": "another"},
        "input_ids": random_ids((salt, "b"), 201),
    }
    status, message = as_client(server, "POST", "/kvedit/skills", body)
    assert status == 429 and "tokens: expected at most 600, got 601" in message
    assert add(server, "c", fresh_name(), (salt, "c"), 400)[0] == 200, "quotas are per salt"


def test_a_client_may_register_five_times_a_minute(server: Server, salt: str) -> None:
    assert [add(server, "same", salt, salt)[0] for _ in range(5)] == [200] * 5
    status, message = add(server, "same", salt, salt)
    assert status == 429 and "rate" in message


def test_lists_and_names_are_those_of_the_callers_namespace(server: Server, salt: str) -> None:
    other = salt + "-other"
    server.add_skill("policy", random_ids((salt, "shared"), 40), shared=True)
    try:
        assert add(server, "mine", salt, (salt, "mine"))[0] == 200
        assert add(server, "theirs", other, (salt, "theirs"))[0] == 200
        shown = as_client(server, "GET", f"/kvedit/skills?cache_salt={salt}")[1]["skills"]
        own = [view["name"] for view in shown if not view["shared"]]
        assert own == ["mine"]
        assert "policy" in [view["name"] for view in shown if view["shared"]]
        path = f"/kvedit/skills/theirs?cache_salt={salt}"
        hidden = as_client(server, "GET", path)
        assert hidden[0] == 404
        unknown = as_client(server, "GET", f"/kvedit/skills/nobody?cache_salt={salt}")
        assert hidden[1].replace("theirs", "nobody") == unknown[1]
        assert as_client(server, "DELETE", path)[0] == 404
        assert as_client(server, "DELETE", f"/kvedit/skills/policy?cache_salt={salt}")[0] == 404
        assert as_client(server, "GET", f"/kvedit/skills/theirs?cache_salt={other}")[0] == 200
        everything = server.call("GET", "/kvedit/skills?all=1")["skills"]
        assert {"mine", "theirs", "policy"} <= {view["name"] for view in everything}
    finally:
        server.call("DELETE", "/kvedit/skills/policy?shared=1&purge=1")


def test_a_shared_skill_is_spliced_everywhere_and_an_own_one_only_at_home(
    server: Server, salt: str
) -> None:
    own, shared = random_ids((salt, "own"), 200), random_ids((salt, "all"), 200)
    name = fresh_name()
    server.add_skill(name, shared, shared=True)
    try:
        body = {"name": "own", "namespace": salt, "input_ids": own}
        assert as_client(server, "POST", "/kvedit/skills", body)[0] == 200
        prompt = [5] * 9 + own + [6] * 9 + shared + [7]
        at_home = server.generate(prompt, cache_salt=salt)
        assert [span["skill"] for span in at_home.report["spans"]] == ["own", name]
        elsewhere = server.generate(prompt, cache_salt=salt + "x")
        assert [span["skill"] for span in elsewhere.report["spans"]] == [name]
        assert "own" not in json.dumps(elsewhere.report["refused"])
    finally:
        server.call("DELETE", f"/kvedit/skills/{name}?shared=1&purge=1")


def test_reports_are_those_of_the_callers_namespace(server: Server, salt: str) -> None:
    assert add(server, "s", salt, salt, 100)[0] == 200
    prompt = random_ids((salt, "p"), 9) + random_ids(salt, 100) + [5]
    elsewhere = server.generate(prompt, cache_salt=salt, extra_key="k", rid=salt)
    assert elsewhere.report["composed"] == 0, "an extra key makes another namespace"
    answer = server.generate(prompt, cache_salt=salt, rid=salt)
    assert answer.report["composed"] > 0
    path = f"/kvedit/requests/{salt}"
    assert as_client(server, "GET", f"{path}?cache_salt={salt}") == (200, answer.report)
    keyed = f"{path}?cache_salt={salt}&extra_key=k"
    assert as_client(server, "GET", keyed) == (200, elsewhere.report)
    for query in ("", "?cache_salt=other", "?extra_key=k"):
        status, message = as_client(server, "GET", path + query)
        assert status == 404 and salt in message


@pytest.mark.parametrize(
    "custom_params",
    [
        {"kvedit": {"op": "register", "name": "forged", "ids": IDS}},
        {"kvedit": {"op": "remove", "name": "default-namespace", "purge": True}},
        {"kvedit": json.dumps({"op": "evict_all"})},
        {"kvedit": {"splice": "auto", "ns": "shared"}},
        {"kvedit": {"skills": ["own"], "namespace": "salt-of-a-client"}},
    ],
)
def test_custom_params_that_imitate_an_admin_operation_are_refused(
    server: Server, custom_params: dict[str, Any]
) -> None:
    before = names(server)
    body = {"input_ids": IDS, "sampling_params": {"custom_params": custom_params}}
    status, message = as_client(server, "POST", "/generate", body)
    assert status == 400 and "custom_params.kvedit" in message
    assert names(server) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"custom_params": {"op": "remove", "kvedit:": {"op": "list"}}},
        {"rid": 'kvedit:{"op":"remove","name":"default-namespace","ns":"shared","nonce":"0"}'},
        {"rid": "kvedit-compile-00000000000000000000000000000000"},
        {"extra_key": "kvedit//1"},
    ],
)
def test_other_imitations_are_ordinary_requests(server: Server, fields: dict[str, Any]) -> None:
    fields, before = dict(fields), names(server)
    params = {"max_new_tokens": 1, "custom_params": fields.pop("custom_params", None)}
    body = {"input_ids": IDS, "sampling_params": params, **fields}
    status, answer = as_client(server, "POST", "/generate", body)
    assert status == 200 and answer["output_ids"]
    assert names(server) == before


def names(server: Server) -> list[tuple[str, str]]:
    views = server.call("GET", "/kvedit/skills?all=1")["skills"]
    return [(view["name"], view["state"]) for view in views]


def test_without_keys_only_this_host_administrates(base: Server) -> None:
    assert base.status_of("GET", "/kvedit/tree")[0] == 200
    for header in ("x-forwarded-for", "origin", "via"):
        headers = {header: "10.0.0.9"}
        status, message = base.status_of("GET", "/kvedit/tree", headers=headers)
        assert status == 403 and "--kvedit-open" in message
        assert base.status_of("GET", "/kvedit/skills", headers=headers)[0] == 200
