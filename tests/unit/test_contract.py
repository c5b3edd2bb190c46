"""The installed host against the table of what kvedit stands on."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches.host import contract  # noqa: E402

SRT = Path(find_spec("sglang").origin).parent / "srt"  # type: ignore[union-attr, arg-type]


def calls_of(tree: ast.AST, name: str) -> int:
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(tree)
    )


def reads_of(tree: ast.AST, attribute: str) -> int:
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )


def test_every_symbol_has_the_signature_it_was_written_against():
    assert contract.broken() == []


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("managers.scheduler.Scheduler.get_prefill_adder_class", ("self", "new")),
        ("managers.scheduler.Scheduler.no_such_method", ("self",)),
        ("managers.no_such_module.f", ()),
    ],
)
def test_a_moved_symbol_is_named(monkeypatch, path, parameters):
    monkeypatch.setattr(contract, "CALLED", (contract.Symbol(path, parameters, "a test"),))
    [reason] = contract.broken()
    assert path in reason and "a test" in reason


def test_keys_are_built_where_we_read_them():
    """A new place that spells a RadixKey from a request's ids must be looked at: it may need
    the served spelling."""
    found = {
        name: calls_of(ast.parse((SRT / name).read_text()), "RadixKey")
        for name in contract.KEY_BUILDERS
    }
    assert found == contract.KEY_BUILDERS


def test_cache_code_reads_a_requests_ids_where_we_read_it():
    found = {}
    for path in sorted((SRT / "mem_cache").glob("*.py")):
        num_reads = reads_of(ast.parse(path.read_text()), "origin_input_ids")
        if num_reads:
            found[f"mem_cache/{path.name}"] = num_reads
    assert found == contract.ID_READERS


def test_a_hook_that_did_not_take_is_named(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", {"sglang.nowhere.f": []})
    monkeypatch.setattr(HookRegistry, "_patched", set())
    assert "sglang.nowhere.f" in contract.unapplied_hooks()[0]
