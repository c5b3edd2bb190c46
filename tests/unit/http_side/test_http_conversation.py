"""Tokens of conversations: one client sees each, the host and the scheduler see digests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from kvedit.errors import BadRequest
from kvedit.request.options import Options, from_wire
from sglang_patches.http import gate
from sglang_patches.http.request import conversation


class Host:
    """What the host keeps of a request: what it could log, and the output that it may dump."""

    server_args = SimpleNamespace(radix_cache_backend="kvedit")
    model_config = SimpleNamespace(vocab_size=100)

    def __init__(self) -> None:
        self.logged: list[str] = []
        self.dumped: list[Any] = []
        self.options: Options | None = None

    async def generate_request(self, obj: Any, request: Any = None) -> Any:
        obj.normalize_batch_and_arguments()
        self.logged.append(repr(obj))
        params = obj.sampling_params[0] if isinstance(obj.sampling_params, list) else None
        params = params or obj.sampling_params
        self.options = from_wire(params["custom_params"]["kvedit"])
        for finish in (None, {"type": "stop"}):
            meta = {"finish_reason": finish, "kvedit": [{"exact": 3}]}
            self.dumped.append({"text": "x", "meta_info": meta})
            yield self.dumped[-1]


def send(host: Host, options: Any, **fields: Any) -> list[Any]:
    async def drain() -> list[Any]:
        params = {"custom_params": {"kvedit": options}}
        obj = GenerateReqInput(**{"text": "hi", "sampling_params": params} | fields)
        outputs: AsyncGenerator[Any, None] = gate.generate_request(
            Host.generate_request, host, obj, None
        )
        return [output async for output in outputs]

    return asyncio.run(drain())


def token_in(outputs: list[Any]) -> str:
    token: str = outputs[-1]["meta_info"]["kvedit"][0]["conversation"]
    return token


@pytest.mark.parametrize("options", [{"conversation": True}, '{"conversation": true}'])
def test_a_token_comes_with_the_finished_answer_and_stays_nowhere_else(options: Any) -> None:
    host = Host()
    first, last = outputs = send(host, options)
    token = token_in(outputs)
    assert "conversation" not in first["meta_info"]["kvedit"][0]
    assert last["meta_info"]["kvedit"][0]["exact"] == 3 and last["text"] == "x"
    kept = json.dumps(host.dumped) + "".join(host.logged)
    assert token not in kept and token.removeprefix(conversation.PREFIX) not in kept
    assert host.options is not None and host.options.sealed.is_issued
    assert host.options.conversation == host.options.sealed.proof is not None


def test_a_token_that_comes_back_is_known_by_its_digest() -> None:
    host = Host()
    token = token_in(send(host, {"conversation": True}))
    issued = host.options
    answers = send(host, {"conversation": token})
    assert host.options is not None and issued is not None
    assert host.options.sealed.proof == issued.sealed.proof == host.options.conversation
    assert not host.options.sealed.is_issued and token not in "".join(host.logged)
    assert all("conversation" not in a["meta_info"]["kvedit"][0] for a in answers)
    assert len(token.removeprefix(conversation.PREFIX)) == 32
    assert token != token_in(send(host, {"conversation": True}))


def test_names_go_on_as_digests_that_tell_them_apart() -> None:
    host, digests = Host(), []
    for name in ("one", "two", "one"):
        send(host, {"conversation": name, "seam": 3})
        assert host.options is not None and host.options.seam == 3
        assert repr(name) not in host.logged[-1] and f'"{name}"' not in host.logged[-1]
        digests.append(host.options.conversation)
    assert digests[0] == digests[2] != digests[1]


def test_options_without_a_conversation_stay_as_they_are() -> None:
    host = Host()
    send(host, {"seam": 3})
    assert host.options == Options(seam=3)


@pytest.mark.parametrize(
    ("fields", "n"),
    [
        ({"text": ["a", "b"]}, 1),
        ({"text": None, "input_ids": [[1], [2]]}, 1),
        ({}, 2),
        ({"text": ["a", "b"], "as_list": True}, 1),
    ],
)
def test_a_token_is_of_one_prompt_and_one_sample(fields: dict[str, Any], n: int) -> None:
    params: Any = {"n": n, "custom_params": {"kvedit": {"conversation": True}}}
    if fields.pop("as_list", False):
        params = [params, {}]
    with pytest.raises(BadRequest, match="conversation: expected one prompt and n 1"):
        send(Host(), None, sampling_params=params, **fields)
    named = {"n": n, "custom_params": {"kvedit": {"conversation": "a name"}}}
    send(Host(), None, sampling_params=named, **fields)


def test_a_prompt_in_a_list_of_one_gets_its_token() -> None:
    class Listing(Host):
        async def generate_request(self, obj: Any, request: Any = None) -> Any:
            async for output in super().generate_request(obj, request):
                yield [output]

    [answer] = send_to_listing(Listing())[-1]
    assert "conversation" in answer["meta_info"]["kvedit"][0]


def send_to_listing(host: Any) -> list[Any]:
    async def drain() -> list[Any]:
        params = {"custom_params": {"kvedit": {"conversation": True}}}
        obj = GenerateReqInput(text=["hi"], sampling_params=params)
        original = type(host).generate_request
        return [o async for o in gate.generate_request(original, host, obj, None)]

    return asyncio.run(drain())


def test_an_answer_without_a_report_stays_as_it_is() -> None:
    async def outputs() -> AsyncGenerator[Any, None]:
        yield {"meta_info": {"finish_reason": {"type": "abort"}}}

    async def drain() -> list[Any]:
        return [output async for output in conversation.handed_out(outputs(), "t")]

    assert asyncio.run(drain()) == [{"meta_info": {"finish_reason": {"type": "abort"}}}]


def test_a_server_without_reports_makes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not reach its client, who would go on without an edit for ever."""
    monkeypatch.setenv("KVEDIT_REPORT", "off")
    with pytest.raises(BadRequest, match="conversation: expected a name from a server without rep"):
        send(Host(), {"conversation": True})
    send(Host(), {"conversation": "a name"})
