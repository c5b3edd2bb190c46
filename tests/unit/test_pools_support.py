"""docs/support.md says what the code answers today."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches.pools import layout, support  # noqa: E402

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "support.md"


def test_the_support_table_is_up_to_date() -> None:
    expected = support.render()
    assert DOCUMENT.read_text(encoding="utf-8") == expected, "run scripts/support_table"


def test_the_table_follows_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a pool class that is no longer served, and a new refusal, both change the text."""
    before = support.render()
    monkeypatch.delitem(layout.SERVED_POOLS, layout.MLATokenToKVPool)
    monkeypatch.setitem(layout.REFUSED_POOLS, "SomeNewPool", "nobody has looked at it")
    after = support.render()
    served_mla = [line for line in before.splitlines() if line.startswith("| MLA | 1 | served")]
    assert served_mla and served_mla[0] not in after
    assert "| `SomeNewPool` | nobody has looked at it |" in after


def test_ropes_that_the_project_promises_are_in_the_table() -> None:
    text = support.render()
    for label in ("default", "linear", "llama3", "YaRN", "partial", "layers without rope"):
        assert f"| {label} | served" in text
    assert "| dynamic NTK | refused" in text
