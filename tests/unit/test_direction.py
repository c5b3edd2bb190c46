"""Who may import whom, read from the source, so that no lazy import escapes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kvedit", "sglang_patches", "kernels/kvedit_kernels")
MAX_LINES = 300

# Not even inside a function.
NEVER = {
    "kvedit": {"sglang", "triton"},
    "kernels/kvedit_kernels": {"sglang", "sglang_patches", "kvedit"},
}
# The pure room is imported by every process of the server and by clients without torch.
NEVER_AT_IMPORT = {"kvedit": {"torch", "transformers", "sglang_patches", "kvedit_kernels"}}


def files_of(room: str) -> list[Path]:
    return sorted((REPO_ROOT / room).rglob("*.py"))


def imported_names(nodes: Iterator[ast.AST]) -> set[str]:
    """Return the top-level names that the import statements among ``nodes`` mention."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).partition(".")[0])
    return names


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk ``tree`` but not into functions, nor into `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from run_at_import(node)


def forbidden_imports(source: str, room: str) -> set[str]:
    tree = ast.parse(source)
    anywhere = imported_names(ast.walk(tree)) & NEVER.get(room, set())
    at_import = imported_names(run_at_import(tree)) & NEVER_AT_IMPORT.get(room, set())
    return anywhere | at_import


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_in_one_direction(room: str) -> None:
    found = {
        str(path.relative_to(REPO_ROOT)): sorted(forbidden)
        for path in files_of(room)
        if (forbidden := forbidden_imports(path.read_text(), room))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("kvedit", "import sglang.srt", {"sglang"}),
        ("kvedit", "def f():\n    from sglang import Engine", {"sglang"}),
        ("kvedit", "if x:\n    import torch", {"torch"}),
        ("kvedit", "def f():\n    import torch", set()),
        ("kvedit", "if TYPE_CHECKING:\n    import torch", set()),
        ("kernels/kvedit_kernels", "from kvedit.rope import x", {"kvedit"}),
        ("kernels/kvedit_kernels", "import torch, triton", set()),
        ("sglang_patches", "import sglang", set()),
    ],
)
def test_the_direction_check_sees_what_it_should(
    room: str, source: str, expected: set[str]
) -> None:
    assert forbidden_imports(source, room) == expected


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_outgrows_a_small_room(room: str) -> None:
    paths = files_of(room)
    assert paths, f"{room} holds no files, so this check looks at nothing"
    lines_of = {
        str(path.relative_to(REPO_ROOT)): len(path.read_text().splitlines()) for path in paths
    }
    assert {name: count for name, count in lines_of.items() if count > MAX_LINES} == {}
