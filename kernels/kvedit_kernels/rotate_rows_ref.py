"""rotate_rows: the rotation alone, over dense rows (keys here, queries by -delta elsewhere)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvedit_kernels.errors import require

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def rotate_rows(
    x: Tensor, row: Tensor, cos_sin: Tensor, *, rot_offset: int = 0, is_neox: bool = True
) -> Tensor:
    """[T, H, D] copy of x whose elements [rot_offset, rot_offset + rot) are turned.

    x: [T, H, D] bf16 | fp16 | fp32 | fp8; row: [T] int32; cos_sin: [R, 2, rot/2] fp32.
    A pair (a, b) becomes (a*cos - b*sin, b*cos + a*sin), each product and sum rounded to fp32,
    then once to x's dtype; fp8 saturates at its largest finite value, nan stays nan.
    """
    op = "rotate_rows"
    require(x.dim() == 3, op, "x", "[T, H, D]", tuple(x.shape))
    require(tuple(row.shape) == (len(x),), op, "row", f"[{len(x)}]", tuple(row.shape))
    rot_dim = 2 * cos_sin.shape[-1]
    fits = rot_offset >= 0 and rot_offset + rot_dim <= x.shape[-1]
    require(fits, op, "cos_sin", f"at most {x.shape[-1] - rot_offset} rotated", rot_dim)
    rows = cos_sin[row.long()]
    cos, sin = rows[:, None, 0], rows[:, None, 1]
    out = x.clone()
    span = slice(rot_offset, rot_offset + rot_dim)
    given, turned = x[..., span], out[..., span]
    first, second = _pair_slices(rot_dim, is_neox)
    a, b = given[..., first].float(), given[..., second].float()
    turned[..., first] = _rounded(a * cos - b * sin, x.dtype)
    turned[..., second] = _rounded(b * cos + a * sin, x.dtype)
    return out


def _pair_slices(rot_dim: int, is_neox: bool) -> tuple[slice, slice]:
    half = rot_dim // 2
    if is_neox:
        return slice(0, half), slice(half, rot_dim)
    return slice(0, rot_dim, 2), slice(1, rot_dim, 2)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype in _FP8:
        limit = torch.finfo(dtype).max
        value = value.clamp(-limit, limit)
    return value.to(dtype)
