"""Clients that ask for nothing of ours see a plain SGLang: the same events, the same keys.

Both servers are asked the same twice, so that the second time everything is cached on both. On
ours the prompts hold a skill: there is a report, and no stream shows it.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import BASE, STOCK, Server, ServerPool, fresh_name
from tests.server.texts import english

pytestmark = pytest.mark.real_server
CONFIG = STOCK
TEXT = "paid back by the house in five days. " + english("as stock", 8)
PROMPT = "Rules:\n" + TEXT + "\nWho pays?"
MESSAGES = [{"role": "system", "content": "Rules:\n" + TEXT}, {"role": "user", "content": "Who?"}]


@pytest.fixture(scope="module")
def stock(servers: ServerPool) -> Server:
    return servers.get(STOCK)


@pytest.fixture(scope="module")
def ours(servers: ServerPool) -> Iterator[Server]:
    server = servers.get(BASE)
    name = fresh_name()
    server.call("POST", "/kvedit/skills", {"name": name, "text": TEXT, "shared": True})
    yield server
    server.call("DELETE", f"/kvedit/skills/{name}?shared=1&purge=1")


LIMIT: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
NATIVE = {"sampling_params": {"temperature": 0, "max_new_tokens": 3}}
OLLAMA = {"model": "m", "options": {"temperature": 0, "num_predict": 3}}
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES, **LIMIT}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": PROMPT, **LIMIT}
USAGE = {"stream_options": {"include_usage": True}}
SYSTEM_AND_USER = {"system": "Rules:\n" + TEXT, "messages": MESSAGES[1:]}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"text": PROMPT, **NATIVE}),
    "generate batch": ("/generate", {"text": [PROMPT, "Hi"], **NATIVE}),
    "completions": ("/v1/completions", COMPLETION),
    "completions usage": ("/v1/completions", {**COMPLETION, **USAGE}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat usage": ("/v1/chat/completions", {**CHAT, **USAGE}),
    "responses": (
        "/v1/responses",
        {"model": "m", "input": MESSAGES, "temperature": 0, "max_output_tokens": 3},
    ),
    "messages": ("/v1/messages", {"model": "m", **SYSTEM_AND_USER, **LIMIT}),
    "ollama chat": ("/api/chat", {**OLLAMA, "messages": MESSAGES}),
    "ollama generate": ("/api/generate", {**OLLAMA, "prompt": PROMPT}),
}


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, JSON where they are; of a whole answer the one it is."""
    if path == "/v1/responses":  # the one route that looks at the model's name
        body = {**body, "model": server.call("GET", "/v1/models")["data"][0]["id"]}
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        lines = response.read().decode().splitlines()
    return named([load(line.removeprefix("data: ")) for line in lines if line])


def named(sent: list[Any]) -> list[Any]:
    """Events that have a name ("event: ...") as one object, the data by the name."""
    result: list[Any] = []
    for item in sent:
        is_data_of_named = result and isinstance(result[-1], str) and result[-1] != "[DONE]"
        if is_data_of_named:
            result[-1] = {result[-1]: item}
        else:
            result.append(item)
    return result


def load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # "event: ...", "[DONE]"


def shape(value: Any) -> Any:
    """Keys in their order; of a list the shapes that it has; no other values."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return distinct(value)
    return value if value == "[DONE]" else "."


def distinct(values: list[Any]) -> list[Any]:
    """Shapes without repetition: how many tokens one event carries is a matter of load."""
    shapes: list[Any] = []
    for value in values:
        if shape(value) not in shapes[-1:]:
            shapes.append(shape(value))
    return shapes


def prompt_of(event: Any) -> int:
    """The place of an event's prompt; of all else, before the first."""
    return event.get("index", -1) if isinstance(event, dict) else -1


def without_report(sent: list[Any]) -> list[Any]:
    """An answer and a usage event may have one: the client asked for the latter."""
    for event in sent:
        if isinstance(event, dict):
            (event.get("metadata") or {}).pop("kvedit", None)
            (event.get("meta_info") or {}).pop("kvedit", None)
            if event.get("usage") and event.get("sglext", {}).pop("kvedit", None):
                del event["sglext"]
    return sent


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_answers_as_stock_does(
    stock: Server, ours: Server, route: str, stream: bool
) -> None:
    path, body = ROUTES[route]
    body = {**body, "stream": stream}
    seen = []
    for server in (stock, ours):
        events(server, path, body)
        sent = events(server, path, body)
        if stream and "usage" not in route:
            assert '"kvedit"' not in json.dumps(sent)
        if not stream and isinstance(sent[0], list):
            sent = sent[0]
        if route == "generate batch":  # its prompts are answered side by side
            sent.sort(key=prompt_of)
        seen.append(distinct(without_report(sent)))
    assert seen[0] == seen[1]


def test_usage_says_what_was_cached_on_both(stock: Server, ours: Server) -> None:
    for server in (stock, ours):
        for _ in range(2):
            answer = server.call("POST", "/v1/chat/completions", CHAT)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        message = server.call("POST", "/v1/messages", ROUTES["messages"][1])
        assert message["usage"]["cache_read_input_tokens"] > 0


def test_reports_are_found_by_the_id_of_the_answer(ours: Server) -> None:
    def found(answer_id: str) -> dict[str, Any]:
        report: dict[str, Any] = ours.call("GET", f"/kvedit/requests/{answer_id}")
        return report

    path, body = ROUTES["messages"]
    answer = ours.call("POST", path, body)
    assert answer["id"].startswith("msg_")
    cached = answer["usage"]["cache_read_input_tokens"]
    assert found(answer["id"])["computed"] == answer["usage"]["input_tokens"]
    assert sum(found(answer["id"])[kind] for kind in ("exact", "composed", "derived")) == cached
    sent = events(ours, path, {**body, "stream": True})
    [start] = [event for event in sent if "event: message_start" in event]
    assert found(start["event: message_start"]["message"]["id"])["computed"] > 0
    path, body = ROUTES["responses"]
    assert found(events(ours, path, body)[0]["id"])["computed"] > 0
    for path, body in (ROUTES["ollama chat"], ROUTES["ollama generate"]):
        for stream in (False, True):
            request = urllib.request.Request(
                ours.url + path,
                json.dumps({**body, "stream": stream}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as response:
                response.read()
                assert found(response.headers["x-kvedit-request-id"])["computed"] > 0


def test_the_openai_client_reads_every_event(ours: Server) -> None:
    import openai

    with openai.OpenAI(base_url=ours.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**CHAT)
        parts = [
            e.choices[0].delta.content for e in client.chat.completions.create(**CHAT, stream=True)
        ]
        assert "".join(filter(None, parts)) == whole.choices[0].message.content
        texts = [e.choices[0].text for e in client.completions.create(**COMPLETION, stream=True)]
        assert "".join(texts) == client.completions.create(**COMPLETION).choices[0].text
        *_, last = client.chat.completions.create(**CHAT, stream=True, **USAGE)
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_anthropic_client_reads_every_event(ours: Server) -> None:
    import anthropic

    greedy = {"extra_body": {"temperature": 0}}  # the client knows models without it only
    fields: Any = {"model": "m", **SYSTEM_AND_USER, "max_tokens": 3, **greedy}
    with anthropic.Anthropic(base_url=ours.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text == final.content[0].text
        assert final.usage.output_tokens == whole.usage.output_tokens


def test_langchain_reads_every_event(ours: Server) -> None:
    from langchain_openai import ChatOpenAI

    for usage in (False, True):
        model = ChatOpenAI(
            base_url=ours.url + "/v1", api_key="none", model="m", stream_usage=usage, **LIMIT
        )
        chunks = list(model.stream(MESSAGES))
        whole = model.invoke(MESSAGES)
        assert "".join(str(chunk.content) for chunk in chunks) == whole.content
        assert any(chunk.usage_metadata for chunk in chunks) is usage


def test_litellm_reads_every_event(ours: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    fields: Any = {**CHAT, "model": "openai/m", "api_base": ours.url + "/v1", "api_key": "none"}
    whole = litellm.completion(**fields)
    for extra in ({}, USAGE):
        chunks = list(litellm.completion(**fields, stream=True, **extra))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
