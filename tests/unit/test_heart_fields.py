"""Fields on the small host: what a turn is served when a value has changed, by the real hooks, tree
and pool, and what the KV that it stands on was computed under."""

from __future__ import annotations

from typing import Any

import pytest

from kvedit.request.options import Options
from kvedit.request.strategy import Strategy
from sglang_patches import guard
from sglang_patches.scheduler.hooks import intake
from sglang_patches.scheduler.request_state import state_of
from tests.unit.edit_lives import FIELDS, SKILL, Conversation, check_answer, check_kv, newest
from tests.unit.small_host_fields import Answer, FieldHost

pytestmark = pytest.mark.small_host  # the host's settings are of a whole process

LINE = "[kvedit update] status is now {}. This overrides what was said."
EDITING: list[Strategy] = ["edit", "edit+erratum"]
REPAIRED = 3


class Chat:
    """One conversation about an order, which proves itself by a token."""

    def __init__(self, strategy: Strategy, **sizes: Any) -> None:
        self.strategy = strategy
        self.host = FieldHost([{**FIELDS[0], "strategy": strategy}], **sizes)
        self.who = Conversation("xa", proof="")
        self.num_asked = 0

    def send(self, status: str = "", **options: Any) -> Any:
        """The newest turn, again or for the first time."""
        self.num_asked += 1
        if status:
            self.who.values["status"] = status
        how = self.who.claimed(Options(**options), self.num_asked)
        return self.host.send(self.who.prompt(), how)

    def served(self, status: str = "", *, retract_at: int | None = None, **options: Any) -> Answer:
        req = self.send(status, **options)
        assert req.to_finish is None, req.to_finish
        return self.host.answer(req, self.reply, retract_at=retract_at)

    def ask(self, status: str = "", **options: Any) -> Answer:
        """And all that must hold of any answer."""
        answer = self.served(status, **options)
        check_answer(self.host, self.who, self.who.prompt(), answer)
        check_kv(self.host, answer, {"status": self.strategy})
        assert answer.served.misread == []
        assert sum(answer.served.split) == len(answer.ids)
        return answer

    @property
    def reply(self) -> str:
        return f"It is done {self.num_asked}"

    def go_on(self) -> None:
        self.who.turns.append((self.who.user, self.reply))
        self.who.user = "and then?"


def lines(answer: Answer) -> list[str]:
    return [line["text"] for line in answer.report["errata"]]


def test_the_first_turn_is_served_as_sent() -> None:
    answer = Chat("edit").ask()
    assert answer.served.split == (0, 0, 0, len(answer.ids))
    assert (answer.report["base"], answer.report["as_sent_because"]) == ("sent", "no_base")


# ---- the same turn with another value


def test_an_erratum_keeps_the_prefix_exact_and_adds_a_line() -> None:
    chat = Chat("erratum")
    first = chat.ask()
    answer = chat.ask("shipped")
    [line] = answer.report["errata"]
    assert line["text"] == LINE.format("shipped")
    assert answer.ids[: line["start"]] == first.ids[: line["start"]]
    assert answer.served.split == (line["start"], 0, 0, len(answer.ids) - line["start"])
    assert answer.report["erratum"] == line["stop"] - line["start"]


def test_an_edit_composes_what_stands_behind_the_value() -> None:
    chat = Chat("edit")
    first = chat.ask()
    answer = chat.ask("shipped")
    assert (answer.report["edited"], lines(answer)) == (["status"], [])
    assert answer.report["composed"] > len(first.ids) - 20
    assert answer.report["copied"] == answer.report["composed"]
    assert answer.computed < 5 and len(answer.ids) < len(first.ids), "the value is a word shorter"
    num_stale = sum(("status", "first xa") in seen for seen in answer.seen)
    assert num_stale >= answer.report["composed"], "a copy knows what it was computed under"


def test_an_edit_with_a_line_composes_and_says_so() -> None:
    chat = Chat("edit+erratum")
    chat.ask()
    answer = chat.ask("shipped")
    assert answer.report["edited"] == ["status"] and lines(answer) == [LINE.format("shipped")]
    assert answer.report["composed"] > 50 and answer.report["erratum"] > 10


def test_recompute_is_the_prompt_as_sent() -> None:
    chat = Chat("recompute")
    chat.ask()
    answer = chat.ask("shipped")
    assert answer.report["as_sent_because"] == "strategy" and answer.report["composed"] == 0


@pytest.mark.parametrize("strategy", ["erratum", "edit+erratum"])
def test_a_line_that_nothing_follows_is_superseded(strategy: Strategy) -> None:
    chat = Chat(strategy)
    chat.ask()
    chat.ask("shipped")
    answer = chat.ask("lost for good")
    assert lines(answer) == [LINE.format("lost for good")]
    assert LINE.format("shipped") not in answer.text


@pytest.mark.parametrize("strategy", ["erratum", "edit+erratum"])
def test_a_line_that_turns_follow_stays_and_a_newer_one_counts(strategy: Strategy) -> None:
    chat = Chat(strategy)
    chat.ask()
    chat.ask("shipped")
    chat.go_on()
    answer = chat.ask("lost for good")
    assert lines(answer) == [LINE.format("lost for good")]
    assert answer.text.index(LINE.format("shipped")) < answer.text.index(lines(answer)[0])


def test_the_first_value_again_hits_the_first_turn() -> None:
    chat = Chat("edit")
    first = chat.ask()
    chat.ask("shipped")
    again = chat.ask("first xa")
    assert again.ids == first.ids
    assert again.served.split == (len(first.ids) - 1, 0, 0, 1)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("chunk", [16, 256])
def test_pages_and_chunks(page_size: int, chunk: int) -> None:
    chat = Chat("edit+erratum", page_size=page_size, chunk=chunk)
    chat.ask()
    assert chat.ask("shipped").report["composed"] > 50
    chat.go_on()
    assert chat.ask("lost for good").report["composed"] > 50


def test_tokens_behind_an_edit_are_computed_again_where_asked() -> None:
    chat = Chat("edit")
    chat.ask()
    plain = chat.ask("shipped").computed
    chat.go_on()
    chat.who.turns.clear()
    chat.who.user = "hi"
    assert chat.ask("gone", repair=REPAIRED).computed == plain + REPAIRED


def test_a_skill_behind_the_value_is_taken_from_its_own_path() -> None:
    chat = Chat("edit")
    skill = chat.host.register_text(SKILL)
    first = chat.ask()
    assert {span["skill"] for span in first.report["spans"]} == {"skill"}
    second = chat.ask("shipped")
    state = state_of(second.served.req)
    segments = [] if state is None else [piece.span.source.number for piece in state.pieces]
    assert segments.count(skill.number) == 1 and len(segments) > 1, "no copy of a copy"


# ---- what a request may ask for


def test_edits_off_is_the_prompt_as_sent() -> None:
    chat = Chat("edit+erratum")
    chat.ask()
    answer = chat.ask("shipped", edits="off")
    assert answer.report["as_sent_because"] == "off" and lines(answer) == []
    assert answer.report["composed"] == 0 and answer.text == chat.who.prompt()


def test_a_strategy_of_the_request_comes_first_and_no_splice_means_no_edit() -> None:
    chat = Chat("edit")
    chat.ask()
    assert lines(chat.served("shipped", strategy="erratum")) == [LINE.format("shipped")]
    assert chat.served("gone", splice="off").report["composed"] == 0


def test_edits_that_are_required_are_met_or_refused_with_a_report() -> None:
    chat = Chat("edit")
    req = chat.send(edits="require")
    assert req.to_finish.status_code == 400 and "no_base" in req.to_finish.message
    assert req.kvedit_refused["as_sent_because"] == "no_base"
    chat.ask()
    assert chat.ask("shipped", edits="require").report["composed"] > 50


def test_edits_that_turn_out_unmet_when_admitted_are_refused_then() -> None:
    chat = Chat("edit")
    chat.ask()
    req = chat.send("shipped", edits="require")
    assert req.to_finish is None
    chat.host.evict()
    chat.host.answer(req, chat.reply)
    assert req.finished_reason.status_code == 400 and "edits" in req.finished_reason.message


def test_an_error_while_choosing_serves_the_prompt_as_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat("edit")
    chat.ask()
    monkeypatch.setattr(intake, "choose_prompt", lambda *_: 1 / 0)
    before = guard.errors["choose_prompt"]
    answer = chat.served("shipped")
    assert guard.errors["choose_prompt"] == before + 1
    assert answer.text == chat.who.prompt() and answer.served.misread == []


# ---- a turn that is retracted


@pytest.mark.parametrize("strategy", ["erratum", *EDITING])
@pytest.mark.parametrize("evicts", [False, True])
def test_a_retracted_turn_keeps_its_prompt_and_its_classes(
    strategy: Strategy, evicts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(strategy)
    chat.ask()
    chat.ask("shipped")
    host = chat.host
    split_before: list[Any] = []

    def then_others_take_the_room(req: Any) -> None:
        state = state_of(req)
        split_before.append((state.split.counts(), req.origin_input_ids))  # type: ignore[union-attr]
        FieldHost.retract(host, req)
        if evicts:
            host.evict()

    monkeypatch.setattr(host, "retract", then_others_take_the_room)
    answer = chat.ask("lost for good", retract_at=3)
    [(counts, ids)] = split_before
    assert answer.ids == ids and {k: answer.report[k] for k in counts} == counts
    chat.go_on()
    after = chat.ask("found")
    assert after.report["base"] == "conversation", "the turn entered the ledger"
    assert after.report["exact"] + after.report["composed"] > len(ids) // 2


# ---- controls: each of the checks above sees what it is there for


def test_a_wrong_shift_of_an_edit_is_seen() -> None:
    chat = Chat("edit")
    chat.ask()
    chat.host.rooms.copies.queue.shift_error = 1
    answer = chat.served("shipped")
    assert "another position" in answer.served.misread[0]


@pytest.mark.parametrize("is_key", [True, False])
def test_one_slot_that_somebody_wrote_over_is_seen(is_key: bool) -> None:
    chat = Chat("edit")
    first = chat.ask()
    model, slot = chat.host.model, chat.host.cached_slots(first.served.req)[40]
    buffer = model.pool.get_key_buffer(1) if is_key else model.pool.get_value_buffer(1)
    buffer[slot] += 1
    answer = chat.served("shipped")
    what = "position" if is_key else "token"
    [problem] = answer.served.misread
    assert f"layer 1: KV of another {what} at" in problem


def test_composed_kv_under_real_ids_is_seen() -> None:
    """As if a copy had been cached as what was sent."""
    chat = Chat("edit")
    chat.ask()
    edited = chat.ask("shipped")
    slots = chat.host.cached_slots(edited.served.req)
    problems = chat.host.model.misread(edited.ids[: len(slots)].tolist(), slots, len(slots))
    assert problems and all("other tokens in front" in problem for problem in problems)


def test_an_edit_whose_line_is_missing_is_seen() -> None:
    chat = Chat("edit")
    chat.ask()
    answer = chat.ask("shipped")
    with pytest.raises(AssertionError, match="no line says so"):
        check_kv(chat.host, answer, {"status": "edit+erratum"})
    with pytest.raises(AssertionError, match="KV of another value"):
        check_kv(chat.host, answer, {"status": "erratum"})
    assert newest(answer.text)["status"] == "shipped"
