"""The routes without HTTP, for an offline ``sglang.Engine`` whose owner is the admin."""

from __future__ import annotations

from typing import Any

from kvedit.errors import BadRequest, NotFound
from sglang_patches.http.admin.auth import Caller
from sglang_patches.http.admin.skill_service import BACKEND, is_enabled, service_of


class Offline:
    def __init__(self, tokenizer_manager: Any, template_manager: Any) -> None:
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
        caller = Caller(True, query.get("cache_salt"), query.get("extra_key"))
        service, (kind, _, name) = self._service, path.removeprefix("/kvedit/").partition("/")
        if (method, kind) == ("POST", "skills"):
            return await service.register(body, caller)
        if (method, kind) == ("DELETE", "skills"):
            shared, purge = query.get("shared") == "1", query.get("purge") == "1"
            return await service.remove(name, caller, shared=shared, purge=purge)
        if (method, path) == ("GET", "/kvedit/skills"):
            return await service.listed(caller, everything=query.get("all") == "1")
        if (method, kind) == ("GET", "skills"):
            return await service.show(name, caller)
        if kind == "fields":
            return await self._fields(method, name, caller, query, body)
        if (method, kind) == ("GET", "requests"):
            return service.request_report(name, caller)
        if (method, path) == ("GET", "/kvedit/status"):
            return await service.status(caller)
        if (method, path) == ("GET", "/kvedit/tree"):
            return await service.tree(caller)
        if (method, path) == ("GET", "/kvedit/audit"):
            return await service.audit(caller)
        raise _no_route(method, path)

    async def _fields(
        self, method: str, name: str, caller: Caller, query: dict[str, str], body: Any
    ) -> Any:
        fields = self._service.fields
        if (method, name) == ("POST", ""):
            return await self._service.declare(body, caller, self._chat)
        if (method, name) == ("GET", ""):
            return await fields.listed(caller)
        if method == "GET":
            return await fields.show(name, caller)
        if method == "DELETE":
            return await fields.remove(name, caller, shared=query.get("shared") == "1")
        raise _no_route(method, f"/kvedit/fields/{name}")

    def _chat(self) -> Any:
        """The chat path that a server over this engine would have."""
        tokenizer_manager, _ = self._managers
        return tokenizer_manager.serving_chat_class(*self._managers)


def _no_route(method: str, path: str) -> NotFound:
    return NotFound(f"kvedit: {method} {path}: expected a route, got an unknown one")
