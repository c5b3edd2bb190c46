"""A run that another request has spliced meanwhile is taken over, not inserted twice."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvedit.request.options import Options
from kvedit.splice.spans import Plan
from kvedit.splice.token_classes import TokenSplit
from sglang_patches import cpu
from tests.unit.spans_of import span, whole

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches.scheduler.request_state import RequestState  # noqa: E402
from sglang_patches.scheduler.runtime import Runtime  # noqa: E402
from sglang_patches.scheduler.splice import realise  # noqa: E402
from sglang_patches.scheduler.splice.donors import Donor  # noqa: E402
from sglang_patches.scheduler.splice.realise import Splice  # noqa: E402
from sglang_patches.scheduler.telemetry.metrics import Metrics  # noqa: E402

START, STOP = 4, 10
PIECES = whole(span(START, STOP, 3))


class Cache:
    """Holds a path of ``cached`` tokens of the request, slots 100 and up; counts its locks."""

    def __init__(self, cached: int) -> None:
        self._cached = cached
        self.locks = 0
        self.runtime = Runtime.__new__(Runtime)
        self.runtime.metrics = Metrics(export=False, model_name="m")
        self.runtime.publisher = None

    def match_prefix(self, params: Any) -> Any:
        assert len(params.key.token_ids) == STOP
        return SimpleNamespace(device_prefix_len=self._cached, last_device_node="node")

    def path_device_indices(self, node: str) -> torch.Tensor:
        return torch.arange(100, 100 + self._cached)

    def lock(self, node: Any) -> str:
        self.locks += 1
        return "lock"

    def unlock(self, lock: str) -> None:
        self.locks -= 1


def spliced(cached: int, monkeypatch: pytest.MonkeyPatch, *, has_donor: bool = True) -> Any:
    """The splice, its cache and the request's state, after run() and commit()."""
    cache = Cache(cached)

    def find_donor(cache: Any, piece: Any, start: int, stop: int) -> Donor | None:
        slots = torch.arange(start, stop)
        return Donor(piece, start, stop, slots, cache.lock("donor")) if has_donor else None

    monkeypatch.setattr(realise, "find_donor", find_donor)
    monkeypatch.setattr(Splice, "_why_lost", lambda self, segment: "retired")
    req = SimpleNamespace(
        last_node="before",
        full_untruncated_fill_ids=array("q", range(50, 62)),
        extra_key=None,
        cache_salt=None,
    )
    plan = Plan(num_tokens=12, registry_version=1)
    state = RequestState(
        namespace="n", options=Options(), plan=plan, split=TokenSplit(12), pieces=PIECES
    )
    splice = Splice(cache, req, state, START, STOP)
    splice.run()
    return splice.commit(), splice, cache, state


def test_the_whole_run_is_taken_over(monkeypatch):
    done, splice, cache, state = spliced(STOP, monkeypatch)
    assert done and splice.node == "node"
    assert state.pieces == PIECES and not state.split.refused
    assert state.realised == [], "nothing was copied for this request"
    assert cache.locks == 0


def test_a_part_of_it_is_not(monkeypatch):
    done, splice, cache, state = spliced(STOP - 2, monkeypatch)
    assert not done and splice.node is None
    assert state.pieces == ()
    assert [refusal.reason for refusal in state.split.refused] == ["overtaken"]
    assert cache.locks == 0


def test_a_run_whose_donor_is_gone_is_not_trusted(monkeypatch):
    """Its copies may have failed: then its segment has another number by now."""
    done, splice, cache, state = spliced(STOP, monkeypatch, has_donor=False)
    assert not done and splice.node is None
    assert [refusal.reason for refusal in state.split.refused] == ["retired"]
    assert cache.locks == 0
