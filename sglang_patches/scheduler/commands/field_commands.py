"""The scheduler's end of the field commands."""

from __future__ import annotations

from kvedit.errors import BadRequest, Unsupported
from kvedit.text.tokens import TokenText
from kvedit.wire import commands as wire
from kvedit.wire.views import DeclaredView, FieldsView, FieldView, declared_view, field_view
from sglang_patches.host.protocols import Scheduler
from sglang_patches.scheduler.commands import apart
from sglang_patches.scheduler.commands.operation import Operation
from sglang_patches.scheduler.wiring.rooms import Rooms


def declare(scheduler: Scheduler, rooms: Rooms, command: wire.DeclareField) -> DeclaredView:
    declaration, namespace, edits = command.declaration, command.namespace, rooms.edits
    form = command.form or edits.chat_form
    if declaration.where.role is not None and form is None:
        raise BadRequest("kvedit: where.role: expected a known chat form, got none")
    special_texts = _special_texts(rooms)
    current, wanted = edits.fields.preview(declaration, namespace, special_texts)
    if current is not wanted:
        apart.check_field(rooms, wanted)
    field, created = edits.fields.declare(declaration, namespace, special_texts)
    if created:
        rooms.reporter.publish("field_declared", field=field.name)
    edits.chat_form = form
    return declared_view(field, created=created)


def remove(scheduler: Scheduler, rooms: Rooms, command: wire.RemoveField) -> FieldView:
    field = rooms.edits.fields.remove(command.name, command.namespace)
    rooms.reporter.publish("field_removed", field=field.name)
    return field_view(field)


def show(scheduler: Scheduler, rooms: Rooms, command: wire.ShowField) -> FieldView:
    return field_view(rooms.edits.fields.get(command.name, command.namespace))


def listed(scheduler: Scheduler, rooms: Rooms, command: wire.ListFields) -> FieldsView:
    fields = rooms.edits.fields.listed(command.namespace)
    return FieldsView(fields=[field_view(field) for field in fields])


def _special_texts(rooms: Rooms) -> frozenset[str]:
    if rooms.edits.tokenizer is None:
        raise BadRequest("kvedit: fields: expected a tokenizer, got --skip-tokenizer-init")
    try:
        return TokenText(rooms.edits.tokenizer).special_texts
    except Unsupported as error:  # of this server, but it is this request that cannot be met
        raise BadRequest(f"kvedit: fields: {'; '.join(error.reasons)}") from error


def _undo_declare(rooms: Rooms, command: wire.DeclareField) -> None:
    rooms.edits.fields.remove(command.declaration.name, command.namespace)


def _finish_removal(rooms: Rooms, command: wire.RemoveField) -> None:
    rooms.edits.fields.remove(command.name, command.namespace)


OPERATIONS: dict[type, Operation] = {
    wire.DeclareField: Operation(declare, _undo_declare),
    wire.RemoveField: Operation(remove, _finish_removal),
    wire.ShowField: Operation(show),
    wire.ListFields: Operation(listed),
}
