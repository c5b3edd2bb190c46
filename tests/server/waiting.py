"""Waiting for a state that the server reaches by itself. A limit, never a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.server.harness import Server

LIMIT_S = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until ``condition`` holds; AssertionError after LIMIT_S seconds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"expected {what} within {LIMIT_S:.0f} s"
        time.sleep(0.05)


def fresh_status(server: Server) -> dict[str, Any]:
    """The status of now: a busy server answers with the last one it knows, marked as such."""
    seen: list[Any] = []

    def is_fresh() -> bool:
        code, answer = server.status_of("GET", "/kvedit/status")
        seen.append(answer)
        return code == 200 and "stale" not in answer

    until(is_fresh, "an answer of the scheduler")
    status: dict[str, Any] = seen[-1]
    return status


def flushed(server: Server) -> None:
    """Empty the cache; the host refuses while anything runs, a background recompile too."""
    until(lambda: server.status_of("POST", "/flush_cache")[0] == 200, "a flush")


def quiet(server: Server) -> None:
    """Insist that no slot is lost and no lock is left. What still runs is waited for: background
    recompiles, and requests that are on their way although their clients have left."""
    until(lambda: num_held(server) == 0, "nothing to be running, locked or queued")
    assert not server.audit()


def num_held(server: Server) -> int:
    """Slots that are neither free nor evictable, locked ones, copies that wait, and skills that
    are being compiled."""
    status = fresh_status(server)
    pool = status["pool"]
    compiling: int = status["skills"].get("compiling", 0)
    held: int = pool["size"] - pool["available"] - pool["evictable"]
    locked: int = pool["protected"] + status["queued_copies"]
    return held + locked + compiling
