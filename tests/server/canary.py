"""Canaries: skills whose greedy answer is certain as long as their KV is right.

Each skill repeats one password; a question in its words continues with it. The password leads
the next best token by 4 nats or more with this model, plain or spliced at any offset, so neither
a seam nor bf16 noise of another batch flips it; KV of another skill, or none, does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from kvedit.workbench.model_store import default_model_dir
from tests.server.harness import Answer, Server, fresh_name

_WORDS = (
    "apple river stone cloud tiger piano green table north music paper glass horse bread light "
    "water house chair money dress train black white summer winter garden window school market "
    "doctor bridge island forest dragon silver orange purple yellow engine signal camera bottle "
    "basket mirror pencil guitar rabbit monkey turtle flower castle desert ocean valley mountain "
    "planet rocket hammer ladder carpet button jacket pocket candle blanket"
)
WORDS = _WORDS.split()
NUM_NEW = 3  # the password, a full stop, a new line


@lru_cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


@dataclass(frozen=True)
class Canary:
    """``skill``: ids to register (about 13 tokens a line). ``text``: what they spell."""

    password: str
    text: str
    skill: list[int]

    @property
    def answer(self) -> str:
        return f" {self.password}.\n"

    def prompt(self, seed: Any, num_words: int = 20) -> list[int]:
        """Something nobody asked before, the skill, and a question that it answers."""
        return heading(seed, num_words) + self.skill + question(seed)

    def answered(self, answer: Answer) -> bool:
        return answer.text == self.answer

    def ask(self, server: Server, seed: Any, num_words: int = 20, **fields: Any) -> Answer:
        """Ask, and insist on the password."""
        answer = server.generate(self.prompt(seed, num_words), num_new=NUM_NEW, **fields)
        assert answer.text == self.answer, (answer.text, self.password, answer.report)
        return answer

    def register(self, server: Server, name: str | None = None, **fields: Any) -> str:
        name = name or fresh_name()
        view = server.add_skill(name, self.skill, **fields)
        assert view["state"] == "ready", view
        return name


def canary(seed: Any, num_lines: int = 18) -> Canary:
    rng = random.Random(f"canary {seed}")
    password = rng.choice(WORDS)
    others = [word for word in WORDS if word != password]
    lines = [f"List of {' '.join(rng.sample(others, 8))}.\n"]
    for _ in range(num_lines):
        near, far = rng.sample(others, 2)
        lines.append(f"Near the {near} and the {far}, the password is {password}.\n")
    text = "".join(lines)
    return Canary(password, text, encode(text))


def canaries(seed: Any, count: int, num_lines: int = 18) -> list[Canary]:
    """Canaries with different passwords."""
    found: dict[str, Canary] = {}
    n = 0
    while len(found) < count:
        made = canary((seed, n), num_lines)
        found.setdefault(made.password, made)
        n += 1
    return list(found.values())


def heading(seed: Any, num_words: int = 20) -> list[int]:
    rng = random.Random(f"heading {seed}")
    return encode(f"{' '.join(rng.choices(WORDS, k=num_words))}.\n\n") if num_words else []


def question(seed: Any) -> list[int]:
    near, far = random.Random(f"question {seed}").sample(WORDS, 2)
    return encode(f"Near the {near} and the {far}, the password is")
