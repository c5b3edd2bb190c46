"""Questions to the scheduler, carried by the host's internal-state request.

A client cannot reach this channel: it never chooses the ``rid`` of an internal-state request.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from kvedit.errors import Unavailable, from_status

RID_PREFIX = "kvedit:"

# Calls in flight. The host's queue breaks when a call is cancelled (the late answer would be taken
# as the next caller's), so each call runs in a task of its own that nobody cancels.
_in_flight: set[asyncio.Task[dict[str, Any]]] = set()


async def call(
    manager: Any, command: dict[str, Any], *, timeout_s: float | None = None
) -> dict[str, Any]:
    """Send ``command`` ({"op": ...}) and return the answer.

    Raises the KvEditError that the scheduler answered, or Unavailable after ``timeout_s`` seconds
    (the call itself goes on) and for an answer that is not ours.
    """
    task = start(manager, command)
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        raise Unavailable(
            f"kvedit: {command['op']}: expected an answer within {timeout_s} s, got none yet"
        )
    return task.result()


def start(manager: Any, command: dict[str, Any]) -> asyncio.Task[dict[str, Any]]:
    """Begin a call; the task must not be cancelled."""
    task = asyncio.create_task(_ask(manager, command))
    _in_flight.add(task)
    task.add_done_callback(_forget)
    return task


def _forget(task: asyncio.Task[dict[str, Any]]) -> None:
    _in_flight.discard(task)
    if not task.cancelled():
        task.exception()  # marks it as seen: the caller may have left


async def _ask(manager: Any, command: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    nonce = secrets.token_hex(8)
    manager.auto_create_handle_loop()
    rid = RID_PREFIX + json.dumps({**command, "nonce": nonce}, separators=(",", ":"))
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=rid))
    reply = answers[0].internal_state
    if reply.get("nonce") != nonce or not isinstance(reply.get("kvedit"), dict):
        raise Unavailable(
            f"kvedit: {command['op']}: expected the scheduler's answer, got a stranger's"
        )
    answer: dict[str, Any] = reply["kvedit"]
    if "error" in answer:
        raise from_status(int(answer["error"]["status"]), str(answer["error"]["message"]))
    return answer
