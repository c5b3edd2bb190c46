"""Events and metrics are optional: they can neither stop a server nor change what it does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvedit.splice.token_classes import TokenSplit
from sglang_patches import cpu, guard

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches.launch import doctor  # noqa: E402
from sglang_patches.scheduler.telemetry.events import EventPublisher, open_publisher  # noqa: E402
from sglang_patches.scheduler.telemetry.metrics import Metrics  # noqa: E402


@pytest.fixture(autouse=True)
def _clean():
    yield
    guard.errors.clear()


def too_long(tmp_path: Path) -> Path:
    return tmp_path / ("h" * 100) / "run"


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("", "utf-8")
    return tmp_path / "file" / "run"


@pytest.mark.parametrize("where", [too_long, a_file, lambda _: Path("/proc/kvedit/run")])
def test_a_path_that_cannot_be_made_is_a_warning(tmp_path: Path, where) -> None:
    publisher, warning = open_publisher(where(tmp_path))
    assert publisher is None and warning is not None
    assert warning.startswith("kvedit: events: expected a socket below KVEDIT_HOME, got ")
    assert str(tmp_path) not in warning, "anybody may read it"


def test_nothing_is_left_of_a_socket_that_was_too_long(tmp_path: Path) -> None:
    open_publisher(too_long(tmp_path))
    assert list(too_long(tmp_path).iterdir()) == []


def test_a_folder_that_cannot_be_pruned_does_not_stop_the_events(tmp_path, monkeypatch) -> None:
    def refuses(run_dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("sglang_patches.scheduler.telemetry.events._prune", refuses)
    publisher, warning = open_publisher(short_dir(tmp_path))
    assert publisher is not None and warning is None and guard.errors["prune_events"] == 1
    publisher.close()


def short_dir(tmp_path: Path) -> Path:
    """A short way to a folder of the test: a socket's path has about 100 characters."""
    link = Path(f"/tmp/kv-{os.getpid()}")
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path)
    return link / "run"


@pytest.mark.parametrize("bad", ["\ud800", object(), 2**70, {1: {2}}])
def test_an_event_that_cannot_be_spelled_is_counted(tmp_path: Path, bad: object) -> None:
    publisher = EventPublisher(short_dir(tmp_path))
    publisher.publish("splice_refused", skill=bad)
    publisher.publish("splice_refused", skill="fine")
    publisher.close()
    assert guard.errors == {"events": 1}


def test_an_event_on_a_socket_that_is_gone_is_counted(tmp_path: Path) -> None:
    publisher = EventPublisher(short_dir(tmp_path))
    publisher.close()
    publisher.publish("splice_refused")
    assert guard.errors == {"events": 1}


def test_an_export_that_fails_changes_no_count(monkeypatch) -> None:
    def broken(self):
        raise OSError("no space left on device")

    monkeypatch.setattr(Metrics, "_counters", broken)
    metrics, split = Metrics(export=True, model_name="m"), TokenSplit(8)
    before = split.counts()
    split.cover((), prefix_len=3, extend_end=8)
    metrics.count_tokens(before, split)
    metrics.count_splice("refused", "no_slots")
    metrics.count_edit("as_sent", "sent")
    assert (metrics.tokens["exact"], metrics.tokens["computed"]) == (3, 5)
    assert metrics.splices == {("refused", "no_slots"): 1} and metrics.edits == {
        ("as_sent", "sent"): 1
    }
    assert guard.errors == {"metrics": 4}


def test_the_doctor_warns_of_a_home_without_room_for_events(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KVEDIT_HOME", str(too_long(tmp_path).parent))
    [warning] = doctor.report_events()
    assert warning.startswith("kvedit: events: ") and str(tmp_path) in warning
    monkeypatch.setenv("KVEDIT_HOME", str(short_dir(tmp_path).parent))
    assert list(doctor.report_events()) == []
