"""Children of scripts/test: run one to its end, and leave none behind, whatever happens."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 15.0


def adopt_orphans() -> None:
    """Make orphaned grandchildren ours, so that a server outliving its test is still found."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def interrupt_on_termination() -> None:
    """Treat SIGTERM and a closed terminal like Ctrl-C: one way out, which cleans up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def run_to_end(command: list[str], env: dict[str, str]) -> int:
    """Run ``command`` and return its exit status; on the way out nothing it started still runs."""
    # A session of its own: Ctrl-C reaches this process alone, which then stops the child once.
    child = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)  # pytest then tears its fixtures down
        wait_at_most(child, GRACE_SECONDS)
        raise
    finally:
        stop_descendants()


def wait_at_most(child: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def stop_descendants() -> None:
    """Give what is left a moment to end by itself, then terminate it, then kill it."""
    for number, seconds in ((None, 1.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        left = descendants()
        if not left:
            return
        if number is not None:
            print(f"==> left behind, sent {number.name}: {describe(left)}", flush=True)
            for pid in left:
                send(pid, number)
        await_no_descendants(seconds)


def await_no_descendants(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.05)


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended in between, which is what we want


def descendants() -> list[int]:
    """Return the ids of all living processes below this one, after collecting the dead."""
    reap()
    parent_of = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = parent_pid(entry)
            if parent is not None:
                parent_of[int(entry.name)] = parent
    found = [os.getpid()]
    for pid in found:  # grows while we walk it
        found.extend(child for child, parent in parent_of.items() if parent == pid)
    return found[1:]


def parent_pid(process: Path) -> int | None:
    try:
        # The name may hold spaces and brackets; the fields behind its last bracket are plain.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def reap() -> None:
    """Collect adopted children that have ended. Call it only after Popen has its own status."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def describe(pids: list[int]) -> str:
    return ", ".join(f"{pid} ({command_line(pid)[:80]})" for pid in pids)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
