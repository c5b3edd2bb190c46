"""Events: orjson frames on a ZMQ PUB socket that only this user can reach.

Skill ready / evicted / retired / unpinned, splice realised / refused. The socket is ipc, mode
0600, in a fresh directory of mode 0700. Slow readers lose events; the scheduler never waits.
Only one rank has a publisher, and a server runs without one: nothing in here decides anything.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from pathlib import Path

import orjson
import zmq

from sglang_patches.guard import contained

TOPIC = b"kvedit"


class EventPublisher:
    """One PUB socket of one scheduler process. ``address`` goes into GET /kvedit/status."""

    def __init__(self, run_dir: Path) -> None:
        """Raises OSError where the folder cannot be made or its path is too long for a socket."""
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contained("prune_events"):
            _prune(run_dir)
        # mkdtemp makes the directory with mode 0700
        self._dir = Path(tempfile.mkdtemp(prefix=f"events-{os.getpid()}-", dir=run_dir))
        path = self._dir / "pub"
        self.address = f"ipc://{path}"
        self._socket: zmq.Socket[bytes] | None = None
        try:
            self._socket = zmq.Context.instance().socket(zmq.PUB)
            self._socket.setsockopt(zmq.SNDHWM, 1000)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(self.address)
            os.chmod(path, 0o600)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            number = error.errno or errno.EIO
            raise OSError(number, os.strerror(number)) from error  # zmq's text holds the path

    def publish(self, kind: str, **fields: object) -> None:
        """Send an event, whatever its fields hold; one that cannot be sent is counted."""
        with contained("events"):
            assert self._socket is not None  # else there is no publisher
            frame = orjson.dumps({"event": kind, "time": time.time(), **fields})
            self._socket.send_multipart([TOPIC, frame], flags=zmq.NOBLOCK)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        shutil.rmtree(self._dir, ignore_errors=True)  # nothing depends on it


def open_publisher(
    run_dir: Path, *, wanted: bool = True
) -> tuple[EventPublisher | None, str | None]:
    """(publisher, None), or (None, why there is none). The reason names no path: anybody may read
    it in GET /kvedit/status."""
    if not wanted:
        return None, None
    try:
        return EventPublisher(run_dir), None
    except OSError as error:
        return None, (
            "kvedit: events: expected a socket below KVEDIT_HOME, "
            f"got {error.strerror or type(error).__name__}: the server runs without events"
        )


def _prune(run_dir: Path) -> None:
    """Remove what ended servers left: a scheduler is killed, so it cannot clean up itself."""
    for folder in run_dir.glob("events-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)  # another server may be first
