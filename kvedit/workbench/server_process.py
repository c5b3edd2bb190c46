"""A real server as a subprocess: started on a free port, awaited, stopped with the block.

    with ServerProcess(["--model-path", folder], log_path=Path("out/server.log")) as url:
        ...  # url is "http://127.0.0.1:PORT"

Used by the demo, the benches and the tests.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

HOST = "127.0.0.1"
SERVE_COMMAND = (sys.executable, "-m", "sglang_patches.serve")
POLL_S = 0.25
HEALTH_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 30.0  # nothing survives SIGKILL, but a busy host takes time to free its memory
LOG_TAIL_LINES = 40

SignalHandler = Callable[[int, FrameType | None], Any] | int | None


class ServerFailed(RuntimeError):
    """The server ended, or was not healthy in time; the message holds the end of its log."""


class ServerProcess:
    """Context manager around one server process group.

    Args:
        args: server flags without --host and --port.
        env: variables set on top of this process's own.
        log_path: file that receives the server's stdout and stderr (overwritten).
        port: 0 picks a free port.
        command: program in front of `args` (default: `python -m sglang_patches.serve`).
        start_timeout_s: seconds until /health must answer 200.
        stop_timeout_s: seconds the group gets to end after SIGTERM, before SIGKILL.
        progress: stream of the progress line, None for silence.

    Leaving the block ends every process of the group, also when an exception, Ctrl-C or SIGTERM
    caused it; after a SIGKILL of this process they live on. SIGTERM is turned into
    SystemExit(143) while the block runs (main thread only).
    """

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        log_path: Path = Path("out/server.log"),
        *,
        port: int = 0,
        command: Sequence[str] = SERVE_COMMAND,
        start_timeout_s: float = 600.0,
        stop_timeout_s: float = 10.0,
        progress: TextIO | None = sys.stderr,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log_path = log_path
        self._argv = [*command, *args, "--host", HOST, "--port", str(self.port)]
        self._env = {**os.environ, **(env or {})}
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._previous_sigterm: SignalHandler = None

    @property
    def pid(self) -> int:
        """Process id of the launcher, which is also the group's id."""
        return self._running().pid

    def __enter__(self) -> str:
        self._divert_sigterm()
        try:
            self._start()
            self._wait_until_healthy()
        except BaseException:
            self._stop()
            raise
        return self.url

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the server's output."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("kvedit: server process: expected a started one, got none")
        return self._process

    def _start(self) -> None:
        # Otherwise the health check would be answered by whoever listens there already.
        if not is_free(self.port):
            raise ServerFailed(f"kvedit: port {self.port}: expected a free one, got a listener")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            # A session of its own: one signal then reaches the schedulers and detokenizers too,
            # and a Ctrl-C at the terminal reaches us alone, so that we decide the order.
            self._process = subprocess.Popen(
                self._argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_healthy(self) -> None:
        process = self._running()
        started = time.monotonic()
        line = ProgressLine(self._progress)
        while not is_healthy(self.port):
            waited_s = time.monotonic() - started
            if process.poll() is not None:
                line.end(f"server ended with status {process.returncode}")
                raise ServerFailed(self._failure(f"got exit status {process.returncode}"))
            if waited_s > self._start_timeout_s:
                line.end("server not healthy in time")
                raise ServerFailed(self._failure(f"got none within {self._start_timeout_s:.0f} s"))
            line.show(f"starting the server on port {self.port}: {waited_s:.0f} s")
            time.sleep(POLL_S)
        line.end(f"server ready on {self.url} after {time.monotonic() - started:.0f} s")

    def _failure(self, got: str) -> str:
        return (
            f"kvedit: server at {self.url}: expected a healthy answer, {got}; "
            f"end of {self.log_path}:\n{self.log_tail()}"
        )

    def _stop(self) -> None:
        # An impatient second Ctrl-C must not leave half of the group alive.
        with IgnoredSignals():
            if self._process is not None:
                end_process_group(self._process, self._stop_timeout_s)
        self._restore_sigterm()

    def _divert_sigterm(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous_sigterm = signal.signal(signal.SIGTERM, _exit_on_signal)

    def _restore_sigterm(self) -> None:
        if self._previous_sigterm is not None:
            signal.signal(signal.SIGTERM, self._previous_sigterm)
            self._previous_sigterm = None


class ProgressLine:
    """One line that is rewritten on a terminal, and at most a line every ten seconds elsewhere."""

    LOG_EVERY_S = 10.0

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._last_s = time.monotonic()

    def show(self, text: str) -> None:
        """Take the place of the line before; without a terminal most calls write nothing."""
        if self._stream is None:
            return
        if self._stream.isatty():
            self._stream.write(f"\r{text}\x1b[K")
        elif time.monotonic() - self._last_s >= self.LOG_EVERY_S:
            self._last_s = time.monotonic()
            self._stream.write(text + "\n")
        self._stream.flush()

    def end(self, text: str) -> None:
        """The last line, with its line break."""
        if self._stream is not None:
            self._stream.write((f"\r{text}\x1b[K" if self._stream.isatty() else text) + "\n")
            self._stream.flush()


class IgnoredSignals:
    """SIGINT and SIGTERM are ignored inside the block (main thread only)."""

    def __enter__(self) -> None:
        self._previous: dict[signal.Signals, SignalHandler] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A TCP port on the loopback that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on the loopback's TCP port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def is_healthy(port: int) -> bool:
    """Whether GET /health on the loopback answers 200."""
    connection = http.client.HTTPConnection(HOST, port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def end_process_group(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """End the group that `process` leads: SIGTERM, then SIGKILL after `timeout_s` seconds.

    Returns when no member is left; the leader's own end is not enough, since its children hold
    the port and the memory. `process` must have been started with start_new_session=True.
    """
    _signal_group(process.pid, signal.SIGTERM)
    if _ends_within(process, timeout_s):
        return
    _signal_group(process.pid, signal.SIGKILL)
    if not _ends_within(process, KILL_TIMEOUT_S):
        raise ServerFailed(
            f"kvedit: process group {process.pid}: expected no member, got survivors"
        )


def _ends_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while group_is_alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def group_is_alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether any process of the group still runs; reaps the leader on the way."""
    process.poll()
    return any(_is_running_member(entry, process.pid) for entry in Path("/proc").glob("[0-9]*"))


def _is_running_member(entry: Path, group_id: int) -> bool:
    try:
        # The command name stands in parentheses and may hold anything, so split behind it.
        fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False  # ended while we looked
    state, _parent, group = fields[:3]
    return int(group) == group_id and state not in "ZX"


def _signal_group(group_id: int, number: signal.Signals) -> None:
    try:
        os.killpg(group_id, number)
    except ProcessLookupError:
        return


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
