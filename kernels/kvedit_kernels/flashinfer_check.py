"""Cross-checks against FlashInfer on a GPU: its rotation of ours, its attention over our slots.

FlashInfer runs nothing without a GPU, so it is imported inside the checks; `missing_calls` reads
its signatures anywhere. Slots need no page alignment there: SGLang plans FlashInfer with pages of
one token, whatever the pool's own page size.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from kvedit_kernels.contract import arithmetic_bound
from kvedit_kernels.relocate import relocate
from kvedit_kernels.testing import Case, build

WORKSPACE_BYTES = 128 << 20
# What this module calls: attribute path below `flashinfer` -> parameters passed by name.
CALLS = {
    "apply_rope_with_cos_sin_cache_inplace": (
        "positions",
        "query",
        "key",
        "head_size",
        "cos_sin_cache",
        "is_neox",
    ),
    "BatchPrefillWithPagedKVCacheWrapper": ("float_workspace_buffer", "kv_layout"),
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        "qo_indptr",
        "paged_kv_indptr",
        "paged_kv_indices",
        "paged_kv_last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim_qk",
        "page_size",
        "causal",
        "q_data_type",
        "kv_data_type",
    ),
    "BatchPrefillWithPagedKVCacheWrapper.run": ("q", "paged_kv_cache"),
}


def missing_calls(flashinfer: object) -> list[str]:
    """Every call of CALLS that this FlashInfer does not offer; empty is a pass."""
    missing = []
    for path, parameters in CALLS.items():
        target: Any = flashinfer
        for name in path.split("."):
            if not hasattr(target, name):
                missing.append(f"flashinfer.{path}: expected to exist, got no {name}")
                break
            target = getattr(target, name)
        else:
            known = inspect.signature(target).parameters
            absent = [name for name in parameters if name not in known]
            if absent:
                missing.append(f"flashinfer.{path}: expected parameters {absent}, got none")
    return missing


def check_rotation(case: Case, device: str = "cuda") -> float:
    """Largest |relocate - FlashInfer| over the K rows, as a multiple of twice the bound.

    FlashInfer fuses multiply and add and may so round the other way: each side is held to the
    bound of correct rounding, and two results within it differ by at most twice that. Pass: <= 1.
    """
    import flashinfer

    group, plan = build(case, device=device)
    given = group.k_views[0][plan.src].clone()
    relocate(group=group, plan=plan)
    keys = given.flatten(1)
    flashinfer.apply_rope_with_cos_sin_cache_inplace(
        positions=plan.row,
        query=keys.clone(),
        key=keys,
        head_size=case.head_dim,
        cos_sin_cache=plan.cos_sin.flatten(1),
        is_neox=case.is_neox,
    )
    ours = group.k_views[0][plan.dst].double()
    theirs = keys.view_as(given).double()
    pair = given.double().abs().amax(dim=-1, keepdim=True).expand_as(ours)
    bound = 2 * arithmetic_bound(case.dtype, theirs, pair)
    return float(((ours - theirs).abs() / bound).max())


def check_paged_prefill(
    case: Case, *, num_queries: int = 33, group_size: int = 4, device: str = "cuda"
) -> float:
    """Largest error of paged prefill over relocated slots against fp32 attention, absolute.

    The request reads the plan's target slots in order and then `num_queries` more slots of its
    own. Pass: at most PREFILL_TOLERANCE.
    """
    import flashinfer

    group, plan = build(case, device=device)
    relocate(group=group, plan=plan)
    taken = torch.cat([plan.src, plan.dst])
    free = torch.arange(1, group.num_slots, device=device)
    own = free[~torch.isin(free, taken)][:num_queries]
    slots = torch.cat([plan.dst, own])
    k, v = group.k_views[0], group.v_views[0]
    num_heads = case.num_heads * group_size
    query = torch.randn(len(own), num_heads, case.head_dim, device=device).to(case.dtype)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        float_workspace_buffer=workspace, kv_layout="NHD"
    )
    wrapper.plan(
        qo_indptr=torch.tensor([0, len(own)], dtype=torch.int32, device=device),
        paged_kv_indptr=torch.tensor([0, len(slots)], dtype=torch.int32, device=device),
        paged_kv_indices=slots.to(torch.int32),
        paged_kv_last_page_len=torch.ones(1, dtype=torch.int32, device=device),
        num_qo_heads=num_heads,
        num_kv_heads=case.num_heads,
        head_dim_qk=case.head_dim,
        page_size=1,
        causal=True,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
    )
    got = wrapper.run(q=query, paged_kv_cache=(k[:, None], v[:, None]))
    want = attention(query, k[slots], v[slots])
    return float((got.float() - want).abs().max())


# Values are normal times 3; two roundings of bf16 at that size.
PREFILL_TOLERANCE = 6e-2


def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[T, Hq, D] fp32: causal attention of the last T of S positions, heads grouped.

    query: [T, Hq, D]; keys, values: [S, Hkv, D].
    """
    num_queries, num_heads, head_dim = query.shape
    repeat = num_heads // keys.shape[1]
    k = keys.float().repeat_interleave(repeat, dim=1)
    v = values.float().repeat_interleave(repeat, dim=1)
    scores = torch.einsum("thd,shd->hts", query.float(), k) / math.sqrt(head_dim)
    position = torch.arange(len(keys), device=query.device)
    visible = position[None] <= position[-num_queries:, None]
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, v)
