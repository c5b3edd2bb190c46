"""The report leaves with the finish of its request, so what changed late is still in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvedit.reason import Reason
from kvedit.request.options import Options
from kvedit.splice.spans import Plan, Refusal
from kvedit.splice.token_classes import TokenSplit
from sglang_patches import guard
from sglang_patches.scheduler.hooks.streamer import reporting_streamer, streamer_hook
from sglang_patches.scheduler.request_state import RequestState

NUM_TOKENS = 8


class HostStreamer:
    """The two methods of the host that matter here."""

    def is_request_level_customized_info_key(self, key: str) -> bool:
        return key == "host"

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        return {"host": [[1] for _ in reqs]}


STREAMER: Any = reporting_streamer(HostStreamer)()  # type: ignore[arg-type]


def state(**fields: Any) -> RequestState:
    return RequestState(
        namespace="ns",
        options=Options(),
        plan=Plan(num_tokens=NUM_TOKENS, registry_version=0),
        split=TokenSplit(NUM_TOKENS),
        **fields,
    )


def request(kvedit: Any = None, *, is_finished: bool = False, **fields: Any) -> Any:
    return SimpleNamespace(kvedit=kvedit, finished=lambda: is_finished, **fields)


def info_of(*reqs: Any) -> dict[str, list[Any]]:
    info: dict[str, list[Any]] = STREAMER.build_additional_customized_info(list(reqs))
    return info


def test_a_running_request_has_none_and_a_finished_one_all_that_happened() -> None:
    mine = state()
    mine.split.cover((), prefix_len=2, extend_end=NUM_TOKENS)
    assert info_of(request(mine)) == {"host": [[1]]}
    mine.split.refuse((Refusal(skill="late", reason=Reason.EVICTED),))  # a retraction, after output
    info = info_of(request(None), request(mine, is_finished=True), request(mine))
    assert info["host"] == [[1], [1], [1]]
    [report] = info["kvedit"][1]
    assert info["kvedit"] == [[], [report], []]
    assert (report["exact"], report["computed"]) == (2, 6)
    assert report["refused"] == [{"skill": "late", "reason": "evicted"}]


def test_a_refused_request_has_the_report_of_its_refusal_and_a_compile_none() -> None:
    refused = request(is_finished=True, kvedit_refused={"evicted": [3]})
    assert info_of(refused)["kvedit"] == [[{"evicted": [3]}]]
    assert "kvedit" not in info_of(request(state(is_compile=True), is_finished=True))
    assert "kvedit" not in info_of(request(is_finished=True))


def test_an_error_costs_the_report_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestState, "report", lambda _: 1 / 0)
    before = guard.errors["streamer"]
    assert info_of(request(state(), is_finished=True)) == {"host": [[1]]}
    assert guard.errors["streamer"] == before + 1


def test_what_is_found_before_the_hook_fails_is_not_streamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "fail_point", lambda _: 1 / 0)
    before = guard.errors["streamer"]
    assert info_of(request(state())) == {"host": [[1]]} and guard.errors["streamer"] == before
    assert info_of(request(state(), is_finished=True)) == {"host": [[1]]}
    assert guard.errors["streamer"] == before + 1


def test_the_key_is_the_requests_and_not_sliced_by_tokens() -> None:
    level = STREAMER.is_request_level_customized_info_key
    assert [level(key) for key in ("kvedit", "host", "other")] == [True, True, False]
    assert STREAMER.has_additional_customized_info


def test_without_our_cache_the_host_keeps_its_own() -> None:
    scheduler = SimpleNamespace(tree_cache=object())
    assert streamer_hook(HostStreamer, scheduler) is HostStreamer  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["exact", "off"])
def test_fields_that_were_not_looked_for_are_said_to_be(reason: str) -> None:
    report = state(no_edits=reason).report()
    assert (report["base"], report["as_sent_because"]) == ("sent", reason)
    assert report["client_prompt_tokens"] == NUM_TOKENS
    assert "base" not in state().report()
