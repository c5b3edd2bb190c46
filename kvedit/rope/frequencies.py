"""Inverse frequencies of the rope scalings that are served, pure rotations all.

All functions return fp64 [rotary_dim / 2], radians per position. Amplitudes that some scalings
multiply into cos and sin (YaRN, longrope) are left out on purpose: a cached key carries the
amplitude already, so a relocation must rotate with amplitude one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Frequencies = npt.NDArray[np.float64]


def default(base: float, rotary_dim: int) -> Frequencies:
    """base^(-2i / rotary_dim) of pair i (RoFormer, arXiv 2104.09864)."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    return np.asarray(float(base) ** -exponents, dtype=np.float64)


def linear(base: float, rotary_dim: int, params: Mapping[str, Any]) -> Frequencies:
    """All divided by ``factor``: position interpolation (arXiv 2306.15595)."""
    return default(base, rotary_dim) / float(params["factor"])


def llama3(base: float, rotary_dim: int, params: Mapping[str, Any]) -> Frequencies:
    """Short wavelengths keep their frequency, long ones are divided, between them a blend."""
    plain = default(base, rotary_dim)
    factor = float(params["factor"])
    low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
    turns_in_training = float(params["original_max_position_embeddings"]) * plain / (2 * math.pi)
    if low == high:
        keep = (turns_in_training > high).astype(np.float64)
    else:
        keep = np.clip((turns_in_training - low) / (high - low), 0.0, 1.0)
    return np.asarray(plain * (keep + (1.0 - keep) / factor), dtype=np.float64)


def yarn(base: float, rotary_dim: int, params: Mapping[str, Any]) -> Frequencies:
    """Blend of interpolated and plain frequencies along a ramp over the pair index (arXiv
    2309.00071)."""
    plain = default(base, rotary_dim)
    low, high = _yarn_ramp_ends(base, rotary_dim, params)
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    keep = (1.0 - ramp) * float(params.get("extrapolation_factor", 1.0))
    return np.asarray(plain * (keep + (1.0 - keep) / float(params["factor"])), dtype=np.float64)


def _yarn_ramp_ends(base: float, rotary_dim: int, params: Mapping[str, Any]) -> tuple[float, float]:
    original_len = float(params["original_max_position_embeddings"])

    def pair_that_turns(times: float) -> float:
        return rotary_dim * math.log(original_len / (times * 2 * math.pi)) / (2 * math.log(base))

    # A null in the config means the paper's value, as in both hosts.
    low = pair_that_turns(float(params.get("beta_fast") or 32))
    high = pair_that_turns(float(params.get("beta_slow") or 1))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return (low, high + 0.001) if low == high else (low, high)


def longrope(base: float, rotary_dim: int, factors: Sequence[float]) -> Frequencies:
    """Each pair divided by a factor of its own, [rotary_dim / 2] (LongRoPE, arXiv 2402.13753)."""
    return default(base, rotary_dim) / np.asarray(factors, dtype=np.float64)
