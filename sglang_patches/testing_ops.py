"""Operations of the RPC that exist for tests: injected faults and dumps of cached KV.

They answer only on a server started with KVEDIT_TESTING=1.
"""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from kvedit.errors import BadRequest
from kvedit.namespace import namespace_tag
from kvedit.options import parse_options
from kvedit.planner import plan_spans
from kvedit.report import TokenSplit
from sglang_patches import guard
from sglang_patches.audit import audit_scheduler
from sglang_patches.runtime import Runtime
from sglang_patches.state import RequestState


def require_testing() -> None:
    if os.environ.get("KVEDIT_TESTING") != "1":
        raise BadRequest("kvedit: testing: expected a server started with KVEDIT_TESTING=1")


def fault(scheduler: Any, runtime: Runtime, command: dict[str, Any]) -> dict[str, Any]:
    """{"hook", "times"}: let the next entries of a hook fail."""
    require_testing()
    guard.arm(command["hook"], command["times"])
    return {}


def dump(scheduler: Any, runtime: Runtime, command: dict[str, Any]) -> dict[str, Any]:
    """{"ids", "extra_key", "options", "path"}: save the cached K and V of a prompt's served path.

    The file (torch.save) holds ``k`` and ``v``, one [num_cached, heads, dim] tensor per layer,
    and the pieces of the path. Answers {"num_cached"}. Every rank writes a file of its own.
    """
    require_testing()
    cache = scheduler.tree_cache
    ids = array("q", command["ids"])
    state = _planned(runtime, ids, command)
    key = RadixKey(ids, command["extra_key"])
    choice = cache.choose(key, state.plan)
    node = cache.match_spelled(key, choice.pieces).last_device_node
    slots = cache.path_device_indices(node)[: choice.matched]
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    torch.save(
        {
            "k": [pool.get_key_buffer(i)[_layer_slots(pool, i, slots)].clone() for i in layers],
            "v": [pool.get_value_buffer(i)[_layer_slots(pool, i, slots)].clone() for i in layers],
            "pieces": [(p.start, p.stop, p.span.delta_pos) for p in choice.pieces],
        },
        rank_path(command["path"]),
    )
    return {"num_cached": choice.matched}


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
