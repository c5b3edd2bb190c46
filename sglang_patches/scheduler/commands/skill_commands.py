"""The scheduler's end of the skill commands."""

from __future__ import annotations

from kvedit.skills.segment import Skill
from kvedit.wire import commands as wire
from kvedit.wire.views import RemovedView, SkillsView, SkillView, removed_view, skill_view
from sglang_patches.host.protocols import Scheduler
from sglang_patches.scheduler.commands import apart
from sglang_patches.scheduler.commands.operation import Operation
from sglang_patches.scheduler.skills.desk import SkillDesk
from sglang_patches.scheduler.wiring.rooms import Rooms


def register(scheduler: Scheduler, rooms: Rooms, command: wire.RegisterSkill) -> wire.Registered:
    desk = rooms.desk
    desk.secret = desk.secret or command.secret
    if not command.skill.memory:
        apart.check_skill(rooms, command.skill)
    declared = desk.declare(command.skill, command.rid)
    return wire.Registered(outcome=declared.outcome, skill=_view(desk, declared.skill))


def compile_failed(
    scheduler: Scheduler, rooms: Rooms, command: wire.ReportCompileFailure
) -> wire.CompileFailure:
    skill = rooms.desk.compile_failed(command.rid, command.reason)
    return wire.CompileFailure(skill=None if skill is None else skill_view(skill))


def recompile(scheduler: Scheduler, rooms: Rooms, command: wire.RecompileSkill) -> wire.Recompile:
    desk = rooms.desk
    desk.secret = desk.secret or command.secret
    outcome = desk.recompile(command.number, command.rid)
    skill = desk.registry.by_number(command.number)
    if skill is None:
        return wire.Recompile(outcome=outcome)
    segment = skill.segment
    return wire.Recompile(
        outcome=outcome, ids=segment.token_ids.tolist(), prefix=segment.compile_prefix.tolist()
    )


def show(scheduler: Scheduler, rooms: Rooms, command: wire.ShowSkill) -> SkillView:
    return _view(rooms.desk, rooms.desk.registry.get(command.name, command.namespace))


def listed(scheduler: Scheduler, rooms: Rooms, command: wire.ListSkills) -> SkillsView:
    registry = rooms.desk.registry
    skills = registry.all() if command.everything else registry.listed(command.namespace)
    return SkillsView(skills=[_view(rooms.desk, skill) for skill in skills])


def remove(scheduler: Scheduler, rooms: Rooms, command: wire.RemoveSkill) -> RemovedView:
    desk, name, namespace = rooms.desk, command.name, command.namespace
    if command.purge:
        last = skill_view(desk.registry.named(name, namespace))
        num_dropped = len(desk.purge(name, namespace))
    else:
        last, num_dropped = skill_view(desk.retire(name, namespace)), 0
    rooms.reporter.publish("skill_retired", skill=name, dropped=num_dropped)
    return removed_view(last, is_purged=command.purge, dropped=num_dropped)


def _view(desk: SkillDesk, skill: Skill) -> SkillView:
    return skill_view(skill, desk.note_on(skill.segment))


def _undo_register(rooms: Rooms, command: wire.RegisterSkill) -> None:
    rooms.desk.purge(command.skill.name, command.skill.namespace)


def _undo_recompile(rooms: Rooms, command: wire.RecompileSkill) -> None:
    rooms.desk.compile_failed(command.rid, "internal error, see the server's log")


def _finish_removal(rooms: Rooms, command: wire.RemoveSkill) -> None:
    end = rooms.desk.purge if command.purge else rooms.desk.retire
    end(command.name, command.namespace)


OPERATIONS: dict[type, Operation] = {
    wire.RegisterSkill: Operation(register, _undo_register),
    wire.ReportCompileFailure: Operation(compile_failed),
    wire.RecompileSkill: Operation(recompile, _undo_recompile),
    wire.ShowSkill: Operation(show),
    wire.ListSkills: Operation(listed),
    wire.RemoveSkill: Operation(remove, _finish_removal),
}
