"""kvedit.lang against a stand-in for the server that keeps what programs send."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import sglang as sgl
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from kvedit import lang
from kvedit.errors import BadRequest, NotFound, Unsupported
from kvedit.lang import functions
from kvedit.request.options import parse_options

POLICY = "Refunds take five days.\n"
PATTERN = "order_status: {value}"
REPORT = {"exact": 1, "composed": 2, "derived": 0, "computed": 3}


class StandIn:
    """One token per character; ChatML. ``refuse``: path -> (status, message)."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.refuse: dict[str, tuple[int, str]] = {}
        self.bos = "<s>"
        self.refuses_system = False

    def sent(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body in self.requests if where == path]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in self.refuse:
            status, message = self.refuse[path]
            # the host's own shape of a route that it does not have
            return status, {"detail": message} if status == 404 else {"error": {"message": message}}
        self.requests.append((path, body))
        if path == "/get_model_info":
            return 200, {"model_path": "some/model"}
        if path == "/tokenize":
            return self.tokenize(body)
        if path == "/detokenize":
            return 200, {"text": "".join(map(chr, body["tokens"]))}
        if path == "/generate":
            if isinstance(body["text"], list):
                logprobs = {"input_token_logprobs": [[-1.0, 1, "a"], [-2.0, 2, "b"]]}
                return 200, [
                    {"meta_info": {**logprobs, "output_token_logprobs": []}} for _ in body["text"]
                ]
            return 200, {"text": "yes", "meta_info": {"prompt_tokens": 5, "kvedit": [REPORT]}}
        return 200, {"name": body.get("name"), "state": "ready"}

    def tokenize(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "prompt" in body:
            text = self.bos + body["prompt"]
        elif self.refuses_system and body["messages"][0]["role"] == "system":
            return 400, {"object": "error", "message": "no system role"}
        else:
            text = self.bos + "".join(
                f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in body["messages"]
            )
            text += "<|im_start|>assistant\n" if body["add_generation_prompt"] else ""
        return 200, {"tokens": list(map(ord, text))}


@pytest.fixture
def stand_in() -> Iterator[tuple[StandIn, str]]:
    server = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            server.keys.append(self.headers.get("authorization"))
            status, answer = server.answer(self.path, json.loads(raw or b"{}"))
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield server, f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def server(stand_in: tuple[StandIn, str]) -> StandIn:
    return stand_in[0]


@pytest.fixture
def url(stand_in: tuple[StandIn, str]) -> str:
    return stand_in[1]


@pytest.fixture(autouse=True)
def own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_patches.frontend import endpoint as host

    own = functions.Library()
    monkeypatch.setattr(functions, "LIBRARY", own)
    monkeypatch.setattr(host, "LIBRARY", own)


@sgl.function
def ask(s: Any, status: str, wanted: dict[str, Any]) -> None:
    lang.options(s, **wanted)
    s += sgl.system(lang.field("order_status", status) + "\n" + lang.skill("policy"))
    s += sgl.user("Where is it?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=4))


def known(backend: Any = None) -> lang.Registration:
    return lang.register(
        backend, skills={"policy": POLICY}, fields={"order_status": {"pattern": PATTERN}}
    )


def options_of(body: dict[str, Any]) -> dict[str, Any]:
    """What a request asks for; the server gets it as one JSON string."""
    text = body["sampling_params"].get("custom_params", {"kvedit": "{}"})["kvedit"]
    assert isinstance(text, str)
    parse_options(text)  # as the server will
    options = json.loads(text)
    return {key: value for key, value in options.items() if value is not None}


def test_a_program_writes_the_prompt_of_the_chat_route(server: StandIn, url: str) -> None:
    known()
    state = ask.run("sent", {}, backend=lang.Endpoint(url))
    assert state["answer"] == "yes"
    [body] = server.sent("/generate")
    # without the token that the server puts in front of text by itself
    assert body["text"] == (
        "<|im_start|>system\norder_status: sent\nRefunds take five days.\n<|im_end|>\n"
        "<|im_start|>user\nWhere is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "custom_params" not in body["sampling_params"]
    assert body["sampling_params"]["stop"] == ["<|im_end|>"]


def test_report_unwraps_the_host_s_list(url: str) -> None:
    known()
    state = ask.run("sent", {}, backend=lang.Endpoint(url))
    assert lang.report(state, "answer") == REPORT
    with pytest.raises(NotFound, match="'other'.*none of this name"):
        lang.report(state, "other")


def test_report_of_a_failed_generation_says_why(server: StandIn, url: str) -> None:
    known()
    backend = lang.Endpoint(url)
    server.refuse["/generate"] = (400, "kvedit: no such thing")
    with pytest.warns(UserWarning):
        state = ask.run("sent", {}, backend=backend)
        with pytest.raises(NotFound, match="no such thing"):
            lang.report(state, "answer")


@pytest.mark.parametrize("kind", [lang.Endpoint, RuntimeEndpoint])
def test_options_go_with_the_requests_of_a_program(
    server: StandIn, url: str, kind: type[RuntimeEndpoint]
) -> None:
    known()
    ask.run("sent", {"splice": "off", "seam": 3}, backend=kind(url)).text()
    [body] = server.sent("/generate")
    asked = options_of(body)
    assert (asked["splice"], asked["seam"]) == ("off", 3)
    assert body["sampling_params"]["max_new_tokens"] == 4


def test_a_program_s_options_stand_in_place_of_the_endpoint_s(server: StandIn, url: str) -> None:
    known()
    backend = lang.Endpoint(url, options={"splice": "off", "seam": 1})
    ask.run("sent", {"seam": 2}, backend=backend).text()
    asked = options_of(server.sent("/generate")[0])
    assert (asked["splice"], asked["seam"]) == ("off", 2)


def test_options_are_checked_where_they_are_written(url: str) -> None:
    known()
    with pytest.raises(BadRequest, match="custom_params.kvedit.splice"):
        ask.run("sent", {"splice": "maybe"}, backend=lang.Endpoint(url))
    with pytest.raises(BadRequest, match="custom_params.kvedit.seam"):
        lang.Endpoint(url, options={"seam": -1})


@sgl.function
def branches(s: Any) -> None:
    s += "Shared text. "
    lang.options(s, splice="require", skills=["policy"])
    forks = s.fork(2)
    for i, branch in enumerate(forks):
        branch += f"Branch {i}. " + lang.skill("policy") + sgl.gen("out", max_tokens=2)
    for branch in forks:
        branch.sync()
    s += sgl.select("choice", choices=["a", "b"])


def test_forks_inherit_options_and_their_own_requests_require_nothing(
    server: StandIn, url: str
) -> None:
    known()
    backend = lang.Endpoint(url, cache_salt="tenant")
    assert branches.run(backend=backend)["choice"] in ("a", "b")
    bodies = server.sent("/generate")
    assert {body["cache_salt"] for body in bodies} == {"tenant"}
    generations = [body for body in bodies if body["sampling_params"]["max_new_tokens"]]
    assert len(generations) == 2 and len(bodies) == 5  # fork: 1, select: 2
    assert {options_of(body)["splice"] for body in generations} == {"require"}
    fillers = [body for body in bodies if body not in generations]
    assert [options_of(body)["skills"] for body in fillers] == [["policy"]] * 3
    assert {options_of(body).get("splice", "auto") for body in fillers} == {"auto"}


def test_options_wait_for_what_was_said_before(server: StandIn, url: str) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "One" + sgl.gen("one", max_tokens=1)
        lang.options(s, splice="off")
        s += "Two" + sgl.gen("two", max_tokens=1)
        lang.options(s)
        s += "Three" + sgl.gen("three", max_tokens=1)

    program.run(backend=lang.Endpoint(url)).text()
    assert [options_of(body).get("splice") for body in server.sent("/generate")] == [
        None,
        "off",
        None,
    ]


def test_register_posts_and_says_what_the_server_took(server: StandIn, url: str) -> None:
    backend = lang.Endpoint(url, "client-key", "admin-key", cache_salt="tenant")
    done = known(backend)
    assert done.skills["policy"]["state"] == "ready" and "order_status" in done.fields
    [skill], [field] = server.sent("/kvedit/skills"), server.sent("/kvedit/fields")
    assert (skill["name"], skill["text"]) == ("policy", POLICY)
    assert (field["name"], field["pattern"]) == ("order_status", PATTERN)
    assert skill["namespace"] == field["namespace"] == {"cache_salt": "tenant"}
    assert server.keys[-1] == "Bearer admin-key"
    lang.register(backend, skills={"policy": POLICY}, shared=True, pin=True, replace=True)
    shared = server.sent("/kvedit/skills")[-1]
    assert shared["shared"] and shared["pin"] and shared["replace"] and "namespace" not in shared


def test_register_through_the_host_s_own_endpoint(server: StandIn, url: str) -> None:
    done = known(RuntimeEndpoint(url, api_key="key"))
    assert set(done.skills) == {"policy"} and server.keys[-1] == "Bearer key"


@pytest.mark.parametrize(
    ("status", "message"), [(403, "kvedit: expected the admin key"), (404, "runs without kvedit")]
)
def test_without_rights_or_kvedit_a_program_is_plain_text(
    server: StandIn, url: str, status: int, message: str
) -> None:
    server.refuse |= dict.fromkeys(("/kvedit/skills", "/kvedit/fields"), (status, message))
    backend = lang.Endpoint(url)
    done = known(backend)
    assert not done.skills and not done.fields
    assert message in done.refused["policy"] and message in done.refused["order_status"]
    assert ask.run("sent", {}, backend=backend)["answer"] == "yes"


def test_other_errors_of_a_registration_are_raised(server: StandIn, url: str) -> None:
    server.refuse["/kvedit/skills"] = (400, "kvedit: text: expected less")
    with pytest.raises(BadRequest, match="expected less"):
        known(lang.Endpoint(url))


class Echo(BaseBackend):
    """A backend that is no SGLang server."""

    def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        return f"{len(s.text_)}", {}


def test_another_backend_gets_plain_text() -> None:
    done = known(Echo())
    assert (done.skills, done.fields, done.refused) == ({}, {}, {})
    state = ask.run("sent", {"splice": "off"}, backend=Echo())
    assert "order_status: sent\nRefunds take five days." in state.text()
    assert lang.report(state, "answer") is None


def test_tracing_sees_the_texts() -> None:
    known()
    nodes = ask.trace(status="sent", wanted={}, backend=Echo()).flatten_nodes()
    values = [getattr(node, "value", None) for node in nodes]
    assert POLICY in values and "order_status: sent" in values


def test_a_field_takes_an_expression_and_a_pattern_with_an_end(url: str) -> None:
    lang.register(None, fields={"mood": {"pattern": "<mood>{value}</mood>"}})

    @sgl.function
    def program(s: Any) -> None:
        s += lang.field("mood", sgl.gen("mood", max_tokens=1)) + lang.field("mood", 7)

    assert program.run(backend=Echo()).text() == "<mood>6</mood><mood>7</mood>"


@pytest.mark.parametrize("value", ["", "  ", "a\nb", "a\n", "a\u2028b", "a\x00", "a" * 5000])
def test_a_value_is_one_line(value: str) -> None:
    known()
    with pytest.raises(BadRequest, match="expected one line of text"):
        lang.field("order_status", value)


def test_unknown_names_and_bad_declarations() -> None:
    with pytest.raises(NotFound, match="skill 'nobody': expected one given to register"):
        lang.skill("nobody")
    with pytest.raises(NotFound, match="field 'nobody'"):
        lang.field("nobody", "x")
    for pattern in ("no value", "{value}{value}", None):
        with pytest.raises(BadRequest, match="pattern: expected text with one {value}"):
            lang.register(None, fields={"f": {"pattern": pattern}})
    with pytest.raises(BadRequest, match="name"):
        lang.register(None, skills={"a/b": "text"})
    with pytest.raises(BadRequest, match="expected a text"):
        lang.memory("m", " ")


@sgl.function
def remember(s: Any, name: str, text: str) -> None:
    s += lang.memory(name, text) + "Go on." + sgl.gen("out", max_tokens=1)


def test_a_memory_is_registered_at_first_use_and_at_each_change(server: StandIn, url: str) -> None:
    backend = lang.Endpoint(url, cache_salt="tenant")
    for text in ("Likes tea.\n", "Likes tea.\n", "Likes coffee.\n"):
        remember.run("profile", text, backend=backend).text()
    order = [path for path, _ in server.requests if path in ("/generate", "/kvedit/skills")]
    assert order == ["/kvedit/skills", "/generate", "/generate", "/kvedit/skills", "/generate"]
    assert server.sent("/kvedit/skills") == [
        {
            "name": "profile",
            "text": text,
            "memory": True,
            "replace": True,
            "namespace": {"cache_salt": "tenant"},
        }
        for text in ("Likes tea.\n", "Likes coffee.\n")
    ]


def test_a_memory_of_another_prompt_is_not_registered(server: StandIn, url: str) -> None:
    lang.memory("other", "Owns a boat.\n")
    remember.run("profile", "Likes tea.\n", backend=lang.Endpoint(url)).text()
    assert [body["name"] for body in server.sent("/kvedit/skills")] == ["profile"]


@pytest.mark.parametrize(("status", "tries"), [(403, 0), (429, 1)])
def test_a_memory_that_is_refused_stays_plain_text(
    server: StandIn, url: str, caplog: pytest.LogCaptureFixture, status: int, tries: int
) -> None:
    backend = lang.Endpoint(url)
    server.refuse["/kvedit/skills"] = (status, "kvedit: not now")
    assert remember.run("profile", "Likes tea.\n", backend=backend)["out"] == "yes"
    assert "not now" in caplog.text
    del server.refuse["/kvedit/skills"]
    # Without rights it never asks again; after a passing refusal the next text is tried.
    remember.run("profile", "Likes tea.\n", backend=backend).text()
    remember.run("profile", "Likes coffee.\n", backend=backend).text()
    assert len(server.sent("/kvedit/skills")) == tries


def test_memories_are_bounded(url: str) -> None:
    for i in range(functions.MAX_MEMORIES + 1):
        lang.memory(f"m{i}", f"text {i}.")
    assert functions.LIBRARY.memories_in("text 0.", {}) == {}
    assert functions.LIBRARY.memories_in("text 1.", {}) == {"m1": "text 1."}


def test_a_template_without_system_must_be_named(server: StandIn, url: str) -> None:
    server.refuses_system = True
    with pytest.raises(Unsupported, match="no system role"):
        lang.Endpoint(url)
    assert lang.Endpoint(url, chat_template_name="gemma-it").chat_template.name == "gemma-it"


def test_a_template_whose_text_has_other_ids_is_refused(
    server: StandIn, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize = server.tokenize

    def with_a_seam(body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = tokenize(body)
        return status, {"tokens": answer["tokens"] + [0] * ("messages" in body)}

    monkeypatch.setattr(server, "tokenize", with_a_seam)
    with pytest.raises(Unsupported):
        lang.Endpoint(url)
