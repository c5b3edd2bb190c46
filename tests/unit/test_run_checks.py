"""scripts/test must fail when anything fails, and stop what its tests forgot to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]

# The static checks look at the whole repository and have their own run; here only tests count.
RUNNER = """
import sys
sys.path.insert(0, "scripts")
import _run_checks
_run_checks.STATIC_CHECKS = {}
sys.exit(_run_checks.main(sys.argv[1:]))
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUNNER, *arguments]
    return subprocess.Popen(command, cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("body", "last_line"),
    [
        ("def test_a(): pass\ndef test_b(): pass", "2 passed, 0 failed"),
        ("def test_a(): pass\ndef test_b(): assert False", "1 passed, 1 failed"),
        ("import pytest\ndef test_a(): pytest.skip()", "0 passed, 1 failed"),
        ("import no_such_module", "0 passed, 1 failed"),
        ("import os\ndef test_a(): os._exit(3)", "0 passed, 1 failed"),
        (
            "import pytest\n@pytest.fixture\ndef f():\n    yield\n    assert False\n"
            "def test_a(f): pass",
            "0 passed, 1 failed",
        ),
        ("", "0 passed, 0 failed"),
    ],
    ids=["green", "failure", "skip", "collection", "crash", "teardown", "nothing"],
)
def test_status_and_last_line_tell_the_same_truth(
    tmp_path: Path, body: str, last_line: str
) -> None:
    (tmp_path / "test_sample.py").write_text(body)
    runner = start(str(tmp_path))
    output, _ = runner.communicate()
    assert output.splitlines()[-1] == last_line
    assert (runner.returncode == 0) == (last_line == "2 passed, 0 failed")


def test_an_interrupted_run_stops_a_detached_grandchild(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "test_sample.py").write_text(
        "import pathlib, subprocess, time\n"
        "def test_a():\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    part = pathlib.Path({str(pid_file)!r} + '.part')\n"
        "    part.write_text(str(child.pid))\n"
        f"    part.rename({str(pid_file)!r})\n"
        "    time.sleep(600)\n"
    )
    runner = start(str(tmp_path))
    while not pid_file.exists():
        assert runner.poll() is None
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    runner.communicate()
    assert runner.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


LANES = """
import sys
sys.path.insert(0, "scripts")
from _run_checks import Lane, Options, Totals, report, run_lanes
totals = Totals()
run_lanes([Lane([sys.argv[1]]), Lane([sys.argv[2]])], Options(), totals)
report(totals)
"""


@pytest.mark.parametrize(
    ("beside", "last_line"),
    [
        ("def test_a(): pass", "2 passed, 0 failed"),
        ("def test_a(): assert False", "1 passed, 1 failed"),
        ("import os, signal\ndef test_a(): os.kill(os.getppid(), signal.SIGKILL)", "1 passed, 1"),
    ],
    ids=["green", "failure", "killed"],
)
def test_lanes_side_by_side_count_together(tmp_path: Path, beside: str, last_line: str) -> None:
    (tmp_path / "test_beside.py").write_text(beside)
    (tmp_path / "test_sample.py").write_text("def test_b(): pass")
    files = [str(tmp_path / name) for name in ("test_beside.py", "test_sample.py")]
    done = subprocess.run(
        [sys.executable, "-c", LANES, *files], cwd=REPO_ROOT, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1].startswith(last_line)
