"""The host's side of `kvedit.lang`: its frontend language's backends, expressions, parameters."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.chat_template import ChatTemplate
from sglang.lang.interpreter import ProgramState, StreamExecutor
from sglang.lang.ir import SglConstantText, SglExpr, SglSamplingParams
from sglang.lang.tracer import TracerProgramState

from kvedit.client.transport import HttpTransport, Json, NoServer
from kvedit.errors import Forbidden, KvEditError, Unsupported
from kvedit.lang.functions import LIBRARY, MAX_MEMORIES
from kvedit.lang.turn_marks import Message, probe, read_turn_marks
from kvedit.request.options import parse_options

logger = logging.getLogger(__name__)

KEY = "kvedit"
TIMEOUT_S = 600.0


class Service:
    """The /kvedit routes of one server, for one namespace."""

    def __init__(self, base_url: str, key: str | None, namespace: Mapping[str, str] | None) -> None:
        self._transport = HttpTransport(base_url, key, TIMEOUT_S)
        self._namespace = namespace

    def post(self, kind: str, body: Json) -> Json:
        """POST /kvedit/``kind``. Raises the KvEditError the server answered, or NoServer."""
        if self._namespace and not body.get("shared"):
            body = {**body, "namespace": dict(self._namespace)}
        answer: Json = self._transport.request("POST", f"/kvedit/{kind}", {}, body)
        return answer


class Endpoint(RuntimeEndpoint):
    """A server as a backend of programs, with the chat template of its own model.

    ``admin_api_key``: for registering; without one, the server's rule for ``api_key`` decides.
    ``cache_salt``, ``extra_key``: sent with every request; what is registered through this
    endpoint then belongs to that namespace. ``options``: of every request, where the program does
    not set its own. ``chat_template_name``: one of SGLang's, instead of the server's.

    Raises Unsupported when the server's template cannot be told, e.g. since it has no system
    message: name one of SGLang's then.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        *,
        cache_salt: str | None = None,
        extra_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        super().__init__(base_url.rstrip("/"), api_key, None, chat_template_name)
        self.namespace = {
            name: value
            for name, value in (("cache_salt", cache_salt), ("extra_key", extra_key))
            if value
        }
        self.options = dict(options or {})
        parse_options(self.options)
        self.service = Service(self.base_url, admin_api_key or api_key, self.namespace)
        self._memories = Memories(self.service)
        if chat_template_name is None:
            self.chat_template = template_of(HttpTransport(self.base_url, api_key, TIMEOUT_S))

    def _add_images(self, s: StreamExecutor, data: Json) -> None:
        """The one method that sees every request of a program before it is sent.

        Also those of ``fork`` and ``select``, which know nothing of sampling parameters.
        """
        super()._add_images(s, data)
        self._memories.register_those_in(s.text_)
        data.update(self.namespace)
        wanted = {**self.options, **options_of(s.default_sampling_para)}
        if data["sampling_params"]["max_new_tokens"] == 0:
            # It only fills the cache; the prompt it was required for has not come yet.
            wanted = {key: value for key, value in wanted.items() if value != "require"}
        if data.get("stream"):
            wanted = {"report": True, **wanted}
        if wanted:
            data["sampling_params"]["custom_params"] = custom_params(wanted)


class Memories:
    """Which text of each memory one server has compiled."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._seen: dict[str, str] = {}
        self._refused = False

    def register_those_in(self, prompt: str) -> None:
        """Compile the memories of ``prompt`` whose text is new. A failure leaves plain text."""
        if self._refused:
            return
        with self._lock:  # the branches of a fork bring the same memory at once
            if len(self._seen) > MAX_MEMORIES:
                self._seen.clear()  # a text that is registered again costs one short request
            for name, text in LIBRARY.memories_in(prompt, self._seen).items():
                # Also after a failure: not again until the text changes.
                self._seen[name] = text
                self._register(name, text)

    def _register(self, name: str, text: str) -> None:
        try:
            self._service.post(
                "skills", {"name": name, "text": text, "memory": True, "replace": True}
            )
        except (Forbidden, NoServer) as error:
            self._refused = True
            logger.warning("kvedit: memories: expected to register them, got: %s", error)
        except KvEditError as error:
            logger.warning("kvedit: memory %r stays plain text: %s", name, error)


class Params(SglSamplingParams):
    """Sampling parameters with options. The host copies them whole, and forks get the same."""

    kvedit: Json

    def to_srt_kwargs(self) -> Json:
        kwargs: Json = super().to_srt_kwargs()
        if self.kvedit:
            kwargs["custom_params"] = custom_params(self.kvedit)
        return kwargs


def constant(text: str) -> SglExpr:
    return SglConstantText(text)


def is_expression(value: Any) -> bool:
    return isinstance(value, SglExpr)


def service_of(backend: Any) -> Service | None:
    """The routes behind a backend of the frontend language; None when it is no SGLang server."""
    backend = getattr(backend, "endpoint", backend)  # as the host does for its Runtime
    if isinstance(backend, Endpoint):
        return backend.service
    if isinstance(backend, RuntimeEndpoint):
        return Service(backend.base_url, backend.api_key, None)
    return None


def options_of(params: SglSamplingParams) -> Json:
    return params.kvedit if isinstance(params, Params) else {}


def set_options(s: ProgramState, wanted: Mapping[str, Any]) -> None:
    """Replace the options of what follows in ``s``; forks that exist keep theirs."""
    if isinstance(s, TracerProgramState):
        return  # nothing is sent
    s.sync()
    executor = s.stream_executor
    old = executor.default_sampling_para
    fields = {f.name: getattr(old, f.name) for f in dataclasses.fields(SglSamplingParams)}
    params = Params(**fields)
    params.kvedit = dict(wanted)
    executor.default_sampling_para = params


def custom_params(wanted: Mapping[str, Any]) -> Json:
    """One JSON string: under msgpack IPC a nested object would end a server without kvedit.
    Raises BadRequest."""
    parse_options(wanted)
    return {KEY: json.dumps(dict(wanted))}


def template_of(server: HttpTransport) -> ChatTemplate:
    """The chat template by which the server renders ``/v1/chat/completions``.

    Raises Unsupported when programs cannot write the same token ids.
    """
    bos = _text_of(server, _ids_of(server, prompt=""))

    def render(messages: list[Message], add_generation_prompt: bool) -> str:
        asked = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        # The server puts it in front of a prompt that comes as text.
        return _text_of(server, _ids_of(server, **asked)).removeprefix(bos)

    try:
        marks = read_turn_marks(render)
    except Unsupported:
        raise
    except KvEditError as error:
        raise Unsupported([f"chat template: expected one that renders, got: {error}"]) from error
    ours = _ids_of(server, prompt=marks.render(probe(), True))
    if ours != _ids_of(server, messages=probe(), add_generation_prompt=True):
        raise Unsupported(["chat template: expected its token ids from its text, got others"])
    end = marks.around["assistant"][1].strip()
    return ChatTemplate(
        name="kvedit-server",
        default_system_prompt=marks.default_system,
        role_prefix_and_suffix=dict(marks.around),
        stop_str=(end,) if end else (),
    )


def _ids_of(server: HttpTransport, **asked: Any) -> list[int]:
    ids: list[int] = server.request("POST", "/tokenize", {}, asked)["tokens"]
    return ids


def _text_of(server: HttpTransport, ids: list[int]) -> str:
    asked = {"tokens": ids, "skip_special_tokens": False}
    text: str = server.request("POST", "/detokenize", {}, asked)["text"]
    return text
