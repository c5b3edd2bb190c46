"""Relocated keys against the same tokens run alone at the target, layer by layer.

The reference is transformers: the skill prefilled with position ids that start at the target.
RoPE is relative, so only rounding may differ. The bound is the one measured for bf16 with this
model (worst layer's relative error .018 at a shift of 3000); every control fails it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.harness import BASE, PAGED, Server, ServerPool, fresh_name, random_ids

pytestmark = pytest.mark.real_server

K_BOUND = 0.03
NUM_TOKENS = 400
PREFIX = {1: 1, 100: 100, 3000: 3000}


@pytest.fixture(scope="module")
def reference_model(default_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.bfloat16).eval()


def alone_at(model: Any, ids: list[int], position: int) -> tuple[list[Any], list[Any]]:
    """K and V [tokens, heads, dim] per layer of ``ids`` prefilled alone from ``position``."""
    positions = torch.arange(position, position + len(ids))[None]
    with torch.no_grad():
        cache = model(torch.tensor([ids]), position_ids=positions, use_cache=True).past_key_values
    keys = [layer.keys[0].transpose(0, 1) for layer in cache.layers]
    values = [layer.values[0].transpose(0, 1) for layer in cache.layers]
    return keys, values


def worst(got: list[Any], want: list[Any]) -> float:
    """Largest relative error over the layers."""
    return max(
        float((g.float() - w.float()).norm() / w.float().norm())
        for g, w in zip(got, want, strict=True)
    )


def best(got: list[Any], want: list[Any]) -> float:
    return min(
        float((g.float() - w.float()).norm() / w.float().norm())
        for g, w in zip(got, want, strict=True)
    )


def dump(server: Server, ids: list[int], path: Path, seam: int) -> dict[str, Any]:
    server.testing(op="dump", ids=ids, extra_key=None, options={"seam": seam}, path=str(path))
    loaded: dict[str, Any] = torch.load(path)
    return loaded


@pytest.mark.parametrize("shift", [1, 100, 3000])
@pytest.mark.parametrize("config", [BASE, PAGED], ids=["p1", "p16"])
def test_keys_equal_keys_computed_at_the_target(
    servers: ServerPool, config: Any, shift: int, reference_model: Any, tmp_path: Path
) -> None:
    server = servers.get(config)
    skill = random_ids(("k", shift, config.page_size), NUM_TOKENS)
    server.add_skill(fresh_name(), skill)
    prompt = random_ids(("k-head", shift, config.page_size), shift) + skill + [5, 6]
    answer = server.generate(prompt, kvedit={"seam": 0})
    [span] = answer.report["spans"]
    start, stop = span["start"], span["stop"]
    assert span["delta"] == shift and stop - start > NUM_TOKENS - 32
    cached = dump(server, prompt, tmp_path / "kv.pt", seam=0)
    assert cached["pieces"] == [(start, stop, shift)]
    keys = [k[start:stop] for k in cached["k"]]
    values = [v[start:stop] for v in cached["v"]]
    want_keys, want_values = alone_at(reference_model, skill, shift)
    window = slice(start - shift, stop - shift)
    want_keys = [k[window] for k in want_keys]
    assert worst(keys, want_keys) < K_BOUND
    # The controls: every layer of an unrotated copy, and of a shift off by one, is outside.
    unrotated, values_at_0 = alone_at(reference_model, skill, 0)
    assert best([k[window] for k in unrotated], want_keys) > K_BOUND
    off_by_one, _ = alone_at(reference_model, skill, shift + 1)
    assert best([k[window] for k in off_by_one], want_keys) > K_BOUND
    assert worst(values, [v[window] for v in want_values]) < 0.05


def test_values_are_copied_byte_for_byte(base: Server, tmp_path: Path) -> None:
    """V of a spliced token is V of the donor; K too where nothing turns (shift 0)."""
    skill = random_ids("v-copy", NUM_TOKENS)
    base.add_skill(fresh_name(), skill)
    base.generate(skill + [9], kvedit={"seam": 0})
    base.generate([8] * 50 + skill + [9], kvedit={"seam": 0})
    still = dump(base, skill + [9], tmp_path / "a.pt", seam=0)
    moved = dump(base, [8] * 50 + skill + [9], tmp_path / "b.pt", seam=0)
    for at_0, at_50 in zip(still["v"], moved["v"], strict=True):
        assert torch.equal(at_0[:NUM_TOKENS], at_50[50 : 50 + NUM_TOKENS])
    turned = [
        torch.equal(a[:NUM_TOKENS], b[50 : 50 + NUM_TOKENS])
        for a, b in zip(still["k"], moved["k"], strict=True)
    ]
    assert not any(turned)
