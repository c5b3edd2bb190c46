"""Who may do what: route x keys of the server x key sent -> status, behind the host's check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.utils import auth as host_auth

from sglang_patches.http.services import auth

READ = [("GET", "/kvedit/skills"), ("GET", "/kvedit/status")]
ADMIN = [
    ("POST", "/kvedit/skills"),
    ("DELETE", "/kvedit/skills/policy"),
    ("GET", "/kvedit/skills?all=1"),
    ("GET", "/kvedit/tree"),
    ("GET", "/kvedit/audit"),
]
BODY = {"name": "policy", "text": "refunds take 30 days"}

# (api key, admin key, address), key sent -> status of a read, of an admin route
TABLE = [
    ((None, None, "127.0.0.1"), None, 200, 200),
    ((None, None, "::1"), None, 200, 200),
    ((None, None, "::ffff:127.0.0.1"), None, 200, 200),
    ((None, None, "10.0.0.9"), None, 200, 403),
    ((None, None, "testclient"), None, 200, 403),
    (("KEY", None, "127.0.0.1"), None, 401, 401),
    (("KEY", None, "127.0.0.1"), "WRONG", 401, 401),
    (("KEY", None, "10.0.0.9"), "KEY", 200, 200),
    ((None, "ADM", "127.0.0.1"), None, 200, 403),
    ((None, "ADM", "127.0.0.1"), "WRONG", 200, 403),
    ((None, "ADM", "10.0.0.9"), "ADM", 200, 200),
    (("KEY", "ADM", "127.0.0.1"), None, 401, 401),
    (("KEY", "ADM", "127.0.0.1"), "WRONG", 401, 401),
    (("KEY", "ADM", "127.0.0.1"), "KEY", 200, 403),
    (("KEY", "ADM", "10.0.0.9"), "ADM", 200, 200),
]


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    original = host_auth.decide_request_auth
    monkeypatch.setattr(host_auth, "decide_request_auth", lambda **kw: auth.decide(original, **kw))


@pytest.fixture(params=TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def row(request: pytest.FixtureRequest, serve: Any, manager: Any) -> Iterator[Any]:
    (api_key, admin_api_key, host), sent, read_status, admin_status = request.param
    client, _ = serve(api_key=api_key, admin_api_key=admin_api_key, host=host)
    headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
    yield client, headers, read_status, admin_status


def test_every_route_answers_each_key_as_the_table_says(row: Any) -> None:
    client, headers, read_status, admin_status = row
    got = {
        (method, path): client.request(
            method, path, headers=headers, json=BODY if method == "POST" else None
        ).status_code
        for method, path in READ + ADMIN
    }
    expected = {route: read_status for route in READ} | {route: admin_status for route in ADMIN}
    assert got == expected


def test_other_routes_keep_the_hosts_own_decision() -> None:
    def decide(path: str, key: str | None) -> bool:
        header = None if key is None else f"Bearer {key}"
        return host_auth.decide_request_auth(
            method="GET",
            path=path,
            authorization_header=header,
            api_key="KEY",
            admin_api_key="ADM",
            auth_level=host_auth.AuthLevel.NORMAL,
        ).allowed

    assert [decide("/generate", key) for key in ("KEY", "ADM", None)] == [True, False, False]
    assert [decide("/kvedit2", key) for key in ("KEY", "ADM", None)] == [True, False, False]
    assert [decide("/kvedit/skills", key) for key in ("KEY", "ADM", None)] == [True, True, False]


@pytest.mark.parametrize("header", ["Origin", "X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
def test_without_keys_a_browser_or_a_proxy_on_this_host_is_no_admin(
    serve: Any, header: str
) -> None:
    client, _ = serve()
    value = {header: "http://127.0.0.1"}
    assert client.post("/kvedit/skills", json=BODY, headers=value).status_code == 403
    assert client.post("/kvedit/skills", json=BODY).status_code == 200


def test_open_lifts_the_loopback_rule_and_only_that(serve: Any) -> None:
    client, _ = serve(host="10.0.0.9", open=True)
    assert client.post("/kvedit/skills", json=BODY).status_code == 200
    keyed, _ = serve(host="10.0.0.9", open=True, admin_api_key="ADM")
    assert keyed.post("/kvedit/skills", json=BODY).status_code == 403


def test_a_key_that_is_not_ascii_is_refused_not_an_error(serve: Any) -> None:
    client, _ = serve(api_key="KEY")
    headers = {"Authorization": b"Bearer \xc3\xa9"}
    assert client.get("/kvedit/status", headers=headers).status_code == 401


def test_only_an_admin_learns_where_events_come_out(serve: Any) -> None:
    client, _ = serve(admin_api_key="ADM")
    admin = client.get("/kvedit/status", headers={"Authorization": "Bearer ADM"}).json()
    assert admin["events"].startswith("ipc://")
    assert "events" not in client.get("/kvedit/status").json()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 200),
        ({"namespace": {"cache_salt": "me", "extra_key": "k"}}, 200),
        ({"namespace": None}, 403),
        ({"namespace": {"extra_key": "k"}}, 403),
        ({"namespace": None, "shared": True}, 403),
        ({"pin": True}, 403),
    ],
)
def test_clients_register_only_into_their_own_salt(serve: Any, change: Any, status: int) -> None:
    body = {**BODY, "namespace": "me", **change}
    client, _ = serve(host="10.0.0.9", client_skills=True)
    assert client.post("/kvedit/skills", json=body).status_code == status
    closed, _ = serve(host="10.0.0.9")
    assert closed.post("/kvedit/skills", json=body).status_code == 403


def test_clients_remove_only_what_their_own_salt_holds(serve: Any) -> None:
    client, _ = serve(host="10.0.0.9", client_skills=True)
    admin, _ = serve()
    assert admin.post("/kvedit/skills", json={**BODY, "shared": True}).status_code == 200
    assert client.post("/kvedit/skills", json={**BODY, "namespace": "me"}).status_code == 200
    assert client.delete("/kvedit/skills/policy").status_code == 403
    assert client.delete("/kvedit/skills/policy?cache_salt=me&shared=1").status_code == 403
    assert client.delete("/kvedit/skills/policy?cache_salt=me").json()["state"] == "retired"
    # the next one of that name is the shared one, which a salt does not reach
    assert client.delete("/kvedit/skills/policy?cache_salt=me").status_code == 404


def test_quotas_count_per_salt_and_a_failed_registration_gives_its_room_back(
    serve: Any, manager: Any
) -> None:
    client, _ = serve(host="10.0.0.9", client_skills=True, client_max_skills=1)

    def register(name: str, salt: str, extra_key: str | None = None) -> Any:
        namespace = {"cache_salt": salt, "extra_key": extra_key}
        body = {"name": name, "text": "refunds", "namespace": namespace}
        return client.post("/kvedit/skills", json=body)

    manager.compile_error = ValueError("no room")
    assert register("a", "me").status_code == 400
    manager.compile_error = None
    assert register("b", "me").status_code == 200
    over = register("c", "me")
    assert (
        over.status_code == 429 and "skills: expected at most 1" in over.json()["error"]["message"]
    )
    assert register("c", "me", extra_key="fresh").status_code == 429  # a new key, no new quota
    assert register("c", "you").status_code == 200
    assert client.delete("/kvedit/skills/b?cache_salt=me").status_code == 200
    assert register("c", "me").status_code == 200


@pytest.mark.parametrize(
    ("host", "is_admin"),
    [
        ("localhost", True),
        ("LocalHost:30000", True),
        ("127.0.0.1:30000", True),
        ("127.8.9.10", True),
        ("[::1]", True),
        ("[::1]:30000", True),
        ("evil.example:30000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("evil.example@localhost", False),
        ("10.0.0.1", False),
        ("[::2]", False),
        ("localhost/", False),
        ("", False),
    ],
)
def test_without_keys_an_admin_calls_this_host_by_a_name_of_this_host(
    serve: Any, host: str, is_admin: bool
) -> None:
    """A web page may let its own name resolve to 127.0.0.1, and its requests need no Origin."""
    client, _ = serve()
    answer = client.post("/kvedit/skills", json=BODY, headers={"Host": host})
    assert answer.status_code == (200 if is_admin else 403)
    assert client.get("/kvedit/skills", headers={"Host": host}).status_code == 200


def test_a_key_is_enough_by_any_name(serve: Any) -> None:
    client, _ = serve(admin_api_key="ADM")
    headers = {"Host": "shop.example", "Authorization": "Bearer ADM"}
    assert client.post("/kvedit/skills", json=BODY, headers=headers).status_code == 200
