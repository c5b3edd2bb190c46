"""The one owner of what becomes of a skill: its state, its pin, its own path in the tree."""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvedit.config import Config
from kvedit.skills.declaration import SkillDeclaration
from kvedit.skills.registry import Declared, RecompileOutcome, Registry
from kvedit.skills.segment import Segment, Skill, State
from sglang_patches.scheduler.ports import Paths
from sglang_patches.scheduler.skills.pins import PinBook
from sglang_patches.scheduler.telemetry.reporter import Reporter


class SkillDesk:
    """Registry and pins move together, the same way on every rank."""

    def __init__(
        self,
        registry: Registry,
        pins: PinBook,
        tree: Paths,
        reporter: Reporter,
        config: Config,
        page_size: int,
    ) -> None:
        self.registry = registry
        self.pins = pins
        self._tree = tree
        self._reporter = reporter
        self._config = config
        self._page_size = page_size
        self.secret = ""  # set by the first registration; part of the skills' tree namespace

    # ---- a skill's own path

    def tree_namespace(self, segment: int) -> str:
        """extra_key of a segment's own path. Clients cannot probe it: the secret is random per
        server start and never leaves the two processes."""
        return f"kvedit/{self.secret}/{segment}"

    def own_key(self, skill: Skill) -> RadixKey:
        """The tree key of the skill's own path, behind its compile prefix."""
        segment = skill.segment
        ids: array[int] = segment.compile_prefix + segment.token_ids
        return RadixKey(ids, self.tree_namespace(segment.number))

    def own_path(self, skill: Skill) -> tuple[Any, int]:
        """(last node, number of tokens) of what the tree still holds of the skill's own path."""
        match = self._tree.match_prefix(MatchPrefixParams(key=self.own_key(skill)))
        return match.last_device_node, match.device_prefix_len

    def _compiled_tokens(self, segment: Segment) -> int:
        """Tokens of the segment's own path that the tree can hold: whole pages."""
        total = len(segment.compile_prefix) + segment.num_tokens
        return total // self._page_size * self._page_size

    def note_on(self, segment: Segment) -> str | None:
        """What its owner should know: a skill that is never spliced at the default seam."""
        seam = self._config.seam if segment.seam is None else segment.seam
        needed = seam + self._config.min_span_tokens
        if segment.num_tokens >= needed:
            return None
        return (
            f"never spliced with seam {seam}: expected at least {needed} tokens "
            f"(KVEDIT_MIN_SPAN behind the seam), got {segment.num_tokens}"
        )

    # ---- what an administrator does

    def declare(self, declaration: SkillDeclaration, rid: str) -> Declared:
        """Register a text, to be compiled as the request ``rid``. Raises BadRequest, Conflict,
        PinBudgetExceeded."""
        num_tokens = len(declaration.token_ids) + len(declaration.compile_prefix)
        if declaration.pin:
            current = self.registry.find(declaration.name, declaration.namespace)
            self.pins.check(num_tokens, but=current)
        declared = self.registry.declare(declaration, rid)
        skill = declared.skill
        self._forget_dropped()
        self._settle_pins()
        if skill.pin and declared.outcome == "compile":
            self.pins.promise(skill.number, num_tokens)
        elif skill.pin and not skill.pinned:
            self._pin_ready(skill)
        return declared

    def retire(self, name: str, namespace: str) -> Skill:
        """No request finds it any more; running conversations keep it. Raises NotFound."""
        skill = self.registry.retire(name, namespace)
        self._settle_pins()
        self._forget_dropped()
        return skill

    def purge(self, name: str, namespace: str) -> list[Segment]:
        """Drop a skill and its retired versions. Raises NotFound."""
        dropped = self.registry.purge(name, namespace)
        for segment in dropped:
            self.pins.release(segment.number)
        self._forget_dropped()
        return dropped

    def recompile(self, number: int, rid: str) -> RecompileOutcome:
        """Begin a compile of a skill whose KV is gone, as the request ``rid``."""
        return self.registry.recompile(number, rid)

    # ---- compiles

    def compiled(self, rid: str) -> None:
        """The compile request's tokens are in the tree: its skill is ready, and pinned if asked."""
        skill = self.registry.compiled(rid)
        if skill.state is not State.READY:
            return
        node, num_cached = self.own_path(skill)
        if num_cached < self._compiled_tokens(skill.segment):
            self.donor_lost(skill.number)
            return
        if skill.pin and self.pins.fits(num_cached, but=skill.number):
            self._pin(skill, num_cached, node)
        self._reporter.publish("skill_ready", skill=skill.segment.name, segment=skill.number)

    def compile_failed(self, rid: str, reason: str) -> Skill | None:
        """A compile did not finish; None if nobody waits for it (any more)."""
        if self.registry.by_rid(rid) is None:
            return None
        skill = self.registry.failed(rid, reason)
        self.pins.release(skill.number)
        return skill

    def compile_broke(self, skill: Skill, reason: str) -> None:
        """Something went wrong while a compile came to an end; ``compiled`` may have been through.
        Not ready, not pinned: whoever waits learns the reason."""
        self.pins.release(skill.number)
        if skill.state is State.READY:
            self._reporter.publish("skill_evicted", skill=skill.segment.name, segment=skill.number)
        self.registry.broken(skill, reason)

    # ---- pins

    def _pin_ready(self, skill: Skill) -> None:
        """Pin a skill that is compiled already; a donor that is gone makes it evicted."""
        node, num_cached = self.own_path(skill)
        if num_cached < self._compiled_tokens(skill.segment):
            self.donor_lost(skill.number)
            return
        self._pin(skill, num_cached, node)

    def _pin(self, skill: Skill, num_tokens: int, node: Any) -> None:
        self.pins.pin(skill.number, num_tokens, node)
        skill.pinned = True

    def _settle_pins(self) -> None:
        """Unlock whatever is no longer meant to be pinned (retired, or registered anew without
        a pin)."""
        for skill in self.registry.all():
            if not skill.pin and self.pins.release(skill.number):
                skill.pinned = False

    def release_oldest_pin(self) -> bool:
        """Give one pin back to the pool; False if there is none."""
        segment = self.pins.release_oldest()
        if segment is None:
            return False
        skill = self.registry.by_number(segment)
        if skill is not None:
            skill.pinned = False
            self._reporter.publish("skill_unpinned", skill=skill.segment.name, segment=segment)
        return True

    def _forget_dropped(self) -> None:
        for segment in self.registry.drain_dropped():
            self.pins.release(segment.number)

    # ---- what the tree has lost

    def donor_lost(self, segment: int) -> None:
        """The skill's own path is not in the tree any more."""
        skill = self.registry.by_number(segment)
        if skill is not None and skill.state is State.READY:
            self.pins.release(segment)
            self.registry.evicted(segment)
            self._reporter.publish("skill_evicted", skill=skill.segment.name, segment=segment)

    def distrust(self, segment: int) -> None:
        """Paths composed from this segment may hold unwritten slots: never match them again."""
        self.pins.release(segment)
        self.registry.renumber(segment)
        self._reporter.publish("skill_evicted", segment=segment)

    def distrust_all(self) -> None:
        for skill in self.registry.all():
            self.distrust(skill.number)

    def new_epoch(self, identity: str) -> None:
        """Whatever shapes KV changed: skills are evicted and their old paths unreachable."""
        self.pins.release_all()
        self.registry.new_epoch(identity)
        self._forget_dropped()

    def emptied(self) -> None:
        """The tree was reset, and the locks of pins with it."""
        self.pins.forget()
