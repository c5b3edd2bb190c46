"""merge_states_ref: attention over disjoint key groups, merged by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from kvedit_kernels.errors import require


def merge_states_ref(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """([T, H, D] in v's dtype, [T, H] fp32): the attention over the union of G key groups.

    v: [T, G, H, D] each group's own output; s: [T, G, H] fp32 its log2-sum-exp2 of the scores.
    An empty group has s = -inf and weighs nothing whatever its v holds; all empty gives 0, -inf.
    """
    op = "merge_states"
    require(v.dim() == 4, op, "v", "[T, G, H, D]", tuple(v.shape))
    require(s.shape == v.shape[:3], op, "s", tuple(v.shape[:3]), tuple(s.shape))
    require(s.dtype == torch.float32, op, "s", "float32", s.dtype)
    top = s.amax(dim=1)
    # A group set without any key has no maximum to subtract: -inf - -inf would be nan.
    pivot = torch.where(top.isinf(), torch.zeros_like(top), top)
    weight = torch.exp2(s - pivot[:, None])
    total = weight.sum(dim=1)
    share = weight / total.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    value = torch.where(share[..., None] > 0, v.float(), torch.zeros((), device=v.device))
    merged = (value * share[..., None]).sum(dim=1)
    return merged.to(v.dtype), torch.log2(total) + pivot
