"""Registering, reading and removing skills: route logic and bad input."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from kvedit.config import Config
from kvedit.errors import Conflict
from sglang_patches.http.services.auth import Caller
from sglang_patches.http.services.skill_service import SkillService

ADMIN = Caller(admin=True)


def post(client: Any, **body: Any) -> Any:
    return client.post("/kvedit/skills", json=body)


def message(response: Any) -> str:
    return str(response.json()["error"]["message"])


def test_a_registered_skill_is_ready_and_found_under_its_namespace_only(serve: Any) -> None:
    client, _ = serve()
    view = post(client, name="policy", text="refunds", namespace="me").json()
    assert (view["state"], view["num_tokens"], view["version"]) == ("ready", 7, 1)
    assert client.get("/kvedit/skills/policy?cache_salt=me").json()["id"] == view["id"]
    assert client.get("/kvedit/skills/policy").status_code == 404
    assert client.get("/kvedit/skills/policy?cache_salt=you").status_code == 404
    assert client.get("/kvedit/skills/policy?extra_key=me").status_code == 404
    names = [skill["name"] for skill in client.get("/kvedit/skills?cache_salt=me").json()["skills"]]
    assert names == ["policy"]
    assert client.get("/kvedit/skills").json()["skills"] == []
    assert len(client.get("/kvedit/skills?all=1").json()["skills"]) == 1


def test_shared_skills_are_seen_from_every_namespace(serve: Any) -> None:
    client, _ = serve()
    post(client, name="policy", text="refunds", shared=True)
    assert client.get("/kvedit/skills/policy?cache_salt=me").json()["shared"] is True


def test_same_content_is_idempotent_and_other_content_needs_replace(
    serve: Any, manager: Any
) -> None:
    client, _ = serve()
    first = post(client, name="policy", text="refunds").json()
    assert post(client, name="policy", text="refunds").json()["id"] == first["id"]
    assert len(manager.compiles) == 1
    assert post(client, name="policy", text="returns").status_code == 409
    replaced = post(client, name="policy", text="returns", replace=True).json()
    assert (replaced["version"], replaced["state"]) == (2, "ready")


def test_the_compile_prefills_the_prefix_of_the_tokenizer_in_front_of_the_text(
    serve: Any, manager: Any
) -> None:
    manager.tokenizer._adds_bos = True
    client, _ = serve()
    assert post(client, name="policy", text="ab").json()["num_tokens"] == 2
    assert manager.compiles[0].input_ids == [1, 2 + ord("a"), 2 + ord("b")]
    register = next(command for command in manager.commands if command.op == "register")
    assert (list(register.skill.compile_prefix), len(register.skill.token_ids)) == ([1], 2)


def test_a_tokenizer_that_ends_texts_gives_no_prefix(manager: Any) -> None:
    from sglang_patches.http.services.skill_text import compile_prefix

    ends = lambda text, add_special_tokens: SimpleNamespace(input_ids=[9])  # noqa: E731
    assert compile_prefix(ends) == []
    assert compile_prefix(None) == []


def test_a_server_without_tokenizer_takes_ids_only(serve: Any, manager: Any) -> None:
    manager.tokenizer = None
    client, _ = serve()
    assert post(client, name="policy", text="refunds").status_code == 400
    assert post(client, name="policy", input_ids=[5, 6]).json()["num_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"name": "a", "text": ""}, "text: expected at least one token"),
        ({"name": "a", "input_ids": []}, "input_ids: expected at least one token"),
        ({"name": "a"}, "exactly one of"),
        ({"name": "a", "text": "x", "input_ids": [5]}, "exactly one of"),
        ({"text": "x"}, "name: expected a string"),
        ({"name": 5, "text": "x"}, "name: expected a string, got int"),
        ({"name": "a/b", "text": "x"}, "name:"),
        ({"name": "..", "text": "x"}, "name:"),
        ({"name": "a\0b", "text": "x"}, "name:"),
        ({"name": "n" * 10_000, "text": "x"}, "name: expected 1 to 200 characters"),
        ({"name": "a", "input_ids": [5, 1000]}, "input_ids[1]"),
        ({"name": "a", "input_ids": [5, -1]}, "input_ids[1]"),
        ({"name": "a", "input_ids": [5, True]}, "input_ids[1]"),
        ({"name": "a", "input_ids": [5, "6"]}, "input_ids[1]"),
        ({"name": "a", "input_ids": [5, 6.0]}, "input_ids[1]"),
        ({"name": "a", "input_ids": [5] * 500}, "got 500"),
        ({"name": "a", "text": "x" * 600}, "got 600"),
        ({"name": "a", "text": "x", "seam": -1}, "seam: expected"),
        ({"name": "a", "text": "x", "seam": 2}, "seam: expected"),
        ({"name": "a", "text": "x", "seam": True}, "seam: expected an integer, got bool"),
        ({"name": "a", "text": "x", "pin": 1}, "pin: expected a boolean, got int"),
        ({"name": "a", "text": "x", "sema": 1}, "sema: expected one of"),
        ({"name": "a", "text": "x", "namespace": 5}, "namespace: expected a string or object"),
        (
            {"name": "a", "text": "x", "namespace": ""},
            "namespace.cache_salt: expected a string of 1",
        ),
        ({"name": "a", "text": "x", "namespace": {"salt": "x"}}, "namespace.salt"),
        (
            {"name": "a", "text": "x", "namespace": {"adapter": "l"}},
            "adapters are refused",
        ),
        ({"name": "a", "text": "x", "namespace": "me", "shared": True}, "namespace: expected null"),
        ([], "body: expected an object, got list"),
    ],
)
def test_bad_bodies_are_refused_by_name_and_nothing_reaches_the_scheduler(
    serve: Any, manager: Any, body: Any, says: str
) -> None:
    client, _ = serve()
    response = client.post("/kvedit/skills", json=body)
    assert response.status_code == 400 and says in message(response), response.text
    assert manager.compiles == []
    assert client.get("/kvedit/status").status_code == 200


def test_all_problems_of_a_body_come_in_one_answer(serve: Any) -> None:
    client, _ = serve()
    text = message(post(client, name=5, seam=-1, sema=1))
    assert all(part in text for part in ("name:", "seam:", "sema:", "exactly one of"))


@pytest.mark.parametrize("raw", [b"", b"{", b'{"name": NaN}', b"\xff\xfe", b"[" * 100_000])
def test_bytes_that_are_no_json_are_a_400(serve: Any, raw: bytes) -> None:
    client, _ = serve()
    response = client.post("/kvedit/skills", content=raw)
    assert response.status_code == 400 and "expected JSON" in message(response)


def test_a_body_over_the_limit_is_a_413_whether_or_not_it_declares_its_length(serve: Any) -> None:
    client, _ = serve()
    big = b" " * (8 * 1024 * 1024 + 1)
    assert client.post("/kvedit/skills", content=big).status_code == 413
    assert client.post("/kvedit/skills", content=iter([big])).status_code == 413


@pytest.mark.parametrize("name", ["a%2Fb", "a%00b", "", "n" * 10_000])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_bad_names_in_a_path_are_a_400(serve: Any, method: str, name: str) -> None:
    client, _ = serve()
    response = client.request(method, f"/kvedit/skills/{name}")
    assert response.status_code == 400 and "name:" in message(response)


def test_a_bad_flag_is_a_400(serve: Any) -> None:
    client, _ = serve()
    assert client.delete("/kvedit/skills/policy?purge=yes").status_code == 400


def test_a_failed_compile_is_told_to_the_scheduler_and_to_the_caller(
    serve: Any, manager: Any
) -> None:
    client, _ = serve()
    manager.compile_error = ValueError("The input is longer than")
    response = post(client, name="policy", text="refunds")
    assert response.status_code == 400 and "longer than" in message(response)
    assert client.get("/kvedit/skills/policy").json()["state"] == "failed"
    manager.compile_error = None
    assert post(client, name="policy", text="refunds").json()["state"] == "ready"


def test_an_unexpected_error_is_a_500_with_its_message_and_the_server_lives(
    serve: Any, manager: Any
) -> None:
    client, _ = serve()
    manager.compile_error = RuntimeError("boom")
    response = post(client, name="policy", text="refunds")
    assert response.status_code == 500 and "boom" in message(response)
    assert client.get("/kvedit/skills/policy").json()["state"] == "failed"


def test_removing_retires_and_purging_drops(serve: Any, manager: Any) -> None:
    client, _ = serve()
    post(client, name="policy", text="refunds")
    assert client.delete("/kvedit/skills/policy").json()["state"] == "retired"
    assert client.delete("/kvedit/skills/policy").status_code == 404
    post(client, name="policy", text="refunds")
    purged = client.delete("/kvedit/skills/policy?purge=1").json()
    assert (purged["state"], purged["pinned"], purged["dropped"]) == ("purged", False, 1)
    assert manager.registry.all() == []


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_racing_registrations_of_one_name_compile_once(manager: Any) -> None:
    async def race() -> None:
        service = SkillService(manager, Config())
        manager.held = asyncio.Event()
        same = [asyncio.create_task(service.register(body("refunds"), ADMIN)) for _ in range(3)]
        other = asyncio.create_task(service.register(body("returns"), ADMIN))
        while not manager.compiles:
            await asyncio.sleep(0)
        manager.held.set()
        views = await asyncio.gather(*same)
        assert {view.state for view in views} == {"ready"}
        assert len(manager.compiles) == 1
        with pytest.raises(Conflict):
            await other

    run(race())


def test_a_caller_that_leaves_does_not_stop_the_compile(manager: Any) -> None:
    async def leave() -> None:
        service = SkillService(manager, Config())
        manager.held = asyncio.Event()
        caller = asyncio.create_task(service.register(body("refunds"), ADMIN))
        while not manager.compiles:
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        manager.held.set()
        view = await service.register(body("refunds"), ADMIN)
        assert view.state == "ready" and len(manager.compiles) == 1

    run(leave())


@pytest.mark.parametrize("has_shared", [False, True])
def test_a_skill_that_is_removed_while_it_compiles_is_a_conflict(
    manager: Any, has_shared: bool
) -> None:
    async def remove_early() -> None:
        service = SkillService(manager, Config())
        if has_shared:
            await service.register({**body("rules"), "shared": True}, ADMIN)
            manager.compiles.clear()
        manager.held = asyncio.Event()
        registration = asyncio.create_task(service.register(body("refunds"), ADMIN))
        while not manager.compiles:
            await asyncio.sleep(0)
        await service.remove("policy", ADMIN)
        manager.held.set()
        with pytest.raises(Conflict, match="while it compiled"):
            await registration

    run(remove_early())


def body(text: str) -> dict[str, Any]:
    return {"name": "policy", "text": text}


def test_reads_come_from_the_last_answer_while_the_scheduler_is_busy(manager: Any) -> None:
    async def busy() -> None:
        service = SkillService(manager, Config())
        service._mirror._fresh_within_s = 0.01
        await service.register(body("refunds"), ADMIN)
        assert (await service.show("policy", ADMIN)).stale is UNSET
        manager.silent = asyncio.Event()
        stale = await service.show("policy", ADMIN)
        assert stale.stale is True and stale.state == "ready"
        manager.silent.set()
        await asyncio.sleep(0)
        manager.silent = None
        await service.remove("policy", ADMIN)
        assert (await service.listed(ADMIN)).skills[0].state == "retired"

    run(busy())


def test_a_first_read_waits_for_a_scheduler_that_is_busy(manager: Any) -> None:
    async def busy() -> None:
        service = SkillService(manager, Config())
        service._mirror._fresh_within_s = 0.01
        await service.register(body("refunds"), ADMIN)
        manager.silent = asyncio.Event()
        reading = asyncio.create_task(service.show("policy", ADMIN))
        await asyncio.sleep(0.05)
        assert not reading.done()
        manager.silent.set()
        assert (await reading).stale is UNSET

    run(busy())


def test_the_secret_of_the_skills_namespace_is_new_per_start_and_in_no_answer(
    serve: Any, manager: Any
) -> None:
    client, _ = serve()
    answer = post(client, name="a", text="refunds").text
    serve()[0].post("/kvedit/skills", json={"name": "b", "text": "refunds"})
    secrets = {c.secret for c in manager.commands if c.op == "register"}
    assert len(secrets) == 2 and all(len(s) == 64 and s not in answer for s in secrets)
