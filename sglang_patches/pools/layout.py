"""Exact-class table of the host's KV pools, and the views of the served ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

PoolKind = Literal["full", "swa"]

SERVED_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# Class names of the host, each with the reason; a class in neither table is refused as unknown.
REFUSED_POOLS = {
    "MHATokenToKVPoolFP4": "rotation breaks the scale of an FP4 block",
    "MLATokenToKVPoolFP4": "rotation breaks the scale of an FP4 block",
    "MHATokenToKVPoolMXFP8": "rotation breaks the scale of an MXFP8 block",
    "DSATokenToKVPool": "its index keys carry rope in a second, quantised buffer",
    "LayerSplitDSATokenToKVPool": "its index keys carry rope in a second, quantised buffer",
    "HiSparseDSATokenToKVPool": "its index keys carry rope in a second, quantised buffer",
    "HiSparseMHAMainPool": "a part of its rows lives in host memory",
    "UnifiedMHATokenToKVPool": "its allocator moves pages under a stored slot",
    "UnifiedMLATokenToKVPool": "its allocator moves pages under a stored slot",
    "UnifiedSWAKVPool": "its allocator moves pages under a stored slot",
    "UnifiedHybridLinearKVPool": "its allocator moves pages under a stored slot",
    "UnifiedDraftKVPool": "its allocator moves pages under a stored slot",
    "UnifiedDraftSWAKVPool": "its allocator moves pages under a stored slot",
    "HybridLinearKVPool": "recurrent (mamba, linear attention) state cannot be relocated",
    "QSATokenToKVPool": "recurrent (mamba, linear attention) state cannot be relocated",
    "PageMajorMHATokenToKVPool": "its rows interleave all layers of a page",
    "PageInterleaveMHATokenToKVPool": "its rows interleave all layers of a page",
    "PageInterleaveMLATokenToKVPool": "its rows interleave all layers of a page",
    "PageInterleaveDSATokenToKVPool": "its index keys carry rope in a second, quantised buffer",
    "MHATokenToKOnlyPool": "it holds index keys without values",
    "MiniMaxSparseKVPool": "its sparse index keys carry rope in a second buffer",
    "MiniMaxM3Nvfp4KVPool": "rotation breaks the scale of an FP4 block",
    "MiniMaxM3Nvfp4MainKVPool": "rotation breaks the scale of an FP4 block",
    "MiniMaxM3Nvfp4IndexKPool": "rotation breaks the scale of an FP4 block",
    "DeepSeekV4TokenToKVPool": "its compressed rows mix several positions",
    "DeepSeekV4SingleKVPool": "its compressed rows mix several positions",
    "DeepSeekV4UniformFP8KVPool": "its compressed rows mix several positions",
    "DeepSeekV4IndexerPool": "its compressed rows mix several positions",
    "HiSparseC4DevicePool": "its compressed rows mix several positions",
    "NoOpMHATokenToKVPool": "it stores nothing",
}


@dataclass(frozen=True)
class SubPool:
    """Layers of one plain pool: global layer ids with their K and V buffers, in pool order."""

    kind: PoolKind
    dtype: torch.dtype
    page_size: int  # 0 for NHD rows, else tokens of an HND page
    rot_offset: int
    head_dim: int  # width of the part that rope may rotate
    layer_ids: tuple[int, ...]
    k_views: tuple[torch.Tensor, ...]
    v_views: tuple[torch.Tensor, ...]  # empty for MLA


def sub_pools(pool: Any) -> tuple[list[SubPool], list[str]]:
    """The plain pools inside `pool` and every reason against serving it."""
    if type(pool) is not SWAKVPool:
        return _sub_pool(pool, "full", None)
    found: list[SubPool] = []
    reasons: list[str] = []
    if pool.swa_req_ring_size is not None:
        reasons.append(
            "kvedit: window pool: expected one slot per token, got a ring per request "
            "(a donor's window slots are overwritten in place)"
        )
    if pool.page_size != 1:
        reasons.append(
            f"kvedit: window pool page size: expected 1, got {pool.page_size} "
            "(its allocator gives whole spans out at page size 1 only)"
        )
    parts: tuple[tuple[Any, PoolKind], ...] = (
        (pool.full_kv_pool, "full"),
        (pool.swa_kv_pool, "swa"),
    )
    for part, kind in parts:
        ids = _swa_layer_ids(pool, is_swa=kind == "swa")
        if ids:
            served, refused = _sub_pool(part, kind, ids)
            found += served
            reasons += refused
    return found, reasons


def _swa_layer_ids(pool: SWAKVPool, *, is_swa: bool) -> tuple[int, ...]:
    rows = [
        (row, layer)
        for layer, (row, in_window) in pool.layers_mapping.items()
        if in_window == is_swa
    ]
    return tuple(layer for _, layer in sorted(rows))


def _sub_pool(
    pool: Any, kind: PoolKind, layer_ids: tuple[int, ...] | None
) -> tuple[list[SubPool], list[str]]:
    describe = SERVED_POOLS.get(type(pool))
    if describe is None:
        return [], [class_refusal(type(pool).__name__)]
    if layer_ids is None:
        layer_ids = tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    reasons = _common_refusals(pool)
    found, own_reasons = describe(pool, kind, layer_ids)
    reasons += own_reasons
    return ([], reasons) if reasons else ([found], [])


def class_refusal(class_name: str) -> str:
    """The refusal of a pool class that is not served."""
    served = ", ".join(cls.__name__ for cls in (*SERVED_POOLS, SWAKVPool))
    why = REFUSED_POOLS.get(class_name, "unknown to kvedit")
    return f"kvedit: KV pool class: expected one of {served}, got {class_name} ({why})"


def _common_refusals(pool: Any) -> list[str]:
    reasons = []
    if pool.dtype not in SERVED_DTYPES:
        served = ", ".join(str(dtype) for dtype in SERVED_DTYPES)
        reasons.append(f"kvedit: KV pool dtype: expected one of {served}, got {pool.dtype}")
    if pool.layer_shard_enabled:
        reasons.append("kvedit: KV pool: expected every layer on this rank, got sharded layers")
    return reasons


def _describe_mha(
    pool: MHATokenToKVPool, kind: PoolKind, layer_ids: tuple[int, ...]
) -> tuple[SubPool, list[str]]:
    reasons = []
    if pool.kv_cache_layout not in ("nhd", "hnd"):
        reasons.append(
            f"kvedit: KV pool layout: expected nhd or hnd, got {pool.kv_cache_layout} "
            "(its rows split a head over several places)"
        )
    if type(pool.quant_method) is not UnquantizedKVCacheMethod:
        reasons.append(
            "kvedit: KV pool quantisation: expected none, "
            f"got {pool.quant_method.name} (rotation breaks block scales)"
        )
    found = SubPool(
        kind=kind,
        dtype=pool.dtype,
        page_size=pool.page_size if pool.kv_cache_layout == "hnd" else 0,
        rot_offset=0,
        head_dim=pool.head_dim,
        layer_ids=layer_ids,
        k_views=tuple(pool.k_buffer),
        v_views=tuple(pool.v_buffer),
    )
    return found, reasons


def _describe_mla(
    pool: MLATokenToKVPool, kind: PoolKind, layer_ids: tuple[int, ...]
) -> tuple[SubPool, list[str]]:
    reasons = []
    if pool.use_dsa:
        reasons.append(class_refusal("DSATokenToKVPool"))
    if pool.kv_scale_buffer is not None:
        reasons.append("kvedit: MLA pool quantisation: expected none, got per-block scales")
    if pool.dcp_replicated:
        reasons.append(
            "kvedit: MLA pool: expected one copy of each row, got decode-context-parallel rows"
        )
    found = SubPool(
        kind=kind,
        dtype=pool.dtype,
        page_size=0,
        rot_offset=pool.kv_lora_rank,
        head_dim=pool.qk_rope_head_dim,
        layer_ids=layer_ids,
        k_views=tuple(pool.kv_buffer),
        v_views=(),
    )
    return found, reasons


# Subclasses change layout or ownership, so membership is by exact class.
SERVED_POOLS: dict[type, Callable[..., tuple[SubPool, list[str]]]] = {
    MHATokenToKVPool: _describe_mha,
    MLATokenToKVPool: _describe_mla,
}
