"""The factory of ``--radix-cache-backend kvedit``: checks, builds the rooms, ties them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvedit.config import Config
from kvedit.errors import Unsupported
from kvedit.identity import host_identity
from kvedit.skills.registry import Registry
from sglang_patches import guard
from sglang_patches.host.contract import broken, unapplied_hooks
from sglang_patches.host.facts import has_overlap, host_facts, model_name
from sglang_patches.host.refusals import check_server_args
from sglang_patches.pools import describe_pool
from sglang_patches.scheduler.edit.room import EditRoom
from sglang_patches.scheduler.skills.desk import SkillDesk
from sglang_patches.scheduler.skills.pins import PinBook
from sglang_patches.scheduler.splice.copies import CopyQueue
from sglang_patches.scheduler.splice.copy_runner import CopyRunner
from sglang_patches.scheduler.splice.donors import Donors
from sglang_patches.scheduler.splice.in_flight import event_maker
from sglang_patches.scheduler.splice.parts import Parts
from sglang_patches.scheduler.splice.tree import KvEditCache
from sglang_patches.scheduler.splice.warm_up import warm_up
from sglang_patches.scheduler.telemetry.events import open_publisher
from sglang_patches.scheduler.telemetry.metrics import Metrics
from sglang_patches.scheduler.telemetry.reporter import Reporter
from sglang_patches.scheduler.wiring.levelling import level
from sglang_patches.scheduler.wiring.rooms import Rooms
from sglang_patches.scheduler.wiring.served_log import ServedLog


def create_cache(ctx: TreeCacheBuildContext) -> UnifiedRadixCache:
    """Raises Unsupported with all reasons."""
    check_server_args(ctx.server_args, ctx.model_config)
    reasons = [*broken(), *unapplied_hooks()]
    if reasons:
        raise Unsupported(reasons)
    tree = create_unified_radix_cache(ctx, cache_class=KvEditCache)
    if not isinstance(tree, KvEditCache):
        raise TypeError(f"kvedit: cache: expected KvEditCache, got {type(tree).__name__}")
    _wire(ctx, tree, Config.from_env())
    return tree


def _wire(ctx: TreeCacheBuildContext, tree: KvEditCache, config: Config) -> None:
    runner = ctx.tp_worker.model_runner
    device = torch.get_device_module(runner.device)
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    groups = describe_pool(pool, runner.model, ctx.model_config)
    warm_up(groups, device)
    rooms = assemble(
        tree,
        config,
        facts=host_facts(ctx, groups),
        reporter=_reporter(ctx, config),
        queue=_queue_class(config)(groups, pool, tree.unlock, event_maker(device)),
        device=device,
        # Copies go where forwards go; without overlap that is the current stream.
        forward_stream=runner.forward_stream if has_overlap(ctx.server_args) else None,
        tokenizer=ctx.tp_worker.tokenizer,
        context_len=ctx.model_config.context_len,
        page_size=ctx.params.page_size,
    )
    ranks: Any = ctx.params.tp_cache_group if ctx.tp_size > 1 else None
    guard.join(ranks, lambda: level(rooms.edits, rooms.desk, tree))


def _queue_class(config: Config) -> type[CopyQueue]:
    """On a server that was started for testing, one whose launches can be told to fail."""
    if not config.testing:
        return CopyQueue
    from sglang_patches.scheduler.testing.faulty_queue import FaultyQueue

    return FaultyQueue


def assemble(
    tree: KvEditCache,
    config: Config,
    *,
    facts: Mapping[str, str | None],
    reporter: Reporter,
    queue: CopyQueue,
    device: Any,
    forward_stream: Any,
    tokenizer: Any,
    context_len: int,
    page_size: int,
) -> Rooms:
    """Build the rooms around a tree and equip it.

    facts: what shapes KV bytes besides the tokens. context_len: in tokens, the model's.
    """
    pool_size: int = tree.token_to_kv_pool_allocator.size

    def identity_of(weight_epoch: int) -> str:
        return host_identity({**facts, "weight_epoch": str(weight_epoch)})

    edits = EditRoom(
        choose=tree.choose,
        tokenizer=tokenizer,
        config=config,
        page_size=page_size,
        max_request_tokens=min(context_len, pool_size) - 1,
    )
    pins = PinBook(int(config.pin_fraction * pool_size), tree.lock, tree.unlock)
    registry = Registry(identity_of(0), config.retired_max, edits.decode)
    desk = SkillDesk(registry, pins, tree, reporter, config, page_size)
    donors = Donors(tree, desk, edits.paths, page_size)
    copies = CopyRunner(
        queue, device, forward_stream, on_unwritten=lambda sources: rooms.on_unwritten(sources)
    )
    rooms = Rooms(
        config=config,
        page_size=page_size,
        pool_size=pool_size,
        identity_of=identity_of,
        tree=tree,
        reporter=reporter,
        desk=desk,
        edits=edits,
        donors=donors,
        copies=copies,
        served_log=ServedLog() if config.testing else None,
    )
    parts = Parts(donors=donors, copies=copies, pins=pins, reporter=reporter, listener=rooms)
    tree.equip(parts, rooms)
    return rooms


def _reporter(ctx: TreeCacheBuildContext, config: Config) -> Reporter:
    is_first_rank = ctx.tp_rank == 0
    metrics = Metrics(
        export=is_first_rank and ctx.params.enable_metrics,
        model_name=model_name(ctx.server_args),
    )
    publisher, problem = open_publisher(config.home / "run", wanted=is_first_rank)
    return Reporter(metrics, publisher, [] if problem is None else [problem])
