"""The scheduler's end of kvedit's RPC: commands that no client can send.

A command is JSON behind ``kvedit:`` in the request id of the host's internal-state request. The
HTTP process spells that id itself; /server_info makes a fresh one. The request is broadcast in
the same ordered stream as generate requests, so all tensor-parallel ranks act alike.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson
from sglang.srt.managers.io_struct import GetInternalStateReqOutput

from kvedit.errors import BadRequest, KvEditError
from kvedit.skills.segment import Skill
from kvedit.splice.pass_price import MAX_BOUNDARIES
from sglang_patches import guard
from sglang_patches.scheduler.commands import field_commands
from sglang_patches.scheduler.commands.audit import audit_scheduler
from sglang_patches.scheduler.skills.desk import SkillDesk
from sglang_patches.scheduler.wiring.rooms import Rooms, rooms_of

PREFIX = "kvedit:"
Command = dict[str, Any]


def internal_state_hook(original: Callable[..., Any], controller: Any, recv_req: Any) -> Any:
    """AROUND ``SchedulerInternalStateController.get_internal_state``."""
    rid = recv_req.rid
    rooms = rooms_of(controller.scheduler.tree_cache)
    if rooms is None or not (isinstance(rid, str) and rid.startswith(PREFIX)):
        return original(controller, recv_req)
    command: Command = orjson.loads(rid[len(PREFIX) :])
    return GetInternalStateReqOutput(
        internal_state={
            "nonce": command["nonce"],
            "kvedit": _answer(controller.scheduler, rooms, command),
        }
    )


def _answer(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    """The same on every rank. After an internal error on one, nothing is left of what the command
    has begun: a skill or field that was being declared is gone."""
    begun: list[Command] = []

    def undo() -> None:
        for started in begun:
            _undo(rooms, started)

    with guard.boundary("rpc", undo) as hook:
        guard.agree("command")
        begun.append(command)
        answer = _run(scheduler, rooms, command)
    if hook.is_well:
        return answer
    reason = hook.error or "on another rank"
    message = f"kvedit: {command.get('op')}: internal error: {reason}"
    return {"error": {"status": 500, "message": message}}


def _run(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    try:
        return _operation(rooms, command["op"])(scheduler, rooms, command)
    except KvEditError as error:
        return {"error": {"status": error.status, "message": str(error)}}


def _undo(rooms: Rooms, command: Command) -> None:
    """A plain rule for a rare error: what the command names is dropped."""
    operation = command.get("op")
    try:
        if operation == "register" or (operation == "remove" and command["purge"]):
            rooms.desk.purge(command["name"], command["ns"])
        elif operation == "remove":
            rooms.desk.retire(command["name"], command["ns"])
        elif operation == "recompile":
            rooms.desk.compile_failed(command["rid"], "internal error, see the server's log")
        elif operation == "field_declare":
            rooms.edits.fields.remove(command["declaration"]["name"], command["ns"])
        elif operation == "field_remove":
            rooms.edits.fields.remove(command["name"], command["ns"])
    except (KvEditError, KeyError):
        return  # it had not come that far, or was done already


def _register(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    desk = rooms.desk
    desk.secret = desk.secret or command["secret"]
    ids = array("q", command["ids"])
    if not command["memory"]:
        field_commands.check_skill_text(rooms, command["name"], command["ns"], ids)
    declared = desk.declare(
        name=command["name"],
        namespace=command["ns"],
        token_ids=ids,
        compile_prefix=array("q", command["prefix"]),
        seam=command["seam"],
        pin=command["pin"],
        replace=command["replace"],
        memory=command["memory"],
        rid=command["rid"],
    )
    return {"outcome": declared.outcome, "skill": _with_note(desk, declared.skill)}


def _compile_failed(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    skill = rooms.desk.compile_failed(command["rid"], command["reason"])
    # without a skill it finished after all, or its own hook reported the failure
    return {} if skill is None else {"skill": skill.view()}


def _recompile(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    desk = rooms.desk
    desk.secret = desk.secret or command["secret"]
    outcome = desk.recompile(command["number"], command["rid"])
    skill = desk.registry.by_number(command["number"])
    if skill is None:
        return {"outcome": outcome}
    segment = skill.segment
    return {
        "outcome": outcome,
        "ids": segment.token_ids.tolist(),
        "prefix": segment.compile_prefix.tolist(),
    }


def _show(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    skill = rooms.desk.registry.get(command["name"], command["ns"])
    return {"skill": _with_note(rooms.desk, skill)}


def _with_note(desk: SkillDesk, skill: Skill) -> dict[str, Any]:
    note = desk.note_on(skill.segment)
    return skill.view() if note is None else {**skill.view(), "note": note}


def _list(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    registry = rooms.desk.registry
    skills = registry.all() if command["all"] else registry.listed(command["ns"])
    return {"skills": [_with_note(rooms.desk, skill) for skill in skills]}


def _remove(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    desk, name, namespace = rooms.desk, command["name"], command["ns"]
    if command["purge"]:
        view = desk.registry.named(name, namespace).view()
        num_dropped = len(desk.purge(name, namespace))
    else:
        view, num_dropped = desk.retire(name, namespace).view(), 0
    rooms.reporter.publish("skill_retired", skill=name, dropped=num_dropped)
    return {"skill": view, "dropped": num_dropped}


def _status(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    tree, pins, publisher = rooms.tree, rooms.desk.pins, rooms.reporter.publisher
    states = Counter(skill.state.value for skill in rooms.desk.registry.all())
    fields = field_commands.status(rooms)
    return {
        "skills": dict(states),
        **fields,
        "warnings": [*rooms.reporter.warnings, *fields["warnings"]],
        "counters": {**rooms.reporter.metrics.to_status(), "hook_errors": dict(guard.errors)},
        "pool": {
            "size": rooms.pool_size,
            "pinned": pins.num_tokens,
            "pin_budget": pins.budget_tokens,
            "available": tree.token_to_kv_pool_allocator.available_size(),
            "evictable": tree.evictable_size(),
            "protected": tree.protected_size(),
        },
        "boundary": {
            "price_tokens": rooms.config.boundary_tokens,
            "max_per_request": MAX_BOUNDARIES,
        },
        "queued_copies": len(rooms.copies.queue),
        "weight_epoch": rooms.edits.weight_epoch,
        "trust": rooms.config.trust,
        "registry_version": rooms.desk.registry.version,
        "events": None if publisher is None else publisher.address,
    }


def _tree(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    return {"segments": [_segment_view(skill) for skill in rooms.desk.registry.all()]}


def _segment_view(skill: Skill) -> dict[str, Any]:
    segment = skill.segment
    return {
        **skill.view(),
        "namespace": segment.namespace,
        "compile_prefix_tokens": len(segment.compile_prefix),
        "last_used": skill.last_used,
    }


def _audit(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    problems = audit_scheduler(scheduler)
    return {"ok": not problems, "problems": problems[:20]}


Operation = Callable[[Any, Rooms, Command], dict[str, Any]]
_OPERATIONS: dict[str, Operation] = {
    "register": _register,
    "compile_failed": _compile_failed,
    "recompile": _recompile,
    "show": _show,
    "list": _list,
    "remove": _remove,
    "status": _status,
    "tree": _tree,
    "audit": _audit,
    **field_commands.OPERATIONS,
}


def _operation(rooms: Rooms, name: object) -> Operation:
    operations = _OPERATIONS
    if rooms.config.testing:
        from sglang_patches.scheduler.testing.operations import OPERATIONS

        operations = {**operations, **OPERATIONS}
    if not isinstance(name, str) or name not in operations:
        raise BadRequest(f"kvedit: op: expected a known one, got {name!r}")
    return operations[name]
