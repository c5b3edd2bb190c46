"""Events: orjson frames on a ZMQ PUB socket that only this user can reach.

Skill ready / evicted / retired / unpinned, splice realised / refused. The socket is ipc, mode
0600, in a fresh directory of mode 0700. Slow readers lose events; the scheduler never waits.
"""

from __future__ import annotations

import os
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
        self._dir = Path(tempfile.mkdtemp(prefix="events-", dir=run_dir))  # mode 0700
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
