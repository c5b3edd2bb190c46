"""Every /kvedit route in one table: what it takes, what it answers, and who answers it. The HTTP
server, the offline client and /openapi.json read the same lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kvedit.request.bodies import FieldBody, SkillBody
from kvedit.request.report import BatchReport, PromptReport
from kvedit.wire.views import (
    AuditView,
    DeclaredView,
    FieldsView,
    FieldView,
    RemovedView,
    SkillsView,
    SkillView,
    StatusView,
    TreeView,
)
from sglang_patches.http.services.auth import Caller
from sglang_patches.http.services.skill_service import SkillService


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """name: the end of the path. flags: those of the route that are set. read_body: its JSON.
    chat: the host's OpenAIServingChat."""

    caller: Caller
    name: str
    flags: frozenset[str]
    read_body: Callable[[], Awaitable[Any]]
    chat: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Route:
    """path: ``{name}`` at its end stands for all the rest. flags: of the query, 0 or 1.
    gives, takes: declared types of the answer and of the body."""

    method: str
    path: str
    answer: Callable[[SkillService, Asked], Awaitable[Any]]
    summary: str
    gives: tuple[type, ...]
    takes: type | None = None
    flags: tuple[str, ...] = ()

    @property
    def has_name(self) -> bool:
        return self.path.endswith("{name}")

    def name_in(self, path: str) -> str | None:
        """The name in a path of this route; "" where it has none, None for another path."""
        begin = self.path.removesuffix("{name}")
        if not self.has_name:
            return "" if path == self.path else None
        return path[len(begin) :] if path.startswith(begin) and len(path) > len(begin) else None


async def _register(service: SkillService, asked: Asked) -> SkillView:
    return await service.register(await asked.read_body(), asked.caller)


async def _skills(service: SkillService, asked: Asked) -> SkillsView:
    return await service.listed(asked.caller, everything="all" in asked.flags)


async def _skill(service: SkillService, asked: Asked) -> SkillView:
    return await service.show(asked.name, asked.caller)


async def _remove(service: SkillService, asked: Asked) -> RemovedView:
    shared, purge = "shared" in asked.flags, "purge" in asked.flags
    return await service.remove(asked.name, asked.caller, shared=shared, purge=purge)


async def _declare(service: SkillService, asked: Asked) -> DeclaredView:
    asked.caller.require_admin("fields")  # before a body of megabytes is read
    return await service.declare(await asked.read_body(), asked.caller, asked.chat)


async def _fields(service: SkillService, asked: Asked) -> FieldsView:
    return await service.fields.listed(asked.caller)


async def _field(service: SkillService, asked: Asked) -> FieldView:
    return await service.fields.show(asked.name, asked.caller)


async def _undeclare(service: SkillService, asked: Asked) -> FieldView:
    shared = "shared" in asked.flags
    return await service.fields.remove(asked.name, asked.caller, shared=shared)


async def _status(service: SkillService, asked: Asked) -> StatusView:
    return await service.status(asked.caller)


async def _report(service: SkillService, asked: Asked) -> dict[str, Any]:
    return service.request_report(asked.name, asked.caller)


async def _tree(service: SkillService, asked: Asked) -> TreeView:
    return await service.tree(asked.caller)


async def _audit(service: SkillService, asked: Asked) -> AuditView:
    return await service.audit(asked.caller)


async def _testing(service: SkillService, asked: Asked) -> dict[str, Any]:
    return await service.testing(await asked.read_body(), asked.caller)


_SKILL, _FIELD = "/kvedit/skills/{name}", "/kvedit/fields/{name}"
ROUTES = (
    Route(
        "POST",
        "/kvedit/skills",
        _register,
        "Compile a text under a name and wait until it is ready",
        gives=(SkillView,),
        takes=SkillBody,
    ),
    Route(
        "GET",
        "/kvedit/skills",
        _skills,
        "The skills of the caller's namespace and the shared ones; all=1: all (admin)",
        gives=(SkillsView,),
        flags=("all",),
    ),
    Route("GET", _SKILL, _skill, "One skill", gives=(SkillView,)),
    Route(
        "DELETE",
        _SKILL,
        _remove,
        "Retire a skill; purge=1: drop its cached paths too",
        gives=(RemovedView,),
        flags=("shared", "purge"),
    ),
    Route(
        "POST",
        "/kvedit/fields",
        _declare,
        "Declare a field (admin)",
        gives=(DeclaredView,),
        takes=FieldBody,
    ),
    Route(
        "GET",
        "/kvedit/fields",
        _fields,
        "The fields of the caller's namespace and the shared ones",
        gives=(FieldsView,),
    ),
    Route("GET", _FIELD, _field, "One field", gives=(FieldView,)),
    Route(
        "DELETE",
        _FIELD,
        _undeclare,
        "Forget a field (admin)",
        gives=(FieldView,),
        flags=("shared",),
    ),
    Route("GET", "/kvedit/status", _status, "Counts of the server", gives=(StatusView,)),
    Route(
        "GET",
        "/kvedit/requests/{name}",
        _report,
        "What a recent request took from the cache, by its id",
        gives=(PromptReport, BatchReport),
    ),
    Route("GET", "/kvedit/tree", _tree, "The segments (admin)", gives=(TreeView,)),
    Route(
        "GET",
        "/kvedit/audit",
        _audit,
        "Whether every slot of the pool has exactly one owner (admin)",
        gives=(AuditView,),
    ),
)
TESTING = Route(
    "POST", "/kvedit/testing", _testing, "Operations of a server under test (admin)", gives=(dict,)
)
