"""Where reports go, how refusals reach the client, and the question channel to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from kvedit.errors import Conflict, NotFound, Unavailable
from kvedit.namespace import namespace_tag
from kvedit.wire.commands import RunAudit, ShowSkill
from kvedit.wire.envelope import command_in, reply, unseal
from kvedit.wire.views import AuditView
from sglang_patches.http.answers import reports
from sglang_patches.http.services import rpc
from sglang_patches.http.services.report_ring import ReportRing

REPORT = {"exact": 0, "composed": 7, "computed": 32, "spans": [], "refused": []}
OWN = namespace_tag("me", None, None)


class Host:
    pass


def state_of(rid: str = "r1", cache_salt: str | None = "me") -> Any:
    return SimpleNamespace(obj=SimpleNamespace(rid=rid, cache_salt=cache_salt, extra_key=None))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Any:
    started: list[Any] = []
    fake = SimpleNamespace(
        reports=ReportRing(3), started=started, recompiler=SimpleNamespace(start=started.append)
    )
    monkeypatch.setattr(reports, "service_of", lambda _: fake)
    return fake


def keep(value: Any, finish: Any = None, state: Any = None) -> dict[str, Any]:
    def original(_m: Any, meta_info: Any, _s: Any, info: Any, index: int, _f: Any) -> None:
        meta_info.update({key: values[index] for key, values in info.items()})

    meta_info: dict[str, Any] = {"id": "r1"}
    reports.keep_report(
        original, Host(), meta_info, state or state_of(), {"kvedit": [value]}, 0, finish
    )
    return meta_info


def test_the_host_never_sees_our_key_and_keeps_the_others() -> None:
    """What it sees it repeats in every later event of a stream, empty too."""
    seen: list[Any] = []

    def original(_m: Any, _meta: Any, _s: Any, info: Any, _i: int, _f: Any) -> None:
        seen.append(info)

    meta_info: dict[str, Any] = {}
    info = {"kvedit": [[], [dict(REPORT)]], "other": [[1], [2]]}
    reports.keep_report(original, Host(), meta_info, state_of(), info, 0, None)
    assert seen == [{"other": [[1], [2]]}] and meta_info == {}


def test_a_report_stays_a_list_of_one_and_is_found_by_its_own_namespace(service: Any) -> None:
    assert keep([dict(REPORT)])["kvedit"] == [REPORT]
    assert service.reports.get("r1", OWN) == REPORT
    with pytest.raises(NotFound):
        service.reports.get("r1", namespace_tag(None, None, None))
    with pytest.raises(NotFound):
        service.reports.get("r2", OWN)


def test_the_empty_list_of_a_request_without_report_is_removed(service: Any) -> None:
    assert "kvedit" not in keep([])


def test_evicted_numbers_start_recompiles_and_are_not_shown(service: Any) -> None:
    assert keep([{**REPORT, "evicted": [3, 4]}])["kvedit"] == [REPORT]
    assert service.started == [[3, 4]]


def test_the_report_of_a_refused_request_waits_for_the_refusal(service: Any) -> None:
    refused = {"type": "abort", "err_type": "KvEditUnmet"}
    meta = keep([{**REPORT, "evicted": [3]}], finish=refused)
    assert meta["kvedit"][0]["evicted"] == [3] and service.started == []


def test_a_client_that_gave_up_sees_no_segment_numbers(service: Any) -> None:
    meta = keep([{**REPORT, "evicted": [3]}], finish={"type": "abort"})
    assert meta["kvedit"] == [REPORT] and service.started == [[3]]


def test_an_error_in_the_report_costs_the_report_only(service: Any) -> None:
    service.reports = None
    assert "kvedit" not in keep([dict(REPORT)])


def test_the_ring_forgets_the_oldest_and_a_reused_id_counts_once() -> None:
    ring = ReportRing(2)
    for rid in ("a", "b", "a", "c"):
        ring.put(rid, OWN, {"rid": rid})
    with pytest.raises(NotFound):
        ring.get("b", OWN)
    assert ring.get("a", OWN) and ring.get("c", OWN)


def test_long_reports_leave_room_for_fewer() -> None:
    ring = ReportRing(100, max_bytes=1_000)
    for number in range(10):
        ring.put(f"r{number}", "ns", {"refused": ["x" * 280]})
    kept = []
    for number in range(10):
        with contextlib.suppress(NotFound):
            ring.get(f"r{number}", "ns")
            kept.append(number)
    assert kept == [7, 8, 9]
    ring.put("huge", "ns", {"refused": ["x" * 2_000]})
    with pytest.raises(NotFound):
        ring.get("huge", "ns")


def test_whoever_guesses_an_id_reads_no_value_and_no_token() -> None:
    line = {"field": "order", "start": 3, "stop": 9, "text": "order: secret"}
    report = {**REPORT, "errata": [line], "conversation": "token"}
    ring = ReportRing(5)
    ring.put("one", OWN, report)
    ring.put("several", OWN, {"exact": 0, "prompts": [report, report]})
    for rid in ("one", "several"):
        shown = json.dumps(ring.get(rid, OWN))
        assert "secret" not in shown and "token" not in shown and '"order"' in shown


def test_an_id_means_something_only_inside_its_namespace() -> None:
    """Clients choose request ids: nobody's id may show, or replace, somebody else's report."""
    ring = ReportRing(5)
    ring.put("r1", OWN, {"mine": 1})
    ring.put("r1", "another", {"theirs": 1})
    assert ring.get("r1", OWN) == {"mine": 1}
    assert ring.get("r1", "another") == {"theirs": 1}
    with pytest.raises(NotFound):
        ring.get("r1", "a third")


def refuse(err_type: Any, status: int, *, is_stream: bool) -> Any:
    async def original(_m: Any, out: Any, _s: Any, stream: bool) -> Any:
        if stream:
            return out
        if status == 400:
            raise ValueError("stock")
        raise HTTPException(status_code=status, detail="stock")

    finish = {"type": "abort", "message": "evicted", "status_code": status, "err_type": err_type}
    out = {"meta_info": {"finish_reason": finish, "kvedit": [{"evicted": [3]}]}}
    return asyncio.run(reports.raise_refusal(original, Host(), out, state_of(), is_stream))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [400, 409, 503])
def test_our_refusals_raise_a_value_error_with_status_and_segments(
    status: int, is_stream: bool
) -> None:
    with pytest.raises(ValueError, match="evicted") as error:
        refuse("KvEditUnmet", status, is_stream=is_stream)
    assert isinstance(error.value, reports.Refused)
    assert (error.value.status_code, error.value.evicted) == (status, (3,))


def test_aborts_of_the_host_keep_their_own_handling() -> None:
    assert refuse(None, 400, is_stream=True)["meta_info"]
    with pytest.raises(ValueError, match="stock"):
        refuse("BadRequest", 400, is_stream=False)


class Wire:
    """The host's channel: ``answer`` of a request id gives the internal state."""

    def __init__(self, answer: Any) -> None:
        self._answer, self.cancelled = answer, False
        self.release = asyncio.Event()

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, request: Any) -> list[Any]:
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return [SimpleNamespace(internal_state=self._answer(request.rid))]


VIEW = AuditView(ok=True, problems=[])
NAME = '"},{"op":"remove"'


def ask(answer: Any, command: Any = RunAudit()) -> Any:  # noqa: B008  (frozen)
    async def scenario() -> Any:
        wire = Wire(answer)
        wire.release.set()
        return await rpc.call(wire, command)

    return asyncio.run(scenario())


def test_an_answer_is_taken_only_with_our_nonce() -> None:
    assert ask(lambda rid: {"kvedit": reply(unseal(rid).nonce, VIEW)}) == VIEW
    with pytest.raises(Unavailable):
        ask(lambda rid: {"kvedit": reply("another", VIEW)})
    with pytest.raises(Unavailable):
        ask(lambda rid: {"api_key": "of /server_info"})


def test_the_text_of_a_client_stays_text() -> None:
    seen = []

    def answer(rid: str) -> Any:
        seen.append(command_in(unseal(rid)))
        return {"kvedit": reply(unseal(rid).nonce, NotFound("kvedit: none"))}

    with pytest.raises(NotFound):
        ask(answer, ShowSkill(name=NAME, namespace="n"))
    assert seen == [ShowSkill(name=NAME, namespace="n")]


def test_an_error_of_the_scheduler_keeps_its_class_and_message() -> None:
    with pytest.raises(Conflict, match="kvedit: taken"):
        ask(lambda rid: {"kvedit": reply(unseal(rid).nonce, Conflict("kvedit: taken"))})


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_a_call_is_never_cancelled_on_its_way(how: str) -> None:
    async def scenario() -> None:
        wire = Wire(lambda rid: {"kvedit": reply(unseal(rid).nonce, VIEW)})
        timeout_s = 0.01 if how == "timeout" else None
        task = asyncio.create_task(rpc.call(wire, RunAudit(), timeout_s=timeout_s))
        await asyncio.sleep(0)
        if how == "cancel":
            task.cancel()
        with pytest.raises((Unavailable, asyncio.CancelledError)):
            await task
        assert not wire.cancelled and len(rpc._in_flight) == 1
        wire.release.set()
        await asyncio.gather(*rpc._in_flight)
        await asyncio.sleep(0)
        assert not wire.cancelled and not rpc._in_flight

    asyncio.run(scenario())
