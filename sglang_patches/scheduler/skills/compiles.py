"""Compiling a skill: an ordinary one-token request whose path stays in the skills' namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from kvedit.skills.registry import State
from sglang_patches.guard import agree
from sglang_patches.scheduler.splice.donors import cached_path

if TYPE_CHECKING:
    from sglang_patches.scheduler.splice.tree import KvEditCache


def finish_compile(cache: KvEditCache, req: Any) -> None:
    """The compile request's tokens are in the tree: the skill is ready, and pinned if asked."""
    runtime = cache.runtime
    agree()  # from here on it is bookkeeping
    if isinstance(req.finished_reason, FINISH_ABORT):
        runtime.compile_failed(req.rid, req.finished_reason.message)
        return
    skill = runtime.registry.compiled(req.rid)
    if skill.state is not State.READY:
        return
    node, num_cached = cached_path(cache, skill)
    if num_cached < runtime.compiled_tokens(skill.segment):
        runtime.donor_lost(skill.number)
        return
    if skill.pin and runtime.pins.fits(num_cached, but=skill.number):
        runtime.pins.pin(skill.number, num_cached, node)
        skill.pinned = True
    runtime.publish("skill_ready", skill=skill.segment.name, segment=skill.number)


def fail_compile(cache: KvEditCache, req: Any) -> None:
    """Finishing broke: the skill is not ready, and whoever waits for it learns that."""
    cache.runtime.compile_failed(req.rid, "internal error, see the server's log")
