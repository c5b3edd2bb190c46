"""merge_states: the merge over key groups equals attention over all keys."""

from __future__ import annotations

import pytest
import torch

from kvedit_kernels import KernelArgumentError, merge_states_ref

LOG2_E = 1.4426950408889634


def test_merging_groups_equals_attention_over_all_keys() -> None:
    """Groups of keys, one of them empty with garbage in it."""
    torch.manual_seed(0)
    query, keys = torch.randn(5, 2, 16), torch.randn(24, 2, 16)
    values = torch.randn(24, 2, 16)
    parts = [slice(0, 7), slice(7, 24)]
    scores = torch.einsum("thd,shd->ths", query, keys) * LOG2_E
    v, s = torch.full((5, 3, 2, 16), float("nan")), torch.full((5, 3, 2), -float("inf"))
    for group, part in enumerate(parts):
        weight = torch.exp2(scores[..., part])
        s[:, group] = weight.sum(-1).log2()
        mean = torch.einsum("ths,shd->thd", weight, values[part])
        v[:, group] = mean / weight.sum(-1, keepdim=True)
    merged, total = merge_states_ref(v, s)
    weight = torch.exp2(scores)
    want = torch.einsum("ths,shd->thd", weight, values) / weight.sum(-1, keepdim=True)
    torch.testing.assert_close(merged, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, weight.sum(-1).log2(), rtol=1e-5, atol=1e-6)
    nothing, empty = merge_states_ref(v[:, 2:], s[:, 2:])
    assert not nothing.any() and bool((empty == -float("inf")).all())


def test_scores_must_be_fp32_and_fit() -> None:
    v = torch.zeros(5, 3, 2, 16)
    with pytest.raises(KernelArgumentError, match="merge_states: s: expected float32"):
        merge_states_ref(v, torch.zeros(5, 3, 2, dtype=torch.float64))
    with pytest.raises(KernelArgumentError, match="merge_states: s: expected"):
        merge_states_ref(v, torch.zeros(5, 2, 2))
