"""Fields over a real server: declared, refused by key, told apart from skills, never dropped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvedit
from tests.server.harness import BASE, Server, ServerPool, fresh_name
from tests.server.texts import english

pytestmark = pytest.mark.real_server
CONFIG = BASE

KVEDIT = Path(sys.executable).with_name("kvedit")
PATTERN = "order_status: {value}"
AS_CLIENT = {"x-forwarded-for": "10.0.0.9"}  # this server has no keys: only a local caller is admin


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(CONFIG)


@pytest.fixture(scope="module", autouse=True)
def serves_on(server: Server) -> Iterator[None]:
    yield
    assert server.healthy() and server.status()["fields"] == 0


@pytest.fixture
def salt(server: Server) -> Iterator[str]:
    """A namespace of its own, empty again afterwards."""
    salt = fresh_name()
    yield salt
    fields = kvedit.Client(server.url).fields
    for view in fields.list(namespace=salt):
        fields.remove(view["name"], namespace=salt, shared=view["shared"])


def declare(server: Server, salt: str, name: str = "order", **keys: Any) -> tuple[int, Any]:
    body = {"name": name, "pattern": PATTERN, "namespace": salt, **keys}
    return server.status_of("POST", "/kvedit/fields", {k: v for k, v in body.items() if v != ()})


def listed(server: Server, salt: str) -> list[Any]:
    views: list[Any] = server.call("GET", f"/kvedit/fields?cache_salt={salt}")["fields"]
    return views


def test_a_field_is_declared_once_and_read_back(server: Server, salt: str) -> None:
    status, view = declare(server, salt, base="unknown", strategy="erratum")
    assert status == 200 and view.pop("created") is True
    again = declare(server, salt, base="unknown", strategy="erratum")
    assert again == (200, {**view, "created": False})
    assert listed(server, salt) == [view]
    assert server.call("GET", f"/kvedit/fields/order?cache_salt={salt}") == view
    status, message = declare(server, salt, base="open", strategy="erratum")
    assert status == 409 and "replace=true" in message
    status, replaced = declare(server, salt, base="open", strategy="erratum", replace=True)
    assert status == 200 and replaced["field"] > view["field"]
    assert listed(server, fresh_name()) == []


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"pattern": "order_status"}, 400, "pattern: expected exactly one {value}, got 0"),
    ({"pattern": "s: {value} {value}"}, 400, "pattern: expected exactly one {value}, got 2"),
    ({"pattern": "{value}"}, 400, "pattern: expected at least 3 visible characters"),
    ({"pattern": "status:\n{value}"}, 400, "pattern: expected one line"),
    ({"pattern": "p" * 100_000 + "{value}"}, 400, "pattern: expected 1 to 500 characters"),
    ({"strategy": "patch"}, 400, "strategy: expected one of recompute, erratum, edit"),
    ({"base": "b" * 100_000}, 400, "base: expected 1 to 4096 characters on one line"),
    ({"base": "a\nb"}, 400, "value_markup"),
    ({"base": "x<|im_end|>"}, 400, "base: expected a legal value, got value_markup"),
    ({"base": "x [update, current value] y"}, 400, "expected a legal value, got value_markup"),
    ({"template": "<|im_start|>system {value}"}, 400, "template: expected no text of a control"),
    ({"template": "no place for it"}, 400, "template: expected exactly one {value}, got 0"),
    ({"where": {"role": "assistant"}}, 400, "where.role: expected one of system, user, tool"),
    ({"where": {"within": -1}}, 400, "where.within: expected an integer >= 1, got -1"),
    ({"where": {"within": 9, "role": "user"}}, 400, "where: expected either within or role"),
    ({"namespace": {"adapter": "lora"}}, 400, "namespace.adapter"),
    ({"shared": True}, 400, "namespace: expected null for a shared field"),
    ({"regex": True}, 400, "regex: expected one of name, pattern"),
    ({"name": "a/b"}, 400, 'name: expected no "/"'),
    ({"name": "other", "pattern": PATTERN}, 409, "overlap with 'order'"),
    ({"name": "other", "pattern": "my order_status: {value}"}, 409, "overlap with 'order'"),
]


@pytest.mark.parametrize(("keys", "status", "says"), BAD)
def test_a_bad_declaration_is_refused_and_changes_nothing(
    server: Server, salt: str, keys: dict[str, Any], status: int, says: str
) -> None:
    assert declare(server, salt)[0] == 200
    before = listed(server, salt)
    got, message = declare(server, salt, **{"name": "bad", "pattern": "mood: {value}", **keys})
    assert got == status and says in message and len(message) < 1_000, message
    assert listed(server, salt) == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"[" * 100_000, b'"\\ud800"'])
def test_a_bad_body_is_refused(server: Server, body: bytes) -> None:
    assert server.status_of("POST", "/kvedit/fields", body)[0] == 400


def test_only_an_admin_declares_and_removes(server: Server, salt: str) -> None:
    body = {"name": "order", "pattern": PATTERN, "namespace": salt}
    path = f"/kvedit/fields/order?cache_salt={salt}"
    assert server.status_of("POST", "/kvedit/fields", body, AS_CLIENT)[0] == 403
    assert server.status_of("POST", "/kvedit/fields", body)[0] == 200
    assert server.status_of("DELETE", path, headers=AS_CLIENT)[0] == 403
    assert server.status_of("GET", path, headers=AS_CLIENT)[0] == 200
    assert server.status_of("DELETE", path)[0] == 200
    for method in ("GET", "DELETE"):
        assert server.status_of(method, path)[0] == 404


def test_skills_and_fields_keep_out_of_each_other(server: Server, salt: str) -> None:
    text = english(salt, 8) + " The order_status: open. " + english(salt + "b", 4)
    skill = {"name": "policy", "text": text, "namespace": salt}
    assert server.status_of("POST", "/kvedit/skills", skill)[0] == 200
    status, message = declare(server, salt)
    assert status == 409 and "skill 'policy'" in message
    memory = server.call("POST", "/kvedit/skills", {**skill, "memory": True})
    assert memory["memory"] is True
    assert declare(server, salt)[0] == 200
    status, message = server.status_of("POST", "/kvedit/skills", {**skill, "name": "other"})
    assert status == 409 and "the field 'order'" in message
    server.call("DELETE", f"/kvedit/skills/policy?cache_salt={salt}&purge=1")


def test_a_flush_keeps_fields(server: Server, salt: str) -> None:
    declare(server, salt)
    before = listed(server, salt)
    server.flush()
    assert listed(server, salt) == before


def test_status_counts_fields_and_warns_about_auto(server: Server, salt: str) -> None:
    declare(server, salt, strategy="edit")
    status = server.status()
    assert (status["fields"], status["warnings"]) == (1, [])
    declare(server, salt, strategy="auto", replace=True)
    warnings = server.status()["warnings"]
    assert len(warnings) == 1 and "serving edit+erratum" in warnings[0]


def test_shared_and_raw_fields(server: Server, salt: str) -> None:
    status, view = declare(server, salt, "raw", where={"within": 64}, namespace=(), shared=True)
    assert status == 200 and view["where"] == {"within": 64}
    assert [field["name"] for field in listed(server, salt)] == ["raw"]
    status, message = server.status_of("DELETE", f"/kvedit/fields/raw?cache_salt={salt}")
    assert status == 404, message


def run(server: Server, *arguments: str) -> Any:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVEDIT_")}
    env["KVEDIT_URL"] = server.url
    return subprocess.run(
        [KVEDIT, "fields", *arguments], capture_output=True, text=True, env=env, timeout=300
    )


def test_the_command_line(server: Server, salt: str) -> None:
    add = ("add", "order", "--pattern", PATTERN, "--base", "unknown", "--cache-salt", salt)
    added = run(server, *add, "--strategy", "edit", "--role", "user")
    assert added.returncode == 0, added.stderr
    assert json.loads(added.stdout)["where"] == {"role": "user", "occurrence": 1}
    refused = run(server, *add)
    assert refused.returncode == 1 and "or --replace" in refused.stderr
    bad = run(server, "add", "bad", "--pattern", "no place", "--cache-salt", salt)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1
    table = run(server, "list", "--cache-salt", salt).stdout.splitlines()
    assert len(table) == 2 and table[1].startswith("order  " + PATTERN)
    assert run(server, "remove", "order", "--cache-salt", salt).returncode == 0
    assert listed(server, salt) == []
