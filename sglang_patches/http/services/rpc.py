"""Questions to the scheduler, carried by the host's internal-state request.

A client cannot reach this channel: it never chooses the ``rid`` of an internal-state request.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, TypeVar

from kvedit.errors import Unavailable
from kvedit.wire.commands import Command
from kvedit.wire.envelope import KEY, answer_in, seal
from sglang_patches.host.protocols import TokenizerManager

A = TypeVar("A")

# Calls in flight. The host's queue breaks when a call is cancelled (the late answer would be taken
# as the next caller's), so each call runs in a task of its own that nobody cancels.
_in_flight: set[asyncio.Task[Any]] = set()


async def call(
    manager: TokenizerManager, command: Command[A], *, timeout_s: float | None = None
) -> A:
    """Send ``command`` and return its answer.

    Raises the KvEditError that the scheduler answered, or Unavailable after ``timeout_s`` seconds
    (the call itself goes on) and for an answer that is not ours.
    """
    task = start(manager, command)
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        raise Unavailable(
            f"kvedit: {command.op}: expected an answer within {timeout_s} s, got none yet"
        )
    return task.result()


def start(manager: TokenizerManager, command: Command[A]) -> asyncio.Task[A]:
    """Begin a call; the task must not be cancelled."""
    task = asyncio.create_task(_ask(manager, command))
    _in_flight.add(task)
    task.add_done_callback(_forget)
    return task


def _forget(task: asyncio.Task[Any]) -> None:
    _in_flight.discard(task)
    if not task.cancelled():
        task.exception()  # marks it as seen: the caller may have left


async def _ask(manager: TokenizerManager, command: Command[A]) -> A:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    nonce = secrets.token_hex(8)
    manager.auto_create_handle_loop()
    request = GetInternalStateReq(rid=seal(command, nonce))
    answers = await manager.get_internal_state_communicator(request)
    return answer_in(answers[0].internal_state.get(KEY), nonce, command)
