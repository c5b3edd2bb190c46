"""Programs of the frontend language against the real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from kvedit import Client, lang
from kvedit.lang.functions import LIBRARY
from tests.server.harness import Server, fresh_name
from tests.server.texts import english

pytestmark = pytest.mark.real_server


@pytest.fixture
def salt() -> str:
    return fresh_name()


@pytest.fixture
def backend(base: Server, salt: str) -> Iterator[lang.Endpoint]:
    yield lang.Endpoint(base.url, cache_salt=salt)
    assert base.audit() == []


@sgl.function
def ask(s: Any, front: str, name: str, wanted: dict[str, Any]) -> None:
    lang.options(s, **wanted)
    s += sgl.system(front + lang.skill(name))
    s += sgl.user("And now?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=2, temperature=0, ignore_eos=True))


def split_of(state: Any, variable: str = "answer") -> tuple[int, int, int, int]:
    report = lang.report(state, variable)
    assert report is not None
    assert state.get_meta_info(variable)["kvedit"] == [report]
    return report["exact"], report["composed"], report["derived"], report["computed"]


def test_a_program_has_the_token_ids_of_the_chat_route(
    base: Server, backend: lang.Endpoint, salt: str
) -> None:
    lang.register(None, skills={salt: english(salt, 4)})
    state = ask.run("Be brief.\n", salt, {"splice": "auto"}, backend=backend)
    num_prompt = state.get_meta_info("answer")["prompt_tokens"]
    assert split_of(state) == (0, 0, 0, num_prompt)
    answer = base.call(
        "POST",
        "/v1/chat/completions",
        {
            "model": "default",
            "max_tokens": 1,
            "cache_salt": salt,
            "custom_params": {"kvedit": {}},
            "messages": [m for m in state.messages() if m["role"] != "assistant"],
        },
    )
    report = answer["metadata"]["kvedit"]
    assert (report["exact"], report["computed"]) == (num_prompt - 1, 1)


def test_the_default_system_message_is_the_model_s_own(
    base: Server, backend: lang.Endpoint, salt: str
) -> None:
    @sgl.function
    def bare(s: Any) -> None:
        s += sgl.user(salt)
        s += sgl.assistant(sgl.gen("answer", max_tokens=1))

    num_prompt = bare.run(backend=backend).get_meta_info("answer")["prompt_tokens"]
    messages = [{"role": "user", "content": salt}]
    body = {"model": "default", "max_tokens": 1, "cache_salt": salt, "messages": messages}
    body["custom_params"] = {"kvedit": {}}
    report = base.call("POST", "/v1/chat/completions", body)["metadata"]["kvedit"]
    assert (report["exact"], report["computed"]) == (num_prompt - 1, 1)


def test_a_registered_skill_is_spliced_and_options_are_heard(
    backend: lang.Endpoint, salt: str
) -> None:
    done = lang.register(backend, skills={salt: english(salt, 8)})
    num_tokens, seam = done.skills[salt]["num_tokens"], 5
    off = split_of(ask.run("One. ", salt, {"splice": "off"}, backend=backend))
    assert off[:3] == (0, 0, 0)
    spliced = split_of(ask.run("Two. ", salt, {"seam": seam}, backend=backend))
    assert spliced[1] in (num_tokens - seam, num_tokens - seam - 1)
    required = {"splice": "require", "skills": [salt]}
    assert split_of(ask.run("Three. ", salt, required, backend=backend))[1] > 0
    refused = {"splice": "require", "skills": ["nobody"]}
    with pytest.warns(UserWarning):
        state = ask.run("Four. ", salt, refused, backend=backend)
        assert "nobody" in str(state.error())


def test_a_skill_of_another_namespace_is_plain_text(
    base: Server, backend: lang.Endpoint, salt: str
) -> None:
    lang.register(backend, skills={salt: english(salt, 8)})
    stranger = lang.Endpoint(base.url, cache_salt=fresh_name())
    assert split_of(ask.run("One. ", salt, {}, backend=stranger))[1] == 0


def test_forks_share_what_their_parent_filled(backend: lang.Endpoint, salt: str) -> None:
    done = lang.register(backend, skills={salt: english(salt, 8)})

    @sgl.function
    def branches(s: Any) -> None:
        s += salt + " " + lang.skill(salt) + "\nThe end of what all branches share.\n"
        lang.options(s, seam=4)
        s["branches"] = list(s.fork(2))
        for i, branch in enumerate(s["branches"]):
            branch += f"Number {i}" + sgl.gen("out", max_tokens=1, temperature=0)

    for branch in branches.run(backend=backend)["branches"]:
        exact, composed, derived, computed = split_of(branch, "out")
        assert composed in (done.skills[salt]["num_tokens"] - n for n in (4, 5))
        assert exact > 0 and derived >= 6 and computed < 8


def test_the_host_s_own_endpoint_runs_the_same_program(base: Server, salt: str) -> None:
    backend = RuntimeEndpoint(base.url)
    done = lang.register(backend, skills={salt: english(salt, 8)})
    try:
        state = ask.run(f"{salt} ", salt, {"seam": 2}, backend=backend)
        assert state.text().startswith("SYSTEM:")
        assert split_of(state)[1] >= done.skills[salt]["num_tokens"] - 3
    finally:
        Client(base.url).remove(salt, purge=True)


@sgl.function
def remember(s: Any, front: str, name: str, text: str) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user(front + lang.memory(name, text) + "Go on.")
    s += sgl.assistant(sgl.gen("answer", max_tokens=1, temperature=0))


def test_a_change_of_a_memory_recompiles_it_alone(
    base: Server, backend: lang.Endpoint, salt: str
) -> None:
    lang.register(backend, skills={salt: english(salt, 8)})
    document, client = LIBRARY.skill(salt), Client(base.url)
    for version in (1, 2):
        text = english(f"{salt} {version}", 6) + "\n"
        state = remember.run(f"Part {version}. {document}\n", f"{salt}-m", text, backend=backend)
        split_of(state)
        report = lang.report(state, "answer")
        assert report is not None
        assert [span["skill"] for span in report["spans"]] == [salt, f"{salt}-m"]
        view = client.show(f"{salt}-m", namespace=salt)
        assert (view["version"], view["state"], view["memory"]) == (version, "ready", True)
        assert client.show(salt, namespace=salt)["version"] == 1


STATUS = {"pattern": "status: {value}", "base": "unknown"}


@sgl.function
def look_up(s: Any, field: str, value: str, document: str, wanted: dict[str, Any]) -> None:
    lang.options(s, **wanted)
    s += sgl.system(lang.field(field, value) + "\n" + document)
    s += sgl.user("What is the status?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=1, temperature=0))


def test_a_changed_field_costs_what_the_strategy_says(
    base: Server, backend: lang.Endpoint, salt: str
) -> None:
    done = lang.register(backend, fields={salt: STATUS})
    assert (done.fields[salt]["pattern"], done.fields[salt]["base"]) == (
        "status: {value}",
        "unknown",
    )
    document = english(salt, 12)

    def served(value: str, wanted: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
        state = look_up.run(salt, value, document, wanted, backend=backend)
        report = lang.report(state, "answer")
        assert report is not None
        return report, split_of(state)

    served("unknown", {})
    report, (exact, _, _, computed) = served("sent", {"strategy": "erratum"})
    assert [line["field"] for line in report["errata"]] == [salt]
    assert exact > 100 > computed > report["erratum"] > 0
    report, (exact, _, _, computed) = served("lost", {"edits": "off"})
    assert not report.get("errata") and computed > 100 > exact
    report, (exact, _, _, computed) = served("late", {"strategy": "recompute"})
    assert not report["errata"] and computed > 100 > exact


def test_a_field_of_the_system_message_needs_the_model_s_own_template(
    base: Server, salt: str
) -> None:
    theirs, document = RuntimeEndpoint(base.url), english(salt, 12)
    lang.register(theirs, fields={salt: STATUS})
    try:
        ours = lang.Endpoint(base.url)
        for backend, has_line in ((theirs, False), (ours, True)):
            for value in ("unknown", "sent"):
                wanted = {"strategy": "erratum"}
                state = look_up.run(salt, value, document, wanted, backend=backend)
                report = lang.report(state, "answer")  # also waits for it
            assert report is not None and bool(report.get("errata")) is has_line
    finally:
        Client(base.url).fields.remove(salt)
