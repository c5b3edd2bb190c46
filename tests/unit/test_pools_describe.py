"""The host's real pool classes, built on CPU, become groups that move the right bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from kvedit_kernels import RelocationPlan, delta_rows, relocate
from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.layers.rotary_embedding import get_rope  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402

from sglang_patches.pools import LostWindowSlots, describe_pool, translate  # noqa: E402

NUM_SLOTS, NUM_HEADS, HEAD_DIM, NUM_LAYERS = 128, 2, 64, 4
SHIFT = 900


class Attention(torch.nn.Module):
    def __init__(self, layer_id: int, rotary: torch.nn.Module | None) -> None:
        super().__init__()
        self.rotary_emb = rotary
        self.attn = RadixAttention(4, HEAD_DIM, 1.0, NUM_HEADS, layer_id=layer_id)


class Model(torch.nn.Module):
    def __init__(self, rotaries: list[torch.nn.Module | None], start_layer: int = 0) -> None:
        super().__init__()
        layers = [Attention(start_layer + i, rotary) for i, rotary in enumerate(rotaries)]
        self.layers = torch.nn.ModuleList(layers)


def rope(base: float = 1e4, width: int = HEAD_DIM, is_neox: bool = True) -> torch.nn.Module:
    return get_rope(HEAD_DIM, width, 2048, base, is_neox, dtype=torch.float32)


def host_config(config: hf.PretrainedConfig, context_len: int = 2048) -> Any:
    return SimpleNamespace(
        hf_text_config=config,
        num_hidden_layers=config.num_hidden_layers,
        context_len=context_len,
    )


def llama_config(**changes: Any) -> hf.PretrainedConfig:
    facts = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": NUM_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return hf.LlamaConfig(**{**facts, **changes})


LLAMA = host_config(llama_config())


def mha_pool(dtype: torch.dtype = torch.float32, page_size: int = 1, **changes: Any) -> Any:
    return MHATokenToKVPool(
        NUM_SLOTS,
        page_size,
        dtype,
        NUM_HEADS,
        HEAD_DIM,
        changes.pop("layer_num", NUM_LAYERS),
        "cpu",
        False,
        **changes,
    )


def fill(*tensors: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        values = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(values if tensor.is_floating_point() else values.mul(16).abs())


def move(described: Any, src: torch.Tensor, dst: torch.Tensor) -> None:
    plan = RelocationPlan(
        src=src,
        dst=dst,
        row=torch.zeros(len(src), dtype=torch.int32),
        cos_sin=delta_rows([SHIFT], described.inv_freq),
    )
    relocate(group=described.group, plan=plan)


def rotated_by_the_server(module: Any, keys: torch.Tensor, position: int) -> torch.Tensor:
    """keys fp32 [tokens, heads, head_dim], all at one position."""
    positions = torch.full((len(keys),), position)
    return module.forward_native(positions, keys.clone(), keys.clone())[1]


def test_one_group_covers_a_plain_pool_through_the_hosts_own_pointers() -> None:
    pool = mha_pool(torch.bfloat16)
    (described,) = describe_pool(pool, Model([rope()] * NUM_LAYERS), LLAMA)
    assert described.layer_ids == (0, 1, 2, 3)
    assert described.pool_kind == "full"
    assert described.group.k_ptrs.tolist() == pool.k_data_ptrs.tolist()
    assert described.group.v_ptrs.tolist() == pool.v_data_ptrs.tolist()
    assert described.inv_freq.dtype == torch.float64
    assert described.group.rotate and described.group.page_size == 0


def test_a_moved_key_in_a_real_pool_is_the_key_at_the_new_position() -> None:
    pool, rotary = mha_pool(), rope()
    raw = torch.randn(5, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    src, dst = torch.arange(10, 15), torch.arange(60, 65)
    for layer in range(NUM_LAYERS):
        pool.k_buffer[layer][src] = rotated_by_the_server(rotary, raw, 70)
        pool.v_buffer[layer][src] = raw
    (described,) = describe_pool(pool, Model([rotary] * NUM_LAYERS), LLAMA)
    move(described, src, dst)
    for layer in range(NUM_LAYERS):
        want = rotated_by_the_server(rotary, raw, 70 + SHIFT)
        torch.testing.assert_close(pool.k_buffer[layer][dst], want, rtol=0, atol=2e-4)
        assert torch.equal(pool.v_buffer[layer][dst], raw)
        # Control: the keys did have to change.
        assert (pool.k_buffer[layer][src] - want).abs().max() > 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pools_are_bytes_with_an_arithmetic_dtype(dtype: torch.dtype) -> None:
    pool = mha_pool(dtype)
    assert pool.k_buffer[0].dtype == torch.uint8
    (described,) = describe_pool(pool, Model([rope()] * NUM_LAYERS), LLAMA)
    assert described.group.dtype == dtype
    one = torch.tensor(1.0).to(dtype).view(torch.uint8)
    pool.k_buffer[0][3] = one
    move(described, torch.tensor([3]), torch.tensor([9]))
    moved = pool.k_buffer[0][9].view(dtype).float()
    angles = SHIFT * described.inv_freq
    want = torch.cat([angles.cos() - angles.sin(), angles.cos() + angles.sin()]).float()
    step = 0.0625 if dtype == torch.float8_e4m3fn else 0.125
    torch.testing.assert_close(moved, want.expand(NUM_HEADS, -1), rtol=step, atol=2**-9)


@pytest.mark.parametrize("page_size", [16, 64])
def test_hnd_pages_are_addressed_by_page_and_offset(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    pool = mha_pool(page_size=page_size)
    assert pool.kv_cache_layout == "hnd"
    (described,) = describe_pool(pool, Model([rope()] * NUM_LAYERS), LLAMA)
    assert described.group.page_size == page_size
    fill(pool.v_buffer[2])
    src, dst = page_size + 3, page_size * 2 - 1
    want = pool.v_buffer[2][1, :, 3].clone()
    move(described, torch.tensor([src]), torch.tensor([dst]))
    assert torch.equal(pool.v_buffer[2][1, :, page_size - 1], want)


def test_values_may_be_narrower_than_keys() -> None:
    pool = mha_pool(v_head_dim=32)
    (described,) = describe_pool(pool, Model([rope()] * NUM_LAYERS), LLAMA)
    assert described.group.v_row == NUM_HEADS * 32


def test_a_pipeline_stage_describes_its_own_layers() -> None:
    pool = mha_pool(layer_num=2, start_layer=2, end_layer=4)
    (described,) = describe_pool(pool, Model([rope()] * 2, start_layer=2), LLAMA)
    assert described.layer_ids == (2, 3)


def test_partial_rope_rotates_only_its_dims() -> None:
    params = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = host_config(llama_config(rope_parameters=params))
    pool = mha_pool()
    (described,) = describe_pool(pool, Model([rope(width=32)] * NUM_LAYERS), config)
    fill(*pool.k_buffer)
    before = pool.k_buffer[1][4].clone()
    move(described, torch.tensor([4]), torch.tensor([8]))
    assert torch.equal(pool.k_buffer[1][8, :, 32:], before[:, 32:])
    assert not torch.equal(pool.k_buffer[1][8, :, :32], before[:, :32])


@pytest.mark.parametrize("model_type", ["smollm3", "cohere2"])
def test_layers_without_rope_are_a_group_that_copies(model_type: str) -> None:
    rotary = rope(is_neox=model_type == "smollm3")
    if model_type == "smollm3":
        config = hf.SmolLM3Config(**sizes(), no_rope_layers=[1, 1, 1, 0], pad_token_id=0)
        rotaries = [rotary, rotary, rotary, None]
    else:  # the host keeps an idle rotary module in the last layer
        config = hf.Cohere2Config(**sizes(), head_dim=HEAD_DIM, layer_types=types(3))
        rotaries = [rotary] * NUM_LAYERS
    pool = mha_pool()
    moving, still = describe_pool(pool, Model(rotaries), host_config(config))
    assert (moving.layer_ids, still.layer_ids) == ((0, 1, 2), (3,))
    assert (still.group.rotate, still.signature) == (False, None)
    fill(*pool.k_buffer)
    move(still, torch.tensor([4]), torch.tensor([8]))
    move(moving, torch.tensor([4]), torch.tensor([8]))
    assert torch.equal(pool.k_buffer[3][8], pool.k_buffer[3][4])
    assert not torch.equal(pool.k_buffer[0][8], pool.k_buffer[0][4])


def test_mla_rotates_only_the_rope_part_of_the_latent_row() -> None:
    rank, rope_dim = 128, 64
    pool = MLATokenToKVPool(NUM_SLOTS, 1, torch.float32, rank, rope_dim, 2, "cpu", False)
    config = hf.DeepseekV2Config(
        **sizes(num_hidden_layers=2), kv_lora_rank=rank, qk_rope_head_dim=rope_dim
    )
    rotary = rope(is_neox=False)
    (described,) = describe_pool(pool, Model([rotary] * 2), host_config(config))
    assert described.group.v_ptrs is None
    raw = torch.randn(1, 1, rope_dim, generator=torch.Generator().manual_seed(2))
    fill(*pool.kv_buffer)
    pool.kv_buffer[1][5, :, rank:] = rotated_by_the_server(rotary, raw, 30)[0]
    latent = pool.kv_buffer[1][5, :, :rank].clone()
    move(described, torch.tensor([5]), torch.tensor([9]))
    assert torch.equal(pool.kv_buffer[1][9, :, :rank], latent)
    want = rotated_by_the_server(rotary, raw, 30 + SHIFT)[0]
    torch.testing.assert_close(pool.kv_buffer[1][9, :, rank:], want, rtol=0, atol=2e-4)


def sizes(**changes: Any) -> dict[str, Any]:
    facts = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": NUM_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return {**facts, **changes}


def types(num_sliding: int) -> list[str]:
    return ["sliding_attention"] * num_sliding + ["full_attention"] * (NUM_LAYERS - num_sliding)


def window_pool() -> tuple[SWAKVPool, SWATokenToKVPoolAllocator]:
    pool = SWAKVPool(
        size=NUM_SLOTS,
        size_swa=32,
        page_size=1,
        dtype=torch.float32,
        head_num=NUM_HEADS,
        head_dim=HEAD_DIM,
        swa_attention_layer_ids=[0, 1, 2],
        full_attention_layer_ids=[3],
        device="cpu",
    )
    allocator = SWATokenToKVPoolAllocator(
        NUM_SLOTS, 32, 1, torch.float32, "cpu", pool, need_sort=False
    )
    return pool, allocator


def gemma() -> tuple[Model, Any]:
    params = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = hf.Gemma3TextConfig(
        **sizes(rope_parameters=params), head_dim=HEAD_DIM, layer_types=types(3)
    )
    return Model([rope(1e4), rope(1e4), rope(1e4), rope(1e6)]), host_config(config)


def test_a_window_pool_is_two_groups_with_their_own_ropes() -> None:
    pool, _ = window_pool()
    full, window = describe_pool(pool, *gemma())
    assert (full.pool_kind, full.layer_ids) == ("full", (3,))
    assert (window.pool_kind, window.layer_ids) == ("swa", (0, 1, 2))
    assert full.inv_freq[1] == pytest.approx(1e6 ** (-2 / HEAD_DIM))
    assert window.inv_freq[1] == pytest.approx(1e4 ** (-2 / HEAD_DIM))
    assert (full.group.num_slots, window.group.num_slots) == (NUM_SLOTS + 1, 33)


def test_window_slots_are_translated_by_the_hosts_mapping() -> None:
    pool, allocator = window_pool()
    allocator.alloc(7)  # so that the two numberings differ
    allocator.free(allocator.alloc(5))
    slots = allocator.alloc(6)
    assert translate(pool, "full", slots) is slots
    window = translate(pool, "swa", slots)
    assert torch.equal(window, pool.translate_loc_from_full_to_swa(slots))
    assert window.dtype == torch.int64 and (window > 0).all()


def test_slots_that_left_the_window_are_refused_with_their_number() -> None:
    pool, allocator = window_pool()
    slots = allocator.alloc(10)
    allocator.free_swa(slots[:4])
    with pytest.raises(LostWindowSlots, match="expected 10 live, got 6"):
        translate(pool, "swa", slots)
    assert len(translate(pool, "swa", slots[4:])) == 6


def test_only_a_window_pool_has_window_slots() -> None:
    with pytest.raises(Exception, match="expected SWAKVPool"):
        translate(mha_pool(), "swa", torch.tensor([1]))
