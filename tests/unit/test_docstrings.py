"""What is public says what it gives. Read from the source; nothing is imported.

Not asked of: dunder methods, overloads, stubs with a `...` body (a Protocol's, an abstract one's)
that their class explains, and a property of one line that a documented base has as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
# Public names without a docstring. Lower a figure when you have made it true; never raise one.
WITHOUT = {"kvedit": 0, "kernels/kvedit_kernels": 0, "sglang_patches": 57, "bench": 49}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def decorators(node: Function) -> set[str]:
    return {ast.unparse(item).rpartition(".")[2] for item in node.decorator_list}


def is_stub(node: Function) -> bool:
    only = node.body[0]
    return (
        len(node.body) == 1
        and isinstance(only, ast.Expr)
        and isinstance(only.value, ast.Constant)
        and only.value.value is ...
    )


def is_asked(node: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return not node.name.startswith("_")
    if not isinstance(node, Function) or node.name.startswith("_"):
        return False
    return not is_stub(node) and decorators(node).isdisjoint({"overload", "setter"})


def is_short_override(
    node: Function, owner: ast.ClassDef, classes: Mapping[str, ast.ClassDef]
) -> bool:
    """Whether ``node`` is a property of one line that a base in the same file documents."""
    if len(node.body) > 1 or decorators(node).isdisjoint({"property", "cached_property"}):
        return False
    for base in map(ast.unparse, owner.bases):
        for item in classes[base].body if base in classes else ():
            if isinstance(item, Function) and item.name == node.name and ast.get_docstring(item):
                return True
    return False


def without(source: str) -> Iterator[str]:
    """The public classes, functions and methods of ``source`` that have no docstring."""
    tree = ast.parse(source)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in filter(is_asked, tree.body):
        if not ast.get_docstring(node):
            yield node.name
        for item in filter(is_asked, node.body if isinstance(node, ast.ClassDef) else ()):
            if not ast.get_docstring(item) and not is_short_override(item, node, classes):
                yield f"{node.name}.{item.name}"


@pytest.mark.parametrize("package", WITHOUT)
def test_no_more_without_than_before(package: str) -> None:
    paths = sorted((REPO_ROOT / package).rglob("*.py"))
    assert paths, f"{package} holds no files, so this check looks at nothing"
    found = [
        f"{path.relative_to(REPO_ROOT)}: {name}"
        for path in paths
        for name in without(path.read_text())
    ]
    advice = "lower the figure in WITHOUT" if len(found) < WITHOUT[package] else "\n".join(found)
    assert len(found) == WITHOUT[package], advice


CONTROL = '''
class Told:
    """Something."""

    @property
    def size(self) -> int:
        """In bytes."""
        return 1

    def untold(self): return 2
    def __len__(self): return 3
    def _inside(self): return 4

class Of(Told):
    """Another."""

    @property
    def size(self) -> int:
        return 2

    @property
    def colour(self) -> int:
        return 3

class Asks(Protocol):
    """A port."""

    def ask(self) -> int: ...

class Untold(Exception): pass

def plain(): return 1
async def late(): return 1
@overload
def plain(x): return 1
def _inside():
    def nested(): return 1
'''


def test_a_source_without_them_is_found() -> None:
    assert list(without(CONTROL)) == ["Told.untold", "Of.colour", "Untold", "plain", "late"]
