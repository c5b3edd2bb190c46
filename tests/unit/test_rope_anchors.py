"""Numeric anchors of re-rotation: each mistake that looks right has its number here.

The good number shows that a pure rotation by the shift is enough; the bad one shows that the
check would notice the mistake. All in fp64 unless a storage dtype is the subject.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvedit.errors import UnsupportedRope
from kvedit.rope import RopeSpec, rope_specs

HEAD_DIM, NUM_TOKENS = 128, 64
SOURCE = np.arange(NUM_TOKENS)
KEYS = np.random.default_rng(0).standard_normal((NUM_TOKENS, HEAD_DIM))


def spec_of(**config: Any) -> RopeSpec:
    text = {"model_type": "llama", "head_dim": HEAD_DIM, "rope_theta": 1e4, **config}
    spec = rope_specs(text, num_layers=1)[0]
    assert spec is not None
    return spec


PLAIN = spec_of()
GPTJ = spec_of(rope_is_neox_style=False)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def stored(keys: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """What a pool of `dtype` keeps of fp64 keys."""
    return torch.from_numpy(keys).to(dtype).double().numpy()


def hop(keys: np.ndarray, delta_pos: int, dtype: torch.dtype) -> np.ndarray:
    return stored(PLAIN.rotate(keys, delta_pos), dtype)


@pytest.mark.parametrize("delta_pos", [4, 6000, 100_000, -40])
def test_one_rotation_by_the_shift_is_the_fresh_key(delta_pos: int) -> None:
    cached = PLAIN.rotate(KEYS, SOURCE + 64)
    fresh = PLAIN.rotate(KEYS, SOURCE + 64 + delta_pos)
    assert relative_error(PLAIN.rotate(cached, delta_pos), fresh) < 2e-11


def test_yarn_amplitude_must_not_be_applied_again() -> None:
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    spec = spec_of(rope_scaling=yarn)
    amplitude = 0.1 * math.log(40.0) + 1.0
    cached, fresh = (amplitude * spec.rotate(KEYS, SOURCE + shift) for shift in (0, 5000))
    assert relative_error(spec.rotate(cached, 5000), fresh) < 1e-11
    # Undoing and redoing the model's own rotation applies the amplitude twice more.
    redone = amplitude * spec.rotate(amplitude * spec.rotate(cached, -SOURCE), SOURCE + 5000)
    growth = np.linalg.norm(redone) / np.linalg.norm(fresh)
    assert growth == pytest.approx(amplitude**2)
    assert relative_error(redone, fresh) > 0.8


def test_bf16_keys_drift_when_moved_hop_by_hop() -> None:
    pristine = stored(PLAIN.rotate(KEYS, SOURCE), torch.bfloat16)
    fresh = PLAIN.rotate(KEYS, SOURCE + 1000)
    once = relative_error(hop(pristine, 1000, torch.bfloat16), fresh)
    many = pristine
    for _ in range(10):
        many = hop(many, 100, torch.bfloat16)
    assert once < 3e-3
    assert relative_error(many, fresh) > 2 * once


def test_a_bf16_angle_table_costs_more_than_the_storage() -> None:
    pristine = stored(PLAIN.rotate(KEYS, SOURCE), torch.bfloat16)
    fresh = PLAIN.rotate(KEYS, SOURCE + 1000)
    angles = 1000.0 * np.asarray(PLAIN.inv_freq)
    cos, sin = (stored(t, torch.bfloat16) for t in (np.cos(angles), np.sin(angles)))
    low, high = pristine[:, : HEAD_DIM // 2], pristine[:, HEAD_DIM // 2 :]
    coarse = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    fine = hop(pristine, 1000, torch.bfloat16)
    assert relative_error(stored(coarse, torch.bfloat16), fresh) > 1.1 * relative_error(fine, fresh)


@pytest.mark.parametrize("delta_pos", [1, 8, 700, 5000])
def test_the_wrong_pairing_is_visible_at_every_shift(delta_pos: int) -> None:
    cached, fresh = GPTJ.rotate(KEYS, SOURCE), GPTJ.rotate(KEYS, SOURCE + delta_pos)
    assert relative_error(GPTJ.rotate(cached, delta_pos), fresh) < 1e-11
    assert relative_error(PLAIN.rotate(cached, delta_pos), fresh) > 0.3


@pytest.mark.parametrize("delta_pos", [1000, 8000, 32_000])
def test_plain_frequencies_do_not_move_llama3_keys(delta_pos: int) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = spec_of(rope_theta=5e5, rope_scaling=llama3)
    unscaled = spec_of(rope_theta=5e5)
    cached, fresh = scaled.rotate(KEYS, SOURCE), scaled.rotate(KEYS, SOURCE + delta_pos)
    assert relative_error(scaled.rotate(cached, delta_pos), fresh) < 1e-11
    assert relative_error(unscaled.rotate(cached, delta_pos), fresh) > 0.1


def test_partial_rope_leaves_the_other_dims_bit_equal() -> None:
    half = spec_of(partial_rotary_factor=0.5)
    cached, fresh = half.rotate(KEYS, SOURCE), half.rotate(KEYS, SOURCE + 1000)
    moved = half.rotate(cached, 1000)
    assert relative_error(moved, fresh) < 1e-11
    assert np.array_equal(moved[:, 64:], KEYS[:, 64:])
    assert relative_error(PLAIN.rotate(cached, 1000), fresh) > 0.5


def test_dynamic_ntk_keys_at_one_position_depend_on_the_length_and_are_refused() -> None:
    def base_at(length: int) -> float:
        return 1e4 * (2.0 * length / 4096 - 1.0) ** (HEAD_DIM / (HEAD_DIM - 2))

    early, late = (spec_of(rope_theta=base_at(length)) for length in (4096, 16384))
    position = SOURCE + 2000
    assert relative_error(early.rotate(KEYS, position), late.rotate(KEYS, position)) > 0.3
    with pytest.raises(UnsupportedRope, match="dynamic"):
        spec_of(rope_scaling={"type": "dynamic", "factor": 2.0})


def test_all_three_axes_of_mrope_move_together() -> None:
    axis_of_pair = np.repeat([0, 1, 2], [16, 24, 24])

    def fresh_at(temporal: np.ndarray, height: np.ndarray, width: np.ndarray) -> np.ndarray:
        position = np.stack([temporal, height, width])[axis_of_pair].T
        angles = position * np.asarray(PLAIN.inv_freq)
        low, high = KEYS[:, :64], KEYS[:, 64:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    axes = np.full(NUM_TOKENS, 10), 10 + SOURCE // 8, 10 + SOURCE % 8
    fresh = fresh_at(*(axis + 161 for axis in axes))
    spec = spec_of(rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})
    assert relative_error(spec.rotate(fresh_at(*axes), 161), fresh) < 1e-12
    # Moving only the temporal axis is what a text-only shift would do to a picture.
    assert relative_error(fresh_at(axes[0] + 161, *axes[1:]), fresh) > 0.5


def test_fp8_costs_one_more_rounding_per_hop() -> None:
    pristine = stored(PLAIN.rotate(KEYS, SOURCE), torch.float8_e4m3fn)
    fresh = PLAIN.rotate(KEYS, SOURCE + 3000)
    once = relative_error(hop(pristine, 3000, torch.float8_e4m3fn), fresh)
    many = pristine
    for _ in range(10):
        many = hop(many, 300, torch.float8_e4m3fn)
    assert once < 0.05
    assert relative_error(many, fresh) > 1.5 * once


def test_a_rotation_can_grow_one_element_by_the_root_of_two() -> None:
    """Why fp8 stores must saturate: a full-scale pair leaves the range of its own scale."""
    pair = np.zeros((1, HEAD_DIM))
    pair[0, [0, HEAD_DIM // 2]] = 448.0
    grown = max(np.abs(PLAIN.rotate(pair, delta_pos)).max() for delta_pos in range(1, 1000))
    assert grown == pytest.approx(448.0 * math.sqrt(2.0), rel=1e-3)


def test_unrotated_reuse_is_visible_on_the_keys() -> None:
    cached, fresh = PLAIN.rotate(KEYS, SOURCE), PLAIN.rotate(KEYS, SOURCE + 200)
    assert relative_error(cached, fresh) > 0.7
