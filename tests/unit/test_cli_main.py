"""The command line's frame: every command is there, errors are one line with the right status."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvedit.cli import main as cli
from kvedit.errors import BadRequest, NotFound

NOTHING_LISTENS = "http://127.0.0.1:9"


def test_help_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["skills", "add", "policy", "/no/such/file"], cli.BAD_INPUT),
        (["skills", "list", "--bogus"], cli.BAD_INPUT),
        (["status", "--url", NOTHING_LISTENS], cli.FAILED),
        (["status", "--url", "127.0.0.1:9"], cli.BAD_INPUT),
    ],
)
def test_errors_are_one_line(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvedit: ") and shown.err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["skills", "add", "x", "--seam", "much"]])
def test_the_parsers_own_errors_end_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == cli.BAD_INPUT


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest("kvedit: name: expected x,\ngot y"), cli.BAD_INPUT),
        (NotFound("kvedit: skill: expected a, got b"), cli.FAILED),
        (ValueError("not JSON"), cli.BAD_INPUT),
    ],
)
def test_what_a_command_raises(
    error: Exception,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr("kvedit.cli.status.connect", refuse)
    assert cli.main(["status"]) == status
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        (b"refunds take", ["--ids"], 'expected a JSON list of token ids, got "refunds take"'),
        (b'{"ids": []}', ["--ids"], "expected a JSON list of token ids, got "),
        (b"[" * 100_000, ["--ids"], "expected a JSON list of token ids, got "),
        (b"ab\xff\x00", [], "expected UTF-8 text, got a byte that is not UTF-8 at offset 2"),
    ],
)
def test_a_file_that_cannot_be_a_skill_is_named(
    content: bytes,
    flags: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "policy"
    file.write_bytes(content)
    assert cli.main(["skills", "add", "policy", str(file), *flags]) == cli.BAD_INPUT
    shown = capsys.readouterr().err
    assert shown.startswith(f"kvedit: {file}: {says}") and len(shown) < 300


def test_version_is_the_packages_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"kvedit {version('kvedit')}\n"


def test_status_shows_splices_as_lines_and_emptiness_as_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    splices = [
        {"outcome": "realised", "reason": "", "count": 3},
        {"outcome": "refused", "reason": "evicted", "count": 1},
    ]
    answers = iter([{"skills": {}, "counters": {"splices": splices}}, {"skills": {"ready": 2}}])
    client = SimpleNamespace(status=lambda: next(answers))
    monkeypatch.setattr("kvedit.cli.status.connect", lambda args: client)
    assert cli.main(["status"]) == cli.main(["status"]) == 0
    assert [line.split(None, 1) for line in capsys.readouterr().out.splitlines()] == [
        ["skills", "none"],
        ["counters.splices.realised", "3"],
        ["counters.splices.refused", "1 (evicted)"],
        ["skills.ready", "2"],
    ]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []

    def execv(program: str, argv: list[str]) -> Any:
        calls.append(argv)
        raise SystemExit(0)  # exec never returns

    monkeypatch.setattr(os, "execv", execv)
    return calls


def test_serve_passes_every_flag_on(executed: list[list[str]], tmp_path: Path) -> None:
    given = ["--page-size=16", "--tp", "2", "--log-level", "info", "--disable-overlap-schedule"]
    with pytest.raises(SystemExit):
        cli.main(["serve", "--stock", "--model-path", str(tmp_path), *given])
    (argv,) = executed
    assert argv[:3] == [sys.executable, "-m", "sglang_patches.serve"]
    assert argv[3:9] == given
    assert argv[9:] == ["--model-path", str(tmp_path), "--stock"]


def test_serve_does_not_take_an_abbreviation_for_its_own(executed: list[list[str]]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model", "m", "--kvedit-open"])
    assert executed[0][3:] == ["--model", "m", "--kvedit-open"]


def test_doctor_passes_flags_behind_the_dashes(executed: list[list[str]]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--", "--pp-size", "2"])
    assert executed[0][1:] == ["-m", "sglang_patches.launch.doctor", "--pp-size", "2"]
