"""The /kvedit routes in the server's /openapi.json, from their declared types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from kvedit.request.bodies import OptionsBody
from sglang_patches.http.admin.table import Route

TAG = "kvedit"
_REFERENCE = "#/components/schemas/{name}"
_NAMESPACE = ("cache_salt", "extra_key")
_ERROR = {
    "description": "what was expected, and what came",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "code": {"type": "integer"},
                        },
                    }
                },
            }
        }
    },
}


def add_to_openapi(app: FastAPI, routes: Sequence[Route]) -> None:
    """``app.openapi()`` shows ``routes`` as well; the host's own part stays as it is."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()  # the host keeps this object, so it is completed once
        if routes[0].path not in document["paths"]:
            _complete(document, routes)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI documents


def _complete(document: dict[str, Any], routes: Sequence[Route]) -> None:
    types = [OptionsBody, *(kind for route in routes for kind in (*route.gives, route.takes))]
    known = list(dict.fromkeys(kind for kind in types if kind is not None))
    references, components = msgspec.json.schema_components(known, ref_template=_REFERENCE)
    schema_of = dict(zip(known, references, strict=True))
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update({name: schema for name, schema in components.items() if name not in schemas})
    for route in routes:
        operations = document["paths"].setdefault(route.path, {})
        operations[route.method.lower()] = _operation(route, schema_of)


def _operation(route: Route, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    answers = [schema_of[kind] for kind in route.gives]
    answer = answers[0] if len(answers) == 1 else {"anyOf": answers}
    operation: dict[str, Any] = {
        "tags": [TAG],
        "summary": route.summary,
        "parameters": _parameters(route),
        "responses": {
            "200": {"description": "done", "content": {"application/json": {"schema": answer}}},
            "default": _ERROR,
        },
    }
    if route.takes is not None:
        schema = schema_of[route.takes]
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    namespace = [
        {"name": key, "in": "query", "schema": {"type": "string"}}
        for key in _NAMESPACE
        if route.takes is None  # a body says it itself
    ]
    flags = [
        {"name": flag, "in": "query", "schema": {"enum": ["0", "1"], "default": "0"}}
        for flag in route.flags
    ]
    return [name] * route.has_name + namespace + flags
