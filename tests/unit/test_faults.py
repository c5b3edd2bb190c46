"""Faults on purpose: a hook that is armed fails as often as asked, by names that the product has,
and only where a server was started for testing."""

from __future__ import annotations

import ast
import asyncio
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from kvedit.config import Config
from kvedit.errors import BadRequest, KvEditError, NotFound
from kvedit.skills.declaration import SkillDeclaration
from kvedit.wire.commands import Command, ListSkills, RegisterSkill, RunTestOperation
from kvedit.wire.envelope import answer_in, seal
from sglang_patches import faults, guard
from tests.unit.small_host import SmallHost

A = TypeVar("A")

pytestmark = pytest.mark.small_host  # the host's settings are of a whole process

REPO_ROOT = Path(__file__).resolve().parents[2]
TESTING = ("sglang_patches/faults.py", "sglang_patches/scheduler/testing/")
ASKING = ("boundary", "contained", "agree", "fail_point")  # what asks for a fault by name


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    guard.errors.clear()
    yield
    guard.errors.clear()
    faults.disarm()


def fails(point: str) -> bool:
    try:
        guard.fail_point(point)
    except faults.InjectedFault as error:
        assert str(error) == f"kvedit: injected fault in {point}"
        return True
    return False


# ---- arming


def test_an_armed_hook_fails_as_often_as_asked_and_no_other() -> None:
    faults.arm("cover", times=2)
    assert [fails(point) for point in ("intake", "cover", "cover", "cover")] == [0, 1, 1, 0]


def test_entries_may_be_let_through_first() -> None:
    faults.arm("rpc", passes=1)
    assert [fails("rpc") for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize("entry", ["checkpoint", "init_load_back"])
def test_a_splice_is_handed_over_once_by_either_entry(entry: str) -> None:
    faults.arm("hand_over")
    assert fails(entry) and not fails("checkpoint") and not fails("init_load_back")


def test_nothing_is_asked_before_a_fault_is_armed_nor_after_all_are_disarmed() -> None:
    assert guard.fail_point is guard.no_fault
    faults.arm("cover")
    faults.disarm()
    assert guard.fail_point is guard.no_fault


@pytest.mark.parametrize("hook", ["relaise", "", None, 3, ["rpc"]])
def test_an_unknown_hook_is_refused_with_the_known_ones(hook: object) -> None:
    with pytest.raises(BadRequest) as refused:
        faults.wanted({"hook": hook})
    assert "realise, " in str(refused.value) and str(refused.value).endswith(f"got {hook!r}")


# ---- the names


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((REPO_ROOT / "sglang_patches").rglob("*.py")):
        yield path.relative_to(REPO_ROOT).as_posix(), ast.parse(path.read_text("utf-8"))


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def points(tree: ast.Module) -> set[str]:
    """Names that a module asks for faults by."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    asked = [call.args[0] for call in calls if name_of(call.func) in ASKING]
    return {arg.value for arg in asked if isinstance(arg, ast.Constant)}


def test_the_hooks_that_can_be_armed_are_those_of_the_product() -> None:
    http: set[str] = set()
    others: set[str] = set()
    for path, tree in sources():
        (http if path.startswith("sglang_patches/http/") else others).update(points(tree))
    assert sorted(faults.HTTP_HOOKS) == sorted(http)
    assert sorted(faults.SCHEDULER_HOOKS) == sorted(others | {"hand_over"})


def test_no_module_of_the_product_arms_a_fault() -> None:
    named = {"InjectedFault", "arm", "disarm"}
    found = [
        f"{path}: {name_of(node)}"
        for path, tree in sources()
        if not path.startswith(TESTING)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute)) and name_of(node) in named
    ]
    assert found == []


# ---- by commands


def ask(host: SmallHost, command: Command[A]) -> A:
    from sglang_patches.scheduler.commands.dispatch import internal_state_hook

    request = SimpleNamespace(rid=seal(command, "nonce"))
    output = internal_state_hook(None, SimpleNamespace(scheduler=host), request)
    return answer_in(output.internal_state["kvedit"], "nonce", command)


def fault(**arguments: object) -> RunTestOperation:
    return RunTestOperation(operation="fault", arguments=arguments)


@pytest.fixture
def host() -> SmallHost:
    return SmallHost(config=Config(testing=True))


def test_a_command_arms_a_hook_on_every_rank_or_on_one(host: SmallHost) -> None:
    assert ask(host, fault(hook="cover", times=1, rank=1)) == {}
    assert not fails("cover"), "this is rank 0"
    for fields in ({"rank": 0}, {}):
        assert ask(host, fault(hook="cover", times=1, **fields)) == {}
        assert fails("cover") and not fails("cover")


def test_a_misspelt_hook_is_a_400(host: SmallHost) -> None:
    with pytest.raises(BadRequest, match="realise"):
        ask(host, fault(hook="relaise", times=1))
    assert guard.fail_point is guard.no_fault


def test_a_fault_in_commands_is_for_the_next_one_which_leaves_nothing(host: SmallHost) -> None:
    skill = SkillDeclaration(
        name="policy",
        namespace="shared",
        token_ids=array("q", [1, 2]),
        compile_prefix=array("q"),
        pin=True,
        memory=True,
    )
    for hook in ("rpc", "command"):
        assert ask(host, fault(hook=hook, times=1)) == {}
        with pytest.raises(KvEditError, match="register: internal error") as failure:
            ask(host, RegisterSkill(skill=skill, rid="r", secret="s"))
        assert failure.value.status == 500
        assert ask(host, ListSkills(namespace="shared", everything=True)).skills == []
        assert not host.rooms.desk.pins._promised
    assert guard.errors == {"rpc": 2}


def test_a_server_that_was_not_started_for_testing_arms_nothing() -> None:
    from sglang_patches.http.services.auth import Caller
    from sglang_patches.http.services.skill_service import SkillService

    with pytest.raises(BadRequest, match="KVEDIT_TESTING"):
        ask(SmallHost(config=Config()), fault(hook="cover", times=1))
    service = SkillService(SimpleNamespace(), Config())
    for hook in ("report", "cover"):
        body = {"op": "fault", "hook": hook, "times": 1}
        with pytest.raises(NotFound, match="KVEDIT_TESTING"):
            asyncio.run(service.testing(body, Caller(True, None, None)))
    assert guard.fail_point is guard.no_fault


def test_the_queue_of_such_a_server_cannot_be_told_to_fail() -> None:
    from sglang_patches.scheduler.wiring.build import _queue_class

    names = [_queue_class(Config(testing=testing)).__name__ for testing in (False, True)]
    assert names == ["CopyQueue", "FaultyQueue"]


def test_the_http_process_arms_its_own_hooks() -> None:
    assert faults.is_taken({"op": "fault", "hook": "report", "times": 1}, faults.HTTP_HOOKS)
    assert fails("report")
    assert not faults.is_taken({"op": "fault", "hook": "cover"}, faults.HTTP_HOOKS)
