"""A host of a few hundred slots in this process: SGLang's own tree, allocator, pools, requests and
prefill adder, and kvedit's rooms wired around them. There is no model: a forward writes, for each
token that it computes, a value that names the token, and a key for the token at its position.

One request after the other is run by the steps of the host's scheduler, hooks included, and the
ownership audit follows each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from kvedit.config import Config
from kvedit.skills.declaration import SkillDeclaration
from kvedit_kernels import PoolGroup
from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req  # noqa: E402
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder  # noqa: E402
from sglang.srt.mem_cache.allocation import alloc_for_extend  # noqa: E402
from sglang.srt.mem_cache.allocator import (  # noqa: E402
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    set_global_server_args_for_scheduler,
)

from sglang_patches.pools import GroupWithRope  # noqa: E402
from sglang_patches.scheduler.commands.audit import audit_scheduler  # noqa: E402
from sglang_patches.scheduler.hooks import admission, forward, intake  # noqa: E402
from sglang_patches.scheduler.request_state import key_of, report_of, state_of  # noqa: E402
from sglang_patches.scheduler.splice.tree import KvEditCache  # noqa: E402
from sglang_patches.scheduler.telemetry.metrics import Metrics  # noqa: E402
from sglang_patches.scheduler.telemetry.reporter import Reporter  # noqa: E402
from sglang_patches.scheduler.testing.faulty_queue import FaultyQueue  # noqa: E402
from sglang_patches.scheduler.wiring.build import assemble  # noqa: E402

__all__ = ["FINISH_ABORT", "Served", "SmallHost"]

HEADS, HEAD_DIM, LAYERS = 1, 8, 2
CONTEXT_LEN = 1_000
MAX_PASSES = 40
# of a request that nothing of ours touches
NO_REPORT = {"exact": 0, "composed": 0, "derived": 0, "refused": [], "copied": 0}


@dataclass
class Served:
    """What became of one request."""

    req: Any
    report: dict[str, Any]
    num_passes: int
    values: list[int]  # the token that each cached slot of its path says it is, by position
    keys: torch.Tensor  # K of layer 0, [num_cached, HEAD_DIM]

    @property
    def split(self) -> tuple[int, int, int, int]:
        r = self.report
        return r["exact"], r["composed"], r["derived"], r["computed"]

    @property
    def reasons(self) -> list[str]:
        return [refusal["reason"] for refusal in self.report["refused"]]


@dataclass
class _Batch:
    """What ``alloc_for_extend`` and the forward hook read of a ScheduleBatch."""

    reqs: list[Any]
    tree_cache: KvEditCache
    device: str = "cpu"
    hisparse_coordinator: None = None
    prefix_lens: list[int] = field(default_factory=list)
    extend_lens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.req_to_token_pool = self.tree_cache.req_to_token_pool
        self.token_to_kv_pool_allocator = self.tree_cache.token_to_kv_pool_allocator
        self.prefix_lens = [req.prefix_len for req in self.reqs]
        self.extend_lens = [req.extend_len for req in self.reqs]
        self.extend_num_tokens = sum(self.extend_lens)
        self.seq_lens_cpu = torch.tensor([req.extend_end for req in self.reqs])
        self.seq_lens = self.seq_lens_cpu

    def maybe_evict_swa(self) -> None: ...

    def is_dllm(self) -> bool:
        return False


class SmallHost:
    """``num_slots`` allocatable slots; chunks of ``chunk`` tokens."""

    def __init__(
        self,
        *,
        num_slots: int = 512,
        page_size: int = 1,
        chunk: int = 256,
        config: Config | None = None,
    ) -> None:
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
        get_parallel().override_permanently(tp_rank=0)
        self.page_size, self.chunk = page_size, chunk
        self.pool = MHATokenToKVPool(
            size=num_slots,
            page_size=page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = self._allocator(num_slots)
        self.rows = ReqToTokenPool(
            size=8, max_context_len=CONTEXT_LEN, device="cpu", enable_memory_saver=False
        )
        self.tree = KvEditCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.inv_freq = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
        self.metrics = Metrics(export=False, model_name="none")
        self.rooms = assemble(
            self.tree,
            config or Config(boundary_tokens=8, min_span_tokens=4, seam=4),
            facts={"model": "none"},
            reporter=Reporter(self.metrics),
            queue=FaultyQueue([self._group()], self.pool, self.tree.unlock),
            device=None,
            forward_stream=None,
            tokenizer=None,
            context_len=CONTEXT_LEN,
            page_size=page_size,
        )
        self._rids = count(1)
        self.waiting_queue: list[Any] = []
        self.chunked_req: Any = None
        self.last_batch: Any = None
        self.running_batch = SimpleNamespace(reqs=[])

    # what the audit asks of a scheduler
    @property
    def token_to_kv_pool_allocator(self) -> Any:
        return self.allocator

    @property
    def tree_cache(self) -> KvEditCache:
        return self.tree

    @property
    def req_to_token_pool(self) -> Any:
        return self.rows

    def _allocator(self, num_slots: int) -> Any:
        if self.page_size == 1:
            return TokenToKVPoolAllocator(num_slots, torch.float32, "cpu", self.pool, False)
        return PagedTokenToKVPoolAllocator(
            num_slots, self.page_size, torch.float32, "cpu", self.pool, False
        )

    def _group(self) -> GroupWithRope:
        group = PoolGroup.from_views(
            [self.pool.get_key_buffer(i) for i in range(LAYERS)],
            [self.pool.get_value_buffer(i) for i in range(LAYERS)],
            dtype=torch.float32,
            page_size=0,
            rot_offset=0,
            rot_dim=HEAD_DIM,
            is_neox=True,
            rotate=True,
        )
        return GroupWithRope(group, self.inv_freq, "full", tuple(range(LAYERS)), "rope")

    # ---- skills

    def register(self, name: str, ids: Sequence[int], **fields: Any) -> Any:
        """Declare and compile a skill. ``fields``: of a SkillDeclaration."""
        rid = f"compile-{next(self._rids)}"
        declaration = SkillDeclaration(
            name=name,
            token_ids=array("q", ids),
            compile_prefix=array("q"),
            **{"namespace": "shared", **fields},
        )
        declared = self.rooms.desk.declare(declaration, rid)
        if declared.outcome == "compile":
            self.run(list(ids), rid=rid, num_new=1)
        return declared.skill

    # ---- requests

    def run(
        self,
        ids: list[int],
        *,
        rid: str = "",
        num_new: int = 2,
        kvedit: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> Served:
        """Serve one request to its end, and audit the slots."""
        req, recv_req = self._request(
            ids, rid or f"request-{next(self._rids)}", num_new, kvedit, salt
        )
        intake.intake_hook(req, self, recv_req)
        assert req.to_finish is None and req.finished_reason is None, req.to_finish
        passes = 0
        while not req.output_ids:
            passes += 1
            assert passes < MAX_PASSES, "the request makes no progress"
            self._pass(req)
        req.output_ids.extend([9] * (num_new - 1))  # as if decoded, and not cached
        req.finished_reason = req.to_finish or FINISH_LENGTH(length=num_new)
        release_kv_cache(req, self.tree, checkpoint=True)
        report: Any = report_of(req) or {**NO_REPORT, "computed": len(ids)}
        assert self.problems() == []
        return Served(req, report, passes, *self._cached(req))

    def refused(self, ids: list[int], **fields: Any) -> Any:
        """A request that intake must refuse."""
        req, recv_req = self._request(ids, f"request-{next(self._rids)}", 1, fields["kvedit"], None)
        intake.intake_hook(req, self, recv_req)
        assert req.to_finish is not None
        return req

    def problems(self) -> list[str]:
        return audit_scheduler(self)

    def _request(
        self, ids: list[int], rid: str, num_new: int, kvedit: Any, salt: str | None
    ) -> tuple[Any, Any]:
        params = SamplingParams(
            max_new_tokens=num_new, custom_params=None if kvedit is None else {"kvedit": kvedit}
        )
        req = Req(rid, "", array("q", ids), params, cache_salt=salt, vocab_size=100_000)
        received = SimpleNamespace(
            rid=rid, sampling_params=params, cache_salt=salt, extra_key=None, lora_id=None,
            session_params=None, session_id=None, input_embeds=None,
            positional_embed_overrides=None, token_type_ids=None, mm_inputs=None,
            multi_item_delimiter_indices=None, token_indices_to_pool=None,
            return_routed_experts=False, return_indexer_topk=False, return_hidden_states=False,
            input_ids=ids,
        )  # fmt: skip
        return req, received

    def _pass(self, req: Any) -> None:
        """One prefill pass, by the steps of ``_get_new_batch_prefill_raw`` and ``run_batch``."""
        adder = admission.planned_adder(PrefillAdder)(
            self.page_size, self.tree, self.allocator, None, 1.0, CONTEXT_LEN, self.chunk
        )
        if self.chunked_req is not None:
            req.init_next_round_input()
            self.chunked_req = adder.add_chunked_req(req)
        else:
            intake.prompt_hook(req, self.tree)
            req.init_next_round_input(self.tree)
            result = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
            assert result is not AddReqResult.NO_TOKEN, "no room"
            self.chunked_req = adder.new_chunked_req
        assert adder.can_run_list == [req]
        self._forward(req)
        if self.chunked_req is not None:
            checkpoint_kv_cache(req, self.tree)
        else:
            req.output_ids.append(7)

    def _forward(self, req: Any) -> None:
        batch: Any = _Batch([req], self.tree)
        slots, _, _ = alloc_for_extend(batch)
        forward.forward_hook(None, batch)
        ids = req.full_untruncated_fill_ids[req.prefix_len : req.extend_end]
        positions = range(req.prefix_len, req.extend_end)
        for slot, token, position in zip(slots.tolist(), ids, positions, strict=True):
            for layer in range(LAYERS):
                self.pool.get_key_buffer(layer)[slot, 0] = self.key(token, position)
                self.pool.get_value_buffer(layer)[slot, 0] = token

    def key(self, token: int, position: int) -> torch.Tensor:
        """fp32 [HEAD_DIM]: the key of ``token``, turned to its position (neox halves)."""
        first = torch.arange(1, 5, dtype=torch.float64) + token % 13
        second = torch.arange(5, 9, dtype=torch.float64) - token % 7
        angle = self.inv_freq * position
        turned = [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ]
        return torch.cat(turned).float()

    def _cached(self, req: Any) -> tuple[list[int], torch.Tensor]:
        """(tokens that the slots of the request's path say they are, K of layer 0)."""
        state = state_of(req)
        pieces = () if state is None else state.pieces
        match = self.tree.match_spelled(key_of(req, req.origin_input_ids), pieces)
        slots = self.tree.path_device_indices(match.last_device_node)[: match.device_prefix_len]
        values = self.pool.get_value_buffer(0)[slots, 0, 0]
        return [int(value) for value in values], self.pool.get_key_buffer(0)[slots, 0]
