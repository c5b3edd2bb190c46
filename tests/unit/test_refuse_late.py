"""A ``require`` that cannot be met any more: a 400 before any output, plain service after it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from kvedit.reason import Reason
from kvedit.request.options import Options
from kvedit.splice.sources import SkillSource
from kvedit.splice.spans import Plan, Refusal
from kvedit.splice.token_classes import TokenSplit
from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches.scheduler.hooks.admission import _cover  # noqa: E402
from sglang_patches.scheduler.request_state import RequestState, report_of  # noqa: E402
from sglang_patches.scheduler.telemetry.metrics import Metrics  # noqa: E402
from sglang_patches.scheduler.telemetry.reporter import Reporter  # noqa: E402

EVICTED = Refusal(skill="policy", reason=Reason.EVICTED)


def admitted_again(output: list[int]) -> SimpleNamespace:
    """A request whose skill is gone at the admission that is covered here."""
    rooms: Any = SimpleNamespace(
        reporter=Reporter(Metrics(export=False, model_name="m")),
    )
    state = RequestState(
        namespace="n",
        options=Options(splice="require", skills=("policy",)),
        plan=Plan(num_tokens=8, registry_version=1),
        split=TokenSplit(8),
        lost=((SkillSource(3), EVICTED),),
    )
    req = SimpleNamespace(
        kvedit=state,
        prefix_len=0,
        extend_end=8,
        output_ids=array("q", output),
        to_finish=None,
    )
    _cover(rooms, req, state)
    return req


def test_before_any_output_it_is_a_400() -> None:
    req = admitted_again([])
    assert req.to_finish.status_code == 400 and "policy: evicted" in req.to_finish.message


def test_with_output_it_is_served_plainly_and_the_report_says_so() -> None:
    req = admitted_again([5, 6])
    assert req.to_finish is None
    report = report_of(req)
    assert report is not None
    assert report["refused"] == [{"skill": "policy", "reason": "evicted"}]
    assert (report["computed"], report["evicted"]) == (8, [3])
