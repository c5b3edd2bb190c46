"""The JSON objects that clients see of skills, fields and the server."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kvedit.fields.book import Field
from kvedit.fields.declaration import Where
from kvedit.namespace import SHARED
from kvedit.request.strategy import Strategy
from kvedit.skills.segment import Skill

SkillState = Literal["compiling", "ready", "evicted", "retired", "failed", "purged"]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """``stale``: an older answer, shown while the scheduler was deep in a forward pass."""

    stale: bool | UnsetType = UNSET


class SkillView(View, frozen=True, kw_only=True):
    """id: names the content under this model and weights. segment: names it in spans, in events
    and in the tree. num_tokens: without the compile prefix. seam: in tokens; null: the server's
    default. uses: splices so far. reason: why its last compile failed. note: what its owner
    should know."""

    name: str
    id: str
    segment: int
    version: int
    num_tokens: int
    state: SkillState
    shared: bool
    pinned: bool
    memory: bool
    seam: int | None
    uses: int
    reason: str | None
    note: str | UnsetType = UNSET


class RemovedView(SkillView, frozen=True, kw_only=True):
    """dropped: how many forms of the skill a purge took out of the cache."""

    dropped: int


class SegmentView(SkillView, frozen=True, kw_only=True):
    """last_used: by the registry's own clock, which counts events."""

    namespace: str
    compile_prefix_tokens: int
    last_used: int


class SkillsView(View, frozen=True, kw_only=True):
    """In order of segment number."""

    skills: list[SkillView]


class TreeView(View, frozen=True, kw_only=True):
    """The skills of all namespaces, in order of segment number."""

    segments: list[SegmentView]


class AuditView(View, frozen=True, kw_only=True):
    """Whether every slot of the pool has exactly one owner."""

    ok: bool
    problems: list[str]


class WhereView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a role, or the first ``within`` tokens of raw text."""

    role: str | UnsetType = UNSET
    occurrence: int | UnsetType = UNSET
    within: int | UnsetType = UNSET


class FieldView(View, frozen=True, kw_only=True):
    """A declared field. ``field``: its number, which is never used again."""

    name: str
    pattern: str
    strategy: Strategy
    base: str | None
    where: WhereView
    anchor: str | None
    template: str
    cross_request: bool
    field: int
    shared: bool


class DeclaredView(FieldView, frozen=True, kw_only=True):
    """created: it is new or other content than before; false: the same declaration again."""

    created: bool


class FieldsView(View, frozen=True, kw_only=True):
    """In order of field number."""

    fields: list[FieldView]


class SpliceCount(msgspec.Struct, frozen=True, kw_only=True):
    """reason: of what was refused, else ""."""

    outcome: str
    reason: str
    count: int


class EditCount(msgspec.Struct, frozen=True, kw_only=True):
    """base: what the edit was served on, as in a report."""

    kind: str
    base: str
    count: int


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start. tokens: of prompts, by class. hook_errors: unexpected errors, by hook."""

    tokens: dict[str, int]
    splices: list[SpliceCount]
    edits: list[EditCount]
    hook_errors: dict[str, int]


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """In tokens."""

    size: int
    pinned: int
    pin_budget: int
    available: int
    evictable: int
    protected: int


class BoundaryView(msgspec.Struct, frozen=True, kw_only=True):
    """What a forced chunk boundary counts for, in tokens, and how many a request may have."""

    price_tokens: int
    max_per_request: int


class StatusView(View, frozen=True, kw_only=True):
    """skills: how many by state. events: where they come out (administrators only). exact,
    reports: as the server was started."""

    skills: dict[str, int]
    fields: int
    warnings: list[str]
    counters: Counters
    pool: PoolView
    boundary: BoundaryView
    queued_copies: int
    weight_epoch: int
    trust: str
    registry_version: int
    events: str | None | UnsetType = UNSET
    exact: bool | UnsetType = UNSET
    reports: bool | UnsetType = UNSET


def skill_view(skill: Skill, note: str | None = None) -> SkillView:
    """A skill as its clients see it."""
    return SkillView(**_shown(skill), note=UNSET if note is None else note)


def removed_view(view: SkillView, *, is_purged: bool, dropped: int) -> RemovedView:
    """A skill as it was last, now removed."""
    last = msgspec.structs.asdict(view) | {"dropped": dropped}
    return RemovedView(**(last | {"state": "purged", "pinned": False} if is_purged else last))


def segment_view(skill: Skill) -> SegmentView:
    """A skill as administrators see it."""
    segment = skill.segment
    return SegmentView(
        **_shown(skill),
        namespace=segment.namespace,
        compile_prefix_tokens=len(segment.compile_prefix),
        last_used=skill.last_used,
    )


def _shown(skill: Skill) -> dict[str, Any]:
    segment = skill.segment
    return {
        "name": segment.name,
        "id": segment.identity,
        "segment": segment.number,
        "version": segment.version,
        "num_tokens": segment.num_tokens,
        "state": skill.state.value,
        "shared": segment.namespace == SHARED,
        "pinned": skill.pinned,
        "memory": skill.memory,
        "seam": segment.seam,
        "uses": skill.num_uses,
        "reason": skill.failed_reason,
    }


def field_view(field: Field) -> FieldView:
    """A field as clients see it."""
    return FieldView(
        name=field.name,
        pattern=field.pattern,
        strategy=field.strategy,
        base=field.base,
        where=_where_view(field.where),
        anchor=field.anchor,
        template=field.template,
        cross_request=field.cross_request,
        field=field.number,
        shared=field.namespace == SHARED,
    )


def declared_view(field: Field, *, created: bool) -> DeclaredView:
    """created: it is new or other content than before; False: the same declaration again."""
    return DeclaredView(**msgspec.structs.asdict(field_view(field)), created=created)


def _where_view(where: Where) -> WhereView:
    if where.role is None:
        return WhereView(within=UNSET if where.within is None else where.within)
    return WhereView(role=where.role, occurrence=where.occurrence)
