"""Tiny random models of every family that the server tests run, as Hugging Face folders.

The first layer's attention adds nothing (its output projection is zero). So the keys of layers
0 and 1 depend on a token and its position alone, and any plain prefill of the same server is an
exact reference for keys at a target; the layers behind them attend as usual.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NUM_LAYERS = 4
CONTEXT = 4096
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# 0.2 instead of 0.02: random attention then tells positions apart.
COMMON: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
WINDOWED_LAYERS = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
WINDOWED_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}


def tiny_model(family: str, default_model_dir: Path, parent: Path) -> Path:
    """The folder of one family's model under ``parent``, written on the first call."""
    folder = parent / f"tiny-{family}"
    return folder if folder.is_dir() else make_model(family, default_model_dir, folder)


def make_model(family: str, default_model_dir: Path, folder: Path) -> Path:
    """Write the model of one family, with the default model's tokenizer, into ``folder``."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                # Trained norms are not flat; a flat one commutes with every rotation.
                weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.save_pretrained(folder)
    for file in TOKENIZER_FILES:
        shutil.copy(default_model_dir / file, folder)
    return folder


def _qwen3() -> Any:
    """Keys are normalised per head before rope."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**COMMON))


def _llama3() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE))


def _gemma3() -> Any:
    """Layers 0 and 2 see a window of 256 tokens and rotate with another base."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **COMMON, layer_types=WINDOWED_LAYERS, sliding_window=256, rope_parameters=WINDOWED_ROPE
    )
    return Gemma3ForCausalLM(config)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **EXPERTS, num_experts=4))


def _mellum() -> Any:
    """The host's hybrid pool: layers 0 and 2 keep a window of 256 tokens in slots of their own."""
    from transformers import MellumConfig, MellumForCausalLM

    config = MellumConfig(
        **COMMON,
        **EXPERTS,
        num_experts=4,
        mlp_layer_types=["dense"] * NUM_LAYERS,
        layer_types=WINDOWED_LAYERS,
        sliding_window=256,
        rope_parameters=WINDOWED_ROPE,
    )
    return MellumForCausalLM(config)


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config)


def _deepseek_v2() -> Any:
    """MLA: one latent row per token, of which the last part rotates, under YaRN."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    fields = {k: v for k, v in COMMON.items() if k != "head_dim"} | {"num_key_value_heads": 8}
    config = DeepseekV2Config(
        **fields,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=NUM_LAYERS,
        moe_layer_freq=1,  # the host's class reads it, transformers' config has no default
        rope_parameters=YARN_ROPE,
    )
    return DeepseekV2ForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "llama3": _llama3,
    "gemma3": _gemma3,
    "qwen3_moe": _qwen3_moe,
    "mellum": _mellum,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek_v2,
}
