"""A tokenizer manager whose scheduler is the real registry without a model behind it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from kvedit.config import Config
from kvedit.fields.book import FieldBook
from kvedit.skills.registry import Registry
from kvedit.wire.commands import AnyCommand
from kvedit.wire.envelope import command_in, unseal
from sglang_patches.http.admin.routes import add_routes
from sglang_patches.http.services.auth import Door
from sglang_patches.http.services.skill_service import SkillService
from sglang_patches.scheduler.commands import dispatch, server_commands
from sglang_patches.scheduler.skills.desk import SkillDesk
from sglang_patches.scheduler.skills.pins import PinBook
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
            weight_epoch=0,
        )
        self.rooms = self._rooms()
        self.commands: list[AnyCommand] = []
        self.compiles: list[Any] = []
        self.held: asyncio.Event | None = None
        self.silent: asyncio.Event | None = None
        self.compile_error: Exception | None = None

    def _rooms(self) -> Any:
        """The scheduler's rooms, but for a tree: no skill of theirs has KV."""
        config = Config(testing=True)
        tree = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 500),
            evictable_size=lambda: 0,
            protected_size=lambda: 0,
        )
        reporter = Reporter(Metrics(export=False, model_name="m"))
        reporter.publisher = SimpleNamespace(  # type: ignore[assignment]
            address="ipc:///run/events/pub", publish=lambda *args, **kwargs: None
        )
        pins = PinBook(0, lambda node: None, lambda lock: None)
        desk = SkillDesk(self.registry, pins, tree, reporter, config, 1)  # type: ignore[arg-type]
        return SimpleNamespace(
            config=config,
            desk=desk,
            edits=self.edits,
            reporter=reporter,
            tree=tree,
            pool_size=500,
            copies=SimpleNamespace(queue=()),
        )

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, request: Any) -> list[Any]:
        self.commands.append(command_in(unseal(request.rid)))
        if self.silent is not None:
            await self.silent.wait()
        reply = dispatch.answered(None, self.rooms, request.rid)
        return [SimpleNamespace(internal_state={"kvedit": reply})]

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
        return [command.op for command in self.commands]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    monkeypatch.setattr(server_commands, "audit_scheduler", lambda scheduler: [])  # has no slots
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
