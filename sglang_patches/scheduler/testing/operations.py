"""Operations that exist for tests: injected faults, dumps of cached KV, what was served."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from kvedit.errors import BadRequest
from kvedit.namespace import namespace_tag
from kvedit.request.options import parse_options
from kvedit.splice.spans import Pieces
from kvedit.wire.commands import RunTestOperation
from kvedit.wire.views import segment_view
from sglang_patches import faults, guard
from sglang_patches.host.protocols import Scheduler
from sglang_patches.scheduler.commands.audit import audit_scheduler
from sglang_patches.scheduler.commands.operation import Operation
from sglang_patches.scheduler.splice.tree import KvEditCache
from sglang_patches.scheduler.wiring.rooms import Rooms
from sglang_patches.scheduler.wiring.served_log import ServedLog

Command = dict[str, Any]


def _log(rooms: Rooms) -> ServedLog:
    assert rooms.served_log is not None  # this module is loaded where it is kept
    return rooms.served_log


def served(scheduler: Scheduler, rooms: Rooms, command: Command) -> dict[str, Any]:
    """{"rid"}: the prompt ids that a finished request was served with, its pieces as
    [start, stop, number of the source, shift], the text, and how many errata and ledger entries
    there are."""
    request = _log(rooms).of(command["rid"])
    ids = request.ids[: request.num_prompt_tokens]
    return {
        "ids": ids.tolist(),
        "text": rooms.edits.decode(ids),
        "pieces": [
            (p.start, p.stop, p.span.source.number, p.span.delta_pos) for p in request.pieces
        ],
        "ledger": len(rooms.edits.ledger),
        "paths": len(rooms.edits.paths),
    }


def fault(scheduler: Scheduler, rooms: Rooms, command: Command) -> dict[str, Any]:
    """{"hook", "times", "rank"?}: let a hook fail that many times, on one rank or on all. Raises
    BadRequest with the known ones."""
    hook, times = faults.wanted(command)
    if command.get("rank") in (None, get_parallel().tp_rank):
        # This command stands inside "rpc" itself: the next one is meant.
        faults.arm(hook, times, passes=1 if hook == "rpc" else 0)
    return {}


def shift_error(scheduler: Scheduler, rooms: Rooms, command: Command) -> dict[str, Any]:
    """{"positions"}: rotate every copy decided from now on by that much too far."""
    rooms.copies.queue.shift_error = int(command["positions"])
    return {}


def dump(scheduler: Scheduler, rooms: Rooms, command: Command) -> dict[str, Any]:
    """{"ids", "extra_key", "options", "path"}: save the cached K and V of a prompt's served path;
    or {"rid", "path"}: of the path that a finished request was served with.

    The file (torch.save) holds ``k`` and ``v``, one [num_cached, heads, dim] tensor per layer,
    and the pieces of the path. Answers {"num_cached"}. Every rank writes a file of its own.
    """
    cache = rooms.tree
    key, pieces, matched = _path(cache, rooms, command)
    node = cache.match_spelled(key, pieces).last_device_node
    slots = cache.path_device_indices(node)[:matched]
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    torch.save(
        {
            "k": [pool.get_key_buffer(i)[_layer_slots(pool, i, slots)].clone() for i in layers],
            "v": [pool.get_value_buffer(i)[_layer_slots(pool, i, slots)].clone() for i in layers],
            "pieces": [(p.start, p.stop, p.span.delta_pos) for p in pieces],
        },
        rank_path(command["path"]),
    )
    return {"num_cached": matched}


def _path(cache: KvEditCache, rooms: Rooms, command: Command) -> tuple[RadixKey, Pieces, int]:
    """(key of real ids, pieces, cached tokens) of the path that a dump is asked for."""
    if "rid" in command:
        request = _log(rooms).of(command["rid"])
        key = RadixKey(request.ids, request.extra_key, cache_salt=request.cache_salt)
        matched = cache.match_spelled(key, request.pieces).device_prefix_len
        return key, request.pieces, matched
    ids = array("q", command["ids"])
    key = RadixKey(ids, command["extra_key"])
    namespace = namespace_tag(None, command["extra_key"], None)
    plan = rooms.plan(ids, namespace, parse_options(command["options"]))
    choice = cache.choose(key, plan)
    return key, choice.pieces, choice.matched


def _layer_slots(pool: Any, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
    """Slots of one layer's buffers; a windowed layer of a hybrid pool has its own, and the dummy
    slot 0 for tokens that have left the window."""
    if type(pool) is not SWAKVPool or not pool.layers_mapping[layer_id][1]:
        return slots
    own: torch.Tensor = pool.translate_loc_from_full_to_swa(slots.long()).long()
    return own


def ranks(scheduler: Scheduler, rooms: Rooms, command: Command) -> dict[str, Any]:
    """{"path"}: every rank writes what it has decided so far, as JSON, to a file of its own."""
    cache = rooms.tree
    decided = {
        "skills": [msgspec.to_builtins(segment_view(s)) for s in rooms.desk.registry.all()],
        "registry_version": rooms.desk.registry.version,
        "counters": msgspec.to_builtins(rooms.reporter.metrics.counters(hook_errors={})),
        "copies": rooms.copies.queue.num_launched,
        "hook_errors": dict(guard.errors),
        "cached_slots": sorted(cache.all_values_flatten().tolist()),
        "audit": audit_scheduler(scheduler),
    }
    Path(rank_path(command["path"])).write_text(json.dumps(decided), "utf-8")
    return {}


def rank_path(path: str) -> str:
    """Rank 0 answers the request and gets the path as it was given."""
    rank = get_parallel().tp_rank
    return path if rank == 0 else f"{path}.rank{rank}"


_OPERATIONS: dict[str, Callable[[Scheduler, Rooms, Command], dict[str, Any]]] = {
    "fault": fault,
    "dump": dump,
    "shift_error": shift_error,
    "ranks": ranks,
    "served": served,
}


def run(scheduler: Scheduler, rooms: Rooms, command: RunTestOperation) -> dict[str, Any]:
    """Raises BadRequest for an operation that nobody knows."""
    operation = _OPERATIONS.get(command.operation)
    if operation is None:
        raise BadRequest(f"kvedit: op: expected a known one, got {command.operation!r}")
    return operation(scheduler, rooms, command.arguments)


OPERATION = Operation(run)
