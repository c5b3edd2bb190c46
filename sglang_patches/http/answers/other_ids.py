"""Routes whose answers have an id of their own, or none: their reports are found by it too."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

from sglang_patches.guard import boundary
from sglang_patches.http.answers.by_request import Answer, answer_of
from sglang_patches.http.services.report_ring import ReportRing
from sglang_patches.http.services.skill_service import is_enabled, service_of

ID_HEADER = "x-kvedit-request-id"  # of answers that have no id
_DATA = "data: "
_START = '"type":"message_start"'


async def keep_message(
    original: Callable[..., Awaitable[Any]], handler: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND ``AnthropicServing.handle_messages``: its answers get an id when they are written."""
    from fastapi.responses import JSONResponse, StreamingResponse

    manager = handler.openai_serving_chat.tokenizer_manager
    response = await original(handler, request, raw_request)
    if not is_enabled(manager):
        return response
    answer, ring = answer_of(raw_request), service_of(manager).reports
    with boundary("message_report", lambda: None):
        if isinstance(response, StreamingResponse):
            response.body_iterator = _keep_streamed(response.body_iterator, answer, ring)
        elif isinstance(response, JSONResponse) and response.status_code == 200:
            _keep(orjson.loads(response.body)["id"], answer, ring)
    return response


async def _keep_streamed(events: Any, answer: Answer, ring: ReportRing) -> AsyncIterator[Any]:
    """``events`` unchanged; the report is kept by the id in the first of them."""
    message_id = None
    try:
        async for event in events:
            if message_id is None and _START in event:
                message_id = _message_id(event)
            yield event
        if message_id is not None:
            with boundary("message_report", lambda: None):
                _keep(message_id, answer, ring)
    finally:
        await events.aclose()


def _message_id(event: str) -> str:
    """Of an event ``event: message_start`` with one line of data."""
    data = event.split(_DATA, 1)[1].split("\n", 1)[0]
    return str(orjson.loads(data)["message"]["id"])


def _keep(answer_id: str, answer: Answer, ring: ReportRing) -> None:
    report = answer.report()
    if report is not None and answer.namespace is not None:
        ring.put(answer_id, answer.namespace, report)


async def name_answer(
    original: Callable[..., Awaitable[Any]], handler: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND ``OllamaServing.handle_chat`` and ``handle_generate``: their answers have no id, so
    a header names the request, on a server that is used."""
    from fastapi.encoders import jsonable_encoder
    from fastapi.responses import JSONResponse, Response

    manager = handler.tokenizer_manager
    if not is_enabled(manager) or not service_of(manager).is_used:
        return await original(handler, request, raw_request)
    answer = answer_of(raw_request)
    answer.rid = uuid.uuid4().hex
    response = await original(handler, request, raw_request)
    if not isinstance(response, Response):
        response = JSONResponse(jsonable_encoder(response))  # as the host's framework would
    response.headers[ID_HEADER] = answer.rid
    return response
