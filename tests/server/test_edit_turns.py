"""Chats in which fields change: what is reused, how many errata live, and what the model reads.

Every served prompt is held to one rule (chats.check_served): without the lines it is the prompt
that was sent but for the values in the windows, and what it says last of a field is the newest
value. The tests below add what each strategy promises on top.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.canary import encode
from tests.server.chats import (
    LINE,
    Chat,
    Reply,
    in_force,
    in_window,
    line,
    new_chat,
    num_unchanged,
    remove_fields,
    render,
)
from tests.server.harness import BASE, PAGED, Server, ServerConfig, ServerPool

pytestmark = pytest.mark.real_server

NUM_TURNS = 10
NUM_STEPS = 8
STATUS = ("open", "paid", "sent to the buyer", "lost", "delivered to a neighbour", "returned")
STOCK = ("none", "eleven boxes", "two", "forty boxes on a shelf", "three hundred and five")
EXACT = pytest.mark.parametrize("strategy", ["erratum", "edit+erratum"])
# The lines are the same ones; what is composed beside them is the harder half.
HARDER = pytest.mark.parametrize(
    "strategy", [pytest.param("erratum", marks=pytest.mark.long), "edit+erratum"]
)


@pytest.fixture
def new(servers: ServerPool) -> Iterator[Any]:
    """Starts chats. What they did must leave every slot owned, and no hook failing."""
    opened: list[tuple[Chat, dict[str, int]]] = []

    def start(strategy: str, config: ServerConfig = BASE, **keys: Any) -> Chat:
        server = servers.get(config)
        opened.append((new_chat(server, strategy, **keys), hook_errors(server)))
        return opened[-1][0]

    yield start
    for chat, errors in opened:
        remove_fields(chat.server, chat.salt)
        assert not chat.server.audit()
        assert hook_errors(chat.server) == errors


def hook_errors(server: Server) -> dict[str, int]:
    errors: dict[str, int] = server.status()["counters"]["hook_errors"]
    return errors


# ---- ten turns, two fields


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (BASE, "erratum"),
        (BASE, "edit"),
        pytest.param(BASE, "edit+erratum", marks=pytest.mark.long),
        (PAGED, "edit+erratum"),
    ],
    ids=["erratum", "edit", "edit+erratum", "edit+erratum-p16"],
)
def test_ten_turns_with_two_fields_that_change(
    new: Any, config: ServerConfig, strategy: str
) -> None:
    chat: Chat = new(strategy, config, num_sentences=40)
    rng = random.Random(f"turns {strategy} {config.page_size}")
    before: Reply | None = None
    lines: list[Any] = []
    num_changes = 0
    for turn in range(NUM_TURNS):
        for name, values in (("order", STATUS), ("stock", STOCK)):
            if before is not None and rng.random() < 0.4:
                chat.values[name] = rng.choice(values)
                num_changes += chat.values[name] != before.values[name]
        reply = chat.ask(f"Question {turn}: what about parcel {rng.randrange(100, 999)}?")
        text = chat.served(reply)
        check_strategy(strategy, text, reply)
        assert LINE.findall(text)[: len(lines)] == lines, "a line that turns follow stays"
        lines = LINE.findall(text)
        assert sum(reply.report[k] for k in ("exact", "composed", "derived", "computed")) == (
            reply.prompt_tokens
        )
        if before is not None:
            unchanged = num_unchanged(chat, before, reply)
            # on pages, each composed span is cut to whole pages at both ends
            in_pages = 2 * config.page_size * len(reply.report["spans"]) if config is PAGED else 0
            assert reply.reused >= 0.9 * unchanged - in_pages, (turn, reply.report, unchanged)
        before = reply
    assert num_changes >= 4, "the seed must let the fields change"


def check_strategy(strategy: str, text: str, reply: Reply) -> None:
    """What the strategy says is served."""
    if strategy == "edit":
        assert not LINE.search(text)
    if strategy in ("edit", "edit+erratum"):
        assert {name: in_window(text, name) for name in reply.values} == reply.values
    else:
        assert reply.report["composed"] == reply.report["derived"] == 0
        assert reply.report["edited"] == []


# ---- tool steps


def test_a_tool_step_costs_its_new_tokens_and_the_line(new: Any) -> None:
    chat: Chat = new("erratum")
    changes = {2: "paid", 3: "sent to the buyer", 6: "returned"}
    before = chat.ask("Look after parcel 417, step by step.")
    for step in range(NUM_STEPS):
        if step in changes:
            chat.values["order"] = changes[step]
        reply = chat.ask(f"Step {step}: the scanner reads {step * 977 + 10_000}.", role="tool")
        chat.served(reply)
        assert reply.errata == (["order"] if step in changes else [])
        assert reply.report["computed"] <= num_new_tokens(before, reply) + reply.line_tokens
        before = reply


def num_new_tokens(before: Reply, now: Reply) -> int:
    """Tokens behind the last reply, and the reply's last token, which nobody has computed yet."""
    said = {"role": "assistant", "content": before.text}
    kept = render([now.sent[0], *before.sent[1:]]) + render([said], generation=False)
    kept = kept.replace("<|im_start|>assistant\n<|im_start|>assistant\n", "<|im_start|>assistant\n")
    whole, end = encode(render(now.sent)), len(encode(kept.removesuffix("<|im_end|>\n")))
    return len(whole) - end + 1


# ---- a leaf is replaced, a followed one superseded


@EXACT
def test_a_regenerated_turn_leaves_only_the_newest_line(new: Any, strategy: str) -> None:
    chat: Chat = new(strategy)
    chat.ask("How is my order?")
    chat.values["order"] = "paid"
    assert LINE.findall(chat.served(chat.ask("And now?"))) == [("order", "paid")]
    chat.values["order"] = "lost at sea"
    again = chat.again()
    assert LINE.findall(chat.served(again)) == [("order", "lost at sea")]
    assert again.reused >= 0.9 * num_unchanged(chat, again, again) - again.line_tokens


@EXACT
def test_a_value_that_goes_back_leaves_no_line(new: Any, strategy: str) -> None:
    """Nothing follows the line yet, so the turn is served as if the change had never been."""
    chat: Chat = new(strategy)
    first = chat.ask("How is my order?")
    chat.values["order"] = "paid"
    changed = chat.ask("And now?")
    assert changed.errata == ["order"]
    chat.values["order"] = first.values["order"]
    back = chat.again()
    assert chat.served(back) == render(back.sent)
    assert back.report["composed"] == back.report["derived"] == 0
    assert back.report["computed"] < 30


@EXACT
def test_a_line_with_turns_behind_it_stays_and_is_superseded(new: Any, strategy: str) -> None:
    chat: Chat = new(strategy)
    chat.ask("How is my order?")
    chat.values["order"] = "paid"
    chat.ask("And now?")
    chat.ask("Say it again.")
    chat.values["order"] = "returned"
    later = chat.served(chat.ask("And today?"))
    assert LINE.findall(later) == [("order", "paid"), ("order", "returned")]
    chat.values["order"] = "open"
    assert in_force(chat.served(chat.ask("Once more?")), "order") == "open"


# ---- other ways to go on


@HARDER
def test_branches_of_one_turn_do_not_see_each_other(new: Any, strategy: str) -> None:
    chat: Chat = new(strategy)
    chat.ask("How is my order?")
    chat.values["order"] = "paid"
    chat.ask("And now?")
    left, right = chat.branch(), chat.branch()
    left.values["order"], right.values["order"] = "lost", "returned"
    for turn in range(2):
        for side, word, other in ((left, "first", "returned"), (right, "second", "lost")):
            reply = side.ask(f"What does the {word} of us do in round {turn}?")
            assert other not in side.served(reply)
            assert reply.report["base"] == "conversation"
            assert reply.reused > 0.8 * reply.report["client_prompt_tokens"]


@HARDER
def test_a_truncated_history_misses_and_is_served_as_sent(new: Any, strategy: str) -> None:
    chat: Chat = new(strategy)
    chat.ask("How is my order?")
    chat.ask("Is it on its way?")
    chat.values["order"] = "paid"
    whole, cut = chat.branch(), chat.branch()
    # the control first: what the other sends as it is would be exact for both
    control = whole.ask("And now?")
    assert (control.report["base"], control.errata) == ("conversation", ["order"])
    del cut.history[:2]
    reply = cut.ask("And now?")
    assert cut.served(reply) == render(reply.sent)
    assert (reply.report["base"], reply.errata) == ("sent", [])
    whole.served(control)


@HARDER
def test_an_edited_user_turn_goes_on_from_where_it_still_agrees(new: Any, strategy: str) -> None:
    chat: Chat = new(strategy)
    chat.ask("How is my order?")
    chat.ask("Is it on its way?")
    chat.ask("When will it be here?")
    chat.values["order"] = "paid"
    del chat.history[3:]
    chat.history[2] = {"role": "user", "content": "Is it at the counter by now?"}
    reply = chat.again()
    text = chat.served(reply)
    assert "on its way" not in text and line("order", "paid") in text
    assert reply.report["base"] == "conversation"
    assert reply.reused > 0.8 * reply.report["client_prompt_tokens"]


def test_recompute_serves_every_prompt_as_sent(new: Any) -> None:
    """Control: the bound on reuse that the other strategies keep is not kept without them."""
    chat: Chat = new("recompute")
    before = chat.ask("How is my order?")
    chat.values["order"] = "paid"
    reply = chat.ask("And now?")
    assert chat.served(reply) == render(reply.sent)
    assert reply.reused < 0.2 * num_unchanged(chat, before, reply)
