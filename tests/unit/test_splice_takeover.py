"""A run that another request has spliced meanwhile is taken over, not inserted twice."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch

from kvedit.request.options import Options
from kvedit.skills.segment import State
from kvedit.splice.sources import Source
from kvedit.splice.spans import Plan
from kvedit.splice.token_classes import TokenSplit
from sglang_patches import cpu
from tests.unit.spans_of import span, whole

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches.scheduler.request_state import RequestState  # noqa: E402
from sglang_patches.scheduler.splice.donors import Donor  # noqa: E402
from sglang_patches.scheduler.splice.realise import Splice  # noqa: E402
from sglang_patches.scheduler.telemetry.metrics import Metrics  # noqa: E402
from sglang_patches.scheduler.telemetry.reporter import Reporter  # noqa: E402

START, STOP = 4, 10
PIECES = whole(span(START, STOP, 3))


class Cache:
    """Holds a path of ``cached`` tokens of the request, slots 100 and up; counts its locks."""

    def __init__(self, cached: int) -> None:
        self._cached = cached
        self.locks = 0

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


class OneDonor:
    """Has the donor of every piece, or its skill was purged."""

    def __init__(self, cache: Cache, has_donor: bool) -> None:
        self._cache, self._has_donor = cache, has_donor

    def find(self, piece: Any, start: int, stop: int) -> Donor | None:
        slots = torch.arange(start, stop)
        lock = self._cache.lock("donor") if self._has_donor else None
        return Donor(piece, start, stop, slots, lock) if self._has_donor else None

    def lost(self, source: Source) -> State:
        return State.RETIRED


def spliced(cached: int, *, has_donor: bool = True) -> Any:
    """The splice, its cache and the request's state, after run() and commit()."""
    cache = Cache(cached)
    donors = OneDonor(cache, has_donor)
    reporter = Reporter(Metrics(export=False, model_name="m"))
    parts: Any = SimpleNamespace(donors=donors, reporter=reporter)
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
    splice = Splice(cache, parts, req, state, START, STOP)
    splice.run()
    return splice.commit(), splice, cache, state


def test_the_whole_run_is_taken_over():
    done, splice, cache, state = spliced(STOP)
    assert done and splice.node == "node"
    assert state.pieces == PIECES and not state.split.refused
    assert state.realised == [], "nothing was copied for this request"
    assert cache.locks == 0


def test_a_part_of_it_is_not():
    done, splice, cache, state = spliced(STOP - 2)
    assert not done and splice.node is None
    assert state.pieces == ()
    assert [refusal.reason for refusal in state.split.refused] == ["overtaken"]
    assert cache.locks == 0


def test_a_run_whose_donor_is_gone_is_not_trusted():
    """Its copies may have failed: then its segment has another number by now."""
    done, splice, cache, state = spliced(STOP, has_donor=False)
    assert not done and splice.node is None
    assert [refusal.reason for refusal in state.split.refused] == ["retired"]
    assert cache.locks == 0
