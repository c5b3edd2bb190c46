"""Reports on the OpenAI routes: ``metadata.kvedit`` of an answer, ``sglext.kvedit`` of a stream.

A stream never gains an event. Its report rides in the usage event where the client asked for one,
else in the finish event where its options ask for a report; otherwise it stays as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

from sglang_patches.guard import boundary
from sglang_patches.http.answers.by_request import Answer, answer_of
from sglang_patches.http.request.wishes import KEY
from sglang_patches.http.services.skill_service import SkillService, is_enabled, service_of

_DATA = "data: "
# As the host spells them; a quote inside a text is escaped, so no answer can spell them.
_NO_CHOICES = '"choices":[]'
_USAGE = '"usage":{'
_FINISH = '"finish_reason":"'


async def add_report(
    original: Callable[..., Awaitable[Any]], handler: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND ``OpenAIServingBase.handle_request``. An error here costs the report only."""
    if not is_enabled(handler.tokenizer_manager):
        return await original(handler, request, raw_request)
    answer = answer_of(raw_request)
    answer.is_echo = _is_echo(request)
    response = await original(handler, request, raw_request)
    service = service_of(handler.tokenizer_manager)
    with boundary("openai_report", lambda: None):
        _attach(response, request, answer, service)
    return response


def _is_echo(request: Any) -> bool:
    from sglang.srt.entrypoints.openai.protocol import CompletionRequest

    return isinstance(request, CompletionRequest) and bool(request.echo)


def _attach(response: Any, request: Any, answer: Answer, service: SkillService) -> None:
    from fastapi.responses import StreamingResponse
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse, CompletionResponse

    if isinstance(response, StreamingResponse):
        if service.config.reports:
            _attach_to_stream(response, request, answer)
    elif isinstance(response, (ChatCompletionResponse, CompletionResponse)):
        report = answer.report()
        if report is None:
            return
        # The first prompt's own report is there already, by the same id.
        if "prompts" in report and answer.namespace is not None:
            service.reports.put(response.id, answer.namespace, report)
        if service.config.reports:
            response.metadata = {**(response.metadata or {}), KEY: report}


def _attach_to_stream(response: Any, request: Any, answer: Answer) -> None:
    options = request.stream_options
    if options is not None and options.include_usage:
        response.body_iterator = in_usage(response.body_iterator, answer)
    elif answer.asked:
        response.body_iterator = in_finish(response.body_iterator, answer)


async def in_usage(events: Any, answer: Answer) -> AsyncIterator[Any]:
    """``events`` with the report in the one that has the usage of the whole answer."""
    try:
        async for event in events:
            text = _text(event)
            is_usage = _NO_CHOICES in text and _USAGE in text
            yield _with_report(text, answer) if is_usage else event
    finally:
        await events.aclose()


async def in_finish(events: Any, answer: Answer) -> AsyncIterator[Any]:
    """``events`` with the report in the first that ends a choice once all prompts have one."""
    is_done = False
    try:
        async for event in events:
            text = _text(event)
            if not is_done and _FINISH in text and answer.is_complete:
                is_done, event = True, _with_report(text, answer)
            yield event
    finally:
        await events.aclose()


def _text(event: Any) -> str:
    return event.decode() if isinstance(event, bytes) else event


def _with_report(event: str, answer: Answer) -> str:
    """An event as it was, with our key behind its own. An error here costs the report only."""
    result = event
    with boundary("openai_report", lambda: None) as hook:
        report = answer.report()
        if report is not None:
            value = orjson.loads(event.removeprefix(_DATA))
            value["sglext"] = {**(value.get("sglext") or {}), KEY: report}
            result = _DATA + orjson.dumps(value).decode() + "\n\n"
    return result if hook.is_well else event
