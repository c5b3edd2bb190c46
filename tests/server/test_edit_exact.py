"""What an edit is made of: exact where it says so, copied and turned once where it does not.

Bit-equal means what it means for skills: same cached length, same chunk boundaries, batch of one,
every top-k logprob the same number. A namespace without fields is brought to the same cached
paths by the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.canary import encode
from tests.server.chats import declare, line, remove_fields, system
from tests.server.harness import (
    BASE,
    PAGED,
    Answer,
    Server,
    ServerConfig,
    ServerPool,
    fresh_name,
    random_ids,
)
from tests.server.texts import english

pytestmark = pytest.mark.real_server

CONFIGS = pytest.mark.parametrize("config", [BASE, PAGED], ids=["p1", "p16"])
NUM_NEW = 5
TURN = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
# A turned key is rounded to bf16 once: 2**-9 of each element at most. Measured: .0017.
ROUNDING = 0.004
THETA, HEAD_DIM = 100_000.0, 64
Pieces = list[tuple[int, int, int, int]]  # start, stop, segment, shift


@dataclass
class Talk:
    """A conversation in ids, so that no tokenizer stands between two turns."""

    server: Server
    salt: str
    policy: str
    behind: list[int] | None = None  # ids behind the field, in place of the policy
    history: list[int] = field(default_factory=list)

    def prompt(self, value: str, question: str) -> list[int]:
        text = system({"order": value, "stock": "two"}, self.policy)
        if self.behind is not None:
            text = f"order_status: {value}\n\n"
        head = encode(f"<|im_start|>system\n{text}") + (self.behind or [])
        return head + self.history + encode(TURN.format(question))

    def turn(self, value: str, question: str, **fields: Any) -> Answer:
        ids = self.prompt(value, question)
        fields = {"num_new": NUM_NEW, "cache_salt": self.salt, **fields}
        answer = self.server.generate(ids, **fields)
        self.history += encode(TURN.format(question)) + answer.token_ids
        return answer


@pytest.fixture
def talks(servers: ServerPool) -> Iterator[Any]:
    """Starts conversations with fields of one strategy, in namespaces of their own."""
    started: list[tuple[Server, str]] = []

    def start(config: ServerConfig, strategy: str, behind: list[int] | None = None) -> Talk:
        server, salt = servers.get(config), fresh_name()
        declare(server, salt, strategy)
        started.append((server, salt))
        return Talk(server, salt, english((strategy, config.page_size), 16), behind)

    yield start
    for server, salt in started:
        remove_fields(server, salt)
        assert not server.audit()


def served(server: Server, answer: Answer) -> tuple[list[int], str, Pieces]:
    out = server.testing(op="served", rid=answer.meta["id"])
    return out["ids"], out["text"], [tuple(piece) for piece in out["pieces"]]


def dump(server: Server, answer: Answer, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [layers, tokens, heads, dim] of the path that a request was served with."""
    server.testing(op="dump", rid=answer.meta["id"], path=str(path))
    loaded = torch.load(path)
    return torch.stack(loaded["k"]), torch.stack(loaded["v"])


def turned(keys: torch.Tensor, shift: int) -> torch.Tensor:
    """K turned by ``shift`` positions: fp32 arithmetic, rounded once; no kernel of ours."""
    half = HEAD_DIM // 2
    inv_freq = THETA ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = shift * inv_freq
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = keys[..., :half].float(), keys[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(keys.dtype)


def errors(got: torch.Tensor, want: torch.Tensor) -> list[float]:
    """Relative error of each layer."""
    pairs = zip(got.float(), want.float(), strict=True)
    return [float((g - w).norm() / w.norm()) for g, w in pairs]


def assert_same(left: Answer, right: Answer) -> None:
    assert left.cached_tokens == right.cached_tokens
    assert left.token_ids == right.token_ids
    assert left.top_logprobs == right.top_logprobs


# ---- exact


@CONFIGS
def test_an_erratum_equals_the_rewritten_prompt(talks: Any, config: ServerConfig) -> None:
    """Turn by turn: the line of a turn is part of the next one's history."""
    talk = talks(config, "erratum")
    clean = Talk(talk.server, fresh_name(), talk.policy)
    first = talk.turn("open", "How is it?")
    assert clean.turn("open", "How is it?").token_ids == first.token_ids
    for value, question in (("delivered to a neighbour", "Now?"), ("lost", "And today?")):
        answer = talk.turn(value, question, top=20)
        ids, text, pieces = served(talk.server, answer)
        assert line("order", value) in text and not pieces
        assert answer.report["erratum"] > 10
        rewritten = talk.server.generate(ids, num_new=NUM_NEW, top=20, cache_salt=clean.salt)
        assert_same(answer, rewritten)
    # Control: the prompt as the client sent it is another one.
    sent = talk.prompt("lost", "And today?")
    other = talk.server.generate(sent, num_new=NUM_NEW, top=20, cache_salt=fresh_name())
    assert other.top_logprobs != answer.top_logprobs


@CONFIGS
def test_a_plain_request_after_edits_equals_a_clean_namespace(
    talks: Any, config: ServerConfig
) -> None:
    talk = talks(config, "edit+erratum")
    clean = Talk(talk.server, fresh_name(), talk.policy)
    for talker in (talk, clean):
        talker.turn("open", "How is it?")
    sent = talk.prompt("delivered to a neighbour", "Now?")
    edited = talk.turn("delivered to a neighbour", "Now?")
    assert edited.report["composed"] > 200
    [first, *_] = served(talk.server, edited)[2]
    # The edit computed the new value on the exact prefix, in a chunk that ended at the splice.
    options = {"edits": "off", "splice": "off"}
    talk.server.generate(sent[: first[0]], kvedit=options, cache_salt=clean.salt)
    plain, other = (
        talk.server.generate(sent, num_new=NUM_NEW, top=20, kvedit=options, cache_salt=salt)
        for salt in (talk.salt, clean.salt)
    )
    assert plain.split[1:3] == (0, 0) and plain.cached_tokens == first[0]
    assert_same(plain, other)


# ---- composed


@CONFIGS
@pytest.mark.parametrize(
    ("before", "now"),
    [("open", "delivered to a neighbour"), ("delivered to a neighbour", "open")],
    ids=["longer", "shorter"],
)
def test_downstream_keys_are_the_sources_turned(
    talks: Any, config: ServerConfig, before: str, now: str, tmp_path: Path
) -> None:
    talk = talks(config, "edit")
    clean = Talk(talk.server, fresh_name(), talk.policy)
    source = talk.turn(before, "How is it?")
    clean.turn(before, "How is it?")
    edited = talk.turn(now, "Now?")
    old_k, old_v = dump(talk.server, source, tmp_path / "old.pt")
    new_k, new_v = dump(talk.server, edited, tmp_path / "new.pt")
    [(start, stop, _, shift)] = served(talk.server, edited)[2]
    assert shift == len(encode(f" {now}")) - len(encode(f" {before}")) != 0
    assert stop - start > 200
    source_k = old_k[:, start - shift : stop - shift]
    assert torch.equal(new_v[:, start:stop], old_v[:, start - shift : stop - shift])
    assert torch.equal(new_k[:, start:stop], turned(source_k, shift))
    # Controls: no rotation, and a shift that is off by one, in every layer.
    assert max(errors(turned(turned(source_k, 7), shift - 7), new_k[:, start:stop])) < ROUNDING
    for wrong in (source_k, turned(source_k, shift + 1)):
        assert min(errors(wrong, new_k[:, start:stop])) > ROUNDING
    # In front of the splice: what a plain prefill of the same prefix computes.
    prefix = talk.prompt(now, "Now?")[:start]
    assert f"order_status: {now}" in served(talk.server, edited)[1]
    plain = talk.server.generate(prefix, cache_salt=clean.salt)
    plain_k, plain_v = dump(talk.server, plain, tmp_path / "plain.pt")
    assert torch.equal(new_k[:, :start], plain_k[:, :start])
    assert torch.equal(new_v[:, :start], plain_v[:, :start])


@CONFIGS
def test_five_edits_in_a_row_turn_every_part_once(
    talks: Any, config: ServerConfig, tmp_path: Path
) -> None:
    """Two skills stand behind the field. Whatever was composed is K of the tokens' first prefill,
    turned once by the sum of the shifts: two turns in a row would round twice."""
    skills = [random_ids(("chain", config.page_size, n), 160) for n in range(2)]
    middle = encode("\n" + english(("chain", config.page_size), 6) + "\n")
    talk: Talk = talks(config, "edit", [*skills[0], *middle, *skills[1]])
    server = talk.server
    alone = []
    for skill in skills:
        server.add_skill(fresh_name(), skill, namespace=talk.salt)
        answer = server.generate(skill, cache_salt=fresh_name())
        alone.append((skill, *dump(server, answer, tmp_path / "alone.pt")))
    values = ("open", "paid in full", "on its way to you", "x", "held at the border since May", "y")
    turns: list[Turn] = []
    for n, value in enumerate(values):
        answer = talk.turn(value, f"Round {n}?")
        ids, _, pieces = served(server, answer)
        path = ids + answer.token_ids
        turns.append(Turn(path, pieces, *dump(server, answer, tmp_path / "turn.pt")))
        if n:
            # On pages a run of one page between two windows may stand alone: no run pays for it.
            reasons = {refusal["reason"] for refusal in answer.report["refused"]}
            assert answer.report["composed"] > 250 and reasons <= {"not_worth_a_pass"}
    last = turns[-1]
    donors = [Turn(skill, [], k, v) for skill, k, v in alone] + turns[:-1]
    shifts = [shift for *_, shift in last.pieces]
    assert len(last.pieces) >= 4 and len(set(shifts)) >= 3
    for start, stop, _, shift in last.pieces:
        sources = [d for d in donors if d.computed(last.ids[start:stop], start - shift)]
        once = [
            d
            for d in sources
            if torch.equal(last.v[:, start:stop], d.v[:, start - shift : stop - shift])
            and torch.equal(last.k[:, start:stop], d.turned(start - shift, stop - shift, shift))
        ]
        assert once, (start, stop, shift, len(sources))
        # Control: by way of a place in between the bytes differ.
        twice = turned(once[0].turned(start - shift, stop - shift, 3), shift - 3)
        assert not torch.equal(last.k[:, start:stop], twice)


@dataclass
class Turn:
    ids: list[int]
    pieces: Pieces
    k: torch.Tensor
    v: torch.Tensor

    def computed(self, ids: list[int], at: int) -> bool:
        """Whether this path holds ``ids`` at position ``at``, and has computed every one."""
        stop = at + len(ids)
        copied = any(first < stop and last > at for first, last, *_ in self.pieces)
        return at >= 0 and self.ids[at:stop] == ids and not copied and stop <= self.k.shape[1]

    def turned(self, start: int, stop: int, shift: int) -> torch.Tensor:
        return turned(self.k[:, start:stop], shift)
