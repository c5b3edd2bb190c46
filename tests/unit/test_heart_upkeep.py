"""Epochs, pins and the audit on the small host: what outlives what, and that every slot is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvedit.edit.proofs import EXPIRED, NEEDS_REPLY
from kvedit.errors import PinBudgetExceeded
from kvedit.request.options import Options
from kvedit.skills.segment import State
from sglang_patches.scheduler.hooks.admission import decode_memory_hook
from sglang_patches.scheduler.hooks.weight_epoch import adapters_hook, weights_hook
from sglang_patches.scheduler.wiring.rooms import Rooms
from tests.unit.edit_lives import FIELDS, Conversation
from tests.unit.small_host import CONFIG, SmallHost
from tests.unit.small_host_fields import FieldHost

pytestmark = pytest.mark.small_host  # the host's settings are of a whole process

SKILL = list(range(100, 140))
OTHER = list(range(200, 230))
PROMPT = [1, 2, 3, 4, 5, 6, *SKILL, 7, 8, 9]
NUM_SLOTS = 128


def new_weights(host: SmallHost) -> None:
    weights_hook(None, SimpleNamespace(scheduler=host))


def new_adapter(host: SmallHost) -> None:
    adapters_hook(SimpleNamespace(success=True), host)


Change = Callable[[SmallHost], None]
CHANGES: list[Change] = [new_weights, new_adapter, SmallHost.flush]
changes = pytest.mark.parametrize("change", CHANGES)


def ask(host: SmallHost, ids: list[int]) -> Any:
    served = host.run(ids)
    assert served.misread == [] and sum(served.split) == len(ids)
    return served


def assert_no_slot_is_lost(host: SmallHost) -> None:
    """Once nobody holds anything, all of the pool is free."""
    assert host.problems() == []
    while host.rooms.desk.release_oldest_pin():
        pass
    host.evict()
    assert host.allocator.available_size() == host.allocator.size


# ---- epochs


@changes
def test_nothing_of_before_is_composed(change: Change) -> None:
    host = SmallHost()
    skill = host.register("policy", SKILL)
    assert ask(host, PROMPT).report["composed"] > 0
    epoch = host.rooms.edits.weight_epoch
    change(host)
    assert host.rooms.edits.weight_epoch == epoch + 1 and skill.state is State.EVICTED
    served = ask(host, PROMPT)
    assert served.report["composed"] == 0 and served.reasons == ["evicted"]
    assert served.report["evicted"] == [skill.number]
    assert_no_slot_is_lost(host)


@changes
def test_a_skill_is_compiled_and_pinned_again(change: Change) -> None:
    host = SmallHost()
    skill = host.register("policy", SKILL, pin=True)
    before = skill.number
    change(host)
    pins = host.rooms.desk.pins
    assert (pins.num_tokens, skill.pinned) == (0, False)
    host.compile_again(skill)
    assert (skill.state, skill.pinned, pins.num_tokens) == (State.READY, True, len(SKILL))
    assert skill.number != before, "paths of the old epoch name a number that nobody has"
    host.evict()
    assert ask(host, PROMPT).report["composed"] > 0, "the pin keeps it"
    assert_no_slot_is_lost(host)


@changes
def test_a_request_that_waits_is_not_served_what_was(change: Change) -> None:
    host = SmallHost()
    host.register("policy", SKILL)
    req = host.begin(PROMPT)
    assert req.kvedit.plan.spans
    change(host)
    host.prefill(req)
    served = host.finish(req)
    assert served.report["composed"] == 0 and served.misread == []


@changes
@pytest.mark.parametrize("proof", ["", None], ids=["by token", "by reply"])
def test_no_turn_of_before_is_a_base(change: Change, proof: str | None) -> None:
    host, who = FieldHost([{**FIELDS[0], "strategy": "edit"}]), Conversation("xa", proof=proof)
    for turn in range(3):
        if turn == 2:
            change(host)
        answer = host.ask(who.prompt(), f"It is done {turn}", who.claimed(Options(), turn))
        who.turns.append((who.user, f"It is done {turn}"))
        who.user, who.values["status"] = "and then?", f"status {turn}"
        if turn == 1:
            assert answer.report["edited"] == ["status"], "the control"
    reason, hint = ("not_proven", NEEDS_REPLY) if proof is None else ("no_base", EXPIRED)
    assert (answer.report["as_sent_because"], answer.report["as_sent_hint"]) == (reason, hint)
    assert answer.report["composed"] == 0


def test_a_turn_that_began_in_an_older_epoch_is_no_base() -> None:
    host, who = FieldHost([{**FIELDS[0], "strategy": "edit"}]), Conversation("xa", proof="")
    req = host.send(who.prompt(), who.claimed(Options(), 1))
    new_weights(host)
    host.answer(req, "Sure")
    assert len(host.rooms.edits.ledger) == 0
    host.ask(who.prompt(), "Sure")
    assert len(host.rooms.edits.ledger) == 1, "the control"


def test_an_adapter_that_was_not_loaded_changes_nothing() -> None:
    host = SmallHost()
    host.register("policy", SKILL)
    adapters_hook(SimpleNamespace(success=False), host)
    assert ask(host, PROMPT).report["composed"] > 0


def test_an_error_in_an_epoch_leaves_nothing_to_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SmallHost()
    host.register("policy", SKILL, pin=True)
    ask(host, PROMPT)
    monkeypatch.setattr(Rooms, "new_epoch", lambda *_: 1 / 0)
    new_weights(host)
    assert ask(host, PROMPT).report["composed"] == 0
    assert_no_slot_is_lost(host)


# ---- pins


def small_budget(budget: int) -> SmallHost:
    return SmallHost(
        num_slots=NUM_SLOTS,
        config=dataclasses.replace(CONFIG, pin_fraction=budget / NUM_SLOTS),
    )


def test_a_pin_beyond_the_budget_is_refused_and_nothing_is_registered() -> None:
    host = small_budget(len(SKILL) + len(OTHER) - 1)
    host.register("policy", SKILL, pin=True)
    with pytest.raises(PinBudgetExceeded, match=f"got {len(SKILL)} held [+] {len(OTHER)} asked"):
        host.register("other", OTHER, pin=True)
    assert [skill.segment.name for skill in host.rooms.desk.registry.all()] == ["policy"]
    host.rooms.desk.retire("policy", "shared")
    assert host.register("other", OTHER, pin=True).pinned, "a retired skill gives its budget back"


def test_pins_yield_oldest_first_and_no_more_than_it_takes() -> None:
    host = small_budget(80)
    first = host.register("policy", SKILL, pin=True)
    second = host.register("other", OTHER, pin=True)
    ask(host, list(range(500, 500 + 80)))  # 58 are not pinned
    assert (first.pinned, second.pinned) == (False, True)
    host.evict()
    ask(host, [*range(600, 610), *OTHER, 7])
    assert host.rooms.desk.own_path(first)[1] == 0 and host.rooms.desk.own_path(second)[1] == 30
    assert_no_slot_is_lost(host)


def test_pins_yield_to_nobody_who_can_wait() -> None:
    host = small_budget(80)
    skill = host.register("policy", SKILL, pin=True)
    running = host.begin(list(range(300, 330)))
    host.prefill(running)
    waiting = host.begin(list(range(500, 500 + 95)))  # 88 are not pinned
    with pytest.raises(AssertionError, match="no room"):
        host.prefill(waiting)
    assert skill.pinned
    host.finish(running)
    host.prefill(waiting)
    host.finish(waiting)
    assert not skill.pinned
    assert_no_slot_is_lost(host)


def test_a_pin_yields_to_the_last_request_that_decodes() -> None:
    host = small_budget(80)
    skill = host.register("policy", SKILL, pin=True)
    req = host.begin(PROMPT)
    host.prefill(req)
    host.evict()

    def fits(batch: Any, selected_indices: Any) -> bool:
        return bool(host.allocator.available_size() + host.tree.evictable_size() > 100)

    batch = SimpleNamespace(reqs=[req, req], tree_cache=host.tree)
    assert not decode_memory_hook(fits, batch) and skill.pinned, "another can be retracted"
    batch.reqs = [req]
    assert not decode_memory_hook(fits, batch) and not skill.pinned, "as far as pins go"
    host.finish(req)
    assert_no_slot_is_lost(host)


def test_no_pin_is_held_in_the_hosts_sanity_check_and_each_is_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = small_budget(80)
    skill = host.register("policy", SKILL, pin=True)
    ask(host, PROMPT)
    protected: list[int] = []
    check = UnifiedRadixCache.sanity_check

    def checks(tree: Any) -> None:
        protected.append(tree.protected_size())
        check(tree)

    monkeypatch.setattr(UnifiedRadixCache, "sanity_check", checks)
    host.tree.sanity_check()
    assert (protected, host.tree.protected_size()) == ([0], len(SKILL))
    host.evict()
    assert host.rooms.desk.own_path(skill)[1] == len(SKILL)
    assert_no_slot_is_lost(host)


# ---- the audit: each injected fault in its words


@pytest.fixture
def host() -> SmallHost:
    host = SmallHost(num_slots=NUM_SLOTS)
    ask(host, PROMPT)
    assert host.problems() == []
    return host


def test_a_slot_that_leaks_has_no_owner(host: SmallHost) -> None:
    slots = host.allocator.alloc(3)
    assert host.problems() == [f"3 slots have no owner: {sorted(slots.tolist())}"]
    host.allocator.free(slots)
    assert host.problems() == []


def test_a_page_that_leaks_has_no_owner() -> None:
    host = SmallHost(num_slots=NUM_SLOTS, page_size=4)
    slots = host.allocator.alloc(4)
    assert host.problems() == [f"4 slots have no owner: {sorted(slots.tolist())}"]


def test_a_slot_that_is_freed_while_the_tree_has_it_is_owned_already(host: SmallHost) -> None:
    slots = host.tree.all_values_flatten()[:2]
    host.allocator.free(slots)
    one, other = slots.tolist()
    told = f"2 slots of tree are owned already: {one} (free), {other} (free)"
    assert host.problems() == [told]


def test_a_request_that_stands_on_a_slot_of_the_tree_is_told(host: SmallHost) -> None:
    theirs = int(host.tree.all_values_flatten()[0])
    req = host.begin([50, 51, 52, 53])
    host.prefill(req)
    row = host.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    mine, row[2] = int(row[2]), theirs
    assert host.problems() == [
        f"1 slots of request {req.rid} are owned already: {theirs} (tree)",
        f"1 slots have no owner: [{mine}]",
    ]


def test_a_slot_of_nowhere_is_not_of_this_pool(host: SmallHost) -> None:
    host.allocator.free(torch.tensor([NUM_SLOTS + 7]))
    assert host.problems() == [f"1 slots are not of this pool: [{NUM_SLOTS + 7}]"]
