"""Every command of the HTTP process to the scheduler, with the answer that it gets.

No client can send one. A command reaches all tensor-parallel ranks in one ordered stream with the
requests, so every rank runs the same commands at the same places.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from kvedit.fields.declaration import Declaration
from kvedit.skills.declaration import SkillDeclaration
from kvedit.text.chat import ChatForm
from kvedit.wire.views import (
    AuditView,
    DeclaredView,
    FieldsView,
    FieldView,
    RemovedView,
    SkillsView,
    SkillView,
    StatusView,
    TreeView,
)

A = TypeVar("A")


class Command(
    msgspec.Struct,
    Generic[A],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="op",
):
    """A question or an order; ``A`` is what the scheduler answers."""

    @classmethod
    def answer_type(cls) -> type[A]:
        """The type that the class was declared with: what its answer is decoded as."""
        answer: type[A] = get_args(vars(cls)["__orig_bases__"][0])[0]
        return answer

    @property
    def op(self) -> str:
        """Its name, as errors tell it."""
        return str(self.__struct_config__.tag)


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """One thing of a namespace (a namespace tag, or SHARED)."""

    name: str
    namespace: str


# ---- skills


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """``compile``: the HTTP process now sends the compile request that it announced."""

    outcome: Literal["exists", "compile"]
    skill: SkillView


class RegisterSkill(Command[Registered], frozen=True, kw_only=True, tag="register"):
    """rid: of the compile request that follows where the text is new. secret: part of the skills'
    tree namespace; the first one counts."""

    skill: SkillDeclaration
    rid: str
    secret: str


class CompileFailure(msgspec.Struct, frozen=True, kw_only=True):
    """skill: null when it finished after all, or its own hook reported the failure."""

    skill: SkillView | None


class ReportCompileFailure(
    Command[CompileFailure], frozen=True, kw_only=True, tag="compile_failed"
):
    """The compile request ``rid`` ended without KV; reason: in words, for the skill's owner."""

    rid: str
    reason: str


class Recompile(msgspec.Struct, frozen=True, kw_only=True):
    """With ``compile`` come the tokens to prefill: ``prefix`` and then ``ids``."""

    outcome: Literal["compile", "busy", "gone", "ready"]
    ids: list[int] = []
    prefix: list[int] = []


class RecompileSkill(Command[Recompile], frozen=True, kw_only=True, tag="recompile"):
    """number: of the segment to compile again. rid: of the request that would do it. secret: as in
    RegisterSkill."""

    number: int
    rid: str
    secret: str


class ShowSkill(Command[SkillView], Named, frozen=True, kw_only=True, tag="show"):
    """The skill of this namespace, else the shared one."""


class ListSkills(Command[SkillsView], frozen=True, kw_only=True, tag="list"):
    """Those of the namespace and the shared ones; ``everything``: all."""

    namespace: str
    everything: bool


class RemoveSkill(Command[RemovedView], Named, frozen=True, kw_only=True, tag="remove"):
    """Retire the skill of exactly this namespace; purge: drop it with all its cached paths."""

    purge: bool


# ---- fields


class DeclareField(Command[DeclaredView], frozen=True, kw_only=True, tag="field_declare"):
    """form: the host's chat form, sent along with every field that has a role."""

    declaration: Declaration
    namespace: str
    form: ChatForm | None


class ShowField(Command[FieldView], Named, frozen=True, kw_only=True, tag="field_show"):
    """The field of this namespace, else the shared one."""


class ListFields(Command[FieldsView], frozen=True, kw_only=True, tag="field_list"):
    """Those of the namespace and the shared ones."""

    namespace: str


class RemoveField(Command[FieldView], Named, frozen=True, kw_only=True, tag="field_remove"):
    """The field of exactly this namespace."""


# ---- the server


class ReadStatus(Command[StatusView], frozen=True, kw_only=True, tag="status"):
    """Counts, pool and settings; asks nothing of the device."""


class ReadTree(Command[TreeView], frozen=True, kw_only=True, tag="tree"):
    """The segments of all namespaces."""


class RunAudit(Command[AuditView], frozen=True, kw_only=True, tag="audit"):
    """Count the owners of every slot of the pool."""


class RunTestOperation(Command[dict[str, Any]], frozen=True, kw_only=True, tag="testing"):
    """Only a server that was started for testing knows any."""

    operation: str
    arguments: dict[str, Any]


AnyCommand = (
    RegisterSkill
    | ReportCompileFailure
    | RecompileSkill
    | ShowSkill
    | ListSkills
    | RemoveSkill
    | DeclareField
    | ShowField
    | ListFields
    | RemoveField
    | ReadStatus
    | ReadTree
    | RunAudit
    | RunTestOperation
)
