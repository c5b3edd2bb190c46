"""Request bodies: read with a limit, parsed strictly, refused with the path of the bad key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request

from kvedit.checks import check_name
from kvedit.errors import BadRequest, KvEditError
from kvedit.namespace import is_unicode, parse_namespace
from kvedit.request.bodies import SkillBody, keys_of

MAX_BODY_BYTES = 8 * 1024 * 1024
DISCARD_FACTOR = 8  # times the limit


class PayloadTooLarge(KvEditError):
    status = 413


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A parsed POST /kvedit/skills. Exactly one of ``text`` and ``input_ids`` is set."""

    name: str
    text: str | None
    input_ids: list[int] | None
    cache_salt: str | None
    extra_key: str | None
    shared: bool
    pin: bool
    seam: int | None
    replace: bool
    memory: bool


_FIELDS = keys_of(SkillBody)


async def read_json(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> Any:
    """The JSON value of a body. Raises PayloadTooLarge (413) and BadRequest (400).

    The host has no limit of its own, so bytes are counted while they arrive. What is somewhat too
    long is read to its end and thrown away: a client that still sends would miss the answer.
    """
    body = bytearray()
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            body += chunk
        elif num_bytes > DISCARD_FACTOR * max_bytes:
            break
    if num_bytes > max_bytes:
        raise PayloadTooLarge(f"kvedit: body: expected at most {max_bytes} bytes, got more")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"kvedit: body: expected JSON, got an error: {error}") from None


def parse_registration(body: Any) -> Registration:
    """Check every field of a registration. Raises BadRequest with all problems at once."""
    if not isinstance(body, dict):
        raise BadRequest(f"kvedit: body: expected an object, got {_kind(body)}")
    problems = [
        f"kvedit: {key}: expected one of {', '.join(_FIELDS)}, got an unknown field"
        for key in map(str, body)
        if key not in _FIELDS
    ]

    def typed(key: str, kind: type, default: Any) -> Any:
        value = body.get(key)
        if value is None:
            return default
        if type(value) is not kind:  # a bool is an int in Python but not in JSON
            problems.append(f"kvedit: {key}: expected {_NAMES[kind]}, got {_kind(value)}")
            return default
        return value

    name = typed("name", str, None)
    text, input_ids = typed("text", str, None), typed("input_ids", list, None)
    seam = typed("seam", int, None)
    shared, pin = typed("shared", bool, False), typed("pin", bool, False)
    replace, memory = typed("replace", bool, False), typed("memory", bool, False)
    cache_salt, extra_key, bad_namespace = parse_namespace(body.get("namespace"))
    problems += bad_namespace

    if body.get("name") is None:
        problems.append("kvedit: name: expected a string, got nothing")
    if (body.get("text") is None) == (body.get("input_ids") is None):
        problems.append('kvedit: body: expected exactly one of "text" and "input_ids"')
    if text == "" or input_ids == []:
        field = "text" if text == "" else "input_ids"
        problems.append(f"kvedit: {field}: expected at least one token, got an empty value")
    if text is not None and not is_unicode(text):
        problems.append("kvedit: text: expected valid Unicode, got a lone surrogate")
    if seam is not None and seam < 0:
        problems.append(f"kvedit: seam: expected an integer >= 0, got {seam}")
    if shared and body.get("namespace") is not None:
        problems.append("kvedit: namespace: expected null for a shared skill, got a namespace")
    if problems:
        raise BadRequest("; ".join(problems))
    check_name(name)
    return Registration(
        name=name,
        text=text,
        input_ids=input_ids,
        cache_salt=cache_salt,
        extra_key=extra_key,
        shared=shared,
        pin=pin,
        seam=seam,
        replace=replace,
        memory=memory,
    )


_NAMES: dict[type, str] = {str: "a string", list: "a list", int: "an integer", bool: "a boolean"}


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
