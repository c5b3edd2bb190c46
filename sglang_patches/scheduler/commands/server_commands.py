"""What an operator asks of the scheduler: counts, segments, slots."""

from __future__ import annotations

from collections import Counter

from kvedit.splice.pass_price import MAX_BOUNDARIES
from kvedit.wire import commands as wire
from kvedit.wire.views import (
    AuditView,
    BoundaryView,
    PoolView,
    StatusView,
    TreeView,
    segment_view,
)
from sglang_patches import guard
from sglang_patches.host.protocols import Scheduler
from sglang_patches.scheduler.commands.audit import audit_scheduler
from sglang_patches.scheduler.commands.operation import Operation
from sglang_patches.scheduler.wiring.rooms import Rooms

MAX_PROBLEMS = 20
AUTO_WARNING = "kvedit: strategy auto: expected a quality profile, got none: serving edit+erratum"


def status(scheduler: Scheduler, rooms: Rooms, command: wire.ReadStatus) -> StatusView:
    publisher = rooms.reporter.publisher
    return StatusView(
        skills=dict(Counter(skill.state.value for skill in rooms.desk.registry.all())),
        fields=len(rooms.edits.fields),
        warnings=[*rooms.reporter.warnings, *_field_warnings(rooms)],
        counters=rooms.reporter.metrics.counters(hook_errors=dict(guard.errors)),
        pool=_pool(rooms),
        boundary=BoundaryView(
            price_tokens=rooms.config.boundary_tokens, max_per_request=MAX_BOUNDARIES
        ),
        queued_copies=len(rooms.copies.queue),
        weight_epoch=rooms.edits.weight_epoch,
        trust=rooms.config.trust,
        registry_version=rooms.desk.registry.version,
        events=None if publisher is None else publisher.address,
    )


def _field_warnings(rooms: Rooms) -> list[str]:
    has_auto = any(field.strategy == "auto" for field in rooms.edits.fields.all())
    return [AUTO_WARNING] * has_auto


def _pool(rooms: Rooms) -> PoolView:
    tree, pins = rooms.tree, rooms.desk.pins
    return PoolView(
        size=rooms.pool_size,
        pinned=pins.num_tokens,
        pin_budget=pins.budget_tokens,
        available=tree.token_to_kv_pool_allocator.available_size(),
        evictable=tree.evictable_size(),
        protected=tree.protected_size(),
    )


def tree(scheduler: Scheduler, rooms: Rooms, command: wire.ReadTree) -> TreeView:
    return TreeView(segments=[segment_view(skill) for skill in rooms.desk.registry.all()])


def audit(scheduler: Scheduler, rooms: Rooms, command: wire.RunAudit) -> AuditView:
    problems = audit_scheduler(scheduler)
    return AuditView(ok=not problems, problems=problems[:MAX_PROBLEMS])


OPERATIONS: dict[type, Operation] = {
    wire.ReadStatus: Operation(status),
    wire.ReadTree: Operation(tree),
    wire.RunAudit: Operation(audit),
}
