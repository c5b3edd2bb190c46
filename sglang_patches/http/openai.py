"""Reports on the OpenAI routes: ``metadata.kvedit``, or one ``sglext`` chunk when streaming."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

from kvedit.namespace import namespace_tag
from sglang_patches.guard import boundary, trip
from sglang_patches.http.ring import ReportRing
from sglang_patches.http.service import service_of

_DATA = "data: "
_DONE = "data: [DONE]"


async def add_report(
    original: Callable[..., Awaitable[Any]], handler: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND ``OpenAIServingBase.handle_request``. An error here costs the report only."""
    response = await original(handler, request, raw_request)
    with boundary("openai_report", lambda: None):
        trip("openai_report")
        namespace = _namespace(request)
        if namespace is not None:
            _attach(response, namespace, service_of(handler.tokenizer_manager).reports)
    return response


def _namespace(request: Any) -> str | None:
    """Of the first prompt, whose report an answer carries; None for routes that do not generate."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

    if not isinstance(request, (ChatCompletionRequest, CompletionRequest)):
        return None
    salt, key = (
        value[0] if isinstance(value, list) and value else value
        for value in (request.cache_salt, request.extra_key)
    )
    return namespace_tag(salt or None, key or None, None)


def _attach(response: Any, namespace: str, ring: ReportRing) -> None:
    from fastapi.responses import StreamingResponse
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse, CompletionResponse

    if isinstance(response, StreamingResponse):
        response.body_iterator = with_report(response.body_iterator, namespace, ring)
    elif isinstance(response, (ChatCompletionResponse, CompletionResponse)):
        report = ring.find(response.id, namespace)
        if report is not None:
            response.metadata = {**(response.metadata or {}), "kvedit": report}


async def with_report(chunks: Any, namespace: str, ring: ReportRing) -> AsyncIterator[Any]:
    """The server-sent events of one answer, with our chunk in front of the last event.

    The id of the answer is the id of its request; the first chunk that has one gives it.
    """
    head: dict[str, Any] | None = None
    try:
        async for chunk in chunks:
            text = chunk.decode() if isinstance(chunk, bytes) else chunk
            if head is None:
                head = _head(text)
            elif text.startswith(_DONE):
                report = ring.find(head["id"], namespace)
                if report is not None:
                    ours = {**head, "choices": [], "sglext": {"kvedit": report}}
                    yield _DATA + orjson.dumps(ours).decode() + "\n\n"
            yield chunk
    finally:
        await chunks.aclose()


def _head(event: str) -> dict[str, Any] | None:
    """id, object, created and model of an event; None for an event that is no chunk."""
    if not event.startswith(_DATA + "{"):
        return None
    first_line = event[len(_DATA) :].split("\n", 1)[0]
    value = orjson.loads(first_line)
    fields = ("id", "object", "created", "model")
    return {key: value[key] for key in fields} if all(key in value for key in fields) else None
