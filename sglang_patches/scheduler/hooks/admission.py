"""Admission of planned requests: the host's PrefillAdder with forced chunk boundaries.

Rules that keep the host's budget right:
R1  A chunk cut at a forced boundary reserves the rest of its request in the pass's budget. The
    host's own truncated chunk is always the last one admitted in a pass; a forced one is not.
R2  One chunked request at a time: a request that would need a second one waits, whether we cut
    it or the host does. A forced chunk leaves budget in its pass, so the host could cut a later
    request (with a plan or without) to what is left, and forget the first one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder

from kvedit.reason import Reason
from kvedit.splice.sources import SkillSource
from kvedit.splice.spans import next_start, run_end
from kvedit.splice.token_classes import TokenSplit
from sglang_patches.guard import boundary
from sglang_patches.host.protocols import Batch, Request, Scheduler
from sglang_patches.scheduler.hooks.intake import refuse_late
from sglang_patches.scheduler.request_state import EditState, RequestState, planned, state_of
from sglang_patches.scheduler.splice.tree import KvEditCache
from sglang_patches.scheduler.telemetry.reporter import Reporter
from sglang_patches.scheduler.wiring.rooms import Rooms, rooms_of


@lru_cache
def planned_adder(base: type[PrefillAdder]) -> type[PrefillAdder]:
    """Subclass of the host's adder class; requests without a plan pass through untouched."""

    class PlannedAdder(base):
        chunked_req_limit: int | None

        @property
        def _rooms(self) -> Rooms:
            rooms = rooms_of(self.tree_cache)
            assert rooms is not None  # this class is given to our trees only
            return rooms

        def add_one_req(self, req: Request, *args: Any, **kwargs: Any) -> AddReqResult:
            result = super().add_one_req(req, *args, **kwargs)
            while result is AddReqResult.NO_TOKEN and self._can_release_a_pin():
                req.init_next_round_input(self.tree_cache)
                result = super().add_one_req(req, *args, **kwargs)
            return result

        def _can_release_a_pin(self) -> bool:
            """Pins are soft: with nothing running and nothing admitted, the head of the queue
            would wait for ever."""
            idle = not self.can_run_list and not self._num_running()
            return idle and self._rooms.desk.release_oldest_pin()

        def _num_running(self) -> int:
            return 0 if self.running_batch is None else len(self.running_batch.reqs)

        def _select_prefill_admission(
            self,
            req: Request,
            *,
            host_hit_length: int,
            has_chunked_req: bool = False,
            **kwargs: Any,
        ) -> Any:
            state = planned(req)
            if state is not None and not host_hit_length:
                _give_up_unrealised(state, req.prefix_len)
            admission = super()._select_prefill_admission(
                req, host_hit_length=host_hit_length, has_chunked_req=has_chunked_req, **kwargs
            )
            if isinstance(admission, AddReqResult):
                return admission
            if state is not None:
                admission = _cut_at_boundary(state, admission)
            if admission.is_chunked and (has_chunked_req or self.new_chunked_req is not None):
                return AddReqResult.OTHER  # R2
            return admission

        def _commit_prefill_admission(
            self, req: Request, admission: Any, mamba_gap_reserve: int
        ) -> None:
            state = state_of(req)
            if state is not None and planned(req) is not None:
                # Spliced slots were never on a host tier: keep the host's own figures right.
                req.host_hit_length = req.host_loaded_length = 0
            super()._commit_prefill_admission(req, admission, mamba_gap_reserve)
            if state is None:
                return
            if state.edit is not None:
                first, state.edit.is_frozen = not state.edit.is_frozen, True
                if first:
                    _count_edit(self._rooms.reporter, state, state.edit)
            if admission.is_chunked and state.pieces:
                self._reserve_rest(req)
            _cover(self._rooms, req, state)

        def _reserve_rest(self, req: Request) -> None:  # R1
            rest = len(req.full_untruncated_fill_ids) - req.extend_end
            if rest > 0:
                new_tokens = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
                self.memory_budget.reserve(rest, new_tokens)

        def add_chunked_req(self, req: Request) -> Any:
            state = planned(req)
            if state is not None:
                _give_up_unrealised(state, req.prefix_len)
                self._limit_chunk(state, req.prefix_len)
            rest = super().add_chunked_req(req)
            if rest is not None and state is not None and state.pieces:
                self._reserve_rest(req)
            any_state = state_of(req)
            if any_state is not None and req.extend_end > req.prefix_len:
                _cover(self._rooms, req, any_state)
            return rest

        def _limit_chunk(self, state: RequestState, position: int) -> None:
            boundary_at = next_start(state.pieces, position)
            if boundary_at is None:
                return
            limit = boundary_at - position
            if self.chunked_req_limit is not None:
                limit = min(limit, self.chunked_req_limit)
            self.chunked_req_limit = limit

    return PlannedAdder


def _count_edit(reporter: Reporter, state: RequestState, edit: EditState) -> None:
    """The request is admitted: its prompt stays, also when it is retracted and tried again."""
    if not state.is_counted or not edit.client.windows:
        return
    reporter.metrics.count_edit(edit.kind, edit.chosen.base)
    reporter.publish("prompt_served", served=edit.kind, base=edit.chosen.base)


def _cut_at_boundary(state: RequestState, admission: Any) -> Any:
    """The admission as far as the next composed run, which is spliced at the chunk's end."""
    boundary_at = next_start(state.pieces, admission.prefix_len)
    if boundary_at is None or boundary_at >= admission.prefix_len + admission.extend_len:
        return admission
    return dataclasses.replace(
        admission,
        extend_len=boundary_at - admission.prefix_len,
        max_new_tokens=0,
        is_chunked=True,
    )


def _give_up_unrealised(state: RequestState, position: int) -> None:
    """A request that stands inside a composed run has not been given its slots: compute them."""
    if run_end(state.pieces, position) > position:
        state.give_up(position)


def _cover(rooms: Rooms, req: Request, state: RequestState) -> None:
    """Class the tokens this admission covers first, for the report and the counters."""
    with boundary("cover", lambda: None) as hook:
        split = state.split.copy()
        split.cover(
            state.pieces,
            prefix_len=req.prefix_len,
            extend_end=req.extend_end,
            copied=state.realised,
            lines=() if state.edit is None else state.edit.line_intervals,
        )
    if hook.is_well:
        _settle_cover(rooms, req, state, split)


def _settle_cover(rooms: Rooms, req: Request, state: RequestState, split: TokenSplit) -> None:
    if state.is_counted:
        rooms.reporter.metrics.count_tokens(state.split.counts(), split)
    state.split = split
    lost, state.lost = state.lost, ()
    rooms.reporter.refuse(state, tuple(refusal for _, refusal in lost))
    state.evicted |= {
        source.number
        for source, refusal in lost
        if refusal.reason is Reason.EVICTED and isinstance(source, SkillSource)
    }
    if state.unmet or (state.options.splice == "require" and state.split.refused):
        refuse_late(req, state)


def decode_memory_hook(
    original: Callable[..., bool], batch: Batch, selected_indices: list[int] | None = None
) -> bool:
    """AROUND ``ScheduleBatch.check_decode_mem``: the host aborts the last running request when
    it has no room left. Pins yield first."""
    fits = original(batch, selected_indices)
    num_running = len(batch.reqs if selected_indices is None else selected_indices)
    rooms = rooms_of(batch.tree_cache)
    if fits or num_running > 1 or rooms is None:
        return fits
    while not fits and rooms.desk.release_oldest_pin():
        fits = original(batch, selected_indices)
    return fits


def adder_hook(result: type[PrefillAdder], scheduler: Scheduler, *args: Any) -> type[PrefillAdder]:
    """AFTER ``Scheduler.get_prefill_adder_class``."""
    if isinstance(scheduler.tree_cache, KvEditCache):
        return planned_adder(result)  # type: ignore[arg-type]  # the host's class is hashable
    return result
