"""A conversation finds its path again, whatever happens to skills between its turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.harness import (
    BASE,
    PAGED,
    Server,
    ServerConfig,
    ServerPool,
    fresh_name,
    random_ids,
)

pytestmark = pytest.mark.real_server

NUM_TURNS = 6
NUM_NEW = 4
SKILL_TOKENS, FIRST_TOKENS, MESSAGE_TOKENS = 300, 40, 50

Event = Callable[[Server, "Conversation"], None]


class Conversation:
    """Opens with some words, the skill, and a question; every answer becomes history."""

    def __init__(self, seed: Any) -> None:
        self.seed = seed
        self.name = fresh_name()
        self.skill = random_ids((seed, "skill"), SKILL_TOKENS)
        self.history = random_ids((seed, "first"), FIRST_TOKENS) + self.skill
        self.computed: list[int] = []

    def message(self, turn: int) -> list[int]:
        return random_ids((self.seed, "message", turn), MESSAGE_TOKENS)

    def turn(self, server: Server, turn: int) -> None:
        prompt = self.history + self.message(turn)
        answer = server.generate(prompt, num_new=NUM_NEW)
        assert sum(answer.split) == len(prompt)
        self.computed.append(answer.report["computed"])
        self.history = prompt + answer.token_ids


def converse(server: Server, seed: Any, events: dict[int, Event]) -> list[int]:
    talk = Conversation(seed)
    register_a_stranger(server, talk)  # without any skill there are no reports
    server.add_skill(talk.name, talk.skill)
    for turn in range(NUM_TURNS):
        talk.turn(server, turn)
        if turn in events:
            events[turn](server, talk)
    assert not server.audit()
    return talk.computed


def replace_it(server: Server, talk: Conversation) -> None:
    server.add_skill(talk.name, random_ids(fresh_name(), 200), replace=True)


def delete_it(server: Server, talk: Conversation) -> None:
    server.call("DELETE", f"/kvedit/skills/{talk.name}")


def bring_it_back(server: Server, talk: Conversation) -> None:
    server.add_skill(talk.name, talk.skill, replace=True)


def register_a_message(server: Server, talk: Conversation) -> None:
    """Text that stands in the history already, served with real ids so far."""
    server.add_skill(fresh_name(), talk.message(0))


def register_a_longer_one(server: Server, talk: Conversation) -> None:
    """It starts before the skill of the conversation, so from now on it wins the match."""
    server.add_skill(fresh_name(), talk.history[20:370])


def register_a_part(server: Server, talk: Conversation) -> None:
    server.add_skill(fresh_name(), talk.skill[100:250])


def register_a_stranger(server: Server, talk: Conversation) -> None:
    server.add_skill(fresh_name(), random_ids(fresh_name(), 200))


HISTORIES: dict[str, dict[int, Event]] = {
    "replaced, deleted": {1: replace_it, 3: delete_it},
    "deleted, back, deleted": {0: delete_it, 2: bring_it_back, 4: delete_it},
    "its messages become skills": {0: register_a_message, 2: register_a_stranger},
    "overlapping skills appear": {1: register_a_longer_one, 3: register_a_part},
    "everything": {
        0: register_a_message,
        1: register_a_longer_one,
        2: replace_it,
        3: register_a_part,
        4: delete_it,
    },
}


@pytest.mark.parametrize(
    ("config", "names"), [(BASE, tuple(HISTORIES)), (PAGED, ("everything",))], ids=["p1", "p16"]
)
def test_computed_tokens_per_turn_do_not_change(
    servers: ServerPool, config: ServerConfig, names: tuple[str, ...]
) -> None:
    server, page = servers.get(config), config.page_size
    undisturbed = converse(server, ("calm", page), {})
    assert max(undisturbed[1:]) <= MESSAGE_TOKENS + NUM_NEW + page, "every turn hits its path"
    for name in names:
        disturbed = converse(server, (name, page), HISTORIES[name])
        assert disturbed == undisturbed, name


def test_a_purge_ends_the_path_and_the_conversation_goes_on(base: Server) -> None:
    """Control: here the count does change, so the test above can fail."""

    def purge(server: Server, talk: Conversation) -> None:
        server.call("DELETE", f"/kvedit/skills/{talk.name}?purge=1")

    computed = converse(base, "purged", {2: purge})
    assert computed[3] > SKILL_TOKENS, "the skill's tokens are computed once"
    assert max(computed[4:]) <= MESSAGE_TOKENS + NUM_NEW + 1
