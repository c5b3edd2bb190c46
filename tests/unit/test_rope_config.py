"""From config dicts to specifications: what is read, what is refused, what the identity sees."""

from __future__ import annotations

from typing import Any

import pytest

from kvedit.errors import UnsupportedRope
from kvedit.rope import RopeSpec, rope_specs

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 32,
    "long_factor": [4.0] * 32,
    "original_max_position_embeddings": 4096,
}


def specs_of(num_layers: int = 1, context_len: int | None = None, **config: Any) -> list[Any]:
    return rope_specs({**LLAMA, **config}, num_layers=num_layers, context_len=context_len)


def reasons_of(**config: Any) -> tuple[str, ...]:
    with pytest.raises(UnsupportedRope) as refusal:
        specs_of(**config)
    return refusal.value.reasons


def test_head_dim_comes_from_the_hidden_size_when_the_config_has_none() -> None:
    (spec,) = specs_of()
    assert (spec.head_dim, spec.rotary_dim, spec.is_neox) == (64, 64, True)
    assert spec.inv_freq[0] == 1.0
    assert spec.inv_freq[16] == pytest.approx(1e5**-0.5)


def test_old_and_new_configs_give_the_same_identity() -> None:
    scaling = {"factor": 8.0, "rope_type": "linear"}
    (new,) = specs_of(rope_parameters={**scaling, "rope_theta": 1e4})
    (old,) = specs_of(
        rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 8.0}
    )
    assert new.signature() == old.signature()


def test_a_multimodal_config_is_read_through_its_text_part() -> None:
    nested = {"model_type": "qwen3_vl", "text_config": LLAMA}
    assert rope_specs(nested, num_layers=1) == specs_of()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 1e4}},
        {"rope_is_neox_style": False},
        {"head_dim": 128},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}},
    ],
    ids=["base", "pairing", "head_dim", "partial", "scaling"],
)
def test_whatever_changes_the_rotation_changes_the_identity(change: dict[str, Any]) -> None:
    assert specs_of(**change)[0].signature() != specs_of()[0].signature()


def test_the_identity_is_stable_text() -> None:
    """A skill stored on disk is found again only while this text stays the same."""
    assert specs_of()[0].signature() == "default:neox:64/64:ce5d8127aa2422b7"


def test_the_identity_ignores_the_last_bits() -> None:
    (spec,) = specs_of()
    nudged = RopeSpec(64, 64, True, tuple(f * (1 + 1e-15) for f in spec.inv_freq), spec.kind)
    assert nudged.signature() == spec.signature()


def test_layers_without_rope_are_none() -> None:
    marked = specs_of(num_layers=4, no_rope_layers=[1, 1, 1, 0])
    counted = specs_of(num_layers=4, no_rope_layer_interval=4)
    full = ["sliding_attention"] * 3 + ["full_attention"]
    cohere = specs_of(num_layers=4, model_type="cohere2", sliding_window=4096, layer_types=full)
    for specs in (marked, counted, cohere):
        assert [spec is None for spec in specs] == [False, False, False, True]


def test_local_and_global_bases_of_both_config_generations() -> None:
    types = ["sliding_attention", "full_attention"]
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    new = specs_of(num_layers=2, layer_types=types, rope_parameters=nested)
    old = specs_of(
        num_layers=2,
        sliding_window_pattern=2,
        rope_parameters=None,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert new == old
    assert new[0].inv_freq[1] == pytest.approx(1e4 ** (-2 / 64))
    assert new[1].inv_freq[1] == pytest.approx(1e6 ** (-2 / 64) / 8)


def test_longrope_needs_a_server_that_never_leaves_the_short_factors() -> None:
    old = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": LONGROPE}
    assert specs_of(context_len=4096, **old)[0].kind == "longrope"
    with pytest.raises(UnsupportedRope, match="expected at most 4096.*got 4097"):
        specs_of(context_len=4097, **old)
    with pytest.raises(UnsupportedRope, match="got no limit"):
        specs_of(**old)
    one_set = {**LONGROPE, "long_factor": LONGROPE["short_factor"]}
    assert specs_of(**{**old, "rope_scaling": one_set})[0].kind == "longrope"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "use_fope": True}}, "use_fope"),
        ({"rotary_dim": 33}, "rotary_dim"),
        ({"partial_rotary_factor": 1.5}, "rotary_dim"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual chunk"),
        ({"position_embedding_type": "alibi"}, "ALiBi"),
        ({"model_type": "hunyuan_v1_dense"}, "hunyuan_v1_dense"),
        ({"alibi": True}, "ALiBi"),
    ],
)
def test_what_one_rotation_cannot_move_is_refused_by_name(
    change: dict[str, Any], names: str
) -> None:
    (reason,) = reasons_of(**change)
    assert names in reason
    assert reason.startswith("kvedit: ")
    assert "expected" in reason and "got" in reason


def test_all_reasons_come_at_once_and_each_only_once() -> None:
    linear = {"rope_type": "linear"}
    assert len(reasons_of(num_layers=8, rope_parameters=linear)) == 2  # no factor, no base
    two_kinds = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "spiral", "rope_theta": 1e4},
    }
    types = ["full_attention", "sliding_attention"] * 2
    reasons = reasons_of(num_layers=4, rope_parameters=two_kinds, layer_types=types)
    assert len(reasons) == 2


def test_a_layer_list_that_is_too_short_is_refused() -> None:
    (reason,) = reasons_of(num_layers=3, layer_types=["full_attention"])
    assert "layer_types: expected 3 layers, got 1" in reason
