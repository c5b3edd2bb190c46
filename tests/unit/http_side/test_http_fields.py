"""Declaring, reading and removing fields: route logic, rights, and fields against skills."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.utils import auth as host_auth

import kvedit
from kvedit.cli import main as cli
from kvedit.errors import BadRequest, Conflict, NotFound, Unsupported
from kvedit.fields.book import MAX_FIELDS
from kvedit.text.chat_probe import ChatForm
from sglang_patches.http.services import auth
from sglang_patches.http.services import field_service as http_fields
from sglang_patches.scheduler.commands import field_commands

FORM = ChatForm(openers=(("system", (1,)), ("user", (2,))), closers=(), suffixes=((3,),))
BODY = {"name": "status", "pattern": "status: {value}"}


@pytest.fixture(autouse=True)
def understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer and a chat template that are understood; how is tested with real ones."""
    tokens = SimpleNamespace(special_texts=frozenset({"<|im_end|>"}))
    for module in (http_fields, field_commands):
        monkeypatch.setattr(module, "TokenText", lambda tokenizer: tokens)
    monkeypatch.setattr(http_fields, "derive_chat_form", lambda render, tokens: FORM)
    monkeypatch.setattr(http_fields, "renderer", lambda chat: chat)


@pytest.fixture
def client(serve: Any) -> Any:
    client, _ = serve()
    client.app.state.openai_serving_chat = object()
    return client


def post(client: Any, **body: Any) -> Any:
    return client.post("/kvedit/fields", json={**BODY, **body})


def message(response: Any) -> str:
    return str(response.json()["error"]["message"])


def names(client: Any, query: str = "") -> list[str]:
    return [view["name"] for view in client.get("/kvedit/fields" + query).json()["fields"]]


def test_a_declared_field_is_found_under_its_namespace_only(client: Any, manager: Any) -> None:
    view = post(client, namespace="me", base="open", where={"role": "user"}).json()
    assert (view["name"], view["base"], view["created"]) == ("status", "open", True)
    assert view["where"] == {"role": "user", "occurrence": 1} and view["shared"] is False
    assert client.get("/kvedit/fields/status?cache_salt=me").json()["field"] == view["field"]
    assert names(client, "?cache_salt=me") == ["status"]
    for other in ("", "?cache_salt=you", "?extra_key=me"):
        assert client.get("/kvedit/fields/status" + other).status_code == 404
        assert names(client, other) == []
    assert manager.edits.chat_form == FORM


def test_a_shared_field_is_seen_from_every_namespace_and_removed_as_shared(client: Any) -> None:
    post(client, shared=True)
    assert client.get("/kvedit/fields/status?cache_salt=me").json()["shared"] is True
    assert client.delete("/kvedit/fields/status?cache_salt=me").status_code == 404
    assert client.delete("/kvedit/fields/status?shared=1").json()["name"] == "status"
    assert names(client) == []


def test_the_same_again_is_no_change_and_other_content_needs_replace(client: Any) -> None:
    first = post(client).json()
    assert post(client).json() == {**first, "created": False}
    refused = post(client, base="open")
    assert refused.status_code == 409 and "replace=true" in message(refused)
    assert post(client, base="open", replace=True).json()["created"] is True


def test_the_chat_form_is_derived_once_and_only_for_roles(
    client: Any, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = []

    def derive(render: Any, tokens: Any) -> ChatForm:
        chats.append(render)
        return FORM

    monkeypatch.setattr(http_fields, "derive_chat_form", derive)
    post(client, name="raw", pattern="raw: {value}", where={"within": 40})
    assert chats == [] and manager.edits.chat_form is None
    post(client, name="one", pattern="one: {value}")
    post(client, name="two", pattern="two: {value}")
    assert chats == [client.app.state.openai_serving_chat]


def test_without_a_chat_form_roles_are_refused_with_all_reasons_and_raw_text_is_not(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def derive(render: Any, tokens: Any) -> ChatForm:
        raise Unsupported(["opener of user: is text", "suffix: is text"])

    monkeypatch.setattr(http_fields, "derive_chat_form", derive)
    refused = post(client)
    assert refused.status_code == 400
    assert "opener of user: is text; suffix: is text" in message(refused)
    assert names(client) == []
    assert post(client, where={"within": 40}).status_code == 200


def test_a_role_that_the_template_lacks_is_refused(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = ChatForm(
        openers=FORM.openers[1:], closers=(), suffixes=(), lacking=(("system", "not supported"),)
    )
    monkeypatch.setattr(http_fields, "derive_chat_form", lambda render, tokens: form)
    refused = post(client)
    assert refused.status_code == 400 and "system: not supported" in message(refused)
    assert post(client, where={"role": "user"}).status_code == 200


def test_a_server_without_tokenizer_has_no_fields(client: Any, manager: Any) -> None:
    manager.tokenizer = manager.edits.tokenizer = None
    refused = post(client, where={"within": 40})
    assert refused.status_code == 400 and "--skip-tokenizer-init" in message(refused)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"pattern": "status"}, "pattern: expected exactly one {value}, got 0"),
        ({"strategy": "patch"}, "strategy: expected one of recompute"),
        ({"base": "<|im_end|>"}, "base: expected a legal value, got value_markup"),
        ({"name": "a/b"}, "name: expected no"),
        ({"namespace": {"adapter": "lora"}}, "namespace.adapter"),
        ({"memory": True}, "memory: expected one of name"),
    ],
)
def test_a_bad_declaration_is_refused(client: Any, body: Any, says: str) -> None:
    refused = post(client, **body)
    assert refused.status_code == 400 and says in message(refused)
    assert names(client) == []


def test_too_many_fields_are_refused(client: Any) -> None:
    for i in range(MAX_FIELDS):
        assert post(client, name=f"f{i:02}", pattern=f"f{i:02}: {{value}}").status_code == 200
    assert post(client).status_code == 429


def test_a_field_is_an_admins_even_where_clients_may_register_skills(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = host_auth.decide_request_auth
    monkeypatch.setattr(host_auth, "decide_request_auth", lambda **kw: auth.decide(original, **kw))
    client, _ = serve(api_key="KEY", admin_api_key="ADM", client_skills=True)
    client.app.state.openai_serving_chat = object()
    mine = {**BODY, "namespace": "me"}
    key, admin = {"Authorization": "Bearer KEY"}, {"Authorization": "Bearer ADM"}
    assert client.post("/kvedit/fields", json=mine, headers=key).status_code == 403
    assert client.post("/kvedit/fields", content=b"{", headers=key).status_code == 403
    assert client.post("/kvedit/fields", json=mine, headers=admin).status_code == 200
    path = "/kvedit/fields/status?cache_salt=me"
    assert client.delete(path, headers=key).status_code == 403
    assert client.get(path, headers=key).status_code == 200
    assert client.get(path).status_code == 401
    assert client.delete(path, headers=admin).status_code == 200


def test_a_skill_with_a_declared_field_is_refused_unless_it_is_a_memory(client: Any) -> None:
    post(client)
    skill = {"name": "policy", "text": "the status: open"}
    refused = client.post("/kvedit/skills", json=skill)
    assert refused.status_code == 409 and "'status'" in message(refused)
    assert client.get("/kvedit/skills").json()["skills"] == []
    assert client.post("/kvedit/skills", json={**skill, "namespace": "you"}).status_code == 200
    assert client.post("/kvedit/skills", json={**skill, "shared": True}).status_code == 409
    view = client.post("/kvedit/skills", json={**skill, "memory": True}).json()
    assert (view["memory"], view["state"]) == (True, "ready")


def test_a_field_that_stands_in_a_skill_is_refused_unless_that_is_a_memory_or_retired(
    client: Any,
) -> None:
    skill = {"name": "policy", "text": "the status: open"}
    client.post("/kvedit/skills", json=skill)
    client.post("/kvedit/skills", json={**skill, "name": "notes", "memory": True})
    refused = post(client)
    assert refused.status_code == 409
    assert "'policy'" in message(refused) and "'notes'" not in message(refused)
    assert post(client, shared=True).status_code == 409
    assert post(client, namespace="you").status_code == 200
    client.delete("/kvedit/skills/policy")
    assert post(client).status_code == 200


def test_memory_is_a_boolean_of_a_skill(client: Any) -> None:
    refused = client.post("/kvedit/skills", json={"name": "a", "text": "b", "memory": "yes"})
    assert refused.status_code == 400 and "memory: expected a boolean" in message(refused)


def test_status_counts_fields_and_warns_about_auto(client: Any) -> None:
    status = client.get("/kvedit/status").json()
    assert (status["fields"], status["warnings"]) == (0, [])
    post(client, strategy="erratum")
    assert client.get("/kvedit/status").json()["warnings"] == []
    post(client, name="mood", pattern="mood: {value}")
    status = client.get("/kvedit/status").json()
    assert status["fields"] == 2
    assert status["warnings"] == [
        "kvedit: strategy auto: expected a quality profile, got none: serving edit+erratum"
    ]


class Engine:
    """The parts of an offline engine that a client of it touches."""

    def __init__(self, manager: Any, loop: Any) -> None:
        manager.server_args = SimpleNamespace(radix_cache_backend="kvedit")
        manager.serving_chat_class = lambda *managers: managers
        self.tokenizer_manager, self.template_manager, self.loop = manager, "templates", loop


def test_an_offline_engine_has_fields_too(
    manager: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    import asyncio

    chats = []
    monkeypatch.setattr(http_fields, "renderer", chats.append)
    loop = asyncio.new_event_loop()
    request.addfinalizer(loop.close)
    fields = kvedit.Client(Engine(manager, loop)).fields
    view = fields.add("status", pattern="status: {value}", namespace="me", base="open")
    assert chats == [(manager, "templates")]
    assert [f["field"] for f in fields.list(namespace="me")] == [view["field"]]
    assert fields.list() == []
    assert fields.show("status", namespace="me")["base"] == "open"
    with pytest.raises(Conflict):
        fields.add("status", pattern="status: {value}", namespace="me", strategy="edit")
    with pytest.raises(BadRequest, match="where: expected either"):
        fields.add("other", pattern="other: {value}", within=4, role="user")
    assert fields.remove("status", namespace="me")["name"] == "status"
    with pytest.raises(NotFound):
        fields.remove("status", namespace="me")


@pytest.fixture
def cli_client(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line, talking to the routes of this process."""

    class Transport:
        def __init__(self, *args: Any) -> None:
            pass

        def request(self, method: str, path: str, query: Any, body: Any) -> Any:
            response = client.request(method, path, params=dict(query), json=body)
            if response.status_code != 200:
                raise kvedit.errors.from_status(response.status_code, message(response))
            return response.json()

    monkeypatch.setattr("kvedit.client.client.HttpTransport", Transport)


@pytest.mark.usefixtures("cli_client")
def test_the_command_line_adds_lists_shows_and_removes(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*argv: str) -> str:
        assert cli.main(["fields", *argv]) == 0
        return capsys.readouterr().out

    added = json.loads(
        run(
            *("add", "status", "--pattern", "status: {value}", "--strategy", "erratum"),
            *("--base", "open", "--role", "user", "--occurrence", "2", "--cache-salt", "me"),
            *("--template", "Status: {name} is {value}", "--anchor", "Now:", "--cross-request"),
        )
    )
    assert added["where"] == {"role": "user", "occurrence": 2} and added["cross_request"] is True
    assert (added["anchor"], added["template"]) == ("Now:", "Status: {name} is {value}")
    run("add", "raw", "--pattern", "raw: {value}", "--within", "50", "--shared")
    table = run("list", "--cache-salt", "me").splitlines()
    assert [line.split()[0] for line in table] == ["name", "status", "raw"]
    assert "user 2" in table[1] and "first 50 tokens" in table[2]
    assert json.loads(run("list", "--json").splitlines()[0])["name"] == "raw"
    assert json.loads(run("show", "status", "--cache-salt", "me"))["base"] == "open"
    overlapping = ["fields", "add", "all", "--pattern", "status: {value}", "--within", "9"]
    assert cli.main([*overlapping, "--shared"]) == 1
    assert "overlap" in capsys.readouterr().err
    run("remove", "status", "--cache-salt", "me")
    run("remove", "raw", "--shared")
    assert cli.main(["fields", "remove", "raw"]) == 1
    assert cli.main(["fields", "add", "a", "--pattern", "no place"]) == 2


@pytest.mark.usefixtures("cli_client")
def test_the_command_line_names_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    add = ["fields", "add", "status", "--pattern", "status: {value}"]
    assert cli.main(add) == 0 and "--kvedit-trust" in capsys.readouterr().err
    assert cli.main([*add, "--base", "open"]) == 1
    assert "or --replace" in capsys.readouterr().err
    assert cli.main(["status"]) == 0
    assert "serving edit+erratum\n" in capsys.readouterr().out
