"""The scheduler process's half of kvedit: registry, copy queue, pins, counters of one server."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kvedit.config import Config
from kvedit.edit.donor_paths import FIRST_PATH_NUMBER, PathBook
from kvedit.edit.ledger import Ledger
from kvedit.edit.proofs import TokenBook
from kvedit.fields.book import FieldBook
from kvedit.fields.public_values import SeenValues
from kvedit.identity import host_identity
from kvedit.skills.registry import Registry, Segment, Skill, State
from kvedit.splice.planner import PlanLimits
from kvedit.splice.spans import Refusal
from kvedit.text.tokens import TokenText
from sglang_patches import guard
from sglang_patches.host.facts import has_overlap, host_facts, model_name
from sglang_patches.pools import describe_pool
from sglang_patches.scheduler.levelling import level
from sglang_patches.scheduler.request_state import RequestState
from sglang_patches.scheduler.skills.pins import PinBook
from sglang_patches.scheduler.splice.copies import CopyQueue, PendingCopies
from sglang_patches.scheduler.splice.donors import cached_path
from sglang_patches.scheduler.splice.in_flight import event_maker
from sglang_patches.scheduler.splice.warm_up import warm_up
from sglang_patches.scheduler.telemetry.events import open_publisher
from sglang_patches.scheduler.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from kvedit.text.chat_probe import ChatForm
    from sglang_patches.scheduler.splice.tree import KvEditCache

logger = logging.getLogger("kvedit")


class Runtime:
    """Built once, by the cache factory. Everything here is the same on every TP rank, except
    that only rank 0 exports metrics and events."""

    def __init__(self, ctx: TreeCacheBuildContext, cache: KvEditCache, config: Config) -> None:
        self.config = config
        runner = ctx.tp_worker.model_runner
        allocator = ctx.params.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        self.groups = describe_pool(pool, runner.model, ctx.model_config)
        self.page_size: int = ctx.params.page_size
        self.pool_size: int = allocator.size
        self.weight_epoch = 0
        self._host_facts = host_facts(ctx, self.groups)
        self.tokenizer: Any = ctx.tp_worker.tokenizer  # None with --skip-tokenizer-init
        self.registry = Registry(self._identity(), config.retired_max, self.decode)
        self.fields = FieldBook()
        self.chat_form: ChatForm | None = None  # comes with the first field that has a role
        self._device = torch.get_device_module(runner.device)
        warm_up(self.groups, self._device)
        self.copies = CopyQueue(self.groups, pool, cache.unlock, event_maker(self._device))
        self.unwritten: list[PendingCopies] = []  # that failed, until the next forward
        # Copies go where forwards go; without overlap that is the current stream.
        self._forward_stream = runner.forward_stream if has_overlap(ctx.server_args) else None
        self.pins = PinBook(int(config.pin_fraction * self.pool_size), cache.lock, cache.unlock)
        is_first_rank = ctx.tp_rank == 0
        self.metrics = Metrics(
            export=is_first_rank and ctx.params.enable_metrics,
            model_name=model_name(ctx.server_args),
        )
        self.publisher, problem = open_publisher(config.home / "run", wanted=is_first_rank)
        self.warnings = [] if problem is None else [problem]
        self._cache = cache
        ranks = ctx.params.tp_cache_group if ctx.tp_size > 1 else None
        guard.join(ranks, ctx.tp_rank, lambda: level(self, cache))
        self.ledger = Ledger()
        self.conversations = TokenBook()
        self.paths = PathBook()
        self.seen_values = SeenValues()
        self.max_request_tokens = min(ctx.model_config.context_len, self.pool_size) - 1
        self.secret = ""  # set by the first registration; part of the skills' tree namespace

    # ---- names and limits

    def tree_namespace(self, segment: int) -> str:
        """extra_key of a segment's own path. Clients cannot probe it: the secret is random per
        server start and never leaves the two processes."""
        return f"kvedit/{self.secret}/{segment}"

    @cached_property
    def tokens(self) -> TokenText:
        """The tokenizer's text, token by token. Raises Unsupported where it cannot be told; a
        server like that refuses to declare fields."""
        return TokenText(self.tokenizer)

    def is_path(self, segment: int) -> bool:
        """Whether a number names a path of an earlier turn instead of a segment."""
        return segment >= FIRST_PATH_NUMBER

    def decode(self, ids: array[int]) -> str:
        """Text of ``ids``, special tokens kept; empty without a tokenizer (then a match starts
        at a skill's first token or not at all)."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def plan_limits(self, last_position: int) -> PlanLimits:
        return PlanLimits(
            page_size=self.page_size,
            min_span_tokens=self.config.min_span_tokens,
            default_seam=self.config.seam,
            last_position=last_position,
            boundary_tokens=self.config.boundary_tokens,
        )

    def note_on(self, segment: Segment) -> str | None:
        """What its owner should know: a skill that is never spliced at the default seam."""
        seam = self.config.seam if segment.seam is None else segment.seam
        needed = seam + self.config.min_span_tokens
        if segment.num_tokens >= needed:
            return None
        return (
            f"never spliced with seam {seam}: expected at least {needed} tokens "
            f"(KVEDIT_MIN_SPAN behind the seam), got {segment.num_tokens}"
        )

    # ---- what happens to skills

    def donor_lost(self, segment: int) -> None:
        """A splice found the donor's path gone."""
        skill = self.registry.by_number(segment)
        if skill is not None and skill.state is State.READY:
            self.pins.release(segment)
            self.registry.evicted(segment)
            self.publish("skill_evicted", skill=skill.segment.name, segment=segment)

    def compile_failed(self, rid: str, reason: str) -> Skill | None:
        """A compile did not finish; None if nobody waits for it (any more)."""
        if self.registry.by_rid(rid) is None:
            return None
        skill = self.registry.failed(rid, reason)
        self.pins.release(skill.number)
        return skill

    def pin_ready(self, skill: Skill) -> None:
        """Pin a skill that is compiled already; a donor that is gone makes it evicted."""
        node, num_cached = cached_path(self._cache, skill)
        if num_cached < self.compiled_tokens(skill.segment):
            self.donor_lost(skill.number)
            return
        self.pins.pin(skill.number, num_cached, node)
        skill.pinned = True

    def compiled_tokens(self, segment: Segment) -> int:
        """Tokens of the segment's own path that the tree can hold: whole pages."""
        total = len(segment.compile_prefix) + segment.num_tokens
        return total // self.page_size * self.page_size

    def settle_pins(self) -> None:
        """Unlock whatever is no longer meant to be pinned (retired, or registered anew without
        a pin)."""
        for skill in self.registry.all():
            if not skill.pin and self.pins.release(skill.number):
                skill.pinned = False

    def forget_dropped(self) -> None:
        for segment in self.registry.drain_dropped():
            self.pins.release(segment.number)

    def distrust_everything(self) -> None:
        self.ledger.clear()
        self.paths.clear()
        for skill in self.registry.all():
            self.distrust(skill.number)

    def distrust(self, segment: int) -> None:
        """Paths composed from this segment may hold unwritten slots: never match them again."""
        if self.is_path(segment):
            self.paths.drop(segment)
            return
        self.pins.release(segment)
        self.registry.renumber(segment)
        self.publish("skill_evicted", segment=segment)

    def release_oldest_pin(self) -> bool:
        """Give one pin back to the pool; False if there is none."""
        segment = self.pins.release_oldest()
        if segment is None:
            return False
        skill = self.registry.by_number(segment)
        if skill is not None:
            skill.pinned = False
            self.publish("skill_unpinned", skill=skill.segment.name, segment=segment)
        return True

    def tree_emptied(self) -> None:
        """The host reset its tree (flush): locks, donors and queued copies went with it."""
        self.copies.discard()
        self.pins.forget()
        self.new_epoch("flush")

    def new_epoch(self, why: str) -> None:
        """Whatever shapes KV changed. Skills are evicted and their old paths unreachable."""
        self.weight_epoch += 1
        self.ledger.clear()
        self.paths.clear()
        self.pins.release_all()
        self.registry.new_epoch(self._identity())
        self.forget_dropped()
        self.publish("weight_epoch", epoch=self.weight_epoch, why=why)

    # ---- copies

    def run_copies(self) -> None:
        """Launch the queued copies on the stream that forwards run on.

        If they cannot be run on every rank, no rank trusts them: every path composed from those
        segments becomes unreachable, and ``unwritten`` names the slots whose requests the next
        forward ends.
        """
        with guard.contained("release_done"):
            self.copies.release_done()
        if not len(self.copies):
            return
        batch = self.copies.pending()
        with guard.boundary("forward", lambda: self._never_written(batch)) as hook:
            guard.trip("forward")
            with self._on_forward_stream():
                self.copies.launch()
        if hook.is_well:
            self.copies.num_launched += batch.num_copies

    def _never_written(self, batch: PendingCopies) -> None:
        self.copies.release_pending()
        self.unwritten.append(batch)
        # A plain rule: no turn or path of before is a base, whether or not it stood on these.
        self.ledger.clear()
        self.paths.clear()
        for segment in sorted(batch.segments):
            self.distrust(segment)

    @contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        stream = self._forward_stream
        if stream is None:
            yield
            return
        stream.wait_stream(self._device.current_stream())
        with self._device.stream(stream):
            yield

    # ---- reporting

    def refuse(self, state: RequestState, refusals: tuple[Refusal, ...]) -> None:
        """Count and report spans that are served plainly."""
        for refusal in refusals:
            if refusal in state.split.refused:
                continue
            state.split.refuse((refusal,))
            if state.is_counted:
                self.metrics.count_splice("refused", refusal.reason)
                self.publish("splice_refused", skill=refusal.skill, reason=refusal.reason)

    def publish(self, kind: str, **fields: object) -> None:
        if self.publisher is not None:
            self.publisher.publish(kind, **fields)

    def _identity(self) -> str:
        return host_identity({**self._host_facts, "weight_epoch": str(self.weight_epoch)})
