"""Rope specifications of a whole model, layer by layer."""

from collections.abc import Mapping
from typing import Any

from kvedit.errors import UnsupportedRope
from kvedit.rope import families, scaling
from kvedit.rope.spec import RopeSpec

TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
BASE_KEYS = ("rope_theta", "rotary_emb_base")
# Types of the GPT-J line have no base in their config; the architecture fixes it.
FIXED_BASE = {"gptj": 10000.0, "codegen": 10000.0}


def rope_specs(
    hf_config_dict: Mapping[str, Any], *, num_layers: int, context_len: int | None = None
) -> list[RopeSpec | None]:
    """One specification per layer; None marks a layer without rope, whose keys are copied.

    hf_config_dict  the model's config as a dict (`config.to_dict()`), text or multimodal
    num_layers      decoder layers that own a KV cache
    context_len     tokens the server admits per request; only longrope needs it
    Raises UnsupportedRope with all reasons against the model, else all those of its layers, each
    once.
    """
    text = text_config(hf_config_dict)
    reasons = _model_refusals(text, num_layers)
    specs: list[RopeSpec | None] = []
    for layer_id in range(num_layers) if not reasons else ():
        spec, layer_reasons = _layer_spec(text, layer_id, context_len)
        specs.append(spec)
        reasons += layer_reasons
    if reasons:
        raise UnsupportedRope(list(dict.fromkeys(reasons)))
    return specs


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multimodal config that describes the decoder."""
    for key in TEXT_CONFIG_KEYS:
        if isinstance(config.get(key), Mapping):
            return text_config(config[key])
    return config


def _model_refusals(text: Mapping[str, Any], num_layers: int) -> list[str]:
    reasons = []
    model_type = str(text.get("model_type"))
    if model_type in families.REFUSED_MODEL_TYPES:
        why = families.REFUSED_MODEL_TYPES[model_type]
        reasons.append(
            f"kvedit: model type: expected keys that one rotation moves, got {model_type} ({why})"
        )
    if text.get("dual_chunk_attention_config"):
        reasons.append(
            "kvedit: attention: expected one position per key, got dual chunk attention "
            "(key positions wrap at each chunk)"
        )
    if text.get("alibi") or text.get("position_embedding_type") == "alibi":
        reasons.append("kvedit: positions: expected rope, got ALiBi")
    for key in ("layer_types", "no_rope_layers"):
        listed = text.get(key)
        if listed and len(listed) < num_layers:
            reasons.append(f"kvedit: {key}: expected {num_layers} layers, got {len(listed)}")
    return reasons


def _layer_spec(
    text: Mapping[str, Any], layer_id: int, context_len: int | None
) -> tuple[RopeSpec | None, list[str]]:
    if not families.has_rope(text, layer_id):
        return None, []
    params = _layer_params(text, layer_id)
    base = _base(text, params, layer_id)
    head_dim, rotary_dim = _dims(text, params)
    reasons = scaling.refusals(params, rotary_dim, context_len)
    if base is None:
        reasons.append("kvedit: rope base: expected rope_theta in the config, got none")
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        reasons.append(
            f"kvedit: rotary_dim: expected an even number in (0, {head_dim}], got {rotary_dim}"
        )
    if reasons or base is None:
        return None, reasons
    spec = RopeSpec(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        is_neox=families.is_neox(text),
        inv_freq=tuple(float(f) for f in scaling.inv_freq(params, base, rotary_dim)),
        kind=scaling.kind_of(params),
    )
    return spec, []


def _layer_params(text: Mapping[str, Any], layer_id: int) -> Mapping[str, Any]:
    """The rope parameters that hold for one layer, from either generation of configs."""
    params: Mapping[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = families.layer_type(text, layer_id)
    if kind is not None and isinstance(params.get(kind), Mapping):
        params = params[kind]
    elif kind == "sliding_attention" and "rope_local_base_freq" in text:
        # The older Gemma configs scale only the full-attention layers.
        return {"rope_theta": text["rope_local_base_freq"]}
    original_len = text.get("original_max_position_embeddings")
    if original_len and "original_max_position_embeddings" not in params:
        params = {**params, "original_max_position_embeddings": original_len}
    return params


def _base(text: Mapping[str, Any], params: Mapping[str, Any], layer_id: int) -> float | None:
    for source in (params, text):
        for key in BASE_KEYS:
            if source.get(key) is not None:
                return float(source[key])
    return FIXED_BASE.get(str(text.get("model_type")))


def _dims(text: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[int, int]:
    """(head_dim, rotary_dim) of the cached key; MLA rotates a part of its own."""
    if families.is_mla(text):
        return int(text["qk_rope_head_dim"]), int(text["qk_rope_head_dim"])
    head_dim = text.get("head_dim") or text.get("kv_channels")
    if head_dim is None:
        hidden = text.get("hidden_size") or text["n_embd"]
        head_dim = hidden // (text.get("num_attention_heads") or text["n_head"])
    if text.get("rotary_dim"):
        return int(head_dim), int(text["rotary_dim"])
    for source in (params, text):
        for key in ("partial_rotary_factor", "rotary_pct"):
            if source.get(key) is not None:
                return int(head_dim), int(head_dim * float(source[key]))
    return int(head_dim), int(head_dim)
