"""The scheduler's end of the field commands, and where fields and skills keep out of each other."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvedit.errors import BadRequest, Conflict, Unsupported
from kvedit.fields.book import Field
from kvedit.fields.declaration import Declaration, parse_declaration
from kvedit.namespace import SHARED
from kvedit.skills.registry import State
from kvedit.text.chat_probe import ChatForm
from kvedit.text.tokens import TokenText

if TYPE_CHECKING:
    from sglang_patches.scheduler.runtime import Runtime

Command = dict[str, Any]
AUTO_WARNING = "kvedit: strategy auto: expected a quality profile, got none: serving edit+erratum"


def declare(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    """``form``: the host's chat form as JSON, sent along with every field that has a role."""
    declaration = parse_declaration(command["declaration"])
    form = runtime.chat_form if command["form"] is None else ChatForm.from_json(command["form"])
    if declaration.where.role is not None and form is None:
        raise BadRequest("kvedit: where.role: expected a known chat form, got none")
    namespace, special_texts = command["ns"], _special_texts(runtime)
    current, wanted = runtime.fields.preview(declaration, namespace, special_texts)
    if current is not wanted:
        _check_skills(runtime, wanted)
    field, created = _commit(runtime, declaration, namespace, special_texts)
    runtime.chat_form = form
    return {"field": field.view(), "created": created}


def _commit(
    runtime: Runtime, declaration: Declaration, namespace: str, special_texts: frozenset[str]
) -> tuple[Field, bool]:
    field, created = runtime.fields.declare(declaration, namespace, special_texts)
    if created:
        runtime.publish("field_declared", field=field.name)
    return field, created


def remove(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    field = runtime.fields.remove(command["name"], command["ns"])
    runtime.publish("field_removed", field=field.name)
    return {"field": field.view()}


def show(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    return {"field": runtime.fields.get(command["name"], command["ns"]).view()}


def listed(scheduler: Any, runtime: Runtime, command: Command) -> dict[str, Any]:
    return {"fields": [field.view() for field in runtime.fields.listed(command["ns"])]}


OPERATIONS: dict[str, Callable[[Any, Runtime, Command], dict[str, Any]]] = {
    "field_declare": declare,
    "field_remove": remove,
    "field_show": show,
    "field_list": listed,
}


def status(runtime: Runtime) -> dict[str, Any]:
    """The fields' part of the status answer."""
    auto = any(field.strategy == "auto" for field in runtime.fields.all())
    return {"fields": len(runtime.fields), "warnings": [AUTO_WARNING] if auto else []}


def check_skill_text(runtime: Runtime, name: str, namespace: str, ids: array[int]) -> None:
    """A skill is copied as it stands, so no field may live in it. Raises Conflict."""
    fields = _meeting(runtime, namespace)
    if not fields:
        return
    text = runtime.decode(ids)
    names = [repr(field.name) for field in fields if field.prefix in text]
    if names:
        raise Conflict(
            f"kvedit: skill {name!r}: expected a text without declared fields, or memory=true, "
            f"got the field {', '.join(names)}"
        )


def _check_skills(runtime: Runtime, field: Field) -> None:
    """The other way round: a field that comes after the skills. Raises Conflict."""
    names = [
        repr(skill.segment.name)
        for skill in runtime.registry.all()
        if skill.state not in (State.RETIRED, State.FAILED)
        and not skill.memory
        and _meet(skill.segment.namespace, field.namespace)
        and field.prefix in runtime.decode(skill.segment.token_ids)
    ]
    if names:
        raise Conflict(
            f"kvedit: field {field.name!r}: expected a pattern that stands in no skill "
            f"(but in a memory), got the skill {', '.join(names)}"
        )


def _meeting(runtime: Runtime, namespace: str) -> list[Field]:
    """Fields that stand in some request together with a skill of ``namespace``."""
    return [field for field in runtime.fields.all() if _meet(field.namespace, namespace)]


def _meet(one: str, other: str) -> bool:
    return one == other or SHARED in (one, other)


def _special_texts(runtime: Runtime) -> frozenset[str]:
    if runtime.tokenizer is None:
        raise BadRequest("kvedit: fields: expected a tokenizer, got --skip-tokenizer-init")
    try:
        return TokenText(runtime.tokenizer).special_texts
    except Unsupported as error:  # of this server, but it is this request that cannot be met
        raise BadRequest(f"kvedit: fields: {'; '.join(error.reasons)}") from error
