"""FlashInfer's side of the cross-checks, as far as it can be seen without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import flashinfer
import pytest
import torch

from kvedit_kernels import flashinfer_check, rotate_rows
from kvedit_kernels.flashinfer_check import CALLS, attention, missing_calls
from kvedit_kernels.testing import Case


def test_the_installed_flashinfer_offers_every_call() -> None:
    assert missing_calls(flashinfer) == []


def test_a_renamed_parameter_or_function_is_reported() -> None:
    assert len(missing_calls(SimpleNamespace())) == len(CALLS)

    def renamed(pos_ids, query, key, head_size, cos_sin_cache, is_neox):
        return None

    other = SimpleNamespace(apply_rope_with_cos_sin_cache_inplace=renamed)
    assert "['positions']" in missing_calls(other)[0]


def fake_rope(*, positions, query, key, head_size, cos_sin_cache, is_neox) -> None:
    """FlashInfer's documented meaning: row p of the table holds cos then sin of position p."""
    rows = key.view(len(key), -1, head_size)
    table = cos_sin_cache.view(len(cos_sin_cache), 2, -1)
    rows.copy_(rotate_rows(rows, positions, table, is_neox=is_neox))


class FakeWrapper:
    """A paged prefill of one request, by the plan's indices."""

    def __init__(self, *, float_workspace_buffer, kv_layout) -> None:
        assert kv_layout == "NHD"

    def plan(self, **plan) -> None:
        assert plan["page_size"] == 1 and plan["causal"]
        assert plan["qo_indptr"].dtype == plan["paged_kv_indices"].dtype == torch.int32
        self.slots = plan["paged_kv_indices"].long()

    def run(self, *, q, paged_kv_cache):
        k, v = (cache[:, 0] for cache in paged_kv_cache)
        return attention(q, k[self.slots], v[self.slots]).to(q.dtype)


@pytest.fixture
def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "apply_rope_with_cos_sin_cache_inplace", fake_rope)
    monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", FakeWrapper)


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotation_check_passes_for_the_documented_meaning(fake_flashinfer, is_neox) -> None:
    assert flashinfer_check.check_rotation(Case(is_neox=is_neox), device="cpu") <= 1


def test_rotation_check_fails_for_the_other_pairing(fake_flashinfer, monkeypatch) -> None:
    def swapped(**arguments) -> None:
        fake_rope(**{**arguments, "is_neox": not arguments["is_neox"]})

    monkeypatch.setattr(flashinfer, "apply_rope_with_cos_sin_cache_inplace", swapped)
    assert flashinfer_check.check_rotation(Case(), device="cpu") > 1


def test_prefill_check_passes_and_fails_where_it_should(fake_flashinfer, monkeypatch) -> None:
    case = Case(num_tokens=64)
    tolerance = flashinfer_check.PREFILL_TOLERANCE
    assert flashinfer_check.check_paged_prefill(case, device="cpu", num_queries=17) <= tolerance
    monkeypatch.setattr(flashinfer_check, "relocate", lambda **_: None)
    monkeypatch.setattr(FakeWrapper, "run", lambda self, *, q, paged_kv_cache: torch.zeros_like(q))
    assert flashinfer_check.check_paged_prefill(case, device="cpu", num_queries=17) > tolerance
