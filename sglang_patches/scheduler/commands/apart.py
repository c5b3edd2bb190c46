"""Where fields and skills keep out of each other: a skill is copied as it stands, so no declared
field may live in one, but in a memory."""

from __future__ import annotations

from kvedit.errors import Conflict
from kvedit.fields.book import Field
from kvedit.namespace import may_meet
from kvedit.skills.declaration import SkillDeclaration
from kvedit.skills.segment import State
from sglang_patches.scheduler.wiring.rooms import Rooms


def check_skill(rooms: Rooms, skill: SkillDeclaration) -> None:
    """A skill that comes after the fields. Raises Conflict."""
    fields = [f for f in rooms.edits.fields.all() if may_meet(f.namespace, skill.namespace)]
    if not fields:
        return
    text = rooms.edits.decode(skill.token_ids)
    names = [repr(field.name) for field in fields if field.prefix in text]
    if names:
        raise Conflict(
            f"kvedit: skill {skill.name!r}: expected a text without declared fields, or "
            f"memory=true, got the field {', '.join(names)}"
        )


def check_field(rooms: Rooms, field: Field) -> None:
    """A field that comes after the skills. Raises Conflict."""
    names = [
        repr(skill.segment.name)
        for skill in rooms.desk.registry.all()
        if skill.state not in (State.RETIRED, State.FAILED)
        and not skill.memory
        and may_meet(skill.segment.namespace, field.namespace)
        and field.prefix in rooms.edits.decode(skill.segment.token_ids)
    ]
    if names:
        raise Conflict(
            f"kvedit: field {field.name!r}: expected a pattern that stands in no skill "
            f"(but in a memory), got the skill {', '.join(names)}"
        )
