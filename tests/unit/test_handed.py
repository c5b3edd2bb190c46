"""A choice is made once for each try to admit a request, and used for nothing else."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from kvedit.fields.declaration_parser import parse_declaration
from kvedit.namespace import SHARED
from kvedit.reason import Reason
from kvedit.splice.spans import Plan
from sglang_patches import cpu, faults, guard
from tests.unit.fake_tree import WordTokens
from tests.unit.small_host import Served, SmallHost

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

from sglang_patches.scheduler.handed import Handed  # noqa: E402
from sglang_patches.scheduler.hooks import intake  # noqa: E402
from sglang_patches.scheduler.request_state import RequestState  # noqa: E402
from sglang_patches.scheduler.splice.tree import KvEditCache  # noqa: E402

pytestmark = pytest.mark.small_host  # the host's settings are of a whole process

STATUS = {
    "name": "status",
    "pattern": "order_status: {value}",
    "template": "[update] {name} is now {value}.",
    "where": {"within": 100},
}
MORE = "".join(f" more{i}" for i in range(40))
REPLY = [7, 9]  # what a small host answers
SALT = "one user's"


class Chat:
    """One conversation over the host's own tree, about a field."""

    def __init__(self) -> None:
        self.host = SmallHost()
        self.words, edits = WordTokens(), self.host.rooms.edits
        edits.tokens = self.words  # type: ignore[assignment, misc]
        edits.fields.declare(parse_declaration(STATUS), SHARED, self.words.special_texts)

    def ids(self, status: str, *, goes_on: bool) -> list[int]:
        ids = list(self.words.encode(f"You help\norder_status: {status}\n{MORE}\n"))
        return [*ids, *REPLY, *self.words.encode(" and\nnow\n")] if goes_on else ids

    def ask(self, status: str, *, goes_on: bool = False) -> Served:
        return self.host.run(self.ids(status, goes_on=goes_on), salt=SALT)


@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of the keys that the host's tree was asked for."""
    asked: list[int] = []
    match = UnifiedRadixCache.match_prefix

    def counted(tree: Any, params: Any) -> Any:
        asked.append(len(params.key))
        return match(tree, params)

    monkeypatch.setattr(UnifiedRadixCache, "match_prefix", counted)
    yield asked


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """The plans that a choice was made for."""
    made: list[Plan] = []
    choose = KvEditCache.choose

    def counted(tree: Any, key: Any, plan: Plan) -> Any:
        made.append(plan)
        return choose(tree, key, plan)

    monkeypatch.setattr(KvEditCache, "choose", counted)
    yield made


def taken_in(chat: Chat, status: str) -> Any:
    """A request that goes on with the conversation, before its first try to be admitted."""
    ids = chat.ids(status, goes_on=True)
    return chat.host.begin(ids, rid=f"try-{status}", salt=SALT)


def a_try(chat: Chat, status: str) -> Any:
    """And in it: its prompt has been chosen, its match is yet to come."""
    req = taken_in(chat, status)
    intake.prompt_hook(req, chat.host.tree)
    return req


def looks_of_a_try(matches: list[int], *, is_handed: bool) -> tuple[Any, int, int]:
    """The request; the looks into the tree to choose among its prompts, and those of its match."""
    chat = Chat()
    chat.ask("open")
    req = taken_in(chat, "shut")
    matches.clear()
    intake.prompt_hook(req, chat.host.tree)
    num_to_choose = len(matches)
    if not is_handed:
        req.kvedit.handed = None
    req.init_next_round_input(chat.host.tree)
    return req, num_to_choose, len(matches) - num_to_choose


def test_the_match_looks_once_instead_of_searching_again(matches: list[int]) -> None:
    """To choose: the prompt as sent is one look; the one with the edit is spelled real, spelled
    composed, and its donor looked up."""
    req, *looks = looks_of_a_try(matches, is_handed=True)
    again, *looks_again = looks_of_a_try(matches, is_handed=False)
    assert (looks, looks_again) == ([4, 1], [4, 4])
    assert req.kvedit.edit.chosen.base == "conversation" and req.kvedit.pieces
    assert (req.kvedit.pieces, req.kvedit.lost) == (again.kvedit.pieces, again.kvedit.lost)
    assert req.prefix_len == again.prefix_len
    assert req.host_hit_length == again.host_hit_length


def test_an_admission_chooses_once_for_each_prompt(choices: list[Plan]) -> None:
    chat = Chat()
    chat.ask("open")
    choices.clear()
    served = chat.ask("shut", goes_on=True)
    edit = served.req.kvedit.edit
    assert served.report["base"] == "conversation" and served.report["composed"]
    assert len(choices) == 1 + len(edit.others)
    assert served.values == list(edit.chosen.path.ids)[: len(served.values)]


def test_the_report_is_the_same_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def lives() -> list[dict[str, Any]]:
        chat = Chat()
        asked = [("open", False), ("shut", True), ("shut", True), ("open", False), ("lost", True)]
        return [chat.ask(status, goes_on=goes_on).report for status, goes_on in asked]

    with_it = lives()
    monkeypatch.setattr(Handed, "is_for", lambda *args: False)
    assert lives() == with_it


# ---- never a stale one, and none of another key


def test_it_is_taken_once() -> None:
    chat = Chat()
    chat.ask("open")
    req = a_try(chat, "shut")
    assert req.kvedit.handed is not None
    req.init_next_round_input(chat.host.tree)
    assert req.kvedit.handed is None


@pytest.mark.parametrize("change", ["replan", "give_up", "drop"])
def test_a_change_of_the_plan_takes_it_away(change: str) -> None:
    chat = Chat()
    chat.ask("open")
    state: RequestState = a_try(chat, "shut").kvedit
    assert state.handed is not None
    if change == "replan":
        state.replan(state.plan)
    elif change == "give_up":
        state.give_up(3)
    else:
        state.drop(0, Reason.INTERNAL_ERROR)
    assert state.handed is None


def test_the_next_try_begins_without_one() -> None:
    chat = Chat()
    chat.ask("open")
    req = a_try(chat, "shut")
    req.kvedit.edit.is_frozen = True  # as if admitted: nothing is chosen any more
    intake.prompt_hook(req, chat.host.tree)
    assert req.kvedit.handed is None


def test_an_error_in_the_hook_leaves_none() -> None:
    chat = Chat()
    chat.ask("open")
    faults.arm("choose_prompt")
    req = a_try(chat, "shut")
    assert req.kvedit.handed is None and req.kvedit.edit is None
    guard.errors.clear()
    faults.disarm()


def test_it_is_for_one_key_and_one_plan() -> None:
    chat = Chat()
    chat.ask("open")
    handed = a_try(chat, "shut").kvedit.handed
    ids, plan, deepest = handed.key.token_ids, handed.plan, handed.choice.deepest
    assert 0 < deepest < len(ids) - 1
    assert handed.is_for(key(ids), plan) and handed.is_for(key(ids, limit=len(ids) - 1), plan)
    assert handed.is_for(key(ids, limit=deepest), plan)
    assert not handed.is_for(key(ids, limit=deepest - 1), plan), "that would cut what was found"
    assert not handed.is_for(key(ids[:-1]), plan)
    assert not handed.is_for(key(ids[:-1] + array("q", [0])), plan)
    assert not handed.is_for(key(ids, salt="another's"), plan)
    assert not handed.is_for(key(ids), dataclasses.replace(plan)), "equal, and not the same"


def key(ids: array[int], *, limit: int | None = None, salt: str = SALT) -> RadixKey:
    return RadixKey(ids, None, limit=limit, cache_salt=salt)
