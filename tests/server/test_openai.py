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


def test_a_stream_ends_with_one_chunk_that_carries_the_report(server: Server, skill: Skill) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": messages(skill, "chat stream")},
        "/v1/completions": {"prompt": english("stream", 2) + "\n" + skill.text + "\n"},
    }
    for path, body in bodies.items():
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, done = events(server, path, {"model": "default", **GREEDY, **options, **body})
        assert done == "[DONE]"
        *others, last = map(json.loads, chunks)
        assert last["choices"] == []
        assert {last["id"]} == {chunk["id"] for chunk in others}
        assert not any("kvedit" in json.dumps(chunk) for chunk in others)
        [usage] = [chunk["usage"] for chunk in others if chunk.get("usage")]
        assert_spliced(last["sglext"]["kvedit"], skill, usage["prompt_tokens"])
        assert server.call("GET", f"/kvedit/requests/{last['id']}") == last["sglext"]["kvedit"]


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
    *_, last = chat.create(**fields, stream=True)
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


def test_generate_streams_the_report_with_every_chunk(server: Server, skill: Skill) -> None:
    text = english("generate stream", 2) + skill.text + " So?"
    *chunks, done = events(server, "/generate", generate_body(text, stream=True))
    assert done == "[DONE]" and chunks
    reports = [json.loads(chunk)["meta_info"]["kvedit"] for chunk in chunks]
    assert all(report == reports[0] for report in reports) and len(reports[0]) == 1
    assert_spliced(reports[0][0], skill, json.loads(chunks[-1])["meta_info"]["prompt_tokens"])


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


def test_input_logprobs_hold_a_splice_back_from_where_they_start(
    server: Server, skill: Skill
) -> None:
    text = english("input logprob", 2) + skill.text + " So?"
    body = generate_body(text, return_logprob=True, logprob_start_len=0)
    raw = server.call("POST", "/generate", body)
    [report] = raw["meta_info"]["kvedit"]
    assert report["composed"] == 0 and report["spans"] == []
    assert len(raw["meta_info"]["input_token_logprobs"]) == raw["meta_info"]["prompt_tokens"]


def test_a_salted_chat_sees_skills_of_its_salt_only(server: Server, skill: Skill) -> None:
    body = {"model": "default", "messages": messages(skill, "salted"), **GREEDY}
    answer = server.call("POST", "/v1/chat/completions", {**body, "cache_salt": "tenant"})
    assert answer["metadata"]["kvedit"]["composed"] == 0
    assert server.status_of("GET", f"/kvedit/requests/{answer['id']}")[0] == 404
    report = server.call("GET", f"/kvedit/requests/{answer['id']}?cache_salt=tenant")
    assert report == answer["metadata"]["kvedit"]
