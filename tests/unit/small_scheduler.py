"""The host of the heart's tests: SGLang's own tree, allocator, pools, requests and prefill adder,
of a few hundred slots, in this process. One request after the other takes the steps of the host's
scheduler, hooks included, and the ownership audit follows each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, release_req  # noqa: E402
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder  # noqa: E402
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend  # noqa: E402
from sglang.srt.mem_cache.allocator import (  # noqa: E402
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    set_global_server_args_for_scheduler,
)

from sglang_patches.scheduler.commands.audit import audit_scheduler  # noqa: E402
from sglang_patches.scheduler.hooks import admission, forward, intake  # noqa: E402
from sglang_patches.scheduler.request_state import state_of  # noqa: E402
from sglang_patches.scheduler.splice.tree import KvEditCache  # noqa: E402
from tests.unit.small_model import MarksOf, SmallModel  # noqa: E402

CONTEXT_LEN = 1_000
MAX_PASSES = 80


@cache
def _settle_process() -> None:
    """What the host reads of its arguments, once."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    get_parallel().override_permanently(tp_rank=0, attn_tp_rank=0, dp_rank=None)


@dataclass
class _Batch:
    """What the host's allocation and the forward hook read of a ScheduleBatch."""

    reqs: list[Any]
    seq_lens: torch.Tensor  # behind an extend; in front of a decode
    tree_cache: KvEditCache
    device: str = "cpu"
    hisparse_coordinator: None = None
    model_config: Any = field(default_factory=lambda: SimpleNamespace(is_encoder_decoder=False))

    def __post_init__(self) -> None:
        self.req_to_token_pool = self.tree_cache.req_to_token_pool
        self.token_to_kv_pool_allocator = self.tree_cache.token_to_kv_pool_allocator
        self.seq_lens_cpu = self.seq_lens
        self.prefix_lens = [req.prefix_len for req in self.reqs]
        self.extend_lens = [req.extend_len for req in self.reqs]
        self.extend_num_tokens = sum(self.extend_lens)

    @property
    def req_pool_indices(self) -> torch.Tensor:
        return torch.tensor([req.kv.req_pool_idx for req in self.reqs])

    req_pool_indices_cpu = req_pool_indices

    def maybe_evict_swa(self) -> None: ...

    def is_dllm(self) -> bool:
        return False


class SmallScheduler:
    """``num_slots`` allocatable slots; chunks of ``chunk`` tokens.

    misreads        by request id: what was wrong with the KV that its forwards read, each once
    between_passes  called between two chunks of a prompt, and when a request has been retracted:
                    where others may take the room
    """

    def __init__(self, num_slots: int, page_size: int, chunk: int, marks_of: MarksOf) -> None:
        _settle_process()
        self.page_size, self.chunk = page_size, chunk
        self.model = SmallModel(num_slots, page_size, marks_of)
        self.token_to_kv_pool_allocator = self._allocator(num_slots)
        self.req_to_token_pool = ReqToTokenPool(
            size=8, max_context_len=CONTEXT_LEN, device="cpu", enable_memory_saver=False
        )
        self.tree_cache = KvEditCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.waiting_queue: list[Any] = []
        self.chunked_req: Any = None
        self.last_batch: Any = None
        self.running_batch = SimpleNamespace(reqs=[])
        self.misreads: dict[str, dict[str, None]] = {}
        self.between_passes: Callable[[], None] = lambda: None

    def _allocator(self, num_slots: int) -> Any:
        pool, page_size = self.model.pool, self.page_size
        if page_size == 1:
            return TokenToKVPoolAllocator(num_slots, torch.float32, "cpu", pool, False)
        return PagedTokenToKVPoolAllocator(num_slots, page_size, torch.float32, "cpu", pool, False)

    def problems(self) -> list[str]:
        return audit_scheduler(self)

    # ---- a request's steps

    def prefill(self, req: Any, first: int = 7) -> int:
        """Admit a request and run its chunks until it has the output ``first``; how many."""
        num_passes = 0
        num_outputs = len(req.output_ids)
        while len(req.output_ids) == num_outputs:
            if num_passes:
                self.between_passes()
            num_passes += 1
            assert num_passes < MAX_PASSES, "the request makes no progress"
            self._pass(req, first)
            assert self.problems() == []
        self.waiting_queue = [other for other in self.waiting_queue if other is not req]
        return num_passes

    def decode(self, req: Any, token: int) -> None:
        """One decode step, which ends with the output ``token``."""
        batch: Any = _Batch([req], torch.tensor([req.kv.kv_committed_len]), self.tree_cache)
        alloc_for_decode(batch, 1)
        forward.forward_hook(None, batch)
        self._compute(req, req.kv.kv_committed_len - 1, req.kv.kv_committed_len)
        req.output_ids.append(token)

    def retract(self, req: Any) -> None:
        """The pool is short: the request gives its KV up and waits to be admitted again."""
        self.running_batch.reqs.remove(req)
        release_req(
            req=req,
            remaing_req_count=0,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
        )
        self.waiting_queue.append(req)
        self.between_passes()
        assert self.problems() == []

    def end(self, req: Any) -> None:
        req.finished_reason = req.to_finish or FINISH_LENGTH(length=len(req.output_ids))
        self.running_batch.reqs.remove(req)
        release_kv_cache(req, self.tree_cache, checkpoint=True)
        assert self.problems() == []

    def slots_of(self, req: Any) -> torch.Tensor:
        """int64: what a running request stands on, by position."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        return row[: req.kv.kv_committed_len].long()

    # ---- to all

    def flush(self) -> None:
        """As ``Scheduler.flush_cache``; only while nothing runs."""
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()

    def evict(self, num_tokens: int | None = None) -> None:
        """Whatever nobody has locked, or so many tokens of it."""
        tree = self.tree_cache
        size = tree.evictable_size() if num_tokens is None else num_tokens
        tree.evict(EvictParams(num_tokens=size))

    # ---- inside

    def _pass(self, req: Any, first: int) -> None:
        """One prefill pass, by the steps of ``_get_new_batch_prefill_raw`` and ``run_batch``."""
        adder = admission.planned_adder(PrefillAdder)(
            self.page_size,
            self.tree_cache,
            self.token_to_kv_pool_allocator,
            self.running_batch,
            1.0,
            CONTEXT_LEN,
            self.chunk,
        )
        if self.chunked_req is not None:
            req.init_next_round_input()
            self.chunked_req = adder.add_chunked_req(req)
        else:
            intake.prompt_hook(req, self.tree_cache)
            req.init_next_round_input(self.tree_cache)
            result = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
            assert result is not AddReqResult.NO_TOKEN, "no room"
            self.chunked_req = adder.new_chunked_req
        assert adder.can_run_list == [req]
        self._extend(req)
        if self.chunked_req is not None:
            checkpoint_kv_cache(req, self.tree_cache)
        else:
            req.output_ids.append(first)
            self.running_batch.reqs.append(req)

    def _extend(self, req: Any) -> None:
        batch: Any = _Batch([req], torch.tensor([req.extend_end]), self.tree_cache)
        alloc_for_extend(batch)
        forward.forward_hook(None, batch)
        self._compute(req, req.prefix_len, req.extend_end)

    def _compute(self, req: Any, start: int, stop: int) -> None:
        """The forward of tokens [start, stop). What it reads is checked, but for a request that
        has been ended because its copies never ran."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        slots, ids = row[:stop].long(), (req.origin_input_ids + req.output_ids).tolist()
        if req.to_finish is None:
            state = state_of(req)
            pieces = () if state is None else state.pieces
            num_exact = min(start, pieces[0].start) if pieces else start
            wrong = self.model.misread(ids[:start], slots[:start], num_exact)
            self.misreads.setdefault(req.rid, {}).update(dict.fromkeys(wrong))
        self.model.compute(ids, slots, start)
