"""Events: orjson frames on a ZMQ PUB socket that only this user can reach.

Skill ready / evicted / retired / unpinned, splice realised / refused. The socket is ipc, mode
0600, in a fresh directory of mode 0700. Slow readers lose events; the scheduler never waits.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import orjson
import zmq

TOPIC = b"kvedit"


class EventPublisher:
    """One PUB socket of one scheduler process. ``address`` goes into GET /kvedit/status."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        _prune(run_dir)
        # mkdtemp makes the directory with mode 0700
        self._dir = Path(tempfile.mkdtemp(prefix=f"events-{os.getpid()}-", dir=run_dir))
        path = self._dir / "pub"
        self.address = f"ipc://{path}"
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 1000)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)
        os.chmod(path, 0o600)

    def publish(self, kind: str, **fields: object) -> None:
        frame = orjson.dumps({"event": kind, "time": time.time(), **fields})
        self._socket.send_multipart([TOPIC, frame], flags=zmq.NOBLOCK)


def _prune(run_dir: Path) -> None:
    """Remove what ended servers left: a scheduler is killed, so it cannot clean up itself."""
    for folder in run_dir.glob("events-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)  # another server may be first
