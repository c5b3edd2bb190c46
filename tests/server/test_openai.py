"""Skills registered as text, recognised inside chats and completions, and where reports come out.

A tokenizer merges across the edges of a text that stands in another one, so up to 8 tokens of a
skill may be spelled otherwise in a prompt: those are computed, the rest is spliced.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.harness import BASE, Server, ServerPool, fresh_name
from tests.server.texts import english

pytestmark = pytest.mark.real_server

MAX_SKIPPED = 8
SEAM = 16
GREEDY = {"max_tokens": 3, "temperature": 0}
CLASSES = ("exact", "composed", "derived", "computed")


@dataclass
class Skill:
    name: str
    text: str
    num_tokens: int


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(BASE)


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model_dir)


@pytest.fixture(scope="module")
def skill(server: Server) -> Iterator[Skill]:
    name = fresh_name()
    text = "funds are paid back by the house. " + english(name, 12)
    view = server.call("POST", "/kvedit/skills", {"name": name, "text": text})
    assert view["state"] == "ready" and view["version"] == 1
    yield Skill(name, text, view["num_tokens"])
    server.call("DELETE", f"/kvedit/skills/{name}?purge=1")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def assert_spliced(report: dict[str, Any], skill: Skill, prompt_tokens: int) -> None:
    [span] = report["spans"]
    assert span["skill"] == skill.name
    assert report["refused"] == []
    assert sum(report[kind] for kind in CLASSES) == prompt_tokens
    fewest = skill.num_tokens - SEAM - 2 * MAX_SKIPPED
    assert fewest <= report["composed"] <= skill.num_tokens
    assert report["composed"] == span["stop"] - span["start"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("The re", "And so on."),
        ("Rule one.\n\n", "\n\n"),
        ("\u00fcber\u00e9", "2024"),
        (" ", " "),
    ],
    ids=["bare", "inside-a-word", "newlines", "accents", "spaces"],
)
def test_a_skill_inside_a_text_whatever_stands_at_its_edges(
    server: Server, skill: Skill, tokenizer: Any, before: str, after: str
) -> None:
    text = english(("edge", before), 3) + before + skill.text + after + "Why?"
    raw = server.call("POST", "/generate", generate_body(text))
    [report] = raw["meta_info"]["kvedit"]
    assert_spliced(report, skill, raw["meta_info"]["prompt_tokens"])
    # What was spliced is spelled in the skill as in the prompt.
    [span] = report["spans"]
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    ids = tokenizer(skill.text, add_special_tokens=False).input_ids
    at = span["start"] - span["delta"]
    assert prompt[span["start"] : span["stop"]] == ids[at : at + report["composed"]]


def generate_body(text: Any, **fields: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": 3, "temperature": 0}, **fields}


GREEDY_NATIVE = {"max_new_tokens": 3, "temperature": 0}


def messages(skill: Skill, seed: Any) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"{english(seed, 2)}\n\nRules:\n{skill.text}\n\nBe brief."},
        {"role": "user", "content": "Who pays?"},
    ]


def test_chat_and_completions_carry_the_report_in_metadata(server: Server, skill: Skill) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": messages(skill, "chat")},
        "/v1/completions": {"prompt": english("completion", 2) + "\n" + skill.text + "\n"},
    }
    for path, body in bodies.items():
        answer = server.call("POST", path, {"model": "default", **GREEDY, **body})
        report = answer["metadata"]["kvedit"]
        assert_spliced(report, skill, answer["usage"]["prompt_tokens"])
        assert "weight_version" in answer["metadata"], "the host's own metadata stays"
        assert answer["choices"][0]["finish_reason"] in ("length", "stop")
        assert server.call("GET", f"/kvedit/requests/{answer['id']}") == report
        again = server.call("POST", path, {"model": "default", **GREEDY, **body})
        assert again["metadata"]["kvedit"]["copied"] == 0
        assert again["metadata"]["kvedit"]["computed"] == 1


STREAMED = {"stream": True, **GREEDY}
USAGE = {"stream_options": {"include_usage": True}}
ASKS = {"custom_params": {"kvedit": {"report": True}}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_carries_its_report_in_an_event_it_has_anyway(
    server: Server, skill: Skill, path: str
) -> None:
    """In the usage event where there is one, in the finish event where a report is asked for."""
    if path == "/v1/completions":
        body: dict[str, Any] = {"prompt": english("stream", 2) + "\n" + skill.text + "\n"}
    else:
        body = {"messages": messages(skill, "chat stream")}
    body = {"model": "default", **STREAMED, **body}
    for wanted, carries in (({**USAGE}, "usage"), ({**USAGE, **ASKS}, "usage"), (ASKS, "finish")):
        *chunks, done = events(server, path, {**body, **wanted})
        assert done == "[DONE]"
        sent = [json.loads(chunk) for chunk in chunks]
        [with_report] = [chunk for chunk in sent if "kvedit" in json.dumps(chunk)]
        report = with_report["sglext"]["kvedit"]
        assert list(with_report)[-1] == "sglext"
        if carries == "usage":
            assert with_report is sent[-1] and with_report["choices"] == []
            usage = with_report["usage"]
            assert sum(report[kind] for kind in CLASSES) == usage["prompt_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == usage["prompt_tokens"] - report["computed"]
        else:
            assert with_report["choices"][0]["finish_reason"] == "length"
        assert report["spans"][0]["skill"] == skill.name
        assert server.call("GET", f"/kvedit/requests/{with_report['id']}") == report


PROVES = {"custom_params": {"kvedit": {"conversation": True}}}


@pytest.mark.parametrize("usage", [{}, USAGE], ids=["finish", "usage"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_hands_out_its_token_once(
    server: Server, skill: Skill, path: str, usage: dict[str, Any]
) -> None:
    """In the one event that has the report, and nowhere that an id leads to."""
    said = english("token", 2)
    turn = {"prompt": said} if path == "/v1/completions" else {"messages": messages(skill, said)}
    *chunks, _ = events(server, path, {"model": "default", **STREAMED, **turn, **usage, **PROVES})
    [with_token] = [chunk for chunk in map(json.loads, chunks) if "kvc-" in json.dumps(chunk)]
    token = with_token["sglext"]["kvedit"]["conversation"]
    assert token.startswith("kvc-") and with_token["id"] == json.loads(chunks[0])["id"]
    assert token not in json.dumps(server.call("GET", f"/kvedit/requests/{with_token['id']}"))
    kept = {"custom_params": {"kvedit": {"conversation": token}}}
    plain = events(server, path, {"model": "default", **STREAMED, **turn, **usage, **kept})
    assert not any(token in chunk for chunk in plain), "it is told once"


def events(server: Server, path: str, body: dict[str, Any]) -> list[str]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        lines = response.read().decode().splitlines()
    return [line.removeprefix("data: ") for line in lines if line]


def test_the_openai_client_sees_reports_and_refusals(client: openai.OpenAI, skill: Skill) -> None:
    chat = client.chat.completions
    fields: dict[str, Any] = {"model": "default", "messages": messages(skill, "client"), **GREEDY}
    wants = {"splice": "require", "skills": [skill.name]}
    fields["extra_body"] = {"custom_params": {"kvedit": wants}}
    answer = chat.create(**fields)
    assert_spliced(answer.metadata["kvedit"], skill, answer.usage.prompt_tokens)
    *_, last = chat.create(**fields, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.sglext["kvedit"]["composed"] > 0
    off = {"custom_params": {"kvedit": {"splice": "off"}}}
    answer = chat.create(**{**fields, "extra_body": off})
    assert answer.metadata["kvedit"]["composed"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_unmet_require_is_a_400_before_anything_is_streamed(
    client: openai.OpenAI, server: Server, skill: Skill, stream: bool
) -> None:
    wants = {"splice": "require", "skills": [skill.name, "nobody"]}
    params = {"custom_params": {"kvedit": wants}}
    with pytest.raises(openai.BadRequestError, match="nobody: unknown_skill"):
        client.chat.completions.create(
            model="default", messages=messages(skill, "unmet"), stream=stream, extra_body=params
        )
    with pytest.raises(openai.BadRequestError, match="nobody: unknown_skill"):
        client.completions.create(
            model="default", prompt=skill.text, stream=stream, extra_body=params
        )
    assert server.healthy()


def test_an_unmet_require_on_generate(server: Server, skill: Skill) -> None:
    params = {"kvedit": {"splice": "require", "skills": [skill.name]}}
    body = generate_body("Nothing of it.", stream=False)
    body["sampling_params"]["custom_params"] = params
    status, message = server.status_of("POST", "/generate", body)
    assert (status, message) == (400, f"kvedit: require: {skill.name}: not_in_prompt")
    # The host has sent 200 by then: the error is the first and only event.
    first, done = events(server, "/generate", {**body, "stream": True})
    assert json.loads(first)["error"]["code"] == 400
    assert json.loads(first)["error"]["message"] == message
    assert done == "[DONE]"


def test_a_generate_stream_that_asks_has_its_report_in_the_last_event(
    server: Server, skill: Skill
) -> None:
    text = english("generate stream", 2) + skill.text + " So?"
    body = generate_body(text, stream=True)
    body["sampling_params"] |= ASKS
    *chunks, done = events(server, "/generate", body)
    *before, last = [json.loads(chunk)["meta_info"] for chunk in chunks]
    assert done == "[DONE]" and not any("kvedit" in meta for meta in before)
    [report] = last["kvedit"]
    assert_spliced(report, skill, last["prompt_tokens"])


def test_several_prompts_have_one_object_that_adds_up_to_the_usage(
    server: Server, skill: Skill
) -> None:
    prompts = [english("several", 2) + skill.text + " So?", english("several plain", 8)]
    body = {"model": "default", "prompt": prompts, "n": 2, **GREEDY}
    before = server.status()["counters"]["tokens"]
    answer = server.call("POST", "/v1/completions", body)
    after = server.status()["counters"]["tokens"]
    whole, usage = answer["metadata"]["kvedit"], answer["usage"]
    assert len(answer["choices"]) == 4 and len(whole["prompts"]) == 2
    assert sum(whole[kind] for kind in CLASSES) == usage["prompt_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] - whole["computed"] == cached
    assert [one["spans"] != [] for one in whole["prompts"]] == [True, False]
    assert server.call("GET", f"/kvedit/requests/{answer['id']}") == whole
    counted = sum(after[kind] - before[kind] for kind in CLASSES)
    assert counted == 2 * usage["prompt_tokens"], "two samples of each, and no warmer of the host"
    *chunks, _ = events(server, "/v1/completions", {**body, "stream": True, **USAGE})
    streamed = json.loads(chunks[-1])
    assert sum(streamed["sglext"]["kvedit"][kind] for kind in CLASSES) == usage["prompt_tokens"]


@pytest.mark.parametrize("n", [1, 2])
def test_tokens_of_requests_that_want_none_are_counted(
    server: Server, skill: Skill, n: int
) -> None:
    body = generate_body(english(("no tokens", n), 3))
    body["sampling_params"] |= {"max_new_tokens": 0, "n": n}
    before = server.status()["counters"]["tokens"]
    answers = server.call("POST", "/generate", body)
    after = server.status()["counters"]["tokens"]
    answers = answers if n > 1 else [answers]
    num_tokens = sum(answer["meta_info"]["prompt_tokens"] for answer in answers)
    assert sum(after[kind] - before[kind] for kind in CLASSES) == num_tokens > 0


def test_a_batch_has_one_report_for_each_prompt(server: Server, skill: Skill) -> None:
    texts = [english("batch", 2) + skill.text + " So?", english("batch plain", 8)]
    with_skill, without = server.call("POST", "/generate", generate_body(texts))
    [report] = with_skill["meta_info"]["kvedit"]
    assert_spliced(report, skill, with_skill["meta_info"]["prompt_tokens"])
    [report] = without["meta_info"]["kvedit"]
    assert report["spans"] == [] and report["composed"] == 0
    assert report["computed"] == without["meta_info"]["prompt_tokens"] - report["exact"]


def test_logprobs_of_the_answer_do_not_stop_a_splice(server: Server, skill: Skill) -> None:
    text = english("logprob", 2) + skill.text + " So?"
    raw = server.call("POST", "/generate", generate_body(text, return_logprob=True))
    assert_spliced(raw["meta_info"]["kvedit"][0], skill, raw["meta_info"]["prompt_tokens"])
    logprobs = raw["meta_info"]["output_token_logprobs"]
    assert [token_id for _, token_id, _ in logprobs] == raw["output_ids"]


EXACT = [{"skill": "", "reason": "exact"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"return_logprob": True, "logprob_start_len": 0},
        {"return_logprob": True, "sampling_params": {"max_new_tokens": 0}},
        {"sampling_params": {"custom_params": {"kvedit": {"exact": True}}}},
    ],
    ids=["prompt logprobs", "no tokens", "option"],
)
def test_scoring_reads_exact_kv_only(server: Server, skill: Skill, fields: dict[str, Any]) -> None:
    text = english(("scoring", str(fields)), 2) + skill.text + " So?"
    body = generate_body(text)
    body = {
        **body,
        **fields,
        "sampling_params": {**GREEDY_NATIVE, **fields.get("sampling_params", {})},
    }
    raw = server.call("POST", "/generate", body)
    [report] = raw["meta_info"]["kvedit"]
    assert (report["composed"], report["spans"], report["refused"]) == (0, [], EXACT)
    if "logprob_start_len" in fields:
        assert len(raw["meta_info"]["input_token_logprobs"]) == raw["meta_info"]["prompt_tokens"]


def test_scoring_routes_are_exact_and_counted(server: Server, skill: Skill) -> None:
    echo = {"model": "default", "prompt": english("echo", 2) + skill.text, "echo": True, **GREEDY}
    answer = server.call("POST", "/v1/completions", echo)
    assert answer["metadata"]["kvedit"]["refused"] == EXACT
    query = english("score", 2) + skill.text + " So?"
    body = {"model": "m", "query": query, "items": [" yes", " no"], "label_token_ids": [5, 6]}
    before = server.status()["counters"]["tokens"]
    answer = server.call("POST", "/v1/score", body)
    after = server.status()["counters"]["tokens"]
    assert after["composed"] == before["composed"]
    counted = sum(after[kind] - before[kind] for kind in CLASSES)
    assert counted == answer["usage"]["prompt_tokens"] > 0
    chat = {"model": "default", "messages": messages(skill, "chat logprobs"), **GREEDY}
    answer = server.call("POST", "/v1/chat/completions", {**chat, "logprobs": True})
    assert answer["metadata"]["kvedit"]["composed"] > 0, "logprobs of an answer are not scoring"


def test_require_and_exact_exclude_each_other(server: Server, skill: Skill) -> None:
    wants = {"splice": "require", "skills": [skill.name]}
    body = generate_body(skill.text, return_logprob=True, logprob_start_len=0)
    body["sampling_params"]["custom_params"] = {"kvedit": wants}
    status, message = server.status_of("POST", "/generate", body)
    assert status == 400 and "custom_params.kvedit.splice: expected" in message
    echo = {"model": "m", "prompt": skill.text, "echo": True, "custom_params": {"kvedit": wants}}
    assert server.status_of("POST", "/v1/completions", echo)[0] == 400


def test_a_salted_chat_sees_skills_of_its_salt_only(server: Server, skill: Skill) -> None:
    body = {"model": "default", "messages": messages(skill, "salted"), **GREEDY}
    answer = server.call("POST", "/v1/chat/completions", {**body, "cache_salt": "tenant"})
    assert answer["metadata"]["kvedit"]["composed"] == 0
    assert server.status_of("GET", f"/kvedit/requests/{answer['id']}")[0] == 404
    report = server.call("GET", f"/kvedit/requests/{answer['id']}?cache_salt=tenant")
    assert report == answer["metadata"]["kvedit"]
