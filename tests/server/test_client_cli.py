"""kvedit.Client and the kvedit command against a server that has both keys."""

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
from kvedit.errors import BadRequest, Conflict, Forbidden, NotFound, QuotaExceeded, Unavailable
from tests.server.harness import (
    ADMIN_KEY,
    API_KEY,
    RIGHTS,
    Server,
    ServerPool,
    fresh_name,
    random_ids,
)
from tests.server.texts import english

pytestmark = pytest.mark.real_server
CONFIG = RIGHTS

KVEDIT = Path(sys.executable).with_name("kvedit")


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(CONFIG)


@pytest.fixture
def admin(server: Server) -> kvedit.Client:
    return kvedit.Client(server.url, API_KEY, ADMIN_KEY)


@pytest.fixture
def tenant(server: Server) -> kvedit.Client:
    return kvedit.Client(server.url, API_KEY)


@pytest.fixture
def name(admin: kvedit.Client) -> Iterator[str]:
    name = fresh_name()
    yield name
    if name in [view["name"] for view in admin.skills(everything=True)]:
        admin.remove(name, purge=True)


def run(server: Server, *arguments: str, stdin: str = "", key: str | None = ADMIN_KEY) -> Any:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVEDIT_")}
    env |= {"KVEDIT_URL": server.url, "KVEDIT_API_KEY": API_KEY}
    if key is not None:
        env["KVEDIT_ADMIN_API_KEY"] = key
    return subprocess.run(
        [KVEDIT, *arguments], input=stdin, capture_output=True, text=True, env=env, timeout=300
    )


def test_register_is_idempotent_and_replace_makes_a_version(
    admin: kvedit.Client, name: str
) -> None:
    text = english(name, 8)
    first = admin.register(name, text=text)
    assert (first["name"], first["version"], first["state"]) == (name, 1, "ready")
    assert admin.register(name, text=text) == first
    with pytest.raises(Conflict, match="replace=true"):
        admin.register(name, text=text + " More.")
    second = admin.register(name, text=text + " More.", replace=True, seam=3)
    assert (second["version"], second["state"], second["seam"]) == (2, "ready", 3)
    assert second["id"] != first["id"] and second["segment"] != first["segment"]
    assert [(v["version"], v["state"]) for v in listed(admin, name)] == [
        (1, "retired"),
        (2, "ready"),
    ]
    assert admin.show(name) == second
    assert admin.remove(name)["state"] == "retired"
    with pytest.raises(NotFound):
        admin.show(name)
    assert admin.remove(name, purge=True)["dropped"] == 2
    assert listed(admin, name) == []


def listed(client: kvedit.Client, name: str) -> list[dict[str, Any]]:
    return [view for view in client.skills() if view["name"] == name]


def test_errors_of_the_server_are_raised_as_they_are(
    server: Server, admin: kvedit.Client, tenant: kvedit.Client
) -> None:
    with pytest.raises(BadRequest, match="seam: expected an integer >= 0, got -1"):
        admin.register("bad", text="a", seam=-1)
    with pytest.raises(BadRequest, match=r'expected no "/"'):
        admin.show("a/b")
    with pytest.raises(Forbidden, match="admin key"):
        tenant.tree()
    with pytest.raises(Forbidden, match="401"):
        kvedit.Client(server.url, "wrong").status()
    with pytest.raises(QuotaExceeded, match="at most 600, got 601"):
        tenant.register("big", input_ids=random_ids("big", 601), namespace=fresh_name())
    with pytest.raises(Unavailable, match="expected a running server"):
        kvedit.Client("http://127.0.0.1:9").status()


def test_reports_namespaces_and_awkward_names(
    server: Server, admin: kvedit.Client, tenant: kvedit.Client
) -> None:
    salt, awkward = fresh_name(), "r\u00e8gle n\u00b0 1?&#%20"
    ids = random_ids(salt, 60)
    view = tenant.register(awkward, input_ids=ids, namespace={"cache_salt": salt})
    assert tenant.show(awkward, namespace=salt) == view
    answer = server.generate([5, 6] + ids + [7], cache_salt=salt, rid=salt + " ?#")
    assert tenant.report(salt + " ?#", namespace=salt) == answer.report
    with pytest.raises(NotFound):
        tenant.report(salt + " ?#")
    assert tenant.remove(awkward, namespace=salt, purge=True)["dropped"] == 1
    assert admin.audit() == {"ok": True, "problems": []}


def test_status_counts_skills_and_tokens(admin: kvedit.Client, name: str) -> None:
    before = admin.status()
    admin.register(name, input_ids=random_ids(name, 60), pin=True)
    status = admin.status()
    assert status["skills"]["ready"] == before["skills"].get("ready", 0) + 1
    assert status["pool"]["pinned"] == before["pool"]["pinned"] + 60
    assert status["pool"]["pinned"] <= status["pool"]["pin_budget"] < status["pool"]["size"]
    assert status["counters"]["hook_errors"] == {}
    [view] = [view for view in admin.tree()["segments"] if view["name"] == name]
    assert view["pinned"] and view["compile_prefix_tokens"] == 0


def test_skills_commands(server: Server, name: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.md"
    file.write_text(english(name, 6), "utf-8")
    added = run(server, "skills", "add", name, str(file))
    assert added.returncode == 0, added.stderr
    view = json.loads(added.stdout)
    assert view["state"] == "ready"
    piped = run(server, "skills", "add", name, stdin=file.read_text("utf-8"))
    assert json.loads(piped.stdout) == view
    assert json.loads(run(server, "skills", "show", name).stdout) == view
    table = run(server, "skills", "list").stdout.splitlines()
    assert table[0].split() == [
        "name",
        "version",
        "num_tokens",
        "state",
        "shared",
        "pinned",
        "uses",
    ]
    assert [row.split()[:4] for row in table if row.startswith(name)] == [
        [name, "1", str(view["num_tokens"]), "ready"]
    ]
    lines = run(server, "skills", "list", "--json").stdout.splitlines()
    assert view in map(json.loads, lines)
    removed = run(server, "skills", "remove", name, "--purge")
    assert json.loads(removed.stdout)["dropped"] == 1
    gone = run(server, "skills", "show", name)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert gone.stderr.startswith("kvedit: skill ") and gone.stderr.count("\n") == 1


def test_ids_and_namespaces_on_the_command_line(server: Server) -> None:
    salt = fresh_name()
    arguments = ["--cache-salt", salt, "--extra-key", "k"]
    ids = json.dumps(random_ids(salt, 30))
    added = run(server, "skills", "add", "s", "--ids", *arguments, stdin=ids, key=None)
    assert added.returncode == 0, added.stderr
    assert json.loads(added.stdout)["num_tokens"] == 30
    shown = run(server, "skills", "list", "--json", *arguments, key=None).stdout
    assert "s" in [json.loads(line)["name"] for line in shown.splitlines()]
    assert run(server, "skills", "show", "s", "--cache-salt", salt, key=None).returncode == 1
    assert run(server, "skills", "remove", "s", *arguments, key=None).returncode == 0


def test_status_command(server: Server) -> None:
    rows = dict(line.split(None, 1) for line in run(server, "status").stdout.splitlines())
    as_json = json.loads(run(server, "status", "--json").stdout)
    assert rows["pool.size"] == str(as_json["pool"]["size"])
    assert rows["events"] == as_json["events"]


@pytest.mark.parametrize(
    ("arguments", "key", "status", "says"),
    [
        (["skills", "add", "x", "/nonexistent/file"], ADMIN_KEY, 2, "/nonexistent/file: No such"),
        (["skills", "add", "a/b"], ADMIN_KEY, 2, 'expected no "/"'),
        (["skills", "add", "x", "--ids"], ADMIN_KEY, 2, "kvedit: "),
        (["skills", "add", "x", "--seam", "-1"], ADMIN_KEY, 2, "seam"),
        (["skills", "remove", "nobody"], ADMIN_KEY, 1, "nobody"),
        (["skills", "list", "--all"], None, 1, "admin key"),
        (["events", "--count", "1"], None, 1, "KVEDIT_ADMIN_API_KEY"),
        (["status", "--url", "http://127.0.0.1:9"], ADMIN_KEY, 1, "expected a running server"),
        (["status", "--url", "no-url"], ADMIN_KEY, 2, "kvedit: "),
        (["status", "extra"], ADMIN_KEY, 2, "extra"),
    ],
)
def test_a_failed_command_says_why_in_one_line(
    server: Server, arguments: list[str], key: str | None, status: int, says: str
) -> None:
    done = run(server, *arguments, stdin="Some text.", key=key)
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_doctor_judges_flags_before_a_start(server: Server) -> None:
    refused = run(server, "doctor", "--", "--enable-lmcache")
    assert refused.returncode == 1
    assert "--enable-lmcache: expected off" in refused.stdout and "Traceback" not in refused.stderr
    fine = run(server, "doctor", "--", "--page-size", "16")
    assert fine.returncode == 0, fine.stdout
    assert "accepted" in fine.stdout and "GET /server_info prints the API key" in fine.stdout
