"""kvedit's rooms around the small scheduler: skills are registered and requests served, in this
process, and what each request stood on and left behind is read back from the pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from kvedit.config import Config
from kvedit.skills.declaration import SkillDeclaration
from sglang_patches.scheduler.hooks import intake
from sglang_patches.scheduler.request_state import key_of, report_of, state_of
from sglang_patches.scheduler.telemetry.metrics import Metrics
from sglang_patches.scheduler.telemetry.reporter import Reporter
from sglang_patches.scheduler.testing.faulty_queue import FaultyQueue
from sglang_patches.scheduler.wiring.build import assemble
from tests.unit.marks import Marks
from tests.unit.small_model import TOKEN, MarksOf
from tests.unit.small_scheduler import CONTEXT_LEN, SmallScheduler

__all__ = ["CONFIG", "FINISH_ABORT", "Served", "SmallHost"]

CONFIG = Config(boundary_tokens=8, min_span_tokens=4, seam=4)
# of a request that nothing of ours touches
NO_REPORT = {"exact": 0, "composed": 0, "derived": 0, "refused": [], "copied": 0}


@dataclass
class Served:
    """What became of one request."""

    req: Any
    report: dict[str, Any]
    num_passes: int
    misread: list[str]  # what was wrong with the KV that it read
    seen: list[Marks]  # by position, what was said when the KV it stood on was computed
    values: list[int]  # the token that each cached slot of its path says it is, by position
    keys: torch.Tensor  # K of layer 0, [num_cached, HEAD_DIM]

    @property
    def split(self) -> tuple[int, int, int, int]:
        r = self.report
        return r["exact"], r["composed"], r["derived"], r["computed"]

    @property
    def reasons(self) -> list[str]:
        return [refusal["reason"] for refusal in self.report["refused"]]


class SmallHost(SmallScheduler):
    """``num_slots`` allocatable slots; chunks of ``chunk`` tokens."""

    def __init__(
        self,
        *,
        num_slots: int = 512,
        page_size: int = 1,
        chunk: int = 256,
        config: Config = CONFIG,
        reporter: Reporter | None = None,
        tokenizer: Any = None,
        marks_of: MarksOf = lambda ids: {},
    ) -> None:
        super().__init__(num_slots, page_size, chunk, marks_of)
        self.tree, self.allocator = self.tree_cache, self.token_to_kv_pool_allocator
        self.reporter = reporter or Reporter(Metrics(export=False, model_name="none"))
        self.rooms = assemble(
            self.tree,
            config,
            facts={"model": "none"},
            reporter=self.reporter,
            queue=FaultyQueue([self.model.group()], self.model.pool, self.tree.unlock),
            device=None,
            forward_stream=None,
            tokenizer=tokenizer,
            context_len=CONTEXT_LEN,
            page_size=page_size,
        )
        self._rids = count(1)

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

    def compile_again(self, skill: Any) -> None:
        """As the HTTP process does when it learns that a skill was evicted."""
        rid = f"compile-{next(self._rids)}"
        if self.rooms.desk.recompile(skill.number, rid) == "compile":
            self.run(skill.segment.token_ids.tolist(), rid=rid, num_new=1)

    # ---- requests

    def run(
        self,
        ids: list[int],
        *,
        rid: str = "",
        num_new: int = 2,
        kvedit: Any = None,
        salt: str | None = None,
    ) -> Served:
        """Serve one request to its end, and audit the slots after each step."""
        req = self.begin(ids, rid=rid, num_new=num_new, kvedit=kvedit, salt=salt)
        assert req.to_finish is None and req.finished_reason is None, req.to_finish
        num_passes = self.prefill(req)
        for _ in range(num_new - 1):
            if req.to_finish is None:
                self.decode(req, 9)
        return self.finish(req, num_passes)

    def begin(
        self,
        ids: list[int],
        *,
        rid: str = "",
        num_new: int = 2,
        kvedit: Any = None,
        salt: str | None = None,
    ) -> Any:
        """A request as the scheduler has it when it waits. ``kvedit``: the options, as sent."""
        params = SamplingParams(
            max_new_tokens=num_new, custom_params=None if kvedit is None else {"kvedit": kvedit}
        )
        rid = rid or f"request-{next(self._rids)}"
        req = Req(rid, "", array("q", ids), params, cache_salt=salt, vocab_size=100_000)
        received = SimpleNamespace(
            rid=rid, sampling_params=params, cache_salt=salt, extra_key=None, lora_id=None,
            session_params=None, session_id=None, input_embeds=None,
            positional_embed_overrides=None, token_type_ids=None, mm_inputs=None,
            multi_item_delimiter_indices=None, token_indices_to_pool=None,
            return_routed_experts=False, return_indexer_topk=False, return_hidden_states=False,
            input_ids=ids,
        )  # fmt: skip
        intake.intake_hook(req, self, received)
        return req

    def finish(self, req: Any, num_passes: int = 0) -> Served:
        """The request has its last token."""
        seen = self.model.seen(self.slots_of(req))
        self.end(req)
        report: Any = report_of(req) or {**NO_REPORT, "computed": len(req.origin_input_ids)}
        misread = list(self.misreads.pop(req.rid, ()))
        return Served(req, report, num_passes, misread, seen, *self._cached(req))

    def refused(self, ids: list[int], **fields: Any) -> Any:
        """A request that intake must refuse."""
        req = self.begin(ids, num_new=1, **fields)
        assert req.to_finish is not None
        return req

    def key(self, token: int, position: int) -> torch.Tensor:
        """fp32 [HEAD_DIM]: the key of ``token`` at its position."""
        return self.model.keys([token], position)[0]

    def _cached(self, req: Any) -> tuple[list[int], torch.Tensor]:
        """(tokens that the slots of the request's path say they are, K of layer 0)."""
        slots = self.cached_slots(req)
        values = self.model.values(slots)[:, TOKEN].tolist()
        return values, self.model.pool.get_key_buffer(0)[slots, 0]

    def cached_slots(self, req: Any) -> torch.Tensor:
        """int64: what the tree holds of a finished request's prompt, as it was served."""
        state = state_of(req)
        pieces = () if state is None else state.pieces
        match = self.tree.match_spelled(key_of(req, req.origin_input_ids), pieces)
        path = self.tree.path_device_indices(match.last_device_node)
        return path[: match.device_prefix_len].long()
