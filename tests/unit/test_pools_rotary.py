"""The comparison of a loaded rotary module with the specification, for every class it accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from kvedit.rope import RopeSpec, rope_specs
from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.layers.rotary_embedding import get_rope  # noqa: E402
from sglang.srt.models.gemma3_causal import Gemma3RotaryEmbedding  # noqa: E402

from sglang_patches.pools.rotary import (  # noqa: E402
    ROTARY_CLASSES,
    module_refusals,
    rotary_refusals,
)

HEAD_DIM, BASE = 64, 1e4
SECTIONS = {"mrope_section": [12, 12, 8]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
# name of the host's class -> the rope parameters that make the host choose it
PARAMS: dict[str, dict[str, Any]] = {
    "RotaryEmbedding": {"rope_type": "default"},
    "LinearScalingRotaryEmbedding": {"rope_type": "linear", "factor": 4.0},
    "Llama3RotaryEmbedding": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "YaRNScalingRotaryEmbedding": {"rope_type": "yarn", **YARN},
    "DeepseekScalingRotaryEmbedding": {
        "rope_type": "deepseek_yarn",
        **YARN,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "MRotaryEmbedding": {"rope_type": "default", **SECTIONS},
    "YaRNScalingMRotaryEmbedding": {"rope_type": "yarn", **YARN, **SECTIONS},
    "Phi3LongRoPEScaledRotaryEmbedding": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 30 for i in range(HEAD_DIM // 2)],
        "long_factor": [2.0 + i for i in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 1024,
    },
}


def module_of(params: dict[str, Any], base: float = BASE) -> torch.nn.Module:
    return get_rope(HEAD_DIM, HEAD_DIM, 4096, base, True, dict(params), dtype=torch.bfloat16)


def spec_of(params: dict[str, Any], base: float = BASE) -> RopeSpec:
    config = {"head_dim": HEAD_DIM, "rope_parameters": {"rope_theta": base, **params}}
    spec = rope_specs(config, num_layers=1, context_len=1024)[0]
    assert spec is not None
    return spec


def test_every_accepted_class_is_tested_here() -> None:
    tested = set(PARAMS) | {Gemma3RotaryEmbedding.__name__}
    assert {cls.__name__ for cls in ROTARY_CLASSES} == tested


@pytest.mark.parametrize("name", PARAMS)
def test_a_module_equals_the_specification_of_its_own_config(name: str) -> None:
    params = PARAMS[name]
    module = module_of(params)
    assert type(module).__name__ == name
    assert module_refusals(module, spec_of(params), where="layer 0") == []


@pytest.mark.parametrize("name", PARAMS)
def test_a_base_that_is_off_by_a_thousandth_is_seen_in_every_class(name: str) -> None:
    params = PARAMS[name]
    (reason,) = module_refusals(module_of(params), spec_of(params, BASE * 1.001), where="layer 0")
    assert "angles at position" in reason


@pytest.mark.parametrize("name", [n for n, p in PARAMS.items() if p["rope_type"] != "default"])
def test_an_unscaled_specification_is_seen_in_every_scaled_class(name: str) -> None:
    plain = spec_of({"rope_type": "default"})
    assert module_refusals(module_of(PARAMS[name]), plain, where="layer 0")


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = module_of({"rope_type": "default"})
        self.attn = RadixAttention(4, HEAD_DIM, 1.0, 2, layer_id=0)


class Gemma(torch.nn.Module):
    """One attention layer, and the table that Gemma 3 keeps at model level."""

    def __init__(self, table_base: float) -> None:
        super().__init__()
        self.layer = Attention()
        config = hf.Gemma3TextConfig(head_dim=HEAD_DIM)
        config.rope_parameters = {"rope_type": "default", "rope_theta": table_base}
        self.table = Gemma3RotaryEmbedding(config)


@pytest.mark.parametrize(("base", "num_reasons"), [(BASE, 0), (1e6, 1)])
def test_the_table_at_model_level_must_belong_to_some_layer(base: float, num_reasons: int) -> None:
    plain = spec_of({"rope_type": "default"})
    reasons = rotary_refusals(Gemma(base), {0: plain}, idle_allowed=False)
    assert len(reasons) == num_reasons
    assert all("table angles at position" in reason for reason in reasons)
