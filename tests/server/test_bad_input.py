"""Bad input without a spliceable prompt: each refused by name, and the server serves on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import BASE, Server, ServerPool, fresh_name, random_ids

pytestmark = pytest.mark.real_server

IDS = random_ids("bad input", 24)
VOCAB = 49_152  # of the default model
CONTEXT = 8_192


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(BASE)


@pytest.fixture(autouse=True)
def serves_on(server: Server) -> Iterator[None]:
    """After every case another request works and no slot is lost."""
    yield
    assert server.healthy()


@pytest.fixture(scope="module", autouse=True)
def stays_healthy(server: Server) -> Iterator[None]:
    """The host's own check at the end: it takes its time, a second for each call."""
    yield
    assert server.status_of("GET", "/health")[0] == 200


def refused(server: Server, body: Any) -> str:
    before = server.call("GET", "/kvedit/skills?all=1")
    status, message = server.status_of("POST", "/kvedit/skills", body)
    assert status == 400, message
    assert server.call("GET", "/kvedit/skills?all=1") == before
    assert message.startswith("kvedit: ") and len(message) < 1_000
    return str(message)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text": ""}, "text: expected at least one token"),
        ({"input_ids": []}, "input_ids: expected at least one token"),
        ({}, 'exactly one of "text" and "input_ids"'),
        ({"text": "a", "input_ids": [1]}, 'exactly one of "text" and "input_ids"'),
        ({"text": 7}, "text: expected a string, got int"),
        ({"text": ["a"]}, "text: expected a string, got list"),
        ({"input_ids": [1, VOCAB]}, f"input_ids[1]: expected an int in [0, {VOCAB}), got {VOCAB}"),
        ({"input_ids": [2**70]}, "input_ids[0]: expected an int"),
        ({"input_ids": [1, -1]}, "input_ids[1]: expected an int"),
        ({"input_ids": [True]}, "input_ids[0]: expected an int"),
        ({"input_ids": [1.0]}, "input_ids[0]: expected an int"),
        ({"input_ids": [None]}, "input_ids[0]: expected an int"),
        ({"input_ids": ["1"]}, "input_ids[0]: expected an int"),
        ({"input_ids": [[1, 2]]}, "input_ids[0]: expected an int"),
        ({"input_ids": "12"}, "input_ids: expected a list, got str"),
        ({"input_ids": IDS * 400}, "expected 1 to "),
        ({"text": "longer than the context " * 4_000}, "expected 1 to "),
        ({"input_ids": IDS, "seam": -1}, "seam: expected an integer >= 0, got -1"),
        ({"input_ids": IDS, "seam": 25}, "seam: expected an integer in [0, 24]"),
        ({"input_ids": IDS, "seam": True}, "seam: expected an integer, got bool"),
        ({"input_ids": IDS, "seam": 2**40}, "seam: expected an integer in [0, 24]"),
        ({"input_ids": IDS, "pin": "yes"}, "pin: expected a boolean, got str"),
        ({"input_ids": IDS, "shared": 1}, "shared: expected a boolean, got int"),
        ({"input_ids": IDS, "op": "evict_all", "color": 1}, "op: expected one of name, text"),
        ({"input_ids": IDS, "namespace": 7}, "namespace: expected a string or object"),
        ({"input_ids": IDS, "namespace": ""}, "namespace.cache_salt: expected a string of 1"),
        ({"input_ids": IDS, "namespace": {"salt": "a"}}, "namespace.salt: expected cache_salt"),
        ({"input_ids": IDS, "namespace": "s" * 10_000}, "got 10000 characters"),
        ({"input_ids": IDS, "namespace": {"adapter": "lora"}}, "namespace.adapter"),
    ],
)
def test_a_bad_registration_is_refused_by_its_field(
    server: Server, fields: dict[str, Any], says: str
) -> None:
    assert says in refused(server, {"name": fresh_name(), **fields})


def test_all_problems_of_a_registration_are_named_at_once(server: Server) -> None:
    message = refused(server, {"name": 7, "text": "", "seam": -1, "color": 1})
    for part in ("name:", "text:", "seam:", "color:"):
        assert part in message


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "/",
        "..",
        "a..b",
        ".",
        "a\0b",
        "a\nb",
        " a",
        "\u202e",
        "n" * 10_240,
        None,
        7,
        ["a"],
    ],
)
def test_a_bad_name_is_refused(server: Server, name: Any) -> None:
    assert "name" in refused(server, {"name": name, "input_ids": IDS})


@pytest.mark.parametrize(
    "path", ["a%2Fb", "..%2F..%2Fhealth", "%2e%2e", "a%00b", "n" * 10_240, "%ff", "a\\b", ""]
)
def test_a_bad_name_in_a_path_is_refused(server: Server, path: str) -> None:
    for method in ("GET", "DELETE"):
        status, message = server.status_of(method, "/kvedit/skills/" + path)
        assert status in (400, 404), message
        assert len(message) < 1_000


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b'{"name": "a", "input_ids": [1,]}', "expected JSON"),
        (b'{"name": "a", "text": "\xff"}', "expected JSON"),
        (b'{"name": "a", "text": "\\ud800"}', "expected"),
        (b'{"name": "a", "input_ids": [NaN]}', "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b"null", "expected an object, got null"),
        (b"[]", "expected an object, got list"),
        (b'"text"', "expected an object, got str"),
    ],
)
def test_malformed_json_is_refused(server: Server, body: bytes, says: str) -> None:
    assert says in refused(server, body)


def test_a_body_above_the_limit_is_refused_and_says_so(server: Server) -> None:
    body = b'{"name": "a", "text": "' + b"x" * (9 << 20) + b'"}'
    status, message = server.status_of("POST", "/kvedit/skills", body)
    assert status == 413 and "expected at most 8388608 bytes" in message


@pytest.mark.parametrize(
    ("ids", "where"),
    [
        ([5, VOCAB], "input_ids[1]"),
        ([5, 2**40], "input_ids[1]"),
        ([5, 2**62], "input_ids[1]"),
        ([-1], "input_ids[0]"),
        ([[5], [5, VOCAB]], "input_ids[1][1]"),
    ],
)
def test_ids_outside_the_vocabulary_never_reach_the_model(
    server: Server, ids: list[Any], where: str
) -> None:
    """In a plain /generate: stock SGLang ends when its embedding gets one of these."""
    for stream in (False, True):
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "stream": stream}
        status, answer = server.status_of("POST", "/generate", body)
        assert (status, stream) in ((400, False), (200, True))
        assert f"{where}: expected an int in [0, {VOCAB})" in str(answer)


@pytest.mark.parametrize("ids", [[5, True], [5, 1.5], [5, None], [5, "6"], [5, 2**70], [5, [6]]])
def test_what_is_no_id_never_reaches_the_model(server: Server, ids: list[Any]) -> None:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    assert server.status_of("POST", "/generate", body)[0] == 400


def test_ids_outside_the_vocabulary_in_a_completion(server: Server) -> None:
    body = {"model": "default", "prompt": [5, VOCAB], "max_tokens": 1}
    status, message = server.status_of("POST", "/v1/completions", body)
    assert status == 400 and f"expected an int in [0, {VOCAB})" in message


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("auto", "custom_params.kvedit: expected an object or JSON text of one"),
        ("[]", "custom_params.kvedit: expected an object, got list"),
        ("[" * 100_000, "custom_params.kvedit: expected an object or JSON text of one"),
        ([], "custom_params.kvedit: expected an object, got list"),
        (["off"], "custom_params.kvedit: expected an object, got list"),
        (7, "custom_params.kvedit: expected an object, got 7"),
        (2**70, "custom_params.kvedit: expected an object"),
        (True, "custom_params.kvedit: expected an object, got true"),
        ({"splice": "maybe"}, "custom_params.kvedit.splice: expected one of auto, off, require"),
        ({"splice": None}, "custom_params.kvedit.splice"),
        ({"splice": ["off"]}, "custom_params.kvedit.splice"),
        ({"seam": -1}, "custom_params.kvedit.seam: expected an integer >= 0, got -1"),
        ({"seam": 1.5}, "custom_params.kvedit.seam"),
        ({"seam": 2**70}, "custom_params.kvedit.seam"),
        ({"skills": "policy"}, "custom_params.kvedit.skills: expected a list of names"),
        ({"skills": [7]}, "custom_params.kvedit.skills[0]"),
        ({"skills": ["n" * 10_240]}, "custom_params.kvedit.skills[0]"),
        ({"splice": "require"}, "custom_params.kvedit.skills: expected at least one name"),
        ({"splice": "require", "skills": []}, "custom_params.kvedit.skills"),
        ({"splice": "require", "skills": ["nobody"]}, "nobody: unknown_skill"),
        ({"splise": "off"}, "custom_params.kvedit: expected only the keys"),
    ],
)
def test_bad_options_are_refused_with_their_path(server: Server, value: Any, says: str) -> None:
    sampling = {"max_new_tokens": 1, "custom_params": {"kvedit": value}}
    body = {"input_ids": IDS, "sampling_params": sampling}
    status, message = server.status_of("POST", "/generate", body)
    assert status == 400 and says in message
    assert len(message) < 1_000
    chat = {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "custom_params": {"kvedit": value},
    }
    status, message = server.status_of("POST", "/v1/chat/completions", chat)
    assert status == 400 and says in message


def test_null_options_are_no_options(server: Server) -> None:
    answer = server.generate(IDS, sampling_params={"custom_params": {"kvedit": None}})
    assert len(answer.token_ids) == 1


def test_bad_queries_are_refused(server: Server) -> None:
    for query in ("all=yes", "cache_salt=" + "s" * 10_000, "extra_key=" + "k" * 10_000):
        status, message = server.status_of("GET", "/kvedit/skills?" + query)
        assert status == 400 and message.startswith("kvedit: ")


def test_a_bad_testing_command_is_refused(server: Server) -> None:
    for body in (b"{", b"[]", b"{}", b'{"op": "nothing"}'):
        assert server.status_of("POST", "/kvedit/testing", body)[0] == 400
