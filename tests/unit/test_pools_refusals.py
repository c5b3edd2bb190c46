"""Whatever the groups cannot serve is refused at start, by name and with every reason."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from kvedit.errors import UnsupportedPool, UnsupportedRope
from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.layers.rotary_embedding import get_rope  # noqa: E402
from sglang.srt.mem_cache import (  # noqa: E402, F401  (imported for their pool classes)
    deepseek_v4_memory_pool,
    dsa_cache_layer_split,
    hisparse_memory_pool,
    minimax_m3_nvfp4_pool,
    page_interleave_pool,
    qsa_kv_pool,
    unified_draft_pool,
    unified_memory_pool,
)
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool  # noqa: E402
from sglang.srt.mem_cache.memory_pool import (  # noqa: E402
    KVCache,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402

from sglang_patches.pools import describe_pool  # noqa: E402
from sglang_patches.pools.layout import REFUSED_POOLS, SERVED_POOLS  # noqa: E402

HEAD_DIM, NUM_LAYERS = 64, 2
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


class Attention(torch.nn.Module):
    def __init__(self, layer_id: int, rotary: torch.nn.Module | None) -> None:
        super().__init__()
        self.rotary_emb = rotary
        self.attn = RadixAttention(4, HEAD_DIM, 1.0, 2, layer_id=layer_id)


def model(*rotaries: torch.nn.Module | None) -> torch.nn.Module:
    return torch.nn.ModuleList(Attention(i, rotary) for i, rotary in enumerate(rotaries))


def rope(**changes: Any) -> torch.nn.Module:
    facts = {
        "head_size": HEAD_DIM,
        "rotary_dim": HEAD_DIM,
        "max_position": 2048,
        "base": 10000.0,
        "is_neox_style": True,
        "dtype": torch.float32,
    }
    return get_rope(**{**facts, **changes})


def config(**changes: Any) -> Any:
    facts = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": NUM_LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    text = hf.LlamaConfig(**{**facts, **changes})
    return SimpleNamespace(hf_text_config=text, num_hidden_layers=NUM_LAYERS, context_len=2048)


def pool(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    facts = {"head_num": 2, "head_dim": HEAD_DIM, "layer_num": NUM_LAYERS, **changes}
    return MHATokenToKVPool(32, 1, dtype, device="cpu", enable_memory_saver=False, **facts)


def pool_reasons(refused: Any) -> tuple[str, ...]:
    with pytest.raises(UnsupportedPool) as refusal:
        describe_pool(refused, model(rope(), rope()), config())
    return refusal.value.reasons


def rope_reasons(*rotaries: torch.nn.Module | None, **changes: Any) -> tuple[str, ...]:
    with pytest.raises(UnsupportedRope) as refusal:
        describe_pool(pool(), model(*rotaries), config(**changes))
    return refusal.value.reasons


def subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


HOST_POOLS = {cls.__name__: cls for cls in subclasses(KVCache)}


def test_every_pool_class_of_the_host_has_an_answer() -> None:
    """A new pool class in the host must be looked at before it is served or refused by name."""
    served = {cls.__name__ for cls in (*SERVED_POOLS, SWAKVPool)}
    abstract = {BaseSWAKVPool.__name__}
    assert set(HOST_POOLS) == served | set(REFUSED_POOLS) | abstract


@pytest.mark.parametrize("name", sorted(REFUSED_POOLS))
def test_a_refused_class_is_named_with_its_reason(name: str) -> None:
    unbuilt = object.__new__(HOST_POOLS[name])  # refused by class alone, before any attribute
    (reason,) = pool_reasons(unbuilt)
    assert f"got {name} ({REFUSED_POOLS[name]})" in reason


def test_a_real_fp4_pool_is_refused() -> None:
    fp4 = MHATokenToKVPoolFP4(32, 1, torch.float4_e2m1fn_x2, 2, HEAD_DIM, 2, "cpu", False)
    (reason,) = pool_reasons(fp4)
    assert "FP4" in reason


def test_a_subclass_of_a_served_pool_is_not_served() -> None:
    class PatchedPool(MHATokenToKVPool):
        pass

    try:
        (reason,) = pool_reasons(object.__new__(PatchedPool))
    finally:
        del PatchedPool
    assert "got PatchedPool (unknown to kvedit)" in reason


def test_all_pool_reasons_come_at_once() -> None:
    odd = pool(torch.float8_e4m3fnuz)
    odd.kv_cache_layout = "vectorized_5d"
    odd.quant_method = SimpleNamespace(name="block32")
    dtype, layout, quantised = pool_reasons(odd)
    assert "float8_e4m3fnuz" in dtype
    assert "vectorized_5d" in layout
    assert "block32" in quantised


def test_pool_and_rope_reasons_come_together() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedPool) as refusal:
        describe_pool(
            pool(torch.float8_e4m3fnuz), model(rope(), rope()), config(rope_parameters=dynamic)
        )
    assert len(refusal.value.reasons) == 2


def test_a_sparse_index_inside_an_mla_pool_is_refused() -> None:
    sparse = MLATokenToKVPool(32, 1, torch.float32, 128, 64, 2, "cpu", False, use_dsa=True)
    assert "index keys carry rope" in pool_reasons(sparse)[0]


def window_pool(page_size: int) -> SWAKVPool:
    return SWAKVPool(
        size=32,
        size_swa=16,
        page_size=page_size,
        dtype=torch.float32,
        head_num=2,
        head_dim=HEAD_DIM,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
    )


def test_a_window_ring_is_refused() -> None:
    ring = window_pool(page_size=1)
    ring.swa_req_ring_size = 8
    assert "ring per request" in pool_reasons(ring)[0]


def test_a_window_pool_with_pages_is_refused() -> None:
    [reason] = pool_reasons(window_pool(page_size=16))
    assert reason.startswith("kvedit: window pool page size: expected 1, got 16 ")


def test_a_pool_of_another_model_is_refused() -> None:
    assert "layer 0 head_dim: expected 64" in pool_reasons(pool(head_dim=128))[0]
    assert "KV pool layer: expected below 2, got 2" in pool_reasons(pool(layer_num=3))[0]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (lambda: rope(base=10001.0), "angles at position"),
        (lambda: rope(is_neox_style=False), "is_neox_style: expected True, got False"),
        (lambda: rope(rotary_dim=32), "rotary_dim: expected 64, got 32"),
        (lambda: rope(rope_scaling=dict(LINEAR)), "angles at position 1"),
        (lambda: rope(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "DynamicNTKScaling"),
        (lambda: torch.nn.Identity(), "got Identity"),
        (lambda: None, "expected a rotary module, got none"),
    ],
    ids=["base", "pairing", "partial", "scaling", "dynamic", "unknown", "none"],
)
def test_a_loaded_model_that_rotates_differently_is_refused(module: Any, names: str) -> None:
    (reason,) = rope_reasons(rope(), module())
    assert names in reason and "layer 1" in reason
    describe_pool(pool(), model(rope(), rope()), config())  # control: equal modules pass


def test_a_scaling_that_the_model_ignores_is_refused() -> None:
    (reason, _) = rope_reasons(rope(), rope(base=10000.5), rope_parameters=LINEAR)
    assert "angles at position 1" in reason


def test_a_table_that_bends_after_the_first_position_is_refused() -> None:
    bent = rope(max_position=2047)  # a module of its own: the host shares equal ones
    straight = bent._compute_cos_sin_cache()
    bent._compute_cos_sin_cache = lambda: torch.cat([straight[:2], straight[3:]])
    (reason,) = rope_reasons(rope(), bent)
    assert "angles at position 64" in reason


def test_a_layer_that_should_not_rotate_but_does_is_refused() -> None:
    (reason,) = rope_reasons(rope(), rope(), no_rope_layers=[1, 0])
    assert "layer 1: expected no rotary module, got RotaryEmbedding" in reason


def test_a_layer_without_attention_is_refused() -> None:
    (reason,) = rope_reasons(rope())
    assert "layer 1: expected an attention module, got none" in reason
