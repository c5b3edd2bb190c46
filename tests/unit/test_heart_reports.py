"""What is told of requests on the small host: reports leave with the finish, counters are the sums
of what reports say, and nothing that is told decides anything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import unwrap_from_pickle
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from kvedit.request.options import Options, Sealed
from kvedit.splice.token_classes import COUNTS
from sglang_patches import guard
from sglang_patches.scheduler.hooks.streamer import KEY, streamer_hook
from sglang_patches.scheduler.telemetry.events import EventPublisher
from sglang_patches.scheduler.telemetry.metrics import Metrics
from sglang_patches.scheduler.telemetry.reporter import Reporter
from tests.unit.edit_lives import FIELDS, SKILL, Conversation
from tests.unit.small_host import SmallHost
from tests.unit.small_host_fields import FieldHost

pytestmark = pytest.mark.small_host  # the host's settings are of a whole process

IDS = list(range(100, 140))
PROMPT = [1, 2, 3, 4, 5, 6, *IDS, 7, 8, 9]


# ---- the streamer


class Outbox:
    """The way to the detokenizer."""

    def __init__(self, host: SmallHost) -> None:
        self.sent: list[Any] = []
        streamer: Any = streamer_hook(SchedulerOutputStreamer, host)
        self._streamer = streamer(
            send_to_detokenizer=self,
            tree_cache=host.tree,
            server_args=ServerArgs(model_path="dummy"),
            is_generation=True,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )

    def send_output(self, payload: Any) -> None:
        self.sent.append(payload)

    def stream(self, *reqs: Any) -> dict[str, Any]:
        """By request id, what leaves of our reports."""
        self._streamer.stream_output(list(reqs), False)
        payload = self.sent[-1]
        info = payload.customized_info
        reports = unwrap_from_pickle(info)[KEY] if info else [None for _ in payload.rids]
        return dict(zip(payload.rids, reports, strict=True))


def test_the_report_leaves_with_the_finish() -> None:
    host = SmallHost()
    plain = host.begin([1, 2, 3])  # nothing is registered: nothing of ours touches it
    host.prefill(plain)
    host.register("policy", IDS)
    spliced = host.begin(PROMPT)
    host.prefill(spliced)
    outbox = Outbox(host)
    plain.stream = spliced.stream = True
    assert outbox.stream(plain, spliced) == {plain.rid: None, spliced.rid: None}
    host.decode(plain, 9)
    host.decode(spliced, 9)
    served = host.finish(spliced)
    assert outbox.stream(plain, spliced) == {plain.rid: [], spliced.rid: [served.report]}
    assert served.report["composed"] > 0


def test_a_request_that_nothing_touches_and_a_compile_get_nothing() -> None:
    host = SmallHost()
    outbox = Outbox(host)
    plain = host.run([1, 2, 3]).req
    assert outbox.stream(plain) == {plain.rid: None}
    host.register("policy", IDS)
    compiled = host.rooms.desk.registry.get("policy", "shared")
    host.evict()
    host.run(PROMPT)
    host.rooms.desk.recompile(compiled.number, "compile again")
    req = host.run(IDS, rid="compile again", num_new=1).req
    assert req.kvedit.is_compile and outbox.stream(req) == {req.rid: None}


def test_a_refused_request_gets_the_report_of_its_refusal() -> None:
    host = SmallHost()
    host.register("policy", IDS)
    host.evict()
    host.run(PROMPT)  # finds that it is gone
    req = host.refused([11, *PROMPT], kvedit={"splice": "require", "skills": ["policy"]})
    host.prefill(req)
    host.finish(req)
    [report] = Outbox(host).stream(req)[req.rid]
    assert report == req.kvedit_refused and len(report["evicted"]) == 1


# ---- the counters


def life(host: FieldHost) -> list[dict[str, Any]]:
    """The reports of a few turns with a skill and a field; some are refused something, one is
    retracted."""
    skill = host.register_text(SKILL)
    who = Conversation("xa", proof="")
    reports = []
    for turn, status in enumerate(["", "shipped", "shipped", "lost", "found for good", "at home"]):
        who.values["status"] = status or who.value("status")
        if turn == 3:
            host.evict()
        if turn == 4:
            host.compile_again(skill)
        how = who.claimed(Options(edits="off" if turn == 2 else "auto"), turn)
        retract_at = 2 if turn == 4 else None
        answer = host.ask(who.prompt(), f"It is done {turn}", how, retract_at=retract_at)
        assert answer.served.misread == []
        reports.append(answer.report)
        who.turns.append((who.user, f"It is done {turn}"))
        who.user = "and then?"
    return reports


def counted_splices(metrics: Metrics) -> dict[str, int]:
    """By reason; realised ones under "realised"."""
    counts: Counter[str] = Counter()
    for (outcome, reason), count in metrics.splices.items():
        counts[reason or outcome] += count
    return dict(counts)


def test_counters_are_the_sums_over_requests() -> None:
    host = FieldHost([FIELDS[0]])
    reports, metrics = life(host), host.reporter.metrics
    told = metrics.counters(hook_errors={}).tokens
    assert told == {kind: sum(report[kind] for report in reports) for kind in COUNTS}
    assert all(told[kind] for kind in ("exact", "composed", "computed", "erratum", "copied"))  # type: ignore[index]
    refused = Counter(r["reason"] for report in reports for r in report["refused"])
    splices = counted_splices(metrics)
    assert splices.pop("realised") >= 3 and splices == dict(refused) and refused["evicted"]
    bases = Counter(report["base"] for report in reports if report["as_sent_because"] != "off")
    edits: Counter[str] = Counter()
    for (_, base), count in metrics.edits.items():
        edits[base] += count
    assert edits == bases and bases["conversation"] >= 3


def test_the_hosts_own_warmers_are_not_counted() -> None:
    host = SmallHost()
    host.register("policy", IDS)
    metrics = host.reporter.metrics
    of_samples = Options(sealed=Sealed(samples="one prompt", wants_nothing=True)).to_json()
    for how in (None, of_samples):
        warmer = host.run(PROMPT, num_new=0, kvedit=how)
        assert warmer.report["composed"] > 0 and not metrics.tokens and not metrics.splices
    second = host.run(PROMPT, num_new=0, kvedit=of_samples)
    assert metrics.tokens["composed"] == second.report["composed"] > 0


# ---- what tells nothing decides nothing


class GoneSocket:
    def send_multipart(self, *_: Any, **__: Any) -> None:
        raise OSError("the reader is gone")


def broken_reporter(monkeypatch: pytest.MonkeyPatch) -> Reporter:
    def no_room(self: Metrics) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(Metrics, "_counters", no_room)
    publisher = EventPublisher.__new__(EventPublisher)
    publisher._socket = GoneSocket()  # type: ignore[assignment]
    return Reporter(Metrics(export=True, model_name="none"), publisher)


def test_failing_metrics_and_events_change_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FieldHost([FIELDS[0]])
    expected = life(plain)
    before = Counter(guard.errors)
    broken = FieldHost([FIELDS[0]], reporter=broken_reporter(monkeypatch))
    assert life(broken) == expected
    told = broken.reporter.metrics.counters(hook_errors={})
    assert told == plain.reporter.metrics.counters(hook_errors={})
    failed = guard.errors - before
    assert failed["metrics"] > 10 and failed["events"] > 5 and len(failed) == 2


def test_a_report_that_cannot_be_made_costs_the_report_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = SmallHost()
    host.register("policy", IDS)
    req = host.run(PROMPT).req
    monkeypatch.setattr(type(req.kvedit), "report", lambda _: 1 / 0)
    before = guard.errors["streamer"]
    assert Outbox(host).stream(req) == {req.rid: None}
    assert guard.errors["streamer"] == before + 1
