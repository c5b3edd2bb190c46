"""Operations of the RPC that exist for tests: injected faults and dumps of cached KV.

They answer only on a server started with KVEDIT_TESTING=1.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from kvedit.errors import BadRequest
from kvedit.namespace import namespace_tag
from kvedit.request.options import parse_options
from kvedit.splice.planner import plan_spans
from kvedit.splice.spans import Pieces
from kvedit.splice.token_classes import TokenSplit
from sglang_patches import guard
from sglang_patches.scheduler.commands.audit import audit_scheduler
from sglang_patches.scheduler.request_state import RequestState

if TYPE_CHECKING:
    from sglang_patches.scheduler.runtime import Runtime


MAX_SERVED = 256


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A finished request: its prompt as served, and its path as far as the tree holds it."""

    num_prompt_tokens: int
    ids: array[int]
    pieces: Pieces
    extra_key: str | None
    cache_salt: str | None


_served: OrderedDict[str, ServedRequest] = OrderedDict()  # by rid, the newest


def is_testing() -> bool:
    return os.environ.get("KVEDIT_TESTING") == "1"


def note_served(req: Any, state: RequestState, up_to: int) -> None:
    """Remember what a request was served, on a server that is being tested."""
    if not is_testing():
        return
    ids = (req.origin_input_ids + array("q", req.output_ids))[:up_to]
    _served[req.rid] = ServedRequest(
        len(req.origin_input_ids), ids, state.pieces, req.extra_key, req.cache_salt
    )
    while len(_served) > MAX_SERVED:
        _served.popitem(last=False)


def served(scheduler: Any, runtime: Runtime, command: dict[str, Any]) -> dict[str, Any]:
    """{"rid"}: the prompt ids that a finished request was served with, its pieces as
    [start, stop, segment, shift], the text, and how many errata and ledger entries there are."""
    require_testing()
    request = _served[command["rid"]]
    ids = request.ids[: request.num_prompt_tokens]
    return {
        "ids": ids.tolist(),
        "text": runtime.decode(ids),
        "pieces": [(p.start, p.stop, p.span.segment, p.span.delta_pos) for p in request.pieces],
        "ledger": len(runtime.ledger),
        "paths": len(runtime.paths),
    }


def require_testing() -> None:
    if not is_testing():
        raise BadRequest("kvedit: testing: expected a server started with KVEDIT_TESTING=1")


def fault(scheduler: Any, runtime: Runtime, command: dict[str, Any]) -> dict[str, Any]:
    """{"hook", "times", "rank"?}: let the next entries of a hook fail, on one rank or on all."""
    require_testing()
    guard.arm(command["hook"], command["times"], command.get("rank"))
    return {}


def shift_error(scheduler: Any, runtime: Runtime, command: dict[str, Any]) -> dict[str, Any]:
    """{"positions"}: rotate every copy decided from now on by that much too far."""
    require_testing()
    runtime.copies.shift_error = int(command["positions"])
    return {}


def dump(scheduler: Any, runtime: Runtime, command: dict[str, Any]) -> dict[str, Any]:
    """{"ids", "extra_key", "options", "path"}: save the cached K and V of a prompt's served path;
    or {"rid", "path"}: of the path that a finished request was served with.

    The file (torch.save) holds ``k`` and ``v``, one [num_cached, heads, dim] tensor per layer,
    and the pieces of the path. Answers {"num_cached"}. Every rank writes a file of its own.
    """
    require_testing()
    cache = scheduler.tree_cache
    key, pieces, matched = _path(cache, runtime, command)
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


def _path(cache: Any, runtime: Runtime, command: dict[str, Any]) -> tuple[RadixKey, Pieces, int]:
    """(key of real ids, pieces, cached tokens) of the path that a dump is asked for."""
    if "rid" in command:
        request = _served[command["rid"]]
        key = RadixKey(request.ids, request.extra_key, cache_salt=request.cache_salt)
        matched = cache.match_spelled(key, request.pieces).device_prefix_len
        return key, request.pieces, matched
    ids = array("q", command["ids"])
    key = RadixKey(ids, command["extra_key"])
    choice = cache.choose(key, _planned(runtime, ids, command).plan)
    return key, choice.pieces, choice.matched


def _layer_slots(pool: Any, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
    """Slots of one layer's buffers; a windowed layer of a hybrid pool has its own, and the dummy
    slot 0 for tokens that have left the window."""
    if type(pool) is not SWAKVPool or not pool.layers_mapping[layer_id][1]:
        return slots
    own: torch.Tensor = pool.translate_loc_from_full_to_swa(slots.long()).long()
    return own


def ranks(scheduler: Any, runtime: Runtime, command: dict[str, Any]) -> dict[str, Any]:
    """{"path"}: every rank writes what it has decided so far, as JSON, to a file of its own."""
    require_testing()
    cache = scheduler.tree_cache
    decided = {
        "skills": [{**s.view(), "last_used": s.last_used} for s in runtime.registry.all()],
        "registry_version": runtime.registry.version,
        "counters": runtime.metrics.to_status(),
        "copies": runtime.copies.num_launched,
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


def _planned(runtime: Runtime, ids: array[int], command: dict[str, Any]) -> RequestState:
    namespace = namespace_tag(None, command["extra_key"], None)
    options = parse_options(command["options"])
    plan = plan_spans(
        ids,
        runtime.registry,
        namespace,
        options,
        runtime.plan_limits(len(ids) - 1),
        lambda start, stop: runtime.decode(ids[start:stop]),
    )
    return RequestState(namespace=namespace, options=options, plan=plan, split=TokenSplit(len(ids)))
