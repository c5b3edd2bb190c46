"""The report of `kvedit doctor`: its verdict is the last line and the exit status."""

from __future__ import annotations

import pytest

from sglang_patches.launch import doctor

pytestmark = pytest.mark.own_process  # judging flags loads the plugins into this process


def report(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str], str]:
    """(exit status, lines of stdout, stderr)"""
    status = doctor.main(flags)
    shown = capsys.readouterr()
    return status, shown.out.splitlines(), shown.err


def test_a_sound_installation_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = report(capsys)
    assert (status, lines[-1]) == (0, "ok")


def test_another_host_version_is_one_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_patches.launch.doctor.version", lambda name: "0.5.24")
    status, lines, _ = report(capsys)
    assert status == 1 and lines[-1].startswith("1 problem: sglang 0.5.24: NOT SUPPORTED")


def test_a_flag_that_sglang_does_not_know_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, err = report(capsys, "--pagesize", "3")
    complaint = "SGLang itself: unrecognized arguments: --pagesize 3"
    assert status == 1 and err == ""
    assert lines[-4:] == [
        "flags: --pagesize 3",
        f"  {complaint}",
        "",
        f"1 problem: {complaint}",
    ]


def test_refused_flags_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = report(capsys, "--enable-lmcache", "--pp-size", "2")
    assert (status, lines[-1]) == (1, "2 problems")
    assert any(line.startswith("  --pp-size: expected ") for line in lines)


def test_a_model_that_is_not_there_is_named_as_at_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, lines, _ = report(capsys, "--model-path", "/nonexist")
    assert status == 1 and lines[-1].endswith("got '/nonexist' (no such folder)")
