"""docs/structure.md names each module once, in its room."""

from __future__ import annotations

import re
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
SHADOW = "shadow"  # stands in for another package


def named() -> dict[str, set[str]]:
    """Modules by room, as the table says."""
    text = (REPO_ROOT / "docs" / "structure.md").read_text("utf-8")
    table = text.partition("## Rooms and modules")[2].partition("\n## ")[0]
    rooms = {}
    for room, modules in re.findall(
        r"^\| `((?:kvedit|sglang_patches)[\w/]*)` \| (.*) \|$", table, re.M
    ):
        outside_of_brackets = re.sub(r"\([^)]*\)", "", modules)
        found = re.findall(r"`(\w+)`", outside_of_brackets)
        assert len(found) == len(set(found)), f"{room} names a module twice"
        rooms[room] = set(found)
    return rooms


def built() -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for package in ("kvedit", "sglang_patches"):
        for path in (REPO_ROOT / package).rglob("*.py"):
            if path.name != "__init__.py" and SHADOW not in path.parts:
                room = str(path.parent.relative_to(REPO_ROOT))
                rooms.setdefault(room, set()).add(path.stem)
    return rooms


def test_the_list_is_the_tree() -> None:
    assert named() == built()
