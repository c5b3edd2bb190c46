"""Realise a composed run: slots into the tree now, bytes queued for the next forward.

Ownership through a splice of prompt tokens [start, stop):
    alloc()      free list           -> the splice
    insert()     the splice          -> one tree node (evictable, shared, counted once)
    on refusal   the splice          -> free list
The donor's path is looked up and locked here, never earlier, so no plan holds a stale slot.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.reason import Reason
from kvedit.skills.segment import WHY_NOT_READY, State
from kvedit.splice.sources import SkillSource, Source, in_order
from kvedit.splice.spans import Piece, Refusal, served_ids
from sglang_patches.guard import LostVote, agree
from sglang_patches.host.protocols import Request
from sglang_patches.pools import LostWindowSlots
from sglang_patches.scheduler.ports import GrowingPaths
from sglang_patches.scheduler.request_state import RequestState
from sglang_patches.scheduler.splice.copies import Copy
from sglang_patches.scheduler.splice.donors import Donor
from sglang_patches.scheduler.splice.parts import Parts


class Splice:
    """Prompt tokens [start, stop) of a request, all composed, on their way into the tree behind
    ``req.last_node`` (a path of ``start`` tokens). All or nothing.

    run()      inside a boundary: find, allocate, insert. It refuses, with the reason counted and
               the request's spelling real from ``start`` on, when a donor is gone or the pool has
               no room.
    commit()   after a boundary that every rank ended well: queue the copies. Bookkeeping only.
    abandon()  after one that some rank did not: give back what is held, wherever run() stopped.
    """

    def __init__(
        self,
        tree: GrowingPaths,
        parts: Parts,
        req: Request,
        state: RequestState,
        start: int,
        stop: int,
    ) -> None:
        self._tree, self._parts = tree, parts
        self._req, self._state = req, state
        self.start, self.stop = start, stop
        self.node: Any = None  # the new tree node; None until it is inserted, and when refused
        self.slots: torch.Tensor | None = None  # int64 [stop - start]
        self._is_in_tree = False  # the slots belong to the tree, or may do
        self._copies: list[Copy] = []
        self._donors: list[Donor] = []
        self._path_lock: Any = None

    def run(self) -> None:
        """Raises whatever goes wrong, and LostVote when it did on another rank."""
        self._path_lock = self._tree.lock(self._req.last_node)
        lost = self._collect_donors()
        cached = self._tree.match_prefix(MatchPrefixParams(key=self._key()))
        agree("donors")  # refusing and evicting change what all ranks share
        if lost is not None:
            self._refuse(lost, self._why_lost(lost.span.source))
        elif cached.device_prefix_len > self.start:
            self._take_over(cached)
        elif not self._allocate():
            self._refuse(self._donors[0].piece, Reason.NO_SLOTS)
        else:
            self._insert()

    def commit(self) -> bool:
        """Copies to the queue, the donors' locks with them. Returns whether it was spliced."""
        if self._copies and self.node is not None:
            locks = [*(donor.lock for donor in self._donors), self._tree.lock(self.node)]
            self._donors = []
            self._parts.copies.queue.put(self._copies, locks, holder=self._req)
            self._count()
        self._release()
        return self.node is not None

    def abandon(self) -> None:
        if self._is_in_tree:
            # The tree may hold slots whose bytes will never be written: make them unreachable.
            for source in in_order({copy.source for copy in self._copies}):
                self._parts.donors.distrust(source)
        self._state.drop(self.start, Reason.INTERNAL_ERROR)
        self._release()

    def _take_over(self, cached: MatchResult) -> None:
        """The run is in the tree by now, spliced for another request while this one computed its
        chunk. The whole of it serves; where only a part is there, the rest is computed. Its donors
        are known, so its copies have not failed."""
        if cached.device_prefix_len < self.stop:
            self._refuse(self._donors[0].piece, Reason.OVERTAKEN)
            return
        self.node = cached.last_device_node
        path = self._tree.path_device_indices(self.node)
        self.slots, self._is_in_tree = path[self.start : self.stop].to(torch.int64), True

    def _collect_donors(self) -> Piece | None:
        """Lock the donor of every piece in [start, stop); the first piece that has none."""
        for piece in self._state.pieces:
            first, last = max(piece.start, self.start), min(piece.stop, self.stop)
            if first >= last:
                continue
            donor = self._parts.donors.find(piece, first, last)
            if donor is None:
                return piece
            self._donors.append(donor)
        return None

    def _why_lost(self, source: Source) -> Reason:
        """Why a donor is not there. One that a compile brings back is noted."""
        why = self._parts.donors.lost(source)
        if why is State.EVICTED and isinstance(source, SkillSource):
            self._state.evicted.add(source.number)
        return WHY_NOT_READY[why]

    def _allocate(self) -> bool:
        num_tokens, copies = self.stop - self.start, self._parts.copies
        num_failed = copies.num_failed
        evict_from_tree_cache(self._tree, num_tokens)
        if copies.num_failed > num_failed:
            raise LostVote  # a launch in there was voted down; this splice ends alike on all ranks
        slots = self._tree.token_to_kv_pool_allocator.alloc(num_tokens)
        self.slots = None if slots is None else slots.to(torch.int64)
        return slots is not None

    def _insert(self) -> None:
        assert self.slots is not None
        try:
            self._copies = [self._copy(donor, self.slots) for donor in self._donors]
        except LostWindowSlots:
            self._refuse(self._donors[0].piece, Reason.WINDOW_LOST)
            return
        insertion = self._insertion(self.slots)
        agree("realise")  # from here on the tree changes
        self._is_in_tree = True
        result = self._tree.insert(insertion)
        if result.prefix_len != self.start:
            raise RuntimeError(
                f"kvedit: insert: expected {self.start} tokens on the path, got {result.prefix_len}"
            )
        self.node = result.last_device_node

    def _copy(self, donor: Donor, slots: torch.Tensor) -> Copy:
        span = donor.piece.span
        dst = slots[donor.start - self.start : donor.stop - self.start]
        return self._parts.copies.queue.plan(donor.slots, dst, span.delta_pos, span.source)

    def _insertion(self, slots: torch.Tensor) -> InsertParams:
        """The slots as the continuation of the request's path of ``start`` tokens."""
        req = self._req
        path = self._tree.path_device_indices(req.last_node)[: self.start].to(torch.int64)
        return InsertParams(
            key=self._key(),
            value=torch.cat([path, slots]),
            prev_prefix_len=self.start,
            inserted_len=self.start,
            priority=req.priority or 0,
        )

    def _key(self) -> RadixKey:
        """The request's path up to the end of the run, as it is served."""
        req = self._req
        ids = served_ids(req.full_untruncated_fill_ids[: self.stop], self._state.pieces)
        return RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)

    def _refuse(self, piece: Piece, reason: Reason) -> None:
        self._state.give_up(self.start)
        refusal = Refusal(skill=piece.span.skill, reason=reason)
        self._parts.reporter.refuse(self._state, (refusal,))

    def _count(self) -> None:
        self._state.realised.append((self.start, self.stop))
        for piece in self._state.pieces:
            if piece.start < self.stop and piece.stop > self.start:
                self._parts.donors.touch(piece.span.source)
                self._parts.reporter.spliced(
                    self._state,
                    skill=piece.span.skill,
                    start=max(piece.start, self.start),
                    stop=min(piece.stop, self.stop),
                    delta=piece.span.delta_pos,
                )

    def _release(self) -> None:
        """Give back the slots that the tree does not have, and every lock."""
        if self.slots is not None and not self._is_in_tree:
            self._tree.token_to_kv_pool_allocator.free(self.slots)
        self.slots = None
        for donor in self._donors:
            self._tree.unlock(donor.lock)
        self._donors = []
        if self._path_lock is not None:
            self._tree.unlock(self._path_lock)
        self._path_lock = None
