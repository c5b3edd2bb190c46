"""A tokenizer manager whose scheduler is the real registry without a model behind it."""

from __future__ import annotations

import asyncio
import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from kvedit.config import Config
from kvedit.errors import KvEditError
from kvedit.fields.book import FieldBook
from kvedit.skills.registry import Registry
from sglang_patches.http.admin.auth import Door
from sglang_patches.http.admin.routes import add_routes
from sglang_patches.http.admin.skill_service import SkillService
from sglang_patches.scheduler.commands import field_commands
from sglang_patches.scheduler.telemetry.metrics import Metrics
from sglang_patches.scheduler.telemetry.reporter import Reporter

VOCAB_SIZE = 1000
CONTEXT_LEN = 512


class Tokenizer:
    """One id per character; ``bos`` in front when the caller asks for special tokens."""

    bos_token_id = 1

    def __init__(self, *, adds_bos: bool) -> None:
        self._adds_bos = adds_bos

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        ids = [2 + ord(char) % 900 for char in text]
        return SimpleNamespace(
            input_ids=[1, *ids] if add_special_tokens and self._adds_bos else ids
        )


class Manager:
    """What the service touches of the host. ``held`` keeps compiles from finishing."""

    def __init__(self) -> None:
        self.tokenizer: Any = Tokenizer(adds_bos=False)
        self.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.context_len, self.num_reserved_tokens, self.max_req_input_len = CONTEXT_LEN, 0, 500
        self.registry = Registry("host", 4)
        self.edits: Any = SimpleNamespace(
            fields=FieldBook(),
            chat_form=None,
            tokenizer=self.tokenizer,
            decode=lambda ids: "".join(chr(i - 2) for i in ids),
        )
        self.rooms: Any = SimpleNamespace(
            desk=SimpleNamespace(registry=self.registry),
            edits=self.edits,
            reporter=Reporter(Metrics(export=False, model_name="m")),
        )
        self.commands: list[dict[str, Any]] = []
        self.compiles: list[Any] = []
        self.held: asyncio.Event | None = None
        self.silent: asyncio.Event | None = None
        self.compile_error: Exception | None = None

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, request: Any) -> list[Any]:
        command = json.loads(request.rid.removeprefix("kvedit:"))
        self.commands.append(command)
        if self.silent is not None:
            await self.silent.wait()
        try:
            answer = self._answer(command)
        except KvEditError as error:
            answer = {"error": {"status": error.status, "message": str(error)}}
        state = {"kvedit": answer, "nonce": command["nonce"]}
        return [SimpleNamespace(internal_state=state)]

    async def generate_request(self, request: Any, http_request: Any) -> Any:
        assert http_request is None  # a client that leaves would abort the compile
        self.compiles.append(request)
        if self.held is not None:
            await self.held.wait()
        if self.compile_error is not None:
            raise self.compile_error
        self.registry.compiled(request.rid)
        yield {"meta_info": {"finish_reason": {"type": "length"}}}

    def ops(self) -> list[str]:
        return [command["op"] for command in self.commands]

    def _answer(self, command: dict[str, Any]) -> dict[str, Any]:
        op, registry = command["op"], self.registry
        if op in field_commands.OPERATIONS:
            return field_commands.OPERATIONS[op](None, self.rooms, command)
        if op == "register":
            ids = array("q", command["ids"])
            if not command["memory"]:
                field_commands.check_skill_text(self.rooms, command["name"], command["ns"], ids)
            declared = registry.declare(
                name=command["name"],
                namespace=command["ns"],
                token_ids=ids,
                compile_prefix=array("q", command["prefix"]),
                seam=command["seam"],
                pin=command["pin"],
                replace=command["replace"],
                rid=command["rid"],
                memory=command["memory"],
            )
            return {"outcome": declared.outcome, "skill": declared.skill.view()}
        if op == "compile_failed":
            return {"skill": registry.failed(command["rid"], command["reason"]).view()}
        if op == "show":
            return {"skill": registry.get(command["name"], command["ns"]).view()}
        if op == "list":
            skills = registry.all() if command["all"] else registry.listed(command["ns"])
            return {"skills": [skill.view() for skill in skills]}
        if op == "remove":
            view = registry.get(command["name"], command["ns"]).view()
            if command["purge"]:
                return {
                    "skill": view,
                    "dropped": len(registry.purge(command["name"], command["ns"])),
                }
            return {"skill": registry.retire(command["name"], command["ns"]).view(), "dropped": 0}
        if op == "recompile":
            outcome = registry.recompile(command["number"], command["rid"])
            if outcome != "compile":
                return {"outcome": outcome}
            segment = registry.by_number(command["number"]).segment
            return {
                "outcome": outcome,
                "ids": list(segment.token_ids),
                "prefix": list(segment.compile_prefix),
            }
        if op == "status":
            fields = field_commands.status(self.rooms)
            return {
                "skills": {"ready": len(registry.all())},
                **fields,
                "events": "ipc:///run/events/pub",
            }
        return {"ok": True, "problems": [], "segments": []}


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def serve(manager: Manager) -> Any:
    """serve(...) -> (TestClient, SkillService) of one server configuration."""

    def build(
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        host: str = "127.0.0.1",
        **config: Any,
    ) -> tuple[TestClient, SkillService]:
        service = SkillService(manager, Config(**config))
        app = FastAPI()
        add_routes(app, service, Door(api_key, admin_api_key, service.config.open))
        if api_key or admin_api_key:
            from sglang.srt.utils.auth import add_api_key_middleware

            add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
        return TestClient(app, "http://127.0.0.1", client=(host, 40000)), service

    return build
