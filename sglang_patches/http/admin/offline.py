"""The routes without HTTP, for an offline ``sglang.Engine`` whose owner is the admin."""

from __future__ import annotations

from typing import Any

import msgspec

from kvedit.errors import BadRequest, NotFound
from sglang_patches.host.protocols import TokenizerManager
from sglang_patches.http.admin.table import ROUTES, Asked
from sglang_patches.http.services.auth import Caller
from sglang_patches.http.services.skill_service import BACKEND, is_enabled, service_of


class Offline:
    def __init__(self, tokenizer_manager: TokenizerManager, template_manager: Any) -> None:
        if not is_enabled(tokenizer_manager):
            raise BadRequest(
                f"kvedit: engine: expected radix_cache_backend={BACKEND!r}, got "
                f"{tokenizer_manager.server_args.radix_cache_backend!r}"
            )
        self._service = service_of(tokenizer_manager)
        self._managers = tokenizer_manager, template_manager

    async def answer(
        self, method: str, path: str, query: dict[str, str], body: dict[str, Any] | None
    ) -> Any:
        """What the route would answer. Raises KvEditError, NotFound for an unknown route."""

        async def read_body() -> Any:
            return body

        for route in ROUTES:
            name = route.name_in(path) if route.method == method else None
            if name is None:
                continue
            asked = Asked(
                caller=Caller(True, query.get("cache_salt"), query.get("extra_key")),
                name=name,
                flags=frozenset(flag for flag in route.flags if query.get(flag) == "1"),
                read_body=read_body,
                chat=self._chat,
            )
            return msgspec.to_builtins(await route.answer(self._service, asked))
        raise NotFound(f"kvedit: {method} {path}: expected a route, got an unknown one")

    def _chat(self) -> Any:
        """The chat path that a server over this engine would have."""
        tokenizer_manager, _ = self._managers
        return tokenizer_manager.serving_chat_class(*self._managers)
