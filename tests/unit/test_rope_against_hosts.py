"""Relocated keys equal keys rotated afresh at the target, by the server's and transformers' rope.

Each case is one real config class; both implementations are built from it the way a model would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama
from transformers.models.phi import modeling_phi
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from kvedit.rope import RopeSpec, rope_specs
from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang.srt.layers.rotary_embedding import get_rope  # noqa: E402

MAX_LEN = 131072
SOURCE_START, NUM_TOKENS = 40, 24
SHORT_SHIFTS = (1, 16, 1000)
ALL_SHIFTS = (*SHORT_SHIFTS, 32_000, 100_000)

# Both hosts build angles in fp32: each angle is off by about 2^-24 of itself plus 2^-24 of its
# frequency times the position. Half of the error budget is for the target, half for the source.
FLOOR = 1e-6
PER_POSITION = 1e-8

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": MAX_LEN,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
    "rope_theta": 1e6,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 40 for i in range(32)],
    "long_factor": [2.0 + i for i in range(32)],
    "original_max_position_embeddings": 4096,
    "rope_theta": 1e4,
}
GEMMA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
SECTIONS = [12, 12, 8]


def llama(**rope: Any) -> hf.PretrainedConfig:
    return hf.LlamaConfig(**SIZES, rope_parameters=rope)


@dataclass(frozen=True)
class Case:
    config: hf.PretrainedConfig
    kind: str
    modeling: Any  # transformers' modeling module
    rotary_class: str
    shifts: tuple[int, ...] = ALL_SHIFTS
    layer_id: int = 0
    layer_type: str | None = None
    context_len: int = MAX_LEN
    axes: int = 1  # 3 for multimodal positions
    host_params: dict[str, Any] = field(default_factory=dict)  # what its server class changes


CASES = {
    "default": Case(
        llama(rope_type="default", rope_theta=1e5),
        "default",
        modeling_llama,
        "LlamaRotaryEmbedding",
    ),
    "linear": Case(
        llama(rope_type="linear", factor=4.0, rope_theta=1e4),
        "linear",
        modeling_llama,
        "LlamaRotaryEmbedding",
    ),
    "llama3": Case(llama(**LLAMA3), "llama3", modeling_llama, "LlamaRotaryEmbedding"),
    "yarn": Case(llama(**YARN), "yarn", modeling_llama, "LlamaRotaryEmbedding"),
    "yarn_untruncated": Case(
        llama(**YARN, truncate=False), "yarn", modeling_llama, "LlamaRotaryEmbedding"
    ),
    "yarn_mla": Case(
        hf.DeepseekV2Config(**SIZES, qk_rope_head_dim=64, rope_parameters=DEEPSEEK_YARN),
        "yarn",
        modeling_deepseek_v2,
        "DeepseekV2RotaryEmbedding",
        host_params={"rope_type": "deepseek_yarn"},
    ),
    "longrope": Case(
        hf.Phi3Config(
            **{**SIZES, "max_position_embeddings": 4096}, rope_parameters=LONGROPE, pad_token_id=0
        ),
        "longrope",
        modeling_phi3,
        "Phi3RotaryEmbedding",
        shifts=SHORT_SHIFTS,
        context_len=4096,
    ),
    "partial": Case(
        hf.PhiConfig(
            **SIZES,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        ),
        "default",
        modeling_phi,
        "PhiRotaryEmbedding",
    ),
    "partial_gptj": Case(
        hf.Glm4Config(
            **SIZES,
            head_dim=64,
            pad_token_id=0,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        ),
        "default",
        modeling_glm4,
        "Glm4RotaryEmbedding",
    ),
    "gptj": Case(
        hf.CohereConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 8e6}),
        "default",
        modeling_cohere,
        "CohereRotaryEmbedding",
    ),
    "per_layer_sliding": Case(
        hf.Gemma3TextConfig(
            **SIZES,
            head_dim=64,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=GEMMA,
        ),
        "default",
        modeling_gemma3,
        "Gemma3RotaryEmbedding",
        layer_type="sliding_attention",
    ),
    "per_layer_full": Case(
        hf.Gemma3TextConfig(
            **SIZES,
            head_dim=64,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=GEMMA,
        ),
        "linear",
        modeling_gemma3,
        "Gemma3RotaryEmbedding",
        layer_id=1,
        layer_type="full_attention",
    ),
    "mrope_sectioned": Case(
        hf.Qwen2VLTextConfig(
            **SIZES,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": SECTIONS,
            },
        ),
        "default+mrope",
        modeling_qwen2_vl,
        "Qwen2VLRotaryEmbedding",
        axes=3,
    ),
    "mrope_interleaved": Case(
        hf.Qwen3VLTextConfig(
            **SIZES,
            head_dim=64,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": SECTIONS,
                "mrope_interleaved": True,
            },
        ),
        "default+mrope_interleaved",
        modeling_qwen3_vl,
        "Qwen3VLTextRotaryEmbedding",
        axes=3,
    ),
}


def spec_of(case: Case) -> RopeSpec:
    specs = rope_specs(case.config.to_dict(), num_layers=2, context_len=case.context_len)
    spec = specs[case.layer_id]
    assert spec is not None
    return spec


def positions_at(start: int, axes: int) -> torch.Tensor:
    """[NUM_TOKENS], or [3, NUM_TOKENS]: an 8-wide picture, whose axes advance apart."""
    steps = torch.arange(NUM_TOKENS)
    if axes == 1:
        return steps + start
    return torch.stack([torch.zeros_like(steps), steps // 8, steps % 8]) + start


def rotated_by_transformers(case: Case, keys: torch.Tensor, positions: torch.Tensor) -> np.ndarray:
    rotary = getattr(case.modeling, case.rotary_class)(case.config)
    extra = {} if case.layer_type is None else {"layer_type": case.layer_type}
    batch = positions.unsqueeze(-2)  # [1, T], or [3, 1, T]
    table = rotary(keys, batch, **extra)
    row = keys[None, None]  # [batch, heads, T, head_dim]
    if case.modeling is modeling_deepseek_v2:
        _, rotated = case.modeling.apply_rotary_emb(row, row, table)
    else:
        _, rotated = apply_cos_sin(case.modeling, row, *table)
    return rotated[0, 0].double().numpy()


def apply_cos_sin(
    modeling: Any, row: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[None, torch.Tensor]:
    # Models with a partial rope slice before the call where their function does not.
    width = cos.shape[-1]
    if modeling is modeling_phi:
        _, part = modeling.apply_rotary_pos_emb(row[..., :width], row[..., :width], cos, sin)
        return None, torch.cat([part, row[..., width:]], dim=-1)
    return None, modeling.apply_rotary_pos_emb(row, row, cos, sin)[1]


def rotated_by_the_server(case: Case, keys: torch.Tensor, positions: torch.Tensor) -> np.ndarray:
    layers = case.config.rope_parameters
    params = {**layers.get(case.layer_type, layers), **case.host_params}
    spec = spec_of(case)
    rotary = get_rope(
        spec.head_dim,
        spec.rotary_dim,
        case.config.max_position_embeddings,
        params["rope_theta"],
        spec.is_neox,
        params,
        dtype=torch.float32,
    )
    # The native path, since the server's CPU kernels need its compiled package; its longrope
    # class has only one path, and that one takes flat rows.
    rows = keys if case.kind == "longrope" else keys[:, None]
    forward = rotary.forward if case.kind == "longrope" else rotary.forward_native
    _, rotated = forward(positions, rows.clone(), rows.clone())
    return rotated.view(keys.shape).double().numpy()


HOSTS = {"transformers": rotated_by_transformers, "server": rotated_by_the_server}


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", CASES)
def test_relocated_keys_equal_keys_rotated_afresh(name: str, host: str) -> None:
    case, spec = CASES[name], spec_of(CASES[name])
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(NUM_TOKENS, spec.head_dim, generator=generator)
    cached = HOSTS[host](case, keys, positions_at(SOURCE_START, case.axes))
    for shift in case.shifts:
        target = SOURCE_START + shift
        fresh = HOSTS[host](case, keys, positions_at(target, case.axes))
        bound = FLOOR + PER_POSITION * (target + NUM_TOKENS)
        assert relative_error(spec.rotate(cached, shift), fresh) <= bound, shift
        # Controls: the bound must notice one position too few, and keys left where they were.
        assert relative_error(spec.rotate(cached, shift - 1), fresh) > 20 * bound, shift
        assert relative_error(cached, fresh) > 20 * bound, shift


@pytest.mark.parametrize("name", CASES)
def test_the_kind_names_the_scaling(name: str) -> None:
    assert spec_of(CASES[name]).kind == CASES[name].kind


def test_both_hosts_agree_that_yarn_scales_the_keys() -> None:
    """Control for the amplitude: fresh keys are longer than raw ones, relocated ones not longer."""
    case, spec = CASES["yarn"], spec_of(CASES["yarn"])
    keys = torch.randn(NUM_TOKENS, spec.head_dim, generator=torch.Generator().manual_seed(1))
    for rotated in HOSTS.values():
        cached = rotated(case, keys, positions_at(SOURCE_START, 1))
        amplitude = np.linalg.norm(cached) / np.linalg.norm(keys.numpy())
        assert amplitude == pytest.approx(0.1 * np.log(4.0) + 1.0, rel=1e-6)
        moved = spec.rotate(cached, 5000)
        assert np.linalg.norm(moved) == pytest.approx(np.linalg.norm(cached), rel=1e-12)
