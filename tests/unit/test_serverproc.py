"""ServerProcess against small stand-in servers: health, failure, and no survivor ever."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kvedit.workbench.server_process import ServerFailed, ServerProcess, free_port, is_healthy

# Answers /health with 200 after START_AFTER_S; a grandchild ignores SIGTERM, as a scheduler
# stuck in a forward pass does.
FAKE_SERVER = """
import http.server, os, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print("child", child.pid, flush=True)
time.sleep(float(os.environ.get("START_AFTER_S", "0")))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(os.environ.get("MARK", "").encode())
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_server(tmp_path: Path, source: str = FAKE_SERVER, **options: object) -> ServerProcess:
    settings: dict[str, object] = {"stop_timeout_s": 1.0, "progress": None, **options}
    return ServerProcess(
        [],
        log_path=tmp_path / "server.log",
        command=[sys.executable, "-c", source],
        **settings,  # type: ignore[arg-type]
    )


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def child_pid(log_path: Path) -> int:
    return int(log_path.read_text().split("child ")[1].split()[0])


def test_block_gets_a_healthy_url_and_leaves_no_process(tmp_path: Path) -> None:
    server = fake_server(tmp_path, env={"MARK": "ours"})
    with server as url:
        with urllib.request.urlopen(url + "/health") as answer:
            assert answer.read() == b"ours"
        leader, child = server.pid, child_pid(server.log_path)
        assert is_running(leader) and is_running(child)
    assert not is_running(leader) and not is_running(child)
    assert not is_healthy(server.port)


def test_exception_in_the_block_stops_the_group(tmp_path: Path) -> None:
    server = fake_server(tmp_path)
    with pytest.raises(ZeroDivisionError), server:
        raise ZeroDivisionError
    assert not is_running(server.pid) and not is_running(child_pid(server.log_path))


def test_early_end_is_reported_with_status_and_log(tmp_path: Path) -> None:
    server = fake_server(tmp_path, "import sys; print('no such model'); sys.exit(3)")
    with pytest.raises(ServerFailed, match=r"exit status 3[\s\S]*no such model"), server:
        pytest.fail("a dead server must not be entered")


def test_slow_start_is_given_up_and_stopped(tmp_path: Path) -> None:
    server = fake_server(tmp_path, env={"START_AFTER_S": "600"}, start_timeout_s=2.0)
    with pytest.raises(ServerFailed, match="got none within 2 s"), server:
        pytest.fail("an unhealthy server must not be entered")
    assert not is_running(server.pid) and not is_running(child_pid(server.log_path))


def test_port_of_another_server_is_refused(tmp_path: Path) -> None:
    """Its /health would answer for ours, and the requests would go to it."""
    with fake_server(tmp_path) as url:
        other = fake_server(tmp_path / "other", port=int(url.rpartition(":")[2]))
        with pytest.raises(ServerFailed, match="expected a free one"), other:
            pytest.fail("a foreign server must not be entered")


def test_progress_names_the_url(tmp_path: Path) -> None:
    progress = io.StringIO()
    with fake_server(tmp_path, progress=progress) as url:
        pass
    assert f"server ready on {url}" in progress.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["starting", "running"])
def test_signal_to_the_user_stops_the_group(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    """A program that waits inside the block (or for health) gets the signal, not the server."""
    log_path = tmp_path / "server.log"
    start_after_s = "600" if moment == "starting" else "0"
    program = (
        "import sys, time; from pathlib import Path\n"
        "from kvedit.workbench.server_process import ServerProcess\n"
        f"server = ServerProcess([], {{'START_AFTER_S': '{start_after_s}'}}, "
        f"Path({str(log_path)!r}), command=[sys.executable, '-c', {FAKE_SERVER!r}], "
        "stop_timeout_s=1.0)\n"
        "with server:\n    print('inside', flush=True)\n    time.sleep(600)\n"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert user.stdout is not None
    if moment == "running":
        assert user.stdout.readline() == b"inside\n"
    else:
        wait_for(lambda: log_path.exists() and "child" in log_path.read_text())
    child = child_pid(log_path)
    os.kill(user.pid, number)
    status = user.wait(timeout=30)
    user.stdout.close()
    assert status != 0
    assert not is_running(child)


def wait_for(condition: object, timeout_s: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)


def test_free_port_can_be_bound() -> None:
    assert 1024 <= free_port() <= 65535
