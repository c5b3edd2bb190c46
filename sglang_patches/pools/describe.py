"""From the host's pool and model to the groups that relocation works on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from kvedit.errors import UnsupportedPool, UnsupportedRope
from kvedit.rope import RopeSpec, keeps_idle_rotary, rope_specs
from kvedit_kernels import PoolGroup
from sglang_patches.pools.layout import PoolKind, SubPool, sub_pools
from sglang_patches.pools.rotary import rotary_refusals


@dataclass(frozen=True)
class GroupWithRope:
    """Layers that one relocation launch serves.

    group      their buffers; `group.rotate` is false for layers without rope
    inv_freq   fp64 [rot_dim / 2] on CPU, radians per position; zeros without rope
    pool_kind  which slot numbers the buffers use: the request's own ("full") or the window's
    layer_ids  global layer ids, in the group's order
    signature  the rope's identity, None without rope
    """

    group: PoolGroup
    inv_freq: torch.Tensor
    pool_kind: PoolKind
    layer_ids: tuple[int, ...]
    signature: str | None


def describe_pool(kv_pool: Any, model: torch.nn.Module, model_config: Any) -> list[GroupWithRope]:
    """Groups of layers that share pool, layout and rope; together they cover the pool once.

    kv_pool       the scheduler's token_to_kv_pool
    model         the loaded model, whose rotary modules are compared with its config
    model_config  the host's ModelConfig
    Raises UnsupportedPool (or UnsupportedRope if only the rope is at fault) with all reasons.
    """
    pools, reasons = sub_pools(kv_pool)
    text_config = model_config.hf_text_config.to_dict()
    specs: list[RopeSpec | None] = []
    rope_reasons: list[str] = []
    try:
        specs = rope_specs(
            text_config,
            num_layers=model_config.num_hidden_layers,
            context_len=model_config.context_len,
        )
    except UnsupportedRope as refusal:
        rope_reasons = list(refusal.reasons)
    if not reasons and not rope_reasons:
        reasons = _layer_refusals(pools, specs)
    if not reasons and not rope_reasons:
        owned = {layer: specs[layer] for pool in pools for layer in pool.layer_ids}
        rope_reasons = rotary_refusals(model, owned, idle_allowed=keeps_idle_rotary(text_config))
    if reasons:
        raise UnsupportedPool(reasons + rope_reasons)
    if rope_reasons:
        raise UnsupportedRope(rope_reasons)
    return [group for pool in pools for group in _groups(pool, specs)]


def _layer_refusals(pools: list[SubPool], specs: list[RopeSpec | None]) -> list[str]:
    reasons = []
    if not any(pool.layer_ids for pool in pools):
        reasons.append("kvedit: KV pool: expected at least one layer, got none")
    for pool in pools:
        for layer_id in pool.layer_ids:
            if layer_id >= len(specs):
                reasons.append(
                    f"kvedit: KV pool layer: expected below {len(specs)}, got {layer_id}"
                )
                continue
            spec = specs[layer_id]
            if spec is not None and spec.head_dim != pool.head_dim:
                reasons.append(
                    f"kvedit: layer {layer_id} head_dim: expected {spec.head_dim} "
                    f"from the config, got {pool.head_dim} in the pool"
                )
    return reasons


def _groups(pool: SubPool, specs: list[RopeSpec | None]) -> list[GroupWithRope]:
    members: defaultdict[tuple[str | None, torch.Size], list[int]] = defaultdict(list)
    for index, layer_id in enumerate(pool.layer_ids):
        spec = specs[layer_id]
        signature = None if spec is None else spec.signature()
        members[signature, pool.k_views[index].shape].append(index)
    return [
        _group(pool, indices, specs[pool.layer_ids[indices[0]]], signature)
        for (signature, _), indices in members.items()
    ]


def _group(
    pool: SubPool, indices: list[int], spec: RopeSpec | None, signature: str | None
) -> GroupWithRope:
    rot_dim = pool.head_dim if spec is None else spec.rotary_dim
    inv_freq = (0.0,) * (rot_dim // 2) if spec is None else spec.inv_freq
    group = PoolGroup.from_views(
        [pool.k_views[i] for i in indices],
        [pool.v_views[i] for i in indices] if pool.v_views else [],
        dtype=pool.dtype,
        page_size=pool.page_size,
        rot_offset=pool.rot_offset,
        rot_dim=rot_dim,
        is_neox=True if spec is None else spec.is_neox,
        rotate=spec is not None,
    )
    return GroupWithRope(
        group=group,
        inv_freq=torch.tensor(inv_freq, dtype=torch.float64),
        pool_kind=pool.kind,
        layer_ids=tuple(pool.layer_ids[i] for i in indices),
        signature=signature,
    )
