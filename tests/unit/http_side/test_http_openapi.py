"""/openapi.json has every /kvedit route with its declared types, and the host's part untouched."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fastapi import FastAPI

from kvedit.fields.declaration_parser import parse_declaration
from kvedit.request.bodies import FieldBody, OptionsBody, SkillBody
from kvedit.request.options import parse_options
from sglang_patches.http.admin.openapi import add_to_openapi
from sglang_patches.http.admin.table import ROUTES
from sglang_patches.http.services.body import parse_registration


@pytest.fixture
def document(serve: Any) -> dict[str, Any]:
    client, _ = serve()
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def test_every_route_stands_in_the_document(document: dict[str, Any]) -> None:
    shown = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        if path.startswith("/kvedit/")
        for method in operations
    }
    assert shown == {(route.method, route.path) for route in ROUTES}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        if isinstance(value, list):
            return set().union(*map(references, value))
        return set()

    found = references(document)
    assert len(found) > 20
    assert {name.rpartition("/")[2] for name in found} <= set(schemas)
    assert "OptionsBody" in schemas  # of generate requests, whose routes are the host's


def test_the_hosts_part_stays() -> None:
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    before = FastAPI.openapi(app)
    app.openapi_schema = None
    add_to_openapi(app, ROUTES)
    after = app.openapi()
    assert after["paths"]["/health"] == before["paths"]["/health"]
    assert app.openapi() is after


def test_a_declared_skill_body_is_what_the_parser_takes() -> None:
    body = SkillBody(name="policy", text="refunds", namespace="me", seam=4, pin=True)
    read = parse_registration(msgspec.to_builtins(body))
    assert (read.name, read.text, read.cache_salt, read.seam, read.pin) == (
        *("policy", "refunds", "me", 4, True),
    )


def test_a_declared_field_body_is_what_the_parser_takes() -> None:
    body = FieldBody(name="status", pattern="status: {value}", base="open", strategy="edit")
    read = parse_declaration(msgspec.to_builtins(body))
    assert (read.name, read.base, read.strategy) == ("status", "open", "edit")


def test_declared_options_are_what_the_parser_takes() -> None:
    body = OptionsBody(splice="require", skills=["policy"], seam=3, conversation=True)
    read = parse_options(msgspec.to_builtins(body))
    assert (read.splice, read.skills, read.seam, read.conversation) == (
        *("require", ("policy",), 3, True),
    )


def test_what_routes_answer_is_what_they_declare(serve: Any) -> None:
    client, _ = serve()
    client.post("/kvedit/skills", json={"name": "policy", "text": "refunds"})
    declared = {(route.method, route.path): route.gives[0] for route in ROUTES}
    for path in ("skills", "skills/policy", "fields", "status", "tree", "audit"):
        route = "/kvedit/skills/{name}" if path == "skills/policy" else f"/kvedit/{path}"
        answer = client.get(f"/kvedit/{path}")
        assert answer.status_code == 200
        view = msgspec.json.decode(answer.content, type=declared["GET", route])
        assert msgspec.to_builtins(view) == answer.json()  # not a key more
