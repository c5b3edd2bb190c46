"""Edits under all that happens to a conversation: no slot lost, no lock left, no stale value.

The rule of chats.check_served (the served prompt is the one that was sent but for its lines and
windows, and says the newest value last) holds after every step, whatever the steps before were.
"""

from __future__ import annotations

import http.client
import json
import random
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvedit.splice.token_classes import without_values
from tests.server.canary import encode
from tests.server.chats import Chat, new_chat, remove_fields, render, system
from tests.server.harness import BASE, Server, ServerPool, random_ids
from tests.server.small_pool import POOL, SMALL_POOL
from tests.server.waiting import flushed, fresh_status, quiet, until

pytestmark = pytest.mark.real_server

STRATEGIES = ("erratum", "edit", "edit+erratum", "recompute")
STATUS = ("open", "paid", "sent to the buyer", "lost", "delivered to a neighbour", "returned")
STOP_ID = 0


@pytest.fixture
def new(servers: ServerPool) -> Iterator[Any]:
    opened: list[Chat] = []

    def start(strategy: str, config: Any = BASE, num_sentences: int = 12) -> Chat:
        opened.append(new_chat(servers.get(config), strategy, num_sentences))
        return opened[-1]

    yield start
    for chat in opened:
        remove_fields(chat.server, chat.salt)
        assert chat.server.healthy()


def nothing_is_held(server: Server) -> bool:
    pool = fresh_status(server)["pool"]
    held: bool = pool["protected"] != pool["pinned"]
    return not held


def num_errors(server: Server, hook: str) -> int:
    count: int = server.status()["counters"]["hook_errors"].get(hook, 0)
    return count


# ---- a random life


class Life:
    """Random steps on the branches of one conversation."""

    def __init__(self, chat: Chat, seed: Any) -> None:
        self.rng = random.Random(f"life {seed}")
        self.chats = [chat]
        self.server = chat.server
        self.num_edits = 0
        self.deck: list[Callable[[Chat], None]] = []

    def step(self) -> str:
        """A step of a shuffled deck, so that every kind occurs."""
        if not self.deck:
            few = [self.revert, self.branch, self.drop_the_head, self.abort, self.evict, self.flush]
            many = [self.ask, self.change, self.change, self.regenerate, self.edit_a_user_turn]
            self.deck = [*few, *many, *many, *many]
            self.rng.shuffle(self.deck)
        step = self.deck.pop()
        step(self.rng.choice(self.chats))
        return step.__name__

    def check(self, chat: Chat, reply: Any) -> None:
        chat.served(reply)
        self.num_edits += bool(reply.errata or reply.report["edited"])

    def options(self) -> dict[str, str]:
        """Now and then another strategy than the field's: conversations mix them."""
        return {"strategy": self.rng.choice(STRATEGIES)} if self.rng.random() < 0.3 else {}

    def ask(self, chat: Chat) -> None:
        if len(chat.history) > 8:
            del chat.history[4:]
        words = self.rng.sample(("box", "bill", "label", "courier", "refund"), 2)
        self.check(chat, chat.ask(f"What of the {words[0]} and the {words[1]}?", **self.options()))

    def change(self, chat: Chat) -> None:
        chat.values[self.rng.choice(("order", "stock"))] = self.rng.choice(STATUS)
        self.ask(chat)

    def revert(self, chat: Chat) -> None:
        chat.values["order"] = STATUS[0]
        self.ask(chat)

    def regenerate(self, chat: Chat) -> None:
        if not chat.history:
            return self.ask(chat)
        chat.values["order"] = self.rng.choice(STATUS)
        self.check(chat, chat.again(**self.options()))

    def branch(self, chat: Chat) -> None:
        self.chats = [*self.chats, chat.branch()][-3:]
        self.change(self.chats[-1])

    def edit_a_user_turn(self, chat: Chat) -> None:
        if len(chat.history) < 4:
            return self.ask(chat)
        at = self.rng.randrange(0, len(chat.history) - 2, 2)
        chat.history[at] = {"role": "user", "content": f"No: what of {self.rng.random():.3f}?"}
        del chat.history[at + 1 :]
        chat.values["order"] = self.rng.choice(STATUS)
        self.check(chat, chat.again())

    def drop_the_head(self, chat: Chat) -> None:
        del chat.history[:2]
        self.change(chat)

    def abort(self, chat: Chat) -> None:
        """Change a value and hang up in the middle of the answer."""
        chat.values["order"] = self.rng.choice(STATUS)
        body = {
            "model": "m",
            "messages": [
                {"role": "system", "content": system(chat.values, chat.policy)},
                *chat.history,
                {"role": "user", "content": "Tell it at length."},
            ],
            "cache_salt": chat.salt,
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.server.url).netloc)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        connection.getresponse().read(1)
        connection.close()

    def evict(self, chat: Chat) -> None:
        """Other traffic takes most of the pool."""
        num_tokens = POOL * self.rng.choice((50, 80)) // 100
        self.server.generate(random_ids(self.rng.random(), num_tokens))

    def flush(self, chat: Chat) -> None:
        flushed(self.server)


def live(chat: Chat, seed: Any, num_steps: int) -> None:
    life = Life(chat, seed)
    done = []
    for _ in range(num_steps):
        done.append(life.step())
        assert not chat.server.audit(), done
    assert life.num_edits > num_steps // 5, "most values change after a turn that is cached"
    quiet(chat.server)


def test_random_steps(new: Any) -> None:
    live(new("edit+erratum", SMALL_POOL, num_sentences=8), 5, num_steps=15)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["erratum", "edit", "edit+erratum"])
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_random_steps(new: Any, strategy: str, seed: int) -> None:
    live(new(strategy, SMALL_POOL, num_sentences=8), (strategy, seed), num_steps=200)


# ---- locks


def edit_often(chat: Chat, num_edits: int) -> None:
    """One conversation; every tenth edit is followed by a new turn, so leaves and followed lines
    both occur."""
    chat.num_new = 1
    chat.ask("How is it?")
    chat.ask("And now?")
    for n in range(num_edits):
        chat.values["order" if n % 3 else "stock"] = f"{STATUS[n % 6]}, as of note {n}"
        if n % 10 == 9:
            del chat.history[6:]
            reply = chat.ask(f"And after {n} notes?")
        else:
            reply = chat.again()
        assert reply.errata or reply.report["edited"], (n, reply.report)
        chat.served(reply)
    until(lambda: nothing_is_held(chat.server), "no lock of a finished request")
    assert not chat.server.audit()


def test_edits_leave_no_lock(new: Any) -> None:
    edit_often(new("edit+erratum", num_sentences=8), 12)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["erratum", "edit", "edit+erratum"])
def test_a_thousand_edits_leave_no_lock(new: Any, strategy: str) -> None:
    edit_often(new(strategy, num_sentences=8), 1_000)


# ---- faults


def test_a_fault_in_choosing_serves_the_prompt_as_sent(new: Any) -> None:
    chat: Chat = new("edit+erratum")
    chat.ask("How is it?")
    chat.values["order"] = "paid"
    before = num_errors(chat.server, "choose_prompt")
    chat.server.fault("choose_prompt")
    reply = chat.ask("And now?")
    text = chat.server.testing(op="served", rid=reply.rid)["text"]
    assert text == render(reply.sent)
    assert reply.prompt_tokens == len(encode(text))
    assert num_errors(chat.server, "choose_prompt") == before + 1
    chat.values["order"] = "lost"
    reply = chat.ask("And today?")
    assert reply.errata == ["order"], "the next request is edited again"
    chat.served(reply)


def test_a_fault_in_recording_costs_the_turn_only(new: Any) -> None:
    """It fails at its end: whether or not the turn is in the ledger by then, the next goes on."""
    chat: Chat = new("erratum")
    chat.ask("How is it?")
    before = num_errors(chat.server, "record_turn")
    chat.server.fault("record_turn")
    lost = chat.ask("And now?")
    assert lost.text and num_errors(chat.server, "record_turn") == before + 1
    chat.values["order"] = "paid"
    reply = chat.ask("And today?")
    chat.served(reply)
    assert reply.errata == ["order"], "this turn or the one before is known"


# ---- requests that ask for more


def ids_of(chat: Chat, question: str) -> list[int]:
    head = {"role": "system", "content": system(chat.values, chat.policy)}
    return encode(render([head, *chat.history, {"role": "user", "content": question}]))


@pytest.fixture
def changed(new: Any) -> Chat:
    """A conversation whose next turn, with the value of now, would get a line."""
    chat: Chat = new("erratum")
    chat.ask("How is it?")
    chat.values["order"] = "paid"
    return chat


def test_logprobs_of_the_prompt_are_those_of_the_clients_tokens(changed: Chat) -> None:
    fields = {"cache_salt": changed.salt, "return_logprob": True}
    ids = ids_of(changed, "What now?")
    control = changed.server.generate(ids, num_new=3, **fields)
    assert control.report["base"] == "conversation" and control.prompt_tokens > len(ids)
    assert len(control.meta["output_token_logprobs"]) == 3
    ids = ids_of(changed, "And now?")
    answer = changed.server.generate(ids, logprob_start_len=0, **fields)
    spelled = [token for _, token, _ in answer.meta["input_token_logprobs"]]
    assert spelled == ids and answer.prompt_tokens == len(ids)
    assert answer.report["computed"] > 100, "as sent, though an edit would have saved them"
    assert (answer.report["base"], answer.report["as_sent_because"]) == ("sent", "exact")


def test_required_edits_are_served_or_refused(new: Any) -> None:
    chat: Chat = new("erratum")
    refused = ask_for(chat, "How is it?", {"edits": "require"})
    assert refused[0] == 400 and "kvedit: require: not_proven (" in refused[1]
    chat.ask("How is it?")
    chat.values["order"] = "paid"
    status, answer = ask_for(chat, "And now?", {"edits": "require"})
    assert status == 200 and answer["meta_info"]["kvedit"][0]["base"] == "conversation"
    chat.values["order"] = "a\tb"
    status, message = ask_for(chat, "And now?", {"edits": "require"})
    assert status == 400 and "order: value_markup" in message
    body = {"text": "No field in here.", "cache_salt": chat.salt}
    status, message = generate(chat.server, body, {"edits": "require"})
    assert status == 400 and "not" in message
    assert ask_for(chat, "And now?", {"edits": "off"})[0] == 200


def ask_for(chat: Chat, question: str, options: dict[str, Any]) -> tuple[int, Any]:
    body = {"input_ids": ids_of(chat, question), "cache_salt": chat.salt}
    return generate(chat.server, body, options)


def generate(server: Server, body: dict[str, Any], options: dict[str, Any]) -> tuple[int, Any]:
    params = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"kvedit": options}}
    return server.status_of("POST", "/generate", {**body, "sampling_params": params})


def test_no_output_token_that_was_promised_is_lost_to_a_line(new: Any) -> None:
    """A prompt whose output fits only without the line is served without it."""
    chat: Chat = new("erratum", SMALL_POOL, num_sentences=8)
    server = chat.server
    chat.ask("How is it?")
    chat.values["order"] = "paid"
    ids = ids_of(chat, "And now?")
    room = POOL - len(ids) - 2  # the host's own rule: one slot for the prompt's end, one to spare
    at_once = {"logit_bias": {str(STOP_ID): 100}, "stop_token_ids": [STOP_ID], "ignore_eos": False}
    for num_new, base in ((room - 200, "conversation"), (room - 3, "sent")):
        answer = server.generate(
            ids, num_new=num_new, cache_salt=chat.salt, sampling_params=at_once
        )
        assert answer.report["base"] == base, (num_new, answer.report)
        assert len(answer.token_ids) == 1


def test_every_sample_is_served_the_same_prompt(changed: Chat) -> None:
    body = {
        "input_ids": ids_of(changed, "And now?"),
        "cache_salt": changed.salt,
        "sampling_params": {"max_new_tokens": 2, "temperature": 1, "n": 2},
    }
    answers = changed.server.call("POST", "/generate", body)
    served = [changed.server.testing(op="served", rid=a["meta_info"]["id"]) for a in answers]
    assert len(answers) == 2 and served[0]["ids"] == served[1]["ids"]
    for answer, prompt in zip(answers, served, strict=True):
        [report] = answer["meta_info"]["kvedit"]
        assert [erratum["field"] for erratum in report["errata"]] == ["order"]
        assert answer["meta_info"]["prompt_tokens"] == len(prompt["ids"])


def test_a_stream_is_served_like_an_answer(changed: Chat) -> None:
    twin = changed.branch()
    body = {
        "input_ids": ids_of(changed, "And now?"),
        "cache_salt": changed.salt,
        "sampling_params": {
            "max_new_tokens": 4,
            "temperature": 0,
            "custom_params": {"kvedit": {"report": True}},
        },
    }
    raw = changed.server.call("POST", "/generate", {**body, "stream": True})
    events = [part.removeprefix("data: ") for part in raw.splitlines() if part]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    report = last["meta_info"]["kvedit"][0]
    assert [erratum["field"] for erratum in report["errata"]] == ["order"]
    query = f"?cache_salt={changed.salt}"
    kept = changed.server.call("GET", f"/kvedit/requests/{last['meta_info']['id']}{query}")
    assert kept == without_values(report) != report, "an id may be guessed: no values"
    assert twin.ask("And now?").text == last["text"]
