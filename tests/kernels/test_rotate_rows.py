"""rotate_rows: dense rows turned; the same arithmetic as relocate, usable for queries."""

from __future__ import annotations

import pytest
import torch

from kvedit_kernels import KernelArgumentError, delta_rows, rotate_rows
from kvedit_kernels.testing import Case, expect_rotated


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_turn_within_the_bound(dtype: torch.dtype, is_neox: bool) -> None:
    case = Case(dtype=dtype, rot_dim=32, is_neox=is_neox, deltas=(5, -9000))
    x = torch.randn(20, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    row = (torch.arange(20) % 2).int()
    given = x.clone()
    table = delta_rows(case.deltas, case.inv_freq)
    got = rotate_rows(x, row, table, rot_offset=8, is_neox=is_neox)
    span = slice(8, 40)
    expect_rotated("x", case, x[..., span].double(), got[..., span].double(), row.long())
    outside = torch.ones(64, dtype=torch.bool)
    outside[span] = False
    assert torch.equal(got[..., outside], x[..., outside])
    assert torch.equal(x, given), "the input is left as it was"


def test_turning_queries_back_equals_turning_keys_forth() -> None:
    """What reading a segment where it is stored relies on: (R(-d) q) . k == q . (R(d) k)."""
    case = Case(dtype=torch.float32, deltas=(300, -300))
    query, key = torch.randn(2, 40, 2, 64, generator=torch.Generator().manual_seed(1)).unbind()
    table = delta_rows(case.deltas, case.inv_freq)
    forth, back = torch.zeros(40, dtype=torch.int32), torch.ones(40, dtype=torch.int32)
    moved = (query * rotate_rows(key, forth, table)).sum(-1)
    stayed = (rotate_rows(query, back, table) * key).sum(-1)
    torch.testing.assert_close(moved, stayed, rtol=1e-4, atol=1e-4)


def test_wrong_shapes_are_named() -> None:
    table = delta_rows([1], Case().inv_freq)
    with pytest.raises(KernelArgumentError, match="rotate_rows: row: expected"):
        rotate_rows(torch.zeros(3, 1, 64), torch.zeros(2, dtype=torch.int32), table)
    with pytest.raises(KernelArgumentError, match="rotate_rows: cos_sin: expected at most 32"):
        rotate_rows(torch.zeros(2, 1, 32), torch.zeros(2, dtype=torch.int32), table)
