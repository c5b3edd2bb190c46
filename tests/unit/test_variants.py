"""What is served on which base, through the scheduler's own glue over a tree without a model."""

from __future__ import annotations

import pytest

from kvedit.request.options import Options
from tests.unit.edit_harness import SUFFIX, FakeServer, rendered, runs

TEMPLATE = "[kvedit update] {name} is now {value}."
STATUS = {"name": "status", "pattern": "order_status: {value}", "template": TEMPLATE}
PERSON = {"name": "person", "pattern": "user_name: {value}", "template": TEMPLATE}
MORE = " ".join(f"more{i}" for i in range(40))
LINE = "\n[kvedit update] status is now {}."


class Chat:
    """One conversation; every reply is its own."""

    def __init__(self, strategy, *fields, **server):
        self.server = FakeServer(fields or [STATUS, PERSON], **server)
        self.options = Options(strategy=strategy)
        self.said = []

    def ask(self, user, status, person="ann", **options):
        system = f"You help.\norder_status: {status}\n{MORE}\nuser_name: {person}\n{MORE}"
        self.sent = rendered([("system", system), *self.said, ("user", user)])
        self.reply = f"The answer number {len(self.said)} has so many words, and a few more"
        return self.server.ask(self.sent, self.reply, options.get("how", self.options))

    def turn(self, user, status, person="ann", **options):
        outcome = self.ask(user, status, person, **options)
        self.said += [("user", user), ("assistant", self.reply)]
        return outcome


def lines(outcome):
    return [outcome.edit.client.fields[x.number].name for x in outcome.edit.chosen.new_lines]


def test_an_erratum_is_the_old_prompt_and_one_line_at_its_end():
    chat = Chat("erratum")
    chat.turn("one", "open")
    outcome = chat.turn("two", "shut now")
    expected = chat.sent.replace("order_status: shut now", "order_status: open")
    assert outcome.text == expected.removesuffix(SUFFIX) + LINE.format("shut now") + SUFFIX
    assert outcome.edit.chosen.base == "conversation"


def test_changes_of_one_turn_leave_the_last_value_alone():
    chat = Chat("erratum")
    chat.turn("one", "open")
    for value in ("shut", "lost", "found"):
        outcome = chat.ask("two", value)
        assert (lines(outcome), outcome.text.count("[kvedit")) == (["status"], 1)
        assert LINE.format(value) in outcome.text
    back = chat.ask("two", "open")
    assert (lines(back), back.text) == ([], chat.sent), "back at the base: nothing to say"


def test_a_line_that_was_followed_stays_and_is_superseded():
    chat = Chat("erratum")
    chat.turn("one", "open")
    chat.turn("two", "shut")
    outcome = chat.turn("three", "open")
    assert outcome.text.index(LINE.format("shut")) < outcome.text.index(LINE.format("open"))
    assert lines(outcome) == ["status"]


@pytest.mark.parametrize("strategy", ["erratum", "edit", "edit+erratum"])
def test_a_turn_computes_what_is_new_and_little_more(strategy):
    """Eight tool steps, the field changes at three of them."""
    chat = Chat(strategy, min_span=1)
    values = ["a", "a", "b b b", "b b b", "c", "c", "d d", "d d"]
    before = 0
    for step, value in enumerate(values):
        outcome = chat.turn(f"step {step}", value)
        line = sum(x.stop - x.start for x in outcome.edit.chosen.new_lines)
        window = 5 if outcome.edit.chosen.edited else 0
        num_sent = len(outcome.edit.client.ids)
        # of the last reply, the tree lacks the last token
        assert step == 0 or outcome.computed <= num_sent - before + line + window + 1
        before = num_sent


def test_an_edit_changes_the_window_and_copies_the_rest():
    chat = Chat("edit")
    chat.turn("one", "open")
    outcome = chat.ask("two", "shut for good")
    assert outcome.text == chat.sent
    assert [p.span.delta_pos for p in outcome.state.pieces] == [2]
    assert outcome.edit.chosen.edited == (1,)


def test_five_edits_in_a_row_copy_each_part_from_where_it_was_computed():
    """The harness refuses a copy of a copy, and a copy of another token."""
    chat = Chat("edit")
    chat.server.add_skill(MORE)
    chat.turn("one", "v")
    for length in (3, 1, 5, 2, 4):
        outcome = chat.turn("more", "v " * length + "end")
        assert outcome.edit.chosen.base == "conversation" and outcome.text == chat.sent
        assert outcome.computed < outcome.as_sent / 2


def test_an_edit_of_a_second_field_keeps_what_is_composed_in_front_of_it():
    for page_size in (1, 4, 16):
        chat = Chat("edit", page_size=page_size)
        chat.turn("one", "open")
        chat.turn("two", "shut for good")
        outcome = chat.turn("three", "shut for good", "bob the second")
        assert len(runs(outcome.state.pieces)) >= 2
        assert outcome.computed < outcome.as_sent / 2
        assert outcome.text == chat.sent


def test_a_declared_base_serves_once_its_prompt_is_cached():
    chat = Chat("erratum", {**STATUS, "base": "unknown"})
    assert chat.ask("one", "open").edit.chosen.base == "sent"
    chat.ask("one", "unknown")
    outcome = chat.ask("one", "shut")
    assert outcome.edit.chosen.base == "declared"
    assert outcome.text.count("order_status: unknown") == 1
    assert LINE.format("shut") + SUFFIX in outcome.text


def test_a_value_of_another_conversation_is_a_base_only_if_it_is_public():
    for public in (False, True):
        chat = Chat("erratum", {**STATUS, "cross_request": public})
        chat.ask("one", "first")
        outcome = chat.ask("another", "second")
        assert ("first" in outcome.text) == public
        assert outcome.edit.chosen.base == ("cross_request" if public else "sent")


def test_a_request_that_wants_nothing_spliced_gets_an_erratum():
    chat = Chat(None)
    chat.turn("one", "open")
    outcome = chat.ask("two", "shut", how=Options(splice="off"))
    assert (lines(outcome), outcome.state.pieces) == (["status"], ())
    plain = chat.ask("two", "shut", how=Options(splice="off", strategy="edit"))
    assert plain.edit.chosen.base == "sent"


def test_a_line_that_a_user_types_stands_for_nothing():
    """It neither makes a line nor spares one, though the served path reads the same so far."""
    chat = Chat("erratum")
    chat.turn("one", "open")
    chat.ask("two", "shut")
    outcome = chat.ask("two" + LINE.format("shut") + " And?", "shut")
    assert lines(outcome) == ["status"]
    assert outcome.text.endswith(" And?" + LINE.format("shut") + SUFFIX)


def test_a_message_that_goes_on_does_not_run_into_the_line_it_had():
    chat = Chat("erratum")
    chat.turn("one", "open")
    chat.ask("two", "shut")
    outcome = chat.ask("two and more", "shut")
    assert outcome.edit.chosen.base == "conversation"
    assert outcome.text.endswith("two and more" + LINE.format("shut") + SUFFIX)
    assert outcome.text.count("[kvedit") == 1


def test_a_base_that_saves_nothing_is_not_served():
    chat = Chat("erratum")
    chat.turn("one", "open")
    chat.server.tree.paths.clear()
    outcome = chat.ask("two", "shut")
    assert (outcome.edit.chosen.base, outcome.text) == ("sent", chat.sent)


def amended(first, second, **options):
    """Packed, then shipped, then the same message longer: what is composed saw "packed"."""
    chat = Chat(first)
    chat.turn("Hello", "packed")
    chat.ask("Where is", "shipped")
    return chat, chat.ask("Where is my parcel", "shipped", how=Options(strategy=second, **options))


@pytest.mark.parametrize("first", [None, "edit+erratum", "edit"])
@pytest.mark.parametrize("second", [None, "edit+erratum"])
def test_a_message_that_grows_keeps_the_line_of_what_is_composed(first, second):
    """The line of the shorter message goes with it; the window alone says the value of now."""
    _, outcome = amended(first, second)
    assert outcome.edit.chosen.base == "conversation" and outcome.state.pieces
    assert outcome.text.endswith("Where is my parcel" + LINE.format("shipped") + SUFFIX)
    assert lines(outcome) == ["status"] and outcome.text.count("[kvedit") == 1


@pytest.mark.parametrize("options", [{}, {"splice": "off"}])
@pytest.mark.parametrize("second", ["erratum", "recompute"])
def test_exact_strategies_are_served_no_kv_of_another_value(second, options):
    _, outcome = amended("edit+erratum", second, **options)
    assert outcome.state.pieces == ()
    _, plain = amended("edit+erratum", "edit")
    assert plain.state.pieces and lines(plain) == [], "the control: edit says nothing of it"


def test_what_is_composed_is_remembered_over_turns_and_forgotten_with_it():
    chat = Chat("edit")
    chat.turn("one", "packed")
    chat.turn("two", "shipped")
    chat.turn("three", "shipped")
    outcome = chat.ask("four", "shipped", how=Options(strategy="edit+erratum"))
    assert outcome.edit.chosen.base == "conversation" and lines(outcome) == ["status"]
    again = chat.turn("four", "shipped", how=Options(strategy="edit+erratum"))
    assert lines(again) == ["status"], "the same turn again says it once"
    followed = chat.ask("five", "shipped", how=Options(strategy="edit+erratum"))
    assert lines(followed) == [] and followed.text.count("[kvedit") == 1, "it is said already"
    chat.server.tree.paths.clear()
    chat.said = []
    fresh = chat.ask("one", "shipped", how=Options(strategy="edit+erratum"))
    assert fresh.text == chat.sent, "nothing is composed, nothing has to be said"


def test_a_value_that_comes_back_is_said_to_what_saw_the_other_one():
    """The window is at its first value again, but a turn was composed while it said another."""
    chat = Chat("edit")
    chat.turn("one", "packed")
    chat.turn("two", "shipped")
    chat.turn("three", "packed")
    outcome = chat.ask("four", "packed", how=Options(strategy="edit+erratum"))
    assert lines(outcome) == ["status"]


def test_each_field_keeps_to_its_own_strategy():
    """One recomputes, the other one changes by a line; then both have to be as they say."""
    exact = {**PERSON, "strategy": "recompute"}
    chat = Chat(None, {**STATUS, "strategy": "erratum"}, exact)
    chat.turn("one", "open", "ann")
    outcome = chat.turn("two", "shut", "ann")
    assert (lines(outcome), outcome.edit.chosen.base) == (["status"], "conversation")
    moved = chat.turn("three", "shut", "bob")
    assert (moved.edit.chosen.base, moved.text) == ("sent", chat.sent)
    assert moved.edit.why_sent == "strategy"


def test_a_field_that_recomputes_has_no_line_of_an_earlier_strategy():
    chat = Chat("erratum", {**STATUS, "strategy": "recompute"}, {**PERSON, "strategy": "erratum"})
    chat.turn("one", "open")
    chat.turn("two", "shut")
    assert chat.ask("three", "shut", how=Options()).text == chat.sent


def test_an_older_turn_serves_where_the_newest_ones_may_not():
    """Four times the same message, each answered from composed KV: the first of it was exact."""
    chat = Chat("edit", min_span=1)
    chat.turn("one", "a")
    chat.ask("two", "a")
    for value in ("b b", "c c c", "d d d d"):
        chat.ask("two", value)
    outcome = chat.ask("two", "e", how=Options(strategy="erratum"))
    assert outcome.edit.chosen.base == "conversation"
    assert LINE.format("e") in outcome.text and "order_status: a\n" in outcome.text


@pytest.mark.parametrize("salt", ["a", None])
def test_why_a_prompt_is_served_as_sent(salt):
    """Without a salt there is one reason, whatever is remembered."""
    chat = Chat("erratum")

    def why(user, status, strategy="erratum"):
        prompt = rendered([("system", f"order_status: {status}\n{MORE}"), *said, ("user", user)])
        how = Options(strategy=strategy)
        return chat.server.ask(
            prompt, "Nine words that only one conversation has ever heard", how, salt=salt
        ).edit

    said = []
    assert why("one", "open").reason == "not_proven"
    said = [
        ("user", "one"),
        ("assistant", "Nine words that only one conversation has ever heard"),
    ]
    assert why("two", "open", "recompute").reason == "strategy"
    edit = why("two", "shut")
    assert edit.reason == (None if salt else "not_proven")
    assert (edit.hint is None) == bool(salt)
    chat.server.tree.paths.clear()
    assert why("three", "open").reason == ("no_saving" if salt else "not_proven")
