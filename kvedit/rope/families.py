"""What a config does not say: pairing style and rope-free layers, by model type."""

from collections.abc import Mapping
from typing import Any

# Model types whose host class pairs neighbouring dims (2i, 2i + 1). Everything else is neox
# (the host permutes the weights of Llama 4 at load). The pool table compares the answer with
# the loaded module, so a wrong guess is refused.
GPTJ_STYLE_MODEL_TYPES = frozenset(
    {"chatglm", "codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm4", "gptj"}
)
# Model types whose full-attention layers carry no rope. Their host classes build a rotary
# module in those layers all the same and never call it.
NOPE_ON_FULL_ATTENTION = frozenset({"cohere2", "exaone4"})
_LEARNED_NORM = "it scales keys per dimension after rope, which no rotation commutes with"
_HOST_DECIDES = "its host class decides per layer, by facts outside this table, whether to rotate"
REFUSED_MODEL_TYPES = {
    "hunyuan": _LEARNED_NORM,
    "hunyuan_v1_dense": _LEARNED_NORM,
    "hunyuan_v1_moe": _LEARNED_NORM,
    "hunyuan_vl": _LEARNED_NORM,
    "hunyuan_vl_text": _LEARNED_NORM,
    "afmoe": _HOST_DECIDES,
    "bailing_moe_linear": _HOST_DECIDES,
    "cohere2_moe": _HOST_DECIDES,
    "exaone_moe": _HOST_DECIDES,
    "iquest_q1": _HOST_DECIDES,
    "muse_spark": _HOST_DECIDES,
}


def is_neox(text: Mapping[str, Any]) -> bool:
    """The pairing style of a text config."""
    if "rope_is_neox_style" in text:
        return bool(text["rope_is_neox_style"])
    if is_mla(text):
        return not text.get("rope_interleave", True)
    return text.get("model_type") not in GPTJ_STYLE_MODEL_TYPES


def is_mla(text: Mapping[str, Any]) -> bool:
    """Whether a token's K and V are one latent row with a rope part of its own (DeepSeek's MLA)."""
    return bool(text.get("kv_lora_rank")) and bool(text.get("qk_rope_head_dim"))


def has_rope(text: Mapping[str, Any], layer_id: int) -> bool:
    """False for a layer whose keys carry no position and are copied."""
    if text.get("position_embedding_type") == "nope":
        return False
    flags = text.get("no_rope_layers")
    if flags:
        # The name says the opposite of the meaning: 1 marks a layer with rope.
        return bool(flags[layer_id])
    interval = text.get("no_rope_layer_interval")
    if interval:
        return bool((layer_id + 1) % interval)
    if text.get("model_type") in NOPE_ON_FULL_ATTENTION and text.get("sliding_window"):
        return layer_type(text, layer_id) != "full_attention"
    return True


def keeps_idle_rotary(text: Mapping[str, Any]) -> bool:
    """True if rope-free layers of the host class hold a rotary module that is never called."""
    return text.get("model_type") in NOPE_ON_FULL_ATTENTION


def layer_type(text: Mapping[str, Any], layer_id: int) -> str | None:
    """`full_attention`, `sliding_attention`, …; None for a config without such a list."""
    types = text.get("layer_types")
    if types:
        return str(types[layer_id])
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern:
        return "sliding_attention" if (layer_id + 1) % pattern else "full_attention"
    return None
