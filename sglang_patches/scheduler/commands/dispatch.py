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
from kvedit.skills.registry import Segment, Skill
from kvedit.splice.pass_price import MAX_BOUNDARIES
from sglang_patches import guard
from sglang_patches.scheduler.commands import field_commands, testing_commands
from sglang_patches.scheduler.commands.audit import audit_scheduler
from sglang_patches.scheduler.runtime import Runtime
from sglang_patches.scheduler.splice.tree import KvEditCache

PREFIX = "kvedit:"
Command = dict[str, Any]


def internal_state_hook(original: Callable[..., Any], controller: Any, recv_req: Any) -> Any:
    """AROUND ``SchedulerInternalStateController.get_internal_state``."""
    rid = recv_req.rid
    cache = controller.scheduler.tree_cache
    if not (isinstance(rid, str) and rid.startswith(PREFIX) and isinstance(cache, KvEditCache)):
        return original(controller, recv_req)
    command: Command = orjson.loads(rid[len(PREFIX) :])
    return GetInternalStateReqOutput(
        internal_state={
            "nonce": command["nonce"],
            "kvedit": _answer(controller.scheduler, cache.runtime, command),
        }
    )


def _answer(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    """The same on every rank. After an internal error on one, nothing is left of what the command
    has begun: a skill or field that was being declared is gone."""
    begun: list[Command] = []

    def undo() -> None:
        for started in begun:
            _undo(runtime, started)

    with guard.boundary("rpc", undo) as hook:
        guard.trip("rpc")
        guard.agree()
        begun.append(command)
        answer = _run(scheduler, runtime, command)
    if hook.is_well:
        return answer
    reason = hook.error or "on another rank"
    message = f"kvedit: {command.get('op')}: internal error: {reason}"
    return {"error": {"status": 500, "message": message}}


def _run(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    try:
        operation = _OPERATIONS.get(command["op"])
        if operation is None:
            raise BadRequest(f"kvedit: op: expected a known one, got {command['op']!r}")
        return operation(scheduler, runtime, command)
    except KvEditError as error:
        return {"error": {"status": error.status, "message": str(error)}}


def _undo(runtime: Runtime, command: Command) -> None:
    """A plain rule for a rare error: what the command names is dropped."""
    operation = command.get("op")
    try:
        if operation == "register" or (operation == "remove" and command["purge"]):
            _purge(runtime, command["name"], command["ns"])
        elif operation == "remove":
            runtime.registry.retire(command["name"], command["ns"])
        elif operation == "recompile":
            runtime.compile_failed(command["rid"], "internal error, see the server's log")
        elif operation == "field_declare":
            runtime.fields.remove(command["declaration"]["name"], command["ns"])
        elif operation == "field_remove":
            runtime.fields.remove(command["name"], command["ns"])
    except (KvEditError, KeyError):
        return  # it had not come that far, or was done already


def _purge(runtime: Runtime, name: str, namespace: str) -> list[Segment]:
    dropped = runtime.registry.purge(name, namespace)
    for segment in dropped:
        runtime.pins.release(segment.number)
    return dropped


def _register(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    runtime.secret = runtime.secret or command["secret"]
    ids, prefix = array("q", command["ids"]), array("q", command["prefix"])
    if not command["memory"]:
        field_commands.check_skill_text(runtime, command["name"], command["ns"], ids)
    if command["pin"]:
        current = runtime.registry.find(command["name"], command["ns"])
        runtime.pins.check(len(ids) + len(prefix), but=current)
    declared = runtime.registry.declare(
        name=command["name"],
        namespace=command["ns"],
        token_ids=ids,
        compile_prefix=prefix,
        seam=command["seam"],
        pin=command["pin"],
        replace=command["replace"],
        memory=command["memory"],
        rid=command["rid"],
    )
    skill = declared.skill
    runtime.forget_dropped()
    runtime.settle_pins()
    if skill.pin and declared.outcome == "compile":
        runtime.pins.promise(skill.number, len(ids) + len(prefix))
    elif skill.pin and not skill.pinned:
        runtime.pin_ready(skill)
    return {"outcome": declared.outcome, "skill": _with_note(runtime, skill)}


def _compile_failed(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    skill = runtime.compile_failed(command["rid"], command["reason"])
    # without a skill it finished after all, or its own hook reported the failure
    return {} if skill is None else {"skill": skill.view()}


def _recompile(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    runtime.secret = runtime.secret or command["secret"]
    outcome = runtime.registry.recompile(command["number"], command["rid"])
    skill = runtime.registry.by_number(command["number"])
    if skill is None:
        return {"outcome": outcome}
    segment = skill.segment
    return {
        "outcome": outcome,
        "ids": segment.token_ids.tolist(),
        "prefix": segment.compile_prefix.tolist(),
    }


def _show(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    skill = runtime.registry.get(command["name"], command["ns"])
    return {"skill": _with_note(runtime, skill)}


def _with_note(runtime: Runtime, skill: Skill) -> dict[str, Any]:
    note = runtime.note_on(skill.segment)
    return skill.view() if note is None else {**skill.view(), "note": note}


def _list(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    registry = runtime.registry
    skills = registry.all() if command["all"] else registry.listed(command["ns"])
    return {"skills": [_with_note(runtime, skill) for skill in skills]}


def _remove(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    registry, name, namespace = runtime.registry, command["name"], command["ns"]
    if command["purge"]:
        view = registry.named(name, namespace).view()
        dropped = _purge(runtime, name, namespace)
    else:
        skill = registry.retire(name, namespace)
        runtime.settle_pins()
        view, dropped = skill.view(), []
    runtime.forget_dropped()
    runtime.publish("skill_retired", skill=name, dropped=len(dropped))
    return {"skill": view, "dropped": len(dropped)}


def _status(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    cache = scheduler.tree_cache
    states = Counter(skill.state.value for skill in runtime.registry.all())
    fields = field_commands.status(runtime)
    return {
        "skills": dict(states),
        **fields,
        "warnings": [*runtime.warnings, *fields["warnings"]],
        "counters": {**runtime.metrics.to_status(), "hook_errors": dict(guard.errors)},
        "pool": {
            "size": runtime.pool_size,
            "pinned": runtime.pins.num_tokens,
            "pin_budget": runtime.pins.budget_tokens,
            "available": cache.token_to_kv_pool_allocator.available_size(),
            "evictable": cache.evictable_size(),
            "protected": cache.protected_size(),
        },
        "boundary": {
            "price_tokens": runtime.config.boundary_tokens,
            "max_per_request": MAX_BOUNDARIES,
        },
        "queued_copies": len(runtime.copies),
        "weight_epoch": runtime.weight_epoch,
        "trust": runtime.config.trust,
        "registry_version": runtime.registry.version,
        "events": None if runtime.publisher is None else runtime.publisher.address,
    }


def _tree(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    return {"segments": [_segment_view(skill) for skill in runtime.registry.all()]}


def _segment_view(skill: Skill) -> dict[str, Any]:
    segment = skill.segment
    return {
        **skill.view(),
        "namespace": segment.namespace,
        "compile_prefix_tokens": len(segment.compile_prefix),
        "last_used": skill.last_used,
    }


def _audit(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    problems = audit_scheduler(scheduler)
    return {"ok": not problems, "problems": problems[:20]}


_OPERATIONS: dict[str, Callable[[Any, Runtime, Command], dict[str, Any]]] = {
    "register": _register,
    "compile_failed": _compile_failed,
    "recompile": _recompile,
    "show": _show,
    "list": _list,
    "remove": _remove,
    "status": _status,
    "tree": _tree,
    "audit": _audit,
    "fault": testing_commands.fault,
    "dump": testing_commands.dump,
    "shift_error": testing_commands.shift_error,
    "ranks": testing_commands.ranks,
    "served": testing_commands.served,
    **field_commands.OPERATIONS,
}
