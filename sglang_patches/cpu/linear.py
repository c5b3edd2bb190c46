"""Linear layers in bf16 on processors that have no instructions for it.

There torch multiplies bf16 matrices about 7x slower than fp32 ones. Products of bf16 numbers are
exact in fp32 and both ways sum in fp32, so the result is the same but for the order of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

MIN_ROWS = 4  # turning the weight costs more than fewer rows gain


def is_needed() -> bool:
    """Whether torch has no fast bf16 matrix product on this processor."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def apply(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """AROUND ``UnquantizedLinearMethod.apply``: x [..., in] times layer.weight [out, in]."""
    weight = layer.weight
    is_bf16 = x.dtype is torch.bfloat16 and weight.dtype is torch.bfloat16
    if not is_bf16 or x.numel() // x.shape[-1] < MIN_ROWS:
        return original(method, layer, x, bias)
    wide_bias = None if bias is None else bias.float()
    return linear(x.float(), weight.float(), wide_bias).to(x.dtype)
