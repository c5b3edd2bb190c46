"""Where the default model lies on disk, and how we know that it is whole.

The model is a Hugging Face folder below ``$KVEDIT_HOME`` (default ``~/.cache/kvedit``).
`model_convert` writes it once; everyone else asks `default_model_dir` for the path.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The revision is part of the folder's name: a change to the conversion raises it, and an old
# folder is then never mistaken for the new one.
DEFAULT_MODEL = "smollm2-135m-instruct-r1"
MANIFEST_NAME = "kvedit-manifest.json"

# Re-hashing the weights takes about as long as loading them, so the check at each use hashes
# only files up to this size and compares the sizes of the others.
QUICK_HASH_MAX_BYTES = 16 << 20


class ModelStoreError(RuntimeError):
    """A model of the store is absent, incomplete or altered, or could not be made."""


def home_dir() -> Path:
    """Return kvedit's cache folder: ``$KVEDIT_HOME``, or ``~/.cache/kvedit`` without one."""
    configured = os.environ.get("KVEDIT_HOME", "")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "kvedit"


def models_dir() -> Path:
    """Return the folder that holds the converted models; it need not exist."""
    return home_dir() / "models"


def default_model_dir(*, deep: bool = False) -> Path:
    """Return the folder of the default model after checking it against its manifest.

    ``deep`` also hashes the large files. Raises `ModelStoreError` naming each file that differs.
    """
    path = models_dir() / DEFAULT_MODEL
    problems = find_problems(path, deep=deep)
    if problems:
        raise ModelStoreError(
            f"kvedit: default model: expected a complete folder at {path}, got "
            + "; ".join(problems)
            + " (run scripts/fetch_model)"
        )
    return path


def sha256_of(path: Path) -> str:
    """Return the lowercase hex SHA-256 of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, source_sha256: str) -> None:
    """Record size (bytes) and SHA-256 of all other files in ``folder``, and their source's."""
    files = {
        path.relative_to(folder).as_posix(): {
            "num_bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    }
    manifest = {"source_sha256": source_sha256, "files": files}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")


def find_problems(folder: Path, *, deep: bool = False) -> list[str]:
    """What differs of the files that the manifest of ``folder`` names; empty means whole.

    Files that it does not name are not looked at, large ones by their size unless ``deep``.
    """
    manifest_path = folder / MANIFEST_NAME
    if not manifest_path.is_file():
        return ["no manifest" if folder.is_dir() else "no such folder"]
    try:
        files = json.loads(manifest_path.read_text())["files"]
        expected = {
            name: (int(row["num_bytes"]), str(row["sha256"])) for name, row in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"an unreadable manifest ({error!r})"]
    if not expected:
        return ["a manifest without files"]
    found = (_file_problem(folder / name, *row, deep=deep) for name, row in expected.items())
    return [problem for problem in found if problem]


def _file_problem(path: Path, num_bytes: int, sha256: str, *, deep: bool) -> str | None:
    if not path.is_file():
        return f"{path.name} missing"
    actual_bytes = path.stat().st_size
    if actual_bytes != num_bytes:
        return f"{path.name} of {actual_bytes} instead of {num_bytes} bytes"
    if (deep or num_bytes <= QUICK_HASH_MAX_BYTES) and sha256_of(path) != sha256:
        return f"{path.name} with another SHA-256"
    return None


@contextmanager
def conversion_lock() -> Iterator[None]:
    """Hold the store's exclusive lock; a second process waits here and then finds the result.

    The kernel drops the lock with its holder, so an interrupted conversion leaves nothing locked.
    """
    models_dir().mkdir(parents=True, exist_ok=True)
    with (models_dir() / ".lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield
