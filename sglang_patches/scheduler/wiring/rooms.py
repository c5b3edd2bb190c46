"""The rooms of one scheduler process, and what happens to several of them at once."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from kvedit.config import Config
from kvedit.request.options import Options
from kvedit.skills.segment import Skill
from kvedit.splice.planner import PlanLimits, plan_spans
from kvedit.splice.sources import Source, in_order
from kvedit.splice.spans import Plan
from sglang_patches.guard import agree, boundary
from sglang_patches.host.protocols import Request
from sglang_patches.scheduler.edit.record import record_turn
from sglang_patches.scheduler.edit.room import EditRoom
from sglang_patches.scheduler.request_state import RequestState
from sglang_patches.scheduler.skills.desk import SkillDesk
from sglang_patches.scheduler.splice.copy_runner import CopyRunner
from sglang_patches.scheduler.splice.donors import Donors
from sglang_patches.scheduler.splice.tree import KvEditCache
from sglang_patches.scheduler.telemetry.reporter import Reporter
from sglang_patches.scheduler.wiring.served_log import ServedLog


@dataclass(frozen=True, kw_only=True)
class Rooms:
    """Everything here is the same on every TP rank, except that only rank 0 exports metrics and
    events.

    page_size, pool_size   in tokens
    identity_of   by weight epoch: what shapes KV bytes besides tokens
    served_log    None but on a server that was started for testing
    """

    config: Config
    page_size: int
    pool_size: int
    identity_of: Callable[[int], str]
    tree: KvEditCache
    reporter: Reporter
    desk: SkillDesk
    edits: EditRoom
    donors: Donors
    copies: CopyRunner
    served_log: ServedLog | None

    @property
    def is_in_use(self) -> bool:
        """Whether anything is registered; if not, nothing of ours touches a plain request."""
        return bool(len(self.desk.registry.matcher) or len(self.edits.fields))

    def plan(self, ids: array[int], namespace: str, options: Options) -> Plan:
        """What could be composed of a prompt."""
        limits = PlanLimits(
            page_size=self.page_size,
            min_span_tokens=self.config.min_span_tokens,
            default_seam=self.config.seam,
            last_position=max(0, len(ids) - 1),  # the last token is always forwarded
            boundary_tokens=self.config.boundary_tokens,
        )
        return plan_spans(
            ids,
            self.desk.registry,
            namespace,
            options,
            limits,
            lambda start, stop: self.edits.decode(ids[start:stop]),
        )

    # ---- what the tree tells

    def on_finished(self, req: Request, state: RequestState, up_to: int) -> None:
        """A request has ended; ``up_to`` tokens of its path are in the tree."""
        if state.is_compile:
            skill = self.desk.registry.by_rid(req.rid)
            with boundary("finish_compile", lambda: self._compile_broke(skill)):
                agree("compiled")  # from here on it is bookkeeping
                self._finish_compile(req)
            return
        with boundary("record_turn", lambda: None):
            if self.served_log is not None:
                self.served_log.note(req, state, up_to)
            record_turn(self.edits, req, state, up_to)

    def on_emptied(self) -> None:
        """The host has reset the tree: locks, donors and queued copies are gone."""
        self.desk.emptied()
        self.new_epoch("flush")

    def _finish_compile(self, req: Request) -> None:
        if isinstance(req.finished_reason, FINISH_ABORT):
            self.desk.compile_failed(req.rid, req.finished_reason.message)
        else:
            self.desk.compiled(req.rid)

    def _compile_broke(self, skill: Skill | None) -> None:
        """Finishing broke: the skill is not ready, and whoever waits for it learns that."""
        if skill is not None:  # else the HTTP process had given it up
            self.desk.compile_broke(skill, "internal error, see the server's log")

    # ---- what happens to all

    def new_epoch(self, why: str) -> None:
        """Whatever shapes KV changed. Skills are evicted and their old paths unreachable."""
        self.edits.weight_epoch += 1
        self.edits.forget_turns()
        self.desk.new_epoch(self.identity_of(self.edits.weight_epoch))
        self.reporter.publish("weight_epoch", epoch=self.edits.weight_epoch, why=why)

    def distrust_everything(self) -> None:
        """No turn, path or segment of before is matched again."""
        self.edits.forget_turns()
        self.desk.distrust_all()

    def on_unwritten(self, sources: frozenset[Source]) -> None:
        """Copies from these sources did not run. A plain rule: no turn or path of before is a
        base, whether or not it stood on these."""
        self.edits.forget_turns()
        for source in in_order(sources):
            self.donors.distrust(source)


def rooms_of(tree: object) -> Rooms | None:
    """The rooms that a tree was wired with; None for a tree that is not ours, or still starting."""
    if not isinstance(tree, KvEditCache) or not isinstance(tree.owner, Rooms):
        return None
    return tree.owner
