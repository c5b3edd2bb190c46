"""The radix tree with composed paths: SGLang's unified cache, with kvedit's spelling of keys.

The host sees virtual ids in tree keys only. Its requests always hold real ids; where it builds a
tree key from a request, the request's ids are respelled for the length of that call.

Entry points of a splice: ``match_prefix`` reports the span behind a match as a host hit, so that
the host's admission budgets it and calls ``init_load_back`` (one forward for the rest); a span
whose prefix is not cached yet is realised by ``checkpoint`` at a forced chunk boundary.
"""

from __future__ import annotations

import dataclasses
from functools import cache as memoized
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvedit.reason import Reason
from kvedit.skills.segment import WHY_NOT_READY, State
from kvedit.splice.pass_price import Lost
from kvedit.splice.spans import Pieces, Plan, Refusal, Span, run_end, served_ids
from kvedit.splice.spelling import Choice, choose_path
from sglang_patches.guard import boundary
from sglang_patches.host.protocols import Request
from sglang_patches.scheduler.request_state import (
    RequestState,
    ServedIds,
    key_of,
    planned,
    state_of,
)
from sglang_patches.scheduler.splice.parts import Parts
from sglang_patches.scheduler.splice.realise import Splice


class KvEditCache(UnifiedRadixCache):
    """A UnifiedRadixCache on either tree core. ``parts`` and ``owner`` are set once, after the
    base class has run its own ``reset``; what wired it finds itself by ``owner`` again, and the
    tree never looks inside."""

    _parts: Parts | None = None
    owner: object = None

    def equip(self, parts: Parts, owner: object) -> None:
        """Give the tree what it splices with, before any request comes."""
        self._parts, self.owner = parts, owner

    @property
    def parts(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("kvedit: tree: expected its parts, got none (still starting)")
        return self._parts

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        state = planned(params.req)
        if state is None:
            return super().match_prefix(params)
        with boundary("match_prefix", lambda: state.drop(0, Reason.INTERNAL_ERROR)) as hook:
            result = self._match_served(params, state)
        return result if hook.is_well else super().match_prefix(params)

    def _match_served(self, params: MatchPrefixParams, state: RequestState) -> MatchResult:
        key = params.key
        choice = state.take_handed(key) or self.choose(key, state.plan)
        state.pieces = choice.pieces
        state.lost = self._lost(choice)
        served = MatchPrefixParams(
            key=_respelled(key, state.pieces), cow_mamba=params.cow_mamba, req=params.req
        )
        result = super().match_prefix(served)
        matched = result.device_prefix_len
        ahead = run_end(state.pieces, matched) - matched
        if ahead and not result.host_hit_length:
            result = result._replace(host_hit_length=ahead, best_match_node=result.last_device_node)
        return result

    def choose(self, key: RadixKey, plan: Plan) -> Choice:
        """The spelling of ``key`` (real ids) that leaves the fewest tokens to compute.

        A plan may be older than the registry. A source that is gone (purged, or given a new
        number because its cached paths are not to be trusted) is not even looked up.
        """
        knows = self.parts.donors.knows
        known = [tuple(filter(knows, spans)) for spans in plan.alternatives]
        gone = [span for span in plan.spans if not knows(span)]
        choice = choose_path(
            [spans for spans in known if spans],
            num_tokens=len(key.token_ids),
            match=lambda pieces: self.match_spelled(key, pieces).device_prefix_len,
            composable=memoized(self._composable),  # asked anew for each spelling that is tried
            worth=plan.worth,
        )
        return dataclasses.replace(choice, lost=(*choice.lost, *gone))

    def preview(self, req: Request, state: RequestState) -> list[Lost]:
        """(source, why) of what the request could not compose if it were admitted now."""
        return list(self._lost(self.choose(key_of(req, req.origin_input_ids), state.plan)))

    def _lost(self, choice: Choice) -> tuple[Lost, ...]:
        gone = [(span.source, self._refusal(span)) for span in choice.lost]
        return (*gone, *choice.unpaid)

    def match_spelled(self, key: RadixKey, pieces: Pieces) -> MatchResult:
        """Match without a request: nobody's state changes, nodes become recent and may be cut."""
        return super().match_prefix(MatchPrefixParams(key=_respelled(key, pieces)))

    def _composable(self, span: Span) -> bool:
        return self.parts.donors.state_of(span) is State.READY

    def _refusal(self, span: Span) -> Refusal:
        state = self.parts.donors.state_of(span)
        return Refusal(skill=span.skill, reason=WHY_NOT_READY[state])

    # ---- the two entry points of a splice

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        req = params.req
        state = planned(req)
        if req is None or state is None or self.cache_controller is not None:
            loaded: tuple[int, Any] | None = super().init_load_back(params)
            return loaded
        start = req.prefix_len
        splice = Splice(self, self.parts, req, state, start, start + params.host_hit_length)
        with boundary("init_load_back", splice.abandon) as hook:
            splice.run()
        if hook.is_well and splice.commit():
            return params.host_hit_length, splice.node
        return 0, req.last_node

    def load_back_is_cache_owned(self) -> bool:
        return True

    def checkpoint_into_tree(self, req: Request, *, up_to: int, **kwargs: Any) -> None:
        state = state_of(req)
        if state is None:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            return
        pieces = state.pieces if state.is_valid_for(req) else ()
        with ServedIds(req, pieces):
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if req.finished():
            self.parts.listener.on_finished(req, state, up_to)
        elif pieces and up_to == req.extend_end and run_end(pieces, up_to) > up_to:
            self._splice_at_boundary(req, state, up_to, run_end(pieces, up_to))

    def _splice_at_boundary(self, req: Request, state: RequestState, start: int, stop: int) -> None:
        """The chunk just published ends where a span starts: hand the request the span's slots.

        All fields that say how far the request is move together. ``checkpoint_kv_cache`` reads
        extend_end after this call, so the next chunk starts behind the span.
        """
        splice = Splice(self, self.parts, req, state, start, stop)
        with boundary("checkpoint", splice.abandon) as hook:
            if req.kv.cache_protected_len != start:
                raise RuntimeError(
                    f"kvedit: chunk boundary: expected the tree to hold {start} tokens, "
                    f"got {req.kv.cache_protected_len}"
                )
            splice.run()
            if splice.node is not None:
                self.req_to_token_pool.write(
                    (req.kv.req_pool_idx, slice(start, stop)), splice.slots
                )
        if not hook.is_well or not splice.commit():
            return
        self.unlock(req.lock)
        req.lock = self.lock(splice.node)
        req.last_node = splice.node
        kv = req.kv
        kv.cache_protected_len = kv.cache_inserted_len = stop
        kv.kv_committed_len = kv.kv_allocated_len = stop
        req.extend_end = stop

    # ---- the host's other calls

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        """Admission counted donors as evictable. A queued copy locks its donor until it ran, so
        it runs now rather than let an admitted request find no slots."""
        self.parts.copies.run()
        return super().evict_for_alloc(params, **kwargs)

    def inc_host_lock_ref(self, node_id: Any) -> IncLockRefResult:
        """Admission takes a host lock around a load-back; without a host tier there is none."""
        if self.cache_controller is None:
            return IncLockRefResult()
        return super().inc_host_lock_ref(node_id)

    def dec_host_lock_ref(self, node_id: Any, params: Any) -> DecLockRefResult:
        if self.cache_controller is None:
            return DecLockRefResult()
        return super().dec_host_lock_ref(node_id, params)

    def reset(self) -> None:
        super().reset()
        if self._parts is not None:
            self._parts.copies.queue.discard()
            self._parts.listener.on_emptied()

    def sanity_check(self) -> None:
        with self.parts.pins.suspended():
            super().sanity_check()


def _respelled(key: RadixKey, pieces: Pieces) -> RadixKey:
    ids = served_ids(key.token_ids, pieces) if pieces else key.token_ids
    return RadixKey(ids, key.extra_key, limit=key.limit, cache_salt=key.cache_salt)
