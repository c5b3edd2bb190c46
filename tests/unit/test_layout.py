"""The folder `kernels/` must never stand in for the PyPI package that SGLang imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import importlib.util, json
spec = importlib.util.find_spec("kernels")
ours = importlib.util.find_spec("kvedit_kernels")
print(json.dumps({"kernels": spec.origin, "kvedit_kernels": ours.origin}))
"""


def origins_seen_from(folder: Path) -> dict[str, str | None]:
    """Start Python in ``folder``; -c puts the current folder first on sys.path."""
    output = subprocess.check_output([sys.executable, "-c", PROBE], cwd=folder, text=True)
    origins: dict[str, str | None] = json.loads(output)
    return origins


def test_import_kernels_from_the_repository_root_is_not_ours() -> None:
    origin = origins_seen_from(REPO_ROOT)["kernels"]
    # None would be a namespace package made of our folder.
    assert origin is not None
    assert not Path(origin).is_relative_to(REPO_ROOT / "kernels")


def test_our_kernels_are_importable_under_their_own_name_from_anywhere(tmp_path: Path) -> None:
    origin = origins_seen_from(tmp_path)["kvedit_kernels"]
    assert origin == str(REPO_ROOT / "kernels" / "kvedit_kernels" / "__init__.py")


def test_a_kernels_package_of_ours_would_be_noticed(tmp_path: Path) -> None:
    """Negative control: with an __init__.py the folder does win over the installed package."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    assert origins_seen_from(tmp_path)["kernels"] == str(package / "__init__.py")
    assert not (REPO_ROOT / "kernels" / "__init__.py").exists()
