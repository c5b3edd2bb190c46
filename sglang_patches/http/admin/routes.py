"""The /kvedit routes, on the host's own port."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from kvedit.errors import BadRequest, KvEditError
from kvedit.namespace import MAX_SALT_CHARS
from sglang_patches.http.admin.openapi import add_to_openapi
from sglang_patches.http.admin.table import ROUTES, TESTING, Asked, Route
from sglang_patches.http.services.auth import Caller, Door, Role, is_local
from sglang_patches.http.services.body import read_json
from sglang_patches.http.services.skill_service import SkillService

logger = logging.getLogger(__name__)


def add_routes(app: FastAPI, service: SkillService, door: Door) -> None:
    """Add every route. Must run before the host decides whether it needs its key check."""
    for route in (*ROUTES, TESTING) if service.config.testing else ROUTES:
        # a Starlette route: FastAPI would read and parse the body before our limits
        app.router.add_route(
            route.path.replace("{name}", "{name:path}"),
            _endpoint(route, service, door),
            methods=[route.method],
        )
    add_to_openapi(app, ROUTES)


def _endpoint(
    route: Route, service: SkillService, door: Door
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            caller = _caller(request, door)
            if caller is None:
                return error_response(401, "kvedit: authorization: expected a key of this server")
            return _json(await route.answer(service, _asked(route, request, caller)))
        except KvEditError as error:
            return error_response(error.status, str(error), type(error).__name__)
        except Exception as error:  # the boundary to the host: one request fails, the server lives
            logger.exception("kvedit: %s %s failed", request.method, request.url.path)
            return error_response(500, f"kvedit: {type(error).__name__}: {error}")

    return endpoint


def _asked(route: Route, request: Request, caller: Caller) -> Asked:
    return Asked(
        caller=caller,
        name=request.path_params.get("name", ""),
        flags=frozenset(flag for flag in route.flags if _flag(request, flag)),
        read_body=partial(read_json, request),
        chat=lambda: request.app.state.openai_serving_chat,
    )


def error_response(status: int, message: str, kind: str = "KvEditError") -> Response:
    """The shape of the host's own error answers."""
    content = {"error": {"message": message, "type": kind, "code": status}}
    return _json(content, status)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


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
