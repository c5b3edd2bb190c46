"""kvedit.Client and the commands, over a real socket and inside an engine's loop."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

import kvedit
from kvedit.cli import events as events_command
from kvedit.cli.main import main
from kvedit.client.transport import NoServer
from kvedit.config import Config
from kvedit.errors import BadRequest, Conflict, Forbidden, NotFound, Unavailable
from sglang_patches.http.admin.routes import add_routes
from sglang_patches.http.services.auth import Door
from sglang_patches.http.services.skill_service import SkillService
from sglang_patches.scheduler.telemetry.events import EventPublisher


@pytest.fixture
def url(manager: Any) -> Iterator[str]:
    app = FastAPI()
    add_routes(app, SkillService(manager, Config()), Door("KEY", "ADM", open=False))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def engine(manager: Any) -> Iterator[Any]:
    manager.server_args = SimpleNamespace(radix_cache_backend="kvedit")
    loop = asyncio.new_event_loop()
    yield SimpleNamespace(tokenizer_manager=manager, template_manager=None, loop=loop)
    loop.close()


def use(client: kvedit.Client) -> None:
    view = client.register("policy", text="refunds take 30 days", namespace="me")
    assert (view["state"], view["num_tokens"]) == ("ready", 20)
    assert client.show("policy", namespace={"cache_salt": "me", "extra_key": None}) == view
    assert client.skills(namespace="me") == [view] and client.skills() == []
    assert client.skills(everything=True) == [view]
    assert client.status()["events"].startswith("ipc://")
    assert client.audit()["ok"] is True and "segments" in client.tree()
    with pytest.raises(Conflict, match="replace=true"):
        client.register("policy", input_ids=[5, 6], namespace="me")
    with pytest.raises(BadRequest, match="seam"):
        client.register("other", input_ids=[5, 6], seam=3)
    with pytest.raises(NotFound):
        client.show("policy")
    with pytest.raises(BadRequest, match="name"):
        client.show("a/b")
    with pytest.raises(NotFound):
        client.report("unknown")
    assert client.remove("policy", namespace="me")["state"] == "retired"
    shared = client.register("rules", input_ids=range(5, 9), shared=True)
    assert client.remove("rules", shared=True, purge=True)["dropped"] == 1 and shared["shared"]


def test_a_client_over_http_reaches_every_route(url: str) -> None:
    use(kvedit.Client(url, "KEY", "ADM"))


def test_a_client_of_an_engine_reaches_every_route(engine: Any) -> None:
    use(kvedit.Client(engine))


def test_an_engine_without_our_cache_is_refused_by_name(engine: Any) -> None:
    engine.tokenizer_manager.server_args.radix_cache_backend = None
    with pytest.raises(BadRequest, match="radix_cache_backend"):
        kvedit.Client(engine)


def test_what_an_ordinary_key_may_not_do_is_forbidden(url: str) -> None:
    client = kvedit.Client(url, "KEY")
    assert client.skills() == []
    with pytest.raises(Forbidden, match="admin key"):
        client.register("policy", text="refunds")
    with pytest.raises(Forbidden, match="expected a key"):
        kvedit.Client(url).status()


def test_no_server_is_unavailable_with_its_address() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        kvedit.Client("http://127.0.0.1:1").status()


@pytest.fixture
def command(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """command(argument, ...) -> (status, stdout, stderr), as the admin of the server."""
    monkeypatch.setenv("KVEDIT_URL", url)
    monkeypatch.setenv("KVEDIT_ADMIN_API_KEY", "ADM")

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_commands_mirror_the_routes(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "policy.md"
    text.write_text("refunds take 30 days")
    status, out, _ = command("skills", "add", "policy", str(text), "--cache-salt", "me")
    assert status == 0 and json.loads(out)["state"] == "ready"
    monkeypatch.setattr("sys.stdin", io.StringIO("[5, 6, 7]"))
    assert command("skills", "add", "ids", "--ids", "--shared")[0] == 0
    rows = command("skills", "list", "--cache-salt", "me")[1].splitlines()
    assert [row.split()[0] for row in rows] == ["name", "policy", "ids"]
    lines = command("skills", "list", "--json")[1].splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["ids"]
    assert json.loads(command("skills", "show", "ids")[1])["num_tokens"] == 3
    assert command("status")[1].splitlines()[0].split() == ["skills.ready", "2"]
    assert json.loads(command("status", "--json")[1])["skills"] == {"ready": 2}
    assert json.loads(command("skills", "remove", "ids", "--shared", "--purge")[1])["dropped"] == 1


def test_a_refused_command_is_one_line_and_a_status(command: Any) -> None:
    status, out, err = command("skills", "show", "unknown")
    assert status != 0 and out == "" and "unknown" in err and "Traceback" not in err
    assert len(err.splitlines()) == 1


def test_the_conflict_hint_of_the_command_names_its_flag(command: Any, tmp_path: Path) -> None:
    text = tmp_path / "policy.md"
    for words in ("refunds", "returns"):
        text.write_text(words)
        status, _, err = command("skills", "add", "policy", str(text))
    assert status == 1 and "or --replace," in err and "replace=true" not in err


def no_check() -> None:
    pass


def test_events_are_followed_as_lines_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = EventPublisher(tmp_path)
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():  # a subscriber misses what came before it
            publisher.publish("skill_ready", skill="policy")
            time.sleep(0.01)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        events_command.follow(publisher.address, 2, no_check)
    finally:
        stop.set()
        thread.join()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["skill_ready"] * 2


def test_following_ends_when_the_server_is_gone_or_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_command, "SILENCE_MS", 10)
    address = EventPublisher(tmp_path).address
    alive = {"events": address}
    answers = iter([alive, Unavailable("busy"), alive, NoServer("kvedit: gone")])

    def status() -> dict[str, str]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client: Any = SimpleNamespace(status=status)
    with pytest.raises(NoServer, match="gone"):
        events_command.follow(address, None, lambda: events_command.check_server(client, address))
    answers = iter([{"events": "ipc:///another"}])
    with pytest.raises(NoServer, match="started anew"):
        events_command.check_server(client, address)
