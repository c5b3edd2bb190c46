"""Commands and answers survive the way between the processes, and nothing else does."""

from __future__ import annotations

from array import array
from typing import Any, get_args

import msgspec
import pytest

from kvedit.errors import BadRequest, Conflict, Unavailable
from kvedit.fields.declaration_parser import parse_declaration
from kvedit.skills.declaration import SkillDeclaration
from kvedit.text.chat import ChatForm
from kvedit.wire import commands as wire
from kvedit.wire.envelope import VERSION, answer_in, command_in, is_command, reply, seal, unseal
from kvedit.wire.views import AuditView, SkillView

SKILL = SkillDeclaration(
    name="policy", namespace="ns", token_ids=array("q", [5, 6]), compile_prefix=array("q", [1])
)
FIELD = parse_declaration({"name": "status", "pattern": "status: {value}", "where": {"within": 9}})
FORM = ChatForm(openers=(("user", (1, 2)),), closers=(), suffixes=((3,), (4, 5)))
EXAMPLES = [
    wire.RegisterSkill(skill=SKILL, rid="r", secret="s"),
    wire.ReportCompileFailure(rid="r", reason='of "all"'),
    wire.RecompileSkill(number=3, rid="r", secret="s"),
    wire.ShowSkill(name='"},{"op":"remove"', namespace="ns"),
    wire.ListSkills(namespace="ns", everything=True),
    wire.RemoveSkill(name="policy", namespace="ns", purge=True),
    wire.DeclareField(declaration=FIELD, namespace="ns", form=FORM),
    wire.DeclareField(declaration=FIELD, namespace="ns", form=None),
    wire.ShowField(name="status", namespace="ns"),
    wire.ListFields(namespace="ns"),
    wire.RemoveField(name="status", namespace="ns"),
    wire.ReadStatus(),
    wire.ReadTree(),
    wire.RunAudit(),
    wire.RunTestOperation(operation="fault", arguments={"hook": "intake", "times": 2}),
]


def test_every_command_has_an_example_and_an_operation() -> None:
    from sglang_patches.scheduler.commands import field_commands, server_commands, skill_commands

    kinds = set(get_args(wire.AnyCommand))
    assert kinds == {type(command) for command in EXAMPLES}
    tables = (field_commands, server_commands, skill_commands)
    operated = [kind for table in tables for kind in table.OPERATIONS]
    assert sorted(kind.__name__ for kind in operated) == sorted(
        kind.__name__ for kind in kinds - {wire.RunTestOperation}
    )


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda command: command.op)
def test_a_command_arrives_as_it_was_sent(command: Any) -> None:
    text = seal(command, "nonce")
    assert is_command(text)
    envelope = unseal(text)
    assert (envelope.nonce, command_in(envelope)) == ("nonce", command)


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda command: command.op)
def test_every_command_says_what_answers_it(command: Any) -> None:
    kind = command.answer_type()
    assert issubclass(kind, msgspec.Struct) or kind == dict[str, Any]


@pytest.mark.parametrize(
    "inside",
    [
        '{"op":"nobody"}',
        '{"op":"show","name":"x"}',
        '{"op":"show","name":"x","namespace":"n","more":1}',
        '{"op":"show","name":7,"namespace":"n"}',
        "[]",
        '{"op":"register","rid":"r","secret":"s","skill":{"name":"x"}}',
    ],
)
def test_what_is_no_command_is_refused(inside: str) -> None:
    text = f'kvedit:{{"version":{VERSION},"nonce":"n","command":{inside}}}'
    with pytest.raises(BadRequest, match="kvedit: command: expected"):
        command_in(unseal(text))


@pytest.mark.parametrize("text", ["kvedit:", "kvedit:{}", "kvedit:[1", "kvedit:null"])
def test_what_is_no_envelope_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="kvedit: command: expected an envelope"):
        unseal(text)


@pytest.mark.parametrize("text", [None, 5, "", "rid", "kvedi:"])
def test_ids_of_others_are_no_commands(text: object) -> None:
    assert not is_command(text)


def test_another_version_is_refused_on_both_sides() -> None:
    text = seal(wire.RunAudit(), "n").replace(f'"version":{VERSION}', '"version":99')
    with pytest.raises(BadRequest, match="expected version 1, got 99"):
        command_in(unseal(text))
    answer = reply("n", AuditView(ok=True, problems=[]))
    with pytest.raises(BadRequest, match="expected version 1, got 99"):
        answer_in(answer.replace(f'"version":{VERSION}', '"version":99'), "n", wire.RunAudit())


def test_an_answer_is_read_as_the_type_of_its_command() -> None:
    view = AuditView(ok=False, problems=["slot 3"])
    assert answer_in(reply("n", view), "n", wire.RunAudit()) == view
    with pytest.raises(msgspec.ValidationError):
        answer_in(reply("n", view), "n", wire.ShowSkill(name="x", namespace="n"))


@pytest.mark.parametrize(
    "text", [None, 5, "", "{}", reply("other", AuditView(ok=True, problems=[]))]
)
def test_a_strangers_answer_is_none(text: object) -> None:
    with pytest.raises(Unavailable, match="audit: expected the scheduler's answer"):
        answer_in(text, "n", wire.RunAudit())


def test_an_error_is_raised_as_it_was() -> None:
    with pytest.raises(Conflict, match="kvedit: taken"):
        answer_in(reply("n", Conflict("kvedit: taken")), "n", wire.RunAudit())


def test_a_view_leaves_out_what_is_not_said() -> None:
    kinds = {"name": "x", "id": "i", "segment": 1, "version": 1, "num_tokens": 2, "uses": 0}
    flags = {"shared": False, "pinned": False, "memory": False, "seam": None, "reason": None}
    shown = msgspec.to_builtins(SkillView(**kinds, **flags, state="ready"))
    assert set(shown) == {*kinds, *flags, "state"}
