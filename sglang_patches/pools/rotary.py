"""What the loaded model really rotates with, compared with the specification from its config."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding
from sglang.srt.layers.rotary_embedding.mrope import (
    MRotaryEmbedding,
    YaRNScalingMRotaryEmbedding,
)
from sglang.srt.layers.rotary_embedding.rope_variant import (
    DeepseekScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
)
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.models.gemma3_causal import Gemma3RotaryEmbedding

from kvedit.rope import RopeSpec

# Two positions tell a wrong frequency from a table that is not linear in the position.
PROBE_POSITIONS = (1, 64)
# The host builds its angles in fp32: 2^-24 on the exponent, times ln(base), on each angle.
RELATIVE_TOLERANCE = 8e-6
ABSOLUTE_TOLERANCE = 4e-7

CosSin = tuple[torch.Tensor, torch.Tensor]


def attention_rotaries(model: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """Rotary modules beside each attention call, by global layer id (an empty list if none)."""
    found: defaultdict[int, list[torch.nn.Module]] = defaultdict(list)
    for owner in model.modules():
        layer_ids = {c.layer_id for c in owner.children() if isinstance(c, RadixAttention)}
        for layer_id in layer_ids:
            found[layer_id] += [c for name, c in owner.named_children() if _is_rotary(name, c)]
    return dict(found)


def rotary_refusals(
    model: torch.nn.Module, specs: Mapping[int, RopeSpec | None], *, idle_allowed: bool
) -> list[str]:
    """Every way in which the loaded rotary modules differ from `specs` (by global layer id).

    idle_allowed  the host class keeps a rotary module in rope-free layers without calling it
    """
    reasons: list[str] = []
    rotaries = attention_rotaries(model)
    seen: set[tuple[int, str]] = set()
    for layer_id, spec in specs.items():
        if layer_id not in rotaries:
            reasons.append(f"kvedit: layer {layer_id}: expected an attention module, got none")
            continue
        if spec is None:
            if rotaries[layer_id] and not idle_allowed:
                got = type(rotaries[layer_id][0]).__name__
                reasons.append(f"kvedit: layer {layer_id}: expected no rotary module, got {got}")
            continue
        if not rotaries[layer_id]:
            reasons.append(f"kvedit: layer {layer_id}: expected a rotary module, got none")
        for module in rotaries[layer_id]:
            # The host shares one module between layers; each pair is compared once.
            pair = (id(module), spec.signature())
            if pair not in seen:
                seen.add(pair)
                reasons += module_refusals(module, spec, where=f"layer {layer_id}")
    return reasons + _model_level_refusals(model, list(specs.values()))


def module_refusals(module: torch.nn.Module, spec: RopeSpec, *, where: str) -> list[str]:
    """Differences between one rotary module of the host and one specification."""
    probe = ROTARY_CLASSES.get(type(module))
    if probe is None:
        return [
            f"kvedit: {where} rotary class: expected one of "
            f"{', '.join(sorted(cls.__name__ for cls in ROTARY_CLASSES))}, "
            f"got {type(module).__name__}"
        ]
    reasons = []
    for name, expected, got in _shape_facts(module, spec):
        if expected != got:
            reasons.append(f"kvedit: {where} {name}: expected {expected}, got {got}")
    if reasons:
        return reasons
    cos, sin = (t.to(device="cpu", dtype=torch.float64) for t in probe(module))
    for row, position in enumerate(PROBE_POSITIONS):
        error = _worst_angle_error(cos[row], sin[row], spec, position)
        if error is not None:
            return [f"kvedit: {where} angles at position {position}: {error}"]
    return []


def _is_rotary(name: str, module: torch.nn.Module) -> bool:
    return type(module) in ROTARY_CLASSES or "rotary" in name or "rope" in name


def _model_level_refusals(model: torch.nn.Module, specs: Sequence[RopeSpec | None]) -> list[str]:
    """Gemma 3 computes cos and sin once per model, beside the modules of its layers."""
    ropes = [spec for spec in specs if spec is not None]
    reasons = []
    for name, module in model.named_modules():
        if type(module) is not Gemma3RotaryEmbedding or not ropes:
            continue
        against = [module_refusals(module, spec, where=name) for spec in ropes]
        if all(against):
            reasons += against[0]
    return reasons


def _shape_facts(module: Any, spec: RopeSpec) -> list[tuple[str, object, object]]:
    if type(module) is Gemma3RotaryEmbedding:
        return [("rotary_dim", spec.rotary_dim, 2 * module.inv_freq.numel())]
    facts: list[tuple[str, object, object]] = [
        ("rotary_dim", spec.rotary_dim, module.rotary_dim),
        ("head_size", spec.head_dim, module.head_size),
    ]
    if type(module) is not Phi3LongRoPEScaledRotaryEmbedding:  # neox only, holds no flag
        facts.append(("is_neox_style", spec.is_neox, module.is_neox_style))
    return facts


def _worst_angle_error(
    cos: torch.Tensor, sin: torch.Tensor, spec: RopeSpec, position: int
) -> str | None:
    want = torch.tensor(spec.inv_freq, dtype=torch.float64) * position
    if cos.shape != want.shape:
        return f"expected {tuple(want.shape)} pairs, got {tuple(cos.shape)}"
    # Amplitude (YaRN, longrope) drops out of the direction; what is left is the angle, modulo
    # full turns.
    error = torch.atan2(sin, cos) - want
    error = (error - 2 * torch.pi * torch.round(error / (2 * torch.pi))).abs()
    excess = error - (RELATIVE_TOLERANCE * want + ABSOLUTE_TOLERANCE)
    worst = int(excess.argmax())
    if not excess[worst] > 0:
        return None
    return (
        f"expected {want[worst].item():.9g} rad for pair {worst}, "
        f"got {(want[worst] + error[worst]).item():.9g} up to sign and full turns"
    )


def _probe_table(module: Any) -> CosSin:
    # Recomputed in fp32: off CUDA the host keeps only a 16-bit copy of this table.
    return _halves(module._compute_cos_sin_cache())


def _probe_longrope(module: Any) -> CosSin:
    return _halves(
        module._compute_cos_sin_cache(
            PROBE_POSITIONS[-1] + 1, module.short_factor, module.short_mscale
        )
    )


def _probe_frequencies(module: Any) -> CosSin:
    positions = torch.tensor(PROBE_POSITIONS, device=module.inv_freq.device)
    angles = torch.outer(positions.float(), module.inv_freq.float())
    return angles.cos(), angles.sin()


def _halves(table: torch.Tensor) -> CosSin:
    cos, sin = table[list(PROBE_POSITIONS)].chunk(2, dim=-1)
    return cos, sin


# Exact class -> cos and sin at PROBE_POSITIONS, fp32 [len(PROBE_POSITIONS), rotary_dim / 2].
ROTARY_CLASSES: dict[type, Callable[[Any], CosSin]] = {
    RotaryEmbedding: _probe_table,
    LinearScalingRotaryEmbedding: _probe_table,
    Llama3RotaryEmbedding: _probe_table,
    YaRNScalingRotaryEmbedding: _probe_table,
    DeepseekScalingRotaryEmbedding: _probe_table,
    MRotaryEmbedding: _probe_table,
    YaRNScalingMRotaryEmbedding: _probe_table,
    Phi3LongRoPEScaledRotaryEmbedding: _probe_longrope,
    Gemma3RotaryEmbedding: _probe_frequencies,
}
