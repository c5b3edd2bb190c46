"""How an answer gets its report: by the request it answers, in no stream that did not ask."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    CompletionResponse,
    UsageInfo,
)
from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.requests import Request
from starlette.responses import StreamingResponse

from kvedit.config import Config
from kvedit.errors import NotFound
from kvedit.namespace import namespace_tag
from kvedit.splice.token_classes import COUNTS
from sglang_patches import guard
from sglang_patches.http.answers import by_request as answers
from sglang_patches.http.answers import openai, other_ids
from sglang_patches.http.answers.by_request import Answer, answer_of, answered
from sglang_patches.http.request.wishes import settled
from sglang_patches.http.services.report_ring import ReportRing

DEFAULT = namespace_tag(None, None, None)


def report(computed: int) -> dict[str, Any]:
    return {**dict.fromkeys(COUNTS, 0), "computed": computed, "spans": [], "refused": []}


def request(**options: Any) -> GenerateReqInput:
    """A request that the host has taken in; ``options`` are our client's."""
    fields = options.pop("fields", {})
    params = {"n": options.pop("n", 1), "custom_params": {"kvedit": options}}
    obj = GenerateReqInput(**{"text": "hi", "sampling_params": params, **fields})
    obj.sampling_params = settled(obj, is_exact=False)
    obj.normalize_batch_and_arguments()
    return obj


def output(number: int | None = None, **fields: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {"id": "r"}
    if number is not None:
        meta["kvedit"] = [report(number)]
    return {"meta_info": meta, **fields}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """serve(obj, outputs) -> (what leaves, answer) on a server of this configuration."""

    def run(obj: Any, outputs: list[Any], **config: Any) -> tuple[list[Any], Answer]:
        service = SimpleNamespace(config=Config(**config))
        monkeypatch.setattr(answers, "service_of", lambda _: service)
        answer = Answer()

        async def stream() -> Any:
            for one in outputs:
                yield one

        async def drain() -> list[Any]:
            return [one async for one in answered(stream(), None, obj, answer)]

        return asyncio.run(drain()), answer

    return run


def kinds(outputs: list[Any]) -> list[bool]:
    return ["kvedit" in one["meta_info"] for one in outputs]


@pytest.mark.parametrize(
    ("options", "stream", "config", "shown"),
    [
        ({}, False, {}, True),
        ({}, True, {}, False),
        ({"report": True}, True, {}, True),
        ({"report": True}, True, {"reports": False}, False),
        ({}, False, {"reports": False}, False),
    ],
)
def test_an_answer_has_its_report_and_a_stream_one_that_asked(
    serve: Any, options: dict[str, Any], stream: bool, config: Any, shown: bool
) -> None:
    obj = request(**options, fields={"stream": stream})
    left, answer = serve(obj, [output(), output(5)], **config)
    assert kinds(left) == [False, shown]
    assert answer.report() == report(5), "known in any case, for the ring"


def test_no_samples_are_one_as_the_host_serves_them(serve: Any) -> None:
    for stream in (False, True):
        obj = request(n=0, report=True, fields={"stream": stream})
        left, answer = serve(obj, [output(5)])
        assert kinds(left) == [True] and answer.report() == report(5)


def test_beams_of_a_stream_show_none_either(serve: Any) -> None:
    finish = output(5)
    finish["meta_info"]["beam_results"] = [output(5), output()]
    [left], _ = serve(request(fields={"stream": True}), [finish])
    assert "kvedit" not in json.dumps(left)


def test_several_prompts_are_added_up_by_the_first_sample_of_each(serve: Any) -> None:
    obj = request(n=2, fields={"text": ["a", "b"], "cache_salt": ["s", "t"]})
    left, answer = serve(obj, [[output(number) for number in (1, 20, 3, 40)]])
    assert kinds(left[0]) == [True] * 4, "each item of a list keeps its own"
    whole = answer.report()
    assert whole is not None and whole["computed"] == 4
    assert whole["prompts"] == [report(1), report(3)]
    assert answer.namespace is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "a"}, (None, None)),
        ({"text": "a", "cache_salt": "s", "extra_key": "k"}, ("s", "k")),
        ({"text": ["a", "b"]}, (None, None)),
        ({"text": ["a", "b"], "cache_salt": "s"}, ("s", None)),
        ({"text": ["a", "b"], "cache_salt": ["s", "s"], "extra_key": "k"}, ("s", "k")),
        ({"text": ["a", "b"], "cache_salt": ["s", "t"]}, None),
        ({"text": ["a", "b"], "cache_salt": ["s", ""]}, None),
        ({"text": ["a", "b"], "cache_salt": "s", "extra_key": ["k", "l"]}, None),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_is_of_a_namespace_only_where_all_its_prompts_are(
    serve: Any, n: int, fields: dict[str, Any], expected: Any
) -> None:
    _, answer = serve(request(n=n, fields=fields), [output()])
    assert answer.namespace == (expected and namespace_tag(*expected, None))


def test_a_report_of_several_namespaces_is_kept_for_none_of_them() -> None:
    answer = answered_by(5, 6)
    answer.namespace = None
    response = completion()
    wanted = CompletionRequest(model="m", prompt=["a", "b"])
    _, ring = attach(response, wanted, answer)
    assert response.metadata is not None and "kvedit" in response.metadata, "who asked sees it"
    with pytest.raises(NotFound):
        ring.get("r1", DEFAULT)
    other_ids._keep("msg_1", answer, ring)
    with pytest.raises(NotFound):
        ring.get("msg_1", DEFAULT)


def test_streams_of_several_prompts_are_complete_with_the_last_one(serve: Any) -> None:
    obj = request(fields={"text": ["a", "b"], "stream": True})
    _, half = serve(obj, [output(1, index=1), output(index=0)])
    assert not half.is_complete and half.report() is None
    _, whole = serve(obj, [output(1, index=1), output(2, index=0)])
    assert whole.is_complete and whole.report()["prompts"] == [report(2), report(1)]


def test_an_error_costs_the_report_only(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_note", lambda *_: 1 / 0)
    left, answer = serve(request(), [output(5)])
    assert kinds(left) == [False] and answer.report() is None


def test_an_answer_hangs_on_its_request_and_on_no_id() -> None:
    scope = {"type": "http", "headers": []}
    mine, other = Request(scope), Request({"type": "http", "headers": []})
    answer_of(mine).is_echo = True
    assert answer_of(Request(scope)).is_echo and not answer_of(other).is_echo
    assert answer_of(None) is not answer_of(None)


def answered_by(*numbers: int, asked: bool = False) -> Answer:
    answer = Answer(asked=asked, namespace=DEFAULT, _num_outputs=len(numbers))
    for place, number in enumerate(numbers):
        answer.take(place, report(number))
    return answer


def attach(
    response: Any, wanted: Any, answer: Answer, *, reports: bool = True
) -> tuple[list[Any], ReportRing]:
    """The events that leave (none of a whole answer), and what was kept."""
    ring = ReportRing(9)
    service: Any = SimpleNamespace(config=Config(reports=reports), reports=ring)
    openai._attach(response, wanted, answer, service)
    return _drained(response), ring


def _drained(response: Any) -> list[Any]:
    async def drain() -> list[Any]:
        return [event async for event in response.body_iterator]

    return asyncio.run(drain()) if isinstance(response, StreamingResponse) else []


def stream_of(*events: Any) -> StreamingResponse:
    async def stream() -> Any:
        for event in events:
            yield event

    return StreamingResponse(stream())


def event(**fields: Any) -> str:
    body = {"id": "r1", "model": "m", **fields}
    return "data: " + json.dumps(body, separators=(",", ":")) + "\n\n"


TEXT = event(choices=[{"index": 0, "text": '"choices":[] "usage":{', "finish_reason": None}])
FINISH = event(choices=[{"index": 0, "finish_reason": "stop"}])
USAGE = event(choices=[], usage={"prompt_tokens": 5})
DONE = "data: [DONE]\n\n"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = ChatCompletionRequest(**CHAT, stream=True)
WITH_USAGE = ChatCompletionRequest(**CHAT, stream=True, stream_options={"include_usage": True})


def load(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text.removeprefix("data: "))
    return value


def test_the_usage_event_carries_the_report_and_no_event_is_added() -> None:
    sent = [TEXT, FINISH, USAGE, DONE]
    got, _ = attach(stream_of(*sent), WITH_USAGE, answered_by(5))
    assert [*got[:2], got[3]] == [*sent[:2], DONE]
    assert load(got[2]) == {**load(USAGE), "sglext": {"kvedit": report(5)}}
    assert list(load(got[2]))[-1] == "sglext", "the host's keys stay in their order"


def test_an_event_whose_report_failed_at_the_last_is_the_hosts_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = [TEXT, FINISH, USAGE, DONE]
    monkeypatch.setattr(guard, "fail_point", lambda _: 1 / 0)
    got, _ = attach(stream_of(*sent), WITH_USAGE, answered_by(5))
    assert got == sent


def test_without_a_usage_event_the_finish_event_carries_it_where_it_was_asked_for() -> None:
    sent = [TEXT, FINISH, FINISH, DONE]
    got, _ = attach(stream_of(*sent), PLAIN, answered_by(5, asked=True))
    assert load(got[1])["sglext"] == {"kvedit": report(5)}
    assert [got[0], *got[2:]] == [TEXT, FINISH, DONE]


@pytest.mark.parametrize(
    ("wanted", "asked", "reports"),
    [(PLAIN, False, True), (PLAIN, True, False), (WITH_USAGE, True, False)],
)
def test_a_stream_that_did_not_ask_is_the_very_same(
    wanted: Any, asked: bool, reports: bool
) -> None:
    response = stream_of(TEXT, FINISH, USAGE, DONE)
    iterator = response.body_iterator
    attach(response, wanted, answered_by(5, asked=asked), reports=reports)
    assert response.body_iterator is iterator


def test_streams_without_report_and_error_events_pass_unchanged() -> None:
    for sent in ([TEXT, USAGE, DONE], [event(error={"message": "no"}), DONE], [": ping\n\n"]):
        got, _ = attach(stream_of(*sent), WITH_USAGE, Answer())
        assert got == sent


def completion(rid: str = "r1") -> CompletionResponse:
    return CompletionResponse(
        id=rid, model="m", choices=[], usage=UsageInfo(), metadata={"weight_version": "default"}
    )


def test_a_whole_answer_carries_the_report_in_metadata() -> None:
    wanted = CompletionRequest(model="m", prompt="a")
    response = completion()
    _, ring = attach(response, wanted, answered_by(5))
    assert response.metadata == {"weight_version": "default", "kvedit": report(5)}
    response = completion()
    attach(response, wanted, answered_by(5), reports=False)
    assert response.metadata == {"weight_version": "default"}
    response = completion()
    attach(response, wanted, Answer())
    assert response.metadata == {"weight_version": "default"}


def test_an_answer_to_several_prompts_is_found_by_its_own_id() -> None:
    response = completion()
    _, ring = attach(response, CompletionRequest(model="m", prompt=["a", "b"]), answered_by(5, 6))
    assert response.metadata is not None
    assert ring.get("r1", DEFAULT) == response.metadata["kvedit"]
    assert response.metadata["kvedit"]["computed"] == 11


def test_a_streamed_message_is_kept_by_its_id_and_passes_unchanged() -> None:
    start = 'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1"}}\n\n'
    sent = [start, "event: message_stop\ndata: {}\n\n"]
    ring = ReportRing(9)
    response = stream_of(*sent)
    response.body_iterator = other_ids._keep_streamed(response.body_iterator, answered_by(5), ring)
    assert _drained(response) == sent
    assert ring.get("msg_1", DEFAULT) == report(5)
