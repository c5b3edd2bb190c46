"""What a generate request must satisfy, and that everything else passes untouched."""

from __future__ import annotations

import asyncio
import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvedit.config import Config
from kvedit.errors import BadRequest
from sglang_patches.http import gate
from sglang_patches.http.answers import by_request
from sglang_patches.http.answers.reports import Refused
from sglang_patches.http.services import compile_request, skill_service


class Host:
    """A manager whose generate_request is an async generator, as the host's is."""

    def __init__(self, outcomes: list[Any] | None = None, *, backend: str = "kvedit") -> None:
        self.server_args = SimpleNamespace(radix_cache_backend=backend)
        self.model_config = SimpleNamespace(vocab_size=100)
        self.seen: list[Any] = []
        self.outcomes = outcomes or []
        self.closed = 0

    async def generate_request(self, obj: Any, request: Any = None) -> Any:
        obj.normalize_batch_and_arguments()
        self.seen.append(obj.sampling_params)
        try:
            outcome = self.outcomes.pop(0) if self.outcomes else None
            if isinstance(outcome, Exception):
                raise outcome
            yield {"text": "first", "meta_info": {}}
            yield {"text": "second", "meta_info": {}}
        finally:
            self.closed += 1


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins import hook_registry

    wrapped = hook_registry._wrap_fn(Host.generate_request, gate.generate_request, HookType.AROUND)
    assert HookRegistry is hook_registry.HookRegistry
    monkeypatch.setattr(Host, "generate_request", wrapped)


def send(host: Host, **fields: Any) -> list[Any]:
    async def drain() -> list[Any]:
        outputs = host.generate_request(GenerateReqInput(**fields))
        return [output["text"] async for output in outputs]

    return asyncio.run(drain())


@pytest.mark.parametrize(
    ("ids", "where"),
    [
        ([5, 100], "input_ids[1]"),
        ([5, -1], "input_ids[1]"),
        ([5, True], "input_ids[1]"),
        ([[5], [6, 2**40]], "input_ids[1][1]"),
        (array("q", [5, 100]), "input_ids[1]"),
    ],
)
def test_ids_outside_the_vocabulary_never_reach_the_scheduler(ids: Any, where: str) -> None:
    host = Host()
    with pytest.raises(BadRequest, match="expected an int in") as error:
        send(host, input_ids=ids)
    assert where in str(error.value) and host.seen == []


@pytest.mark.parametrize(
    "fields", [{"input_ids": [0, 99]}, {"input_ids": [[1], [2]]}, {"text": "hi"}, {"text": ["a"]}]
)
def test_ordinary_requests_pass_with_every_output(fields: Any) -> None:
    host = Host()
    assert send(host, **fields) == ["first", "second"]
    assert host.closed == 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("register", "custom_params.kvedit:"),
        ([1], "custom_params.kvedit:"),
        (5, "custom_params.kvedit:"),
        (True, "custom_params.kvedit:"),
        ({"op": "register", "name": "x"}, "custom_params.kvedit:"),
        ({"secret": "00"}, "custom_params.kvedit:"),
        ({"splice": "always"}, "custom_params.kvedit.splice"),
        ({"skills": "policy"}, "custom_params.kvedit.skills"),
        ({"skills": ["a", 5]}, "custom_params.kvedit.skills[1]"),
        ({"seam": -1}, "custom_params.kvedit.seam"),
    ],
)
def test_bad_options_are_refused_with_the_path_of_the_key(value: Any, path: str) -> None:
    host = Host()
    params = {"custom_params": {"kvedit": value}}
    for sampling_params in (params, [{}, params]):
        text: Any = "a" if isinstance(sampling_params, dict) else ["a", "b"]
        with pytest.raises(BadRequest) as error:
            send(host, text=text, sampling_params=sampling_params)
        assert path in str(error.value)
    assert host.seen == []


def test_options_go_on_as_one_string_and_the_callers_dicts_stay_as_they_were() -> None:
    host = Host()
    options = {"splice": "require", "skills": ["a", "b"]}
    params = {"temperature": 0, "custom_params": {"mine": 1, "kvedit": options}}
    before = json.dumps(params)
    send(host, text="hi", sampling_params=params)
    assert json.dumps(params) == before
    sent = host.seen[0]["custom_params"]
    assert sent["mine"] == 1 and json.loads(sent["kvedit"])["skills"] == ["a", "b"]
    send(host, text=["a", "b"], sampling_params=params)
    assert [s["custom_params"] for s in host.seen[1]] == [sent, sent]


def test_params_without_our_key_are_the_very_same_object() -> None:
    host, params = Host(), {"custom_params": {"mine": [1, [2]]}}
    send(host, text="hi", sampling_params=params)
    assert host.seen[0] is params


def test_a_server_may_make_every_request_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(config=Config(exact=True), is_used=False)
    monkeypatch.setattr(gate, "service_of", lambda _: fake)
    monkeypatch.setattr(by_request, "service_of", lambda _: fake)
    host = Host()
    send(host, text="hi")
    assert json.loads(host.seen[0]["custom_params"]["kvedit"])["exact"] is True
    with pytest.raises(BadRequest, match="custom_params.kvedit.splice"):
        send(host, text="hi", sampling_params=REQUIRE)


def test_strings_are_checked_once_something_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    send(host, text="hi", rid="\ud800")
    skill_service.service_of(host).is_used = True
    with pytest.raises(BadRequest, match="rid: expected valid Unicode"):
        send(host, text="hi", rid="\ud800")


def test_the_host_sees_its_generator_closed_when_the_reader_stops_early() -> None:
    host = Host()

    async def first_only() -> None:
        outputs = host.generate_request(GenerateReqInput(text="hi"))
        assert (await outputs.__anext__())["text"] == "first"
        await outputs.aclose()
        assert host.closed == 1

    asyncio.run(first_only())


def test_only_the_compile_request_itself_is_unchecked_not_one_that_looks_like_it() -> None:
    host = Host()
    ours = GenerateReqInput(input_ids=[5, 100], rid="kvedit-compile-0")
    compile_request._own_requests.add(id(ours))
    try:
        asyncio.run(anext_of(host, ours))
        with pytest.raises(BadRequest):
            send(host, input_ids=[5, 100], rid="kvedit-compile-0")
    finally:
        compile_request._own_requests.discard(id(ours))


async def anext_of(host: Host, obj: Any) -> None:
    await host.generate_request(obj).__anext__()


class Recompiles:
    def __init__(self, is_ready: bool) -> None:
        self.is_ready, self.waited, self.started = is_ready, [], []

    async def ready(self, numbers: Any, *, timeout_s: float) -> bool:
        self.waited.append((tuple(numbers), timeout_s))
        return bool(numbers) and self.is_ready

    def start(self, numbers: Any) -> list[Any]:
        self.started.append(tuple(numbers))
        return []


REQUIRE = {"custom_params": {"kvedit": {"splice": "require", "skills": ["policy"]}}}


@pytest.fixture
def service_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """service_with(is_ready): every recompile ends so."""

    def build(is_ready: bool) -> Recompiles:
        recompiles = Recompiles(is_ready)
        fake = SimpleNamespace(
            recompiler=recompiles, config=Config(compile_wait_s=10.0), is_used=True
        )
        monkeypatch.setattr(gate, "service_of", lambda _: fake)
        monkeypatch.setattr(by_request, "service_of", lambda _: fake)
        return recompiles

    return build


def test_require_tries_again_once_the_skill_is_back(service_with: Any) -> None:
    recompiles = service_with(True)
    host = Host([Refused("kvedit: policy: evicted", 400, (3,))])
    outputs = send(host, text="hi", cache_salt="me", sampling_params=REQUIRE)
    assert outputs == ["first", "second"] and recompiles.waited == [((3,), 10.0)]


@pytest.mark.parametrize(("is_ready", "evicted"), [(False, (3,)), (True, ())])
def test_require_is_refused_when_the_wait_ends_or_would_not_help(
    service_with: Any, is_ready: bool, evicted: tuple[int, ...]
) -> None:
    service_with(is_ready)
    host = Host([Refused("kvedit: policy: no", 400, evicted)])
    with pytest.raises(Refused, match="no"):
        send(host, text="hi", cache_salt="me", sampling_params=REQUIRE)
    assert len(host.seen) == 1


def test_a_second_refusal_is_final(service_with: Any) -> None:
    service_with(True)
    host = Host([Refused("evicted", 400, (3,)), Refused("differs_at", 400, (3,))])
    with pytest.raises(Refused, match="differs_at"):
        send(host, text="hi", cache_salt="me", sampling_params=REQUIRE)
    assert len(host.seen) == 2


def test_a_batch_starts_the_recompile_but_does_not_wait(service_with: Any) -> None:
    recompiles = service_with(True)
    host = Host([Refused("evicted", 400, (3,))])
    with pytest.raises(Refused):
        send(host, text=["a", "b"], sampling_params=REQUIRE)
    assert (recompiles.started, recompiles.waited) == ([(3,)], [])


def test_without_our_cache_requests_of_other_plugins_pass_as_they_are() -> None:
    host = Host(backend="other")
    params = {"custom_params": {"kvedit": 5}}
    assert send(host, text="hi", sampling_params=params) == ["first", "second"]
    assert host.seen == [params]


def test_one_service_per_manager() -> None:
    host = Host()
    assert skill_service.service_of(host) is skill_service.service_of(host)
    assert skill_service.service_of(host) is not skill_service.service_of(Host())
