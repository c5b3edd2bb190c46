"""The CPU attention computes what SGLang's own method computes, for every shape it serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_patches.cpu import attention, prepare

pytestmark = pytest.mark.own_process
prepare()

from sglang.srt.layers.attention.torch_native_backend import (  # noqa: E402
    TorchNativeAttnBackend,
)

HEAD_DIM = 16
BACKEND = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
BACKEND.use_sliding_window_kv_pool = False
EXTEND = TorchNativeAttnBackend._run_sdpa_forward_extend
DECODE = TorchNativeAttnBackend._run_sdpa_forward_decode
ATOL = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

# (prefix_len, num_new) of each request of a batch
BATCHES = {
    "no prefix": [(0, 17)],
    "prefix": [(40, 23)],
    "one new token": [(63, 1)],
    "first token": [(0, 1)],
    "mixed batch": [(0, 5), (31, 1), (7, 40), (0, 1), (64, 3)],
}


def batch_of(
    lens: list[tuple[int, int]], num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Arguments of the method, with the requests' slots scattered over the pool."""
    generator = torch.Generator().manual_seed(sum(prefix + 3 * new for prefix, new in lens))
    num_slots = sum(prefix + new for prefix, new in lens) + 9
    rows = torch.zeros(len(lens) + 2, 256, dtype=torch.int32)
    slots = torch.randperm(num_slots, generator=generator).int()
    start = 0
    for index, (prefix, new) in enumerate(lens):
        rows[index + 2, : prefix + new] = slots[start : start + prefix + new]
        start += prefix + new

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = normal(sum(new for _, new in lens), num_heads, HEAD_DIM)
    return [
        query,
        torch.full_like(query, float("nan")),
        normal(num_slots, num_kv_heads, HEAD_DIM),
        normal(num_slots, num_kv_heads, HEAD_DIM),
        rows,
        torch.arange(len(lens)) + 2,
        torch.tensor([prefix + new for prefix, new in lens]),
        torch.tensor([prefix for prefix, _ in lens]),
        torch.tensor([new for _, new in lens]),
    ]


def both(args: list[torch.Tensor], original: Any, ours: Any, **kwargs: Any) -> list[torch.Tensor]:
    theirs, replaced = list(args), list(args)
    theirs[1], replaced[1] = args[1].clone(), args[1].clone()
    original(BACKEND, *theirs, **kwargs)
    ours(refuse_fallback, BACKEND, *replaced, **kwargs)
    return [theirs[1], replaced[1]]


def refuse_fallback(*args: object, **kwargs: object) -> torch.Tensor:
    raise AssertionError("the stock method was called for a case of ours")


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)], ids=["gqa", "mha", "mqa"])
@pytest.mark.parametrize("window", [None, 0, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_extend_equals_the_stock_method(
    lens: list[tuple[int, int]], heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    args = batch_of(lens, *heads, dtype)
    theirs, ours = both(
        args,
        EXTEND,
        attention.extend,
        scaling=0.3,
        enable_gqa=heads[0] != heads[1],
        causal=True,
        sliding_window_size=window,
    )
    torch.testing.assert_close(ours, theirs, atol=ATOL[dtype], rtol=0)


def test_extend_without_causal_mask() -> None:
    args = batch_of(BATCHES["mixed batch"], 6, 2, torch.float32)
    theirs, ours = both(args, EXTEND, attention.extend, scaling=0.3, enable_gqa=True, causal=False)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 12])
def test_blocks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(attention, "MAX_BLOCK_QUERIES", 7)
    args = batch_of([(40, 23), (3, 14)], 6, 2, torch.float32)
    theirs, ours = both(
        args, EXTEND, attention.extend, scaling=0.3, enable_gqa=True, causal=True,
        sliding_window_size=window,
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def test_a_mask_one_position_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the comparison above must notice a shifted causal mask."""
    right = attention.band_mask.__wrapped__

    def shifted(num_queries: int, num_keys: int, query_offset: int, *rest: Any) -> torch.Tensor:
        return right(num_queries, num_keys, query_offset - 1, *rest)

    monkeypatch.setattr(attention, "band_mask", shifted)
    args = batch_of(BATCHES["prefix"], 6, 2, torch.float32)
    theirs, ours = both(args, EXTEND, attention.extend, scaling=0.3, enable_gqa=True, causal=True)
    assert (ours - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)], ids=["gqa", "mha", "mqa"])
@pytest.mark.parametrize("window", [None, 0, 12])
def test_decode_equals_the_stock_method(heads: tuple[int, int], window: int | None) -> None:
    args = batch_of([(16, 1), (0, 1), (90, 1)], *heads, torch.float32)[:7]
    theirs, ours = both(
        args, DECODE, attention.decode, scaling=0.3, enable_gqa=heads[0] != heads[1],
        sliding_window_size=window,
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def test_a_small_kv_dtype_is_read_as_the_query_dtype() -> None:
    args = batch_of(BATCHES["mixed batch"], 6, 2, torch.float32)
    args[2], args[3] = args[2].bfloat16(), args[3].bfloat16()
    theirs, ours = both(args, EXTEND, attention.extend, scaling=0.3, enable_gqa=True, causal=True)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("case", [{"encoder_lens": torch.tensor([3])}, {"is_cross_attn": True}])
def test_encoder_decoder_models_keep_the_stock_method(case: dict[str, Any]) -> None:
    seen: list[dict[str, Any]] = []

    def original(*args: object, **kwargs: Any) -> str:
        seen.append(kwargs)
        return "stock"

    args = batch_of([(4, 3)], 4, 4, torch.float32)
    assert attention.extend(original, BACKEND, *args, **case) == "stock"
    assert attention.decode(original, BACKEND, *args[:7], **case) == "stock"
    assert all(kwargs[name] is value for kwargs in seen for name, value in case.items())


def test_long_prompts_never_need_a_large_mask() -> None:
    for prefix_len, num_new in ((0, 3), (8, 4096), (131_072, 8192)):
        blocks = list(attention.query_blocks(num_new, prefix_len, True, -1))
        assert [b.start for b in blocks][1:] == [b.stop for b in blocks][:-1]
        assert (blocks[0].start, blocks[-1].stop) == (0, num_new)
        if prefix_len:
            rows = max(b.stop - b.start for b in blocks)
            assert rows * (prefix_len + num_new) <= attention.MAX_MASK_ELEMENTS


class Layer:
    """The facts of an MLA layer that expands its latents for a first prompt."""

    tp_q_head_num = tp_k_head_num = 4
    qk_head_dim = 24
    v_head_dim = 16
    scaling = 0.2


class Batch:
    def __init__(self, lens: list[tuple[int, int]]) -> None:
        self.extend_prefix_lens_cpu = [prefix for prefix, _ in lens]
        self.extend_seq_lens_cpu = [new for _, new in lens]


def qkv_of(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    widths = (Layer.qk_head_dim, Layer.qk_head_dim, Layer.v_head_dim)
    return [torch.randn(num_tokens, 4 * width, generator=generator) for width in widths]


def test_keys_and_values_that_are_given_but_not_stored() -> None:
    """Request by request, causal, and never the pool."""
    q, k, v = qkv_of(12)
    got = attention.forward_extend(
        never, BACKEND, q, k, v, Layer, Batch([(0, 7), (0, 1), (0, 4)]), False
    )
    for rows in (slice(0, 7), slice(7, 8), slice(8, 12)):
        heads = [x[rows].view(-1, 4, x.shape[1] // 4).transpose(0, 1) for x in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(1, 2) * Layer.scaling
        ahead = torch.ones_like(scores[0]).triu(1).bool()
        want = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ heads[2]
        torch.testing.assert_close(got[rows], want.transpose(0, 1).flatten(1))


@pytest.mark.parametrize(
    ("lens", "save_kv_cache"), [([(0, 5)], True), ([(8, 5)], False), ([(0, 2), (8, 3)], False)]
)
def test_what_stands_in_the_pool_is_read_there(
    lens: list[tuple[int, int]], save_kv_cache: bool
) -> None:
    q, k, v = qkv_of(5)
    want = object()
    got = attention.forward_extend(
        lambda *args: want, BACKEND, q, k, v, Layer, Batch(lens), save_kv_cache
    )
    assert got is want


class WindowPool:
    """Rows of windowed layers stand in slots of their own."""

    def __init__(self, num_slots: int) -> None:
        self.own = torch.randperm(num_slots, generator=torch.Generator().manual_seed(5))

    def translate_loc_from_full_to_swa(self, slot_ids: torch.Tensor) -> torch.Tensor:
        return self.own[slot_ids.long()]


@pytest.mark.parametrize("method", ["extend", "decode"])
def test_windowed_layers_of_a_hybrid_pool_are_read_at_their_own_slots(method: str) -> None:
    lens = [(40, 1), (7, 1)]
    args = batch_of(lens, 4, 2, torch.float32)
    num_slots = args[2].shape[0]
    backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    backend.use_sliding_window_kv_pool = True
    backend.token_to_kv_pool = pool = WindowPool(num_slots)
    moved = list(args)
    for at in (2, 3):  # the same rows, stored where the window pool holds them
        moved[at] = torch.empty_like(args[at])
        moved[at][pool.own] = args[at]
    call = getattr(attention, method)
    rest = slice(None) if method == "extend" else slice(0, 7)
    options = {"enable_gqa": True, "causal": method == "extend", "sliding_window_size": 11}

    def run(backend: Any, given: list[torch.Tensor]) -> torch.Tensor:
        given = [*given]
        given[1] = torch.full_like(given[1], float("nan"))
        return call(never, backend, *given[rest], **options)

    want = run(BACKEND, args)
    assert torch.equal(run(backend, moved), want)
    assert not torch.equal(run(BACKEND, moved), want)  # control: untranslated slots are seen
    full = {**options, "sliding_window_size": None}
    assert torch.equal(
        call(never, backend, *args[rest], **full), call(never, BACKEND, *args[rest], **full)
    )


def never(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("the stock method was called")
