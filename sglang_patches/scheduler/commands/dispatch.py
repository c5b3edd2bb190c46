"""The scheduler's end of kvedit's RPC: commands that no client can send.

A command travels in the request id of the host's internal-state request (``kvedit.wire``). The
HTTP process spells that id itself; /server_info makes a fresh one. The request is broadcast in
the same ordered stream as generate requests, so all tensor-parallel ranks act alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import GetInternalStateReqOutput

from kvedit.errors import BadRequest, KvEditError
from kvedit.wire import envelope
from kvedit.wire.commands import AnyCommand, RunTestOperation
from sglang_patches import guard
from sglang_patches.host.protocols import ReceivedRequest, Scheduler
from sglang_patches.scheduler.commands import field_commands, server_commands, skill_commands
from sglang_patches.scheduler.commands.operation import Operation
from sglang_patches.scheduler.wiring.rooms import Rooms, rooms_of


def internal_state_hook(
    original: Callable[..., Any], controller: Any, recv_req: ReceivedRequest
) -> Any:
    """AROUND ``SchedulerInternalStateController.get_internal_state``."""
    rooms = rooms_of(controller.scheduler.tree_cache)
    if rooms is None or not envelope.is_command(recv_req.rid):
        return original(controller, recv_req)
    text = answered(controller.scheduler, rooms, recv_req.rid)
    return GetInternalStateReqOutput(internal_state={envelope.KEY: text})


def answered(scheduler: Scheduler, rooms: Rooms, text: str) -> str:
    """The reply to a command, as text; the same on every rank. After an internal error on one,
    nothing is left of what the command has begun."""
    nonce, op = "", "command"
    begun: list[AnyCommand] = []
    with guard.boundary("rpc", lambda: _undo(rooms, begun)) as hook:
        try:
            letter = envelope.unseal(text)
            nonce = letter.nonce
            command = envelope.command_in(letter)
            op = command.op
        except BadRequest as error:
            reply = envelope.reply(nonce, error)
        else:
            guard.agree("command")
            begun.append(command)
            reply = envelope.reply(nonce, _run(scheduler, rooms, command))
    if hook.is_well:
        return reply
    why = hook.error or "on another rank"
    return envelope.reply(nonce, KvEditError(f"kvedit: {op}: internal error: {why}"))


def _run(scheduler: Scheduler, rooms: Rooms, command: AnyCommand) -> object:
    try:
        return _operation(rooms, command).run(scheduler, rooms, command)
    except KvEditError as error:
        return error


def _undo(rooms: Rooms, begun: list[AnyCommand]) -> None:
    for command in begun:
        try:
            _operation(rooms, command).undo(rooms, command)
        except KvEditError:
            continue  # it had not come that far, or was done already


_OPERATIONS = {
    **skill_commands.OPERATIONS,
    **field_commands.OPERATIONS,
    **server_commands.OPERATIONS,
}


def _operation(rooms: Rooms, command: AnyCommand) -> Operation:
    if not isinstance(command, RunTestOperation):
        return _OPERATIONS[type(command)]
    if not rooms.config.testing:
        raise BadRequest("kvedit: testing: expected a server started with KVEDIT_TESTING=1")
    from sglang_patches.scheduler.testing.operations import OPERATION

    return OPERATION
