"""Linear layers on processors without bf16 instructions: the same numbers, by fp32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches.cpu import linear  # noqa: E402

LAYER = SimpleNamespace(
    weight=torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
)
BIAS = torch.linspace(-1, 1, 24).to(torch.bfloat16)


def stock(method, layer, x, bias=None):
    return torch.nn.functional.linear(x, layer.weight, bias)


def never(*args):
    raise AssertionError("expected the replacement, got the stock method")


def rows(num_rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, 64, generator=generator).to(dtype)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_the_product_is_rounded_once(bias):
    x = rows(40)
    exact = torch.nn.functional.linear(
        x.double(), LAYER.weight.double(), None if bias is None else bias.double()
    )
    got = linear.apply(never, None, LAYER, x, bias)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5)
    stepwise = torch.zeros(40, 24, dtype=torch.bfloat16)  # control: rounded at every step
    for i in range(64):
        stepwise += x[:, i : i + 1] * LAYER.weight[:, i]
    assert (stepwise.double() - exact).abs().max() > 4 * (got.double() - exact).abs().max()


def test_it_is_the_stock_product_but_for_the_order_of_the_sum():
    x = rows(7).view(1, 7, 64)
    got, expected = linear.apply(never, None, LAYER, x), stock(None, LAYER, x)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("x", [rows(3), rows(1)[0], rows(40, torch.float32)])
def test_few_rows_and_other_types_go_the_stock_way(x):
    layer = LAYER if x.dtype is torch.bfloat16 else SimpleNamespace(weight=LAYER.weight.float())
    asked = []

    def note(method, layer, x, bias=None):
        asked.append(len(x))
        return stock(method, layer, x, bias)

    linear.apply(note, None, layer, x)
    assert asked
