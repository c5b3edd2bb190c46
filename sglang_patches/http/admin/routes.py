"""The /kvedit routes, on the host's own port."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from kvedit.errors import BadRequest, KvEditError
from kvedit.namespace import MAX_SALT_CHARS
from sglang_patches.http.admin.auth import Caller, Door, Role, is_local
from sglang_patches.http.admin.body import read_json
from sglang_patches.http.admin.skill_service import SkillService

logger = logging.getLogger(__name__)

Answer = Callable[[Request, Caller], Awaitable[Any]]


def add_routes(app: FastAPI, service: SkillService, door: Door) -> None:
    """Add every route. Must run before the host decides whether it needs its key check."""
    fields = service.fields

    async def register(request: Request, caller: Caller) -> Any:
        return await service.register(await read_json(request), caller)

    async def listed(request: Request, caller: Caller) -> Any:
        return await service.listed(caller, everything=_flag(request, "all"))

    async def show(request: Request, caller: Caller) -> Any:
        return await service.show(request.path_params["name"], caller)

    async def remove(request: Request, caller: Caller) -> Any:
        return await service.remove(
            request.path_params["name"],
            caller,
            shared=_flag(request, "shared"),
            purge=_flag(request, "purge"),
        )

    async def declare(request: Request, caller: Caller) -> Any:
        caller.require_admin("fields")  # before a body of megabytes is read
        body = await read_json(request)
        return await service.declare(body, caller, lambda: request.app.state.openai_serving_chat)

    async def fields_listed(request: Request, caller: Caller) -> Any:
        return await fields.listed(caller)

    async def field(request: Request, caller: Caller) -> Any:
        return await fields.show(request.path_params["name"], caller)

    async def undeclare(request: Request, caller: Caller) -> Any:
        name, shared = request.path_params["name"], _flag(request, "shared")
        return await fields.remove(name, caller, shared=shared)

    async def status(request: Request, caller: Caller) -> Any:
        return await service.status(caller)

    async def report(request: Request, caller: Caller) -> Any:
        return service.request_report(request.path_params["request_id"], caller)

    async def tree(request: Request, caller: Caller) -> Any:
        return await service.tree(caller)

    async def audit(request: Request, caller: Caller) -> Any:
        return await service.audit(caller)

    async def testing(request: Request, caller: Caller) -> Any:
        return await service.testing(await read_json(request), caller)

    if service.config.testing:
        app.router.add_route("/kvedit/testing", _endpoint(testing, door), methods=["POST"])
    for method, path, answer in (
        ("POST", "/kvedit/skills", register),
        ("GET", "/kvedit/skills", listed),
        ("GET", "/kvedit/skills/{name:path}", show),
        ("DELETE", "/kvedit/skills/{name:path}", remove),
        ("POST", "/kvedit/fields", declare),
        ("GET", "/kvedit/fields", fields_listed),
        ("GET", "/kvedit/fields/{name:path}", field),
        ("DELETE", "/kvedit/fields/{name:path}", undeclare),
        ("GET", "/kvedit/status", status),
        ("GET", "/kvedit/requests/{request_id:path}", report),
        ("GET", "/kvedit/tree", tree),
        ("GET", "/kvedit/audit", audit),
    ):
        # a Starlette route: FastAPI would read and parse the body before our limits
        app.router.add_route(path, _endpoint(answer, door), methods=[method])


def _endpoint(answer: Answer, door: Door) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            caller = _caller(request, door)
            if caller is None:
                return error_response(401, "kvedit: authorization: expected a key of this server")
            return _json(await answer(request, caller))
        except KvEditError as error:
            return error_response(error.status, str(error), type(error).__name__)
        except Exception as error:  # the boundary to the host: one request fails, the server lives
            logger.exception("kvedit: %s %s failed", request.method, request.url.path)
            return error_response(500, f"kvedit: {type(error).__name__}: {error}")

    return endpoint


def error_response(status: int, message: str, kind: str = "KvEditError") -> Response:
    """The shape of the host's own error answers."""
    content = {"error": {"message": message, "type": kind, "code": status}}
    return _json(content, status)


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _caller(request: Request, door: Door) -> Caller | None:
    host = request.client.host if request.client else None
    local = is_local(host, request.headers)
    role = door.role(request.headers.get("authorization"), local=local)
    if role is None:
        return None
    return Caller(
        admin=role is Role.ADMIN,
        cache_salt=_salt(request, "cache_salt"),
        extra_key=_salt(request, "extra_key"),
    )


def _salt(request: Request, name: str) -> str | None:
    """The host reads an empty salt as none, so do we."""
    value = request.query_params.get(name)
    if value and len(value) > MAX_SALT_CHARS:
        raise BadRequest(
            f"kvedit: {name}: expected at most {MAX_SALT_CHARS} characters, got {len(value)}"
        )
    return value or None


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "0")
    if value not in ("0", "1"):
        raise BadRequest(f"kvedit: {name}: expected 0 or 1, got {value[:40]!r}")
    return value == "1"
