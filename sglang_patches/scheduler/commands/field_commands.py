"""The scheduler's end of the field commands, and where fields and skills keep out of each other."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from kvedit.errors import BadRequest, Conflict, Unsupported
from kvedit.fields.book import Field
from kvedit.fields.declaration import Declaration
from kvedit.fields.declaration_parser import parse_declaration
from kvedit.namespace import SHARED
from kvedit.skills.segment import State
from kvedit.text.chat_probe import ChatForm
from kvedit.text.tokens import TokenText
from sglang_patches.scheduler.wiring.rooms import Rooms

Command = dict[str, Any]
AUTO_WARNING = "kvedit: strategy auto: expected a quality profile, got none: serving edit+erratum"


def declare(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    """``form``: the host's chat form as JSON, sent along with every field that has a role."""
    declaration = parse_declaration(command["declaration"])
    form = rooms.edits.chat_form if command["form"] is None else ChatForm.from_json(command["form"])
    if declaration.where.role is not None and form is None:
        raise BadRequest("kvedit: where.role: expected a known chat form, got none")
    namespace, special_texts = command["ns"], _special_texts(rooms)
    current, wanted = rooms.edits.fields.preview(declaration, namespace, special_texts)
    if current is not wanted:
        _check_skills(rooms, wanted)
    field, created = _commit(rooms, declaration, namespace, special_texts)
    rooms.edits.chat_form = form
    return {"field": field.view(), "created": created}


def _commit(
    rooms: Rooms, declaration: Declaration, namespace: str, special_texts: frozenset[str]
) -> tuple[Field, bool]:
    field, created = rooms.edits.fields.declare(declaration, namespace, special_texts)
    if created:
        rooms.reporter.publish("field_declared", field=field.name)
    return field, created


def remove(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    field = rooms.edits.fields.remove(command["name"], command["ns"])
    rooms.reporter.publish("field_removed", field=field.name)
    return {"field": field.view()}


def show(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    return {"field": rooms.edits.fields.get(command["name"], command["ns"]).view()}


def listed(scheduler: Any, rooms: Rooms, command: Command) -> dict[str, Any]:
    return {"fields": [field.view() for field in rooms.edits.fields.listed(command["ns"])]}


OPERATIONS: dict[str, Callable[[Any, Rooms, Command], dict[str, Any]]] = {
    "field_declare": declare,
    "field_remove": remove,
    "field_show": show,
    "field_list": listed,
}


def status(rooms: Rooms) -> dict[str, Any]:
    """The fields' part of the status answer."""
    auto = any(field.strategy == "auto" for field in rooms.edits.fields.all())
    return {"fields": len(rooms.edits.fields), "warnings": [AUTO_WARNING] if auto else []}


def check_skill_text(rooms: Rooms, name: str, namespace: str, ids: array[int]) -> None:
    """A skill is copied as it stands, so no field may live in it. Raises Conflict."""
    fields = _meeting(rooms, namespace)
    if not fields:
        return
    text = rooms.edits.decode(ids)
    names = [repr(field.name) for field in fields if field.prefix in text]
    if names:
        raise Conflict(
            f"kvedit: skill {name!r}: expected a text without declared fields, or memory=true, "
            f"got the field {', '.join(names)}"
        )


def _check_skills(rooms: Rooms, field: Field) -> None:
    """The other way round: a field that comes after the skills. Raises Conflict."""
    names = [
        repr(skill.segment.name)
        for skill in rooms.desk.registry.all()
        if skill.state not in (State.RETIRED, State.FAILED)
        and not skill.memory
        and _meet(skill.segment.namespace, field.namespace)
        and field.prefix in rooms.edits.decode(skill.segment.token_ids)
    ]
    if names:
        raise Conflict(
            f"kvedit: field {field.name!r}: expected a pattern that stands in no skill "
            f"(but in a memory), got the skill {', '.join(names)}"
        )


def _meeting(rooms: Rooms, namespace: str) -> list[Field]:
    """Fields that stand in some request together with a skill of ``namespace``."""
    return [field for field in rooms.edits.fields.all() if _meet(field.namespace, namespace)]


def _meet(one: str, other: str) -> bool:
    return one == other or SHARED in (one, other)


def _special_texts(rooms: Rooms) -> frozenset[str]:
    if rooms.edits.tokenizer is None:
        raise BadRequest("kvedit: fields: expected a tokenizer, got --skip-tokenizer-init")
    try:
        return TokenText(rooms.edits.tokenizer).special_texts
    except Unsupported as error:  # of this server, but it is this request that cannot be met
        raise BadRequest(f"kvedit: fields: {'; '.join(error.reasons)}") from error
