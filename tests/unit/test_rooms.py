"""Rooms call downwards only: every import is read, lazy and TYPE_CHECKING ones too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
MAX_MODULES = 13  # in a folder, its __init__ included

# A room may import the rooms of earlier lines, and its own. A module belongs to the longest name
# that it begins with.
FLOORS = [
    ["kvedit"],
    ["kvedit.rope", "kvedit.request", "kvedit.text"],
    ["kvedit.skills", "kvedit.fields"],
    ["kvedit.splice"],
    ["kvedit.edit"],
    ["kvedit.wire"],
    ["kvedit.client"],
    ["kvedit.lang"],
    ["kvedit.workbench"],
    ["kvedit.workbench.demo"],
    ["kvedit.cli"],
    ["sglang_patches.guard"],
    ["sglang_patches.faults"],
    ["sglang_patches.cpu", "sglang_patches.pools"],
    ["sglang_patches.host"],
    ["sglang_patches.scheduler"],
    ["sglang_patches.scheduler.telemetry"],
    ["sglang_patches.scheduler.skills"],
    ["sglang_patches.scheduler.splice", "sglang_patches.scheduler.edit"],
    ["sglang_patches.scheduler.wiring"],
    ["sglang_patches.scheduler.commands"],
    ["sglang_patches.scheduler.hooks", "sglang_patches.scheduler.testing"],
    ["sglang_patches.http.services"],
    ["sglang_patches.http.admin", "sglang_patches.http.request"],
    ["sglang_patches.http.answers"],
    ["sglang_patches.http"],
    ["sglang_patches.launch", "sglang_patches.frontend"],
    ["sglang_patches"],
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# (importer, imported room): names that users know under a shorter path, a client inside the
# process of an engine, test operations and a queue that can fail behind a flag.
DOORS = {
    ("kvedit", "kvedit.client"),
    ("kvedit.client.transport", "sglang_patches.http.admin"),
    ("kvedit.lang", "sglang_patches.frontend"),
    ("kvedit.lang.functions", "sglang_patches.frontend"),
    ("sglang_patches.scheduler.commands.dispatch", "sglang_patches.scheduler.testing"),
    ("sglang_patches.scheduler.wiring.build", "sglang_patches.scheduler.testing"),
}
# The HTTP process and the scheduler's meet in commands, which are JSON; nothing is imported.
NEVER = [("sglang_patches.http", "sglang_patches.scheduler"), ("kvedit", "sglang_patches")]


def modules() -> dict[str, Path]:
    found = {}
    for package in ("kvedit", "sglang_patches"):
        for path in sorted((REPO_ROOT / package).rglob("*.py")):
            parts = path.relative_to(REPO_ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    while module not in FLOOR_OF:
        module = module.rpartition(".")[0]
    return module


def imported(source: str, names: set[str]) -> Iterator[str]:
    """Modules of ours that the source mentions in an import, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from [whole] if whole in names else {node.module} & names
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & names


def arrows() -> dict[str, set[str]]:
    found = modules()
    return {
        name: set(imported(path.read_text(), set(found))) - {name} for name, path in found.items()
    }


def upward(importer: str, target: str) -> bool:
    one, other = room_of(importer), room_of(target)
    if one == other or (importer, other) in DOORS:
        return False
    forbidden = any(one.startswith(a) and other.startswith(b) for a, b in NEVER)
    return forbidden or FLOOR_OF[other] >= FLOOR_OF[one]


def test_every_import_points_down() -> None:
    found = [
        f"{importer} -> {target}"
        for importer, targets in arrows().items()
        for target in sorted(targets)
        if upward(importer, target)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("importer", "target", "is_upward"),
    [
        ("kvedit.splice.spans", "kvedit.edit.ledger", True),
        ("kvedit.edit.ledger", "kvedit.splice.spans", False),
        ("kvedit.skills.registry", "kvedit.fields.book", True),  # neighbours
        ("kvedit.config", "sglang_patches.guard", True),
        ("sglang_patches.scheduler.splice.tree", "sglang_patches.scheduler.wiring.rooms", True),
        ("sglang_patches.http.gate", "sglang_patches.scheduler.ports", True),
        ("kvedit.client.transport", "sglang_patches.http.admin.offline", False),
        ("kvedit.client.client", "sglang_patches.http.admin.offline", True),
    ],
)
def test_the_check_sees_what_it_should(importer: str, target: str, is_upward: bool) -> None:
    assert upward(importer, target) is is_upward


def test_lazy_and_typing_imports_are_read() -> None:
    source = "def f():\n    from kvedit import errors\nif TYPE_CHECKING:\n    import kvedit.config"
    assert set(imported(source, {"kvedit.errors", "kvedit.config"})) == {
        "kvedit.errors",
        "kvedit.config",
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A way from a module back to itself; empty if there is none."""
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph[module]):
            found = walk(target, [*way, module])
            if found:
                return found
        done.add(module)
        return []

    return next(filter(None, (walk(module, []) for module in graph)), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = arrows()
    for importer, targets in graph.items():  # the doors are taken after start-up, by intent
        graph[importer] = {t for t in targets if (importer, room_of(t)) not in DOORS}
    assert circle(graph) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_every_room_says_what_it_is() -> None:
    silent = []
    for name, path in modules().items():
        is_face = name in ("kvedit", "sglang_patches") or ".shadow" in name  # another's package
        if path.name != "__init__.py" or is_face:
            continue
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if "Called by:" not in text or "May touch:" not in text:
            silent.append(name)
    assert silent == []


def test_no_folder_is_a_drawer() -> None:
    folders = {path.parent for path in modules().values()}
    crowded = {str(f): n for f in folders if (n := len(list(f.glob("*.py")))) > MAX_MODULES}
    assert crowded == {}
