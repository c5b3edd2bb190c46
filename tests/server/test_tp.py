"""Two tensor-parallel ranks on CPU: they decide alike, and each holds its own heads.

One scenario runs on a server with one rank and on one with two. fp32, so that the two sums of an
all-reduce cannot change a greedy token; scheduled by longest prefix (lpm), so that the order of
the queue depends on what each rank's tree holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.canary import encode
from tests.server.harness import Answer, Server, ServerConfig, ServerPool, fresh_name, random_ids
from tests.server.test_bit_equal import assert_same
from tests.server.texts import english
from tests.server.tiny_models import tiny_model

RUN_LAST = True  # servers of its own
pytestmark = pytest.mark.real_server

NUM_TOKENS = 300
FLAGS = ("--dtype", "float32", "--schedule-policy", "lpm")
TWO_RANKS = (*FLAGS, "--tp-size", "2")
TWO_RANKS_ENV = (
    # One NUMA node: the host refuses two ranks unless told which core each may use.
    ("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),
    # Without a library pynccl switches itself off instead of asking for a CUDA device.
    ("SGLANG_NCCL_SO_PATH", "/nonexistent/libnccl.so"),
)


@dataclass(frozen=True)
class Run:
    """One server, what it answered, and what each of its ranks had decided by then."""

    server: Server
    answers: list[Answer]
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("qwen3", default_model_dir, tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def two(servers: ServerPool, model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = ServerConfig(model=model, flags=TWO_RANKS, env=TWO_RANKS_ENV)
    return run(servers.get(config), tmp_path_factory.mktemp("ranks") / "two.json", num_ranks=2)


@pytest.fixture(scope="module")
def one(servers: ServerPool, model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = ServerConfig(model=model, flags=FLAGS)
    return run(servers.get(config), tmp_path_factory.mktemp("ranks") / "one.json", num_ranks=1)


def run(server: Server, path: Path, num_ranks: int) -> Run:
    answers = scenario(server)
    return Run(server, answers, ranks(server, path, num_ranks))


def scenario(server: Server) -> list[Answer]:
    """Splices behind several heads, a skill replaced, everything evicted and compiled again."""
    alpha, beta, gamma = (random_ids(("tp", name), NUM_TOKENS) for name in ("a", "b", "g"))
    heads = [random_ids(("tp-h", i), 10 + 40 * i) for i in range(4)]
    answers: list[Answer] = []

    def ask(ids: list[int], **fields: Any) -> Answer:
        answers.append(server.generate([*ids, 5, 6, 7], num_new=8, top=3, **fields))
        return answers[-1]

    server.add_skill("alpha", alpha)
    server.add_skill("beta", beta, pin=True)
    ask(heads[1] + alpha)
    ask(heads[1] + alpha + heads[2] + beta)
    ask(heads[0] + beta + alpha, kvedit={"seam": 0})
    server.add_skill("alpha", gamma, replace=True)
    ask(heads[2] + alpha + gamma)
    server.flush()
    ask(heads[3] + beta, kvedit={"splice": "require", "skills": ["beta"]})  # compiled again
    ask(heads[3] + gamma + beta)
    ask(heads[3] + beta, kvedit={"splice": "off"})
    edits(server, ask)
    return answers


def edits(server: Server, ask: Callable[..., Answer]) -> None:
    """A field that changes twice: in place with a line, then by a line alone, then back. The
    conversation is proven by a token, which every rank has to know."""
    where = {"within": 64}
    server.call(
        "POST", "/kvedit/fields", {"name": "st", "pattern": "status: {value}", "where": where}
    )
    text = english("tp", 30)
    conversation: Any = True
    for value, strategy in [
        ("open", None),
        ("sent away", None),
        ("lost", "erratum"),
        ("open", None),
    ]:
        options = {"conversation": conversation, "strategy": strategy}
        answer = ask(encode(f"status: {value}\n{text}\nAnd now?\n"), kvedit=options)
        if conversation is True:
            conversation = answer.report.pop("conversation")
    server.call("DELETE", "/kvedit/fields/st")


def ranks(server: Server, path: Path, num_ranks: int) -> list[dict[str, Any]]:
    server.testing(op="ranks", path=str(path))
    all_ranks_are_through(server)
    paths = [path, *(Path(f"{path}.rank{rank}") for rank in range(1, num_ranks))]
    return [json.loads(p.read_text("utf-8")) for p in paths]


def all_ranks_are_through(server: Server) -> None:
    """Rank 0 answers for all; the next forward needs every rank, behind what it did before."""
    server.generate(random_ids(fresh_name(), 4), kvedit={"splice": "off"})


def test_answers_and_reports_equal_those_of_one_rank(one: Run, two: Run) -> None:
    assert [a.token_ids for a in two.answers] == [a.token_ids for a in one.answers]
    assert [a.report for a in two.answers] == [a.report for a in one.answers]
    composed = [a.report["composed"] for a in one.answers]
    assert min(composed[:6]) > 0 and composed[6] == 0
    edited = [
        (a.report["base"], len(a.report["errata"]), a.report["edited"]) for a in one.answers[7:]
    ]
    assert edited == [
        ("sent", 0, []),
        ("conversation", 1, ["st"]),
        ("conversation", 1, []),
        ("sent", 0, []),
    ]
    # A text that was replaced is found and not composed.
    assert [len(a.report["spans"]) for a in one.answers[:4]] == [1, 2, 2, 1]


def test_ranks_decide_alike(two: Run) -> None:
    first, second = two.ranks
    assert first["copies"] > 5
    for what in ("skills", "registry_version", "copies", "cached_slots"):
        assert first[what] == second[what], what
    for what in ("tokens", "edits"):
        assert first["counters"][what] == second["counters"][what], what
    assert first["audit"] == second["audit"] == []
    assert first["hook_errors"] == second["hook_errors"] == {}


def test_one_rank_made_the_same_decisions(one: Run, two: Run) -> None:
    """The control: the record tells one run from another by more than its shape."""
    for what in ("registry_version", "copies"):
        assert one.ranks[0][what] == two.ranks[0][what], what
    assert identities(one.ranks[0]) != identities(two.ranks[0])  # the rank count shapes KV


def identities(rank: dict[str, Any]) -> list[str]:
    return [skill["id"] for skill in rank["skills"]]


def test_each_rank_relocates_its_own_heads(one: Run, two: Run, tmp_path: Path) -> None:
    skill, head = random_ids("tp-k", NUM_TOKENS), random_ids("tp-kh", 77)
    for server in (one.server, two.server):
        server.add_skill(fresh_name(), skill)
        server.generate(head + skill + [5, 6], kvedit={"seam": 0})
    whole = dump(one.server, head + skill + [5, 6], tmp_path / "one.pt")
    first = dump(two.server, head + skill + [5, 6], tmp_path / "two.pt")
    all_ranks_are_through(two.server)
    second = torch.load(f"{tmp_path / 'two.pt'}.rank1")
    assert whole["pieces"] == first["pieces"] == second["pieces"] == [(77, 77 + NUM_TOKENS, 77)]
    for name in ("k", "v"):
        for layer, both in enumerate(whole[name]):
            halves = [first[name][layer], second[name][layer]]
            assert halves[0].shape[1] == halves[1].shape[1] == both.shape[1] // 2 == 2
            torch.testing.assert_close(torch.cat(halves, dim=1), both, rtol=1e-3, atol=1e-4)
            assert not torch.allclose(halves[0], halves[1], rtol=1e-3, atol=1e-4)


def dump(server: Server, ids: list[int], path: Path) -> dict[str, Any]:
    server.testing(op="dump", ids=ids, extra_key=None, options={"seam": 0}, path=str(path))
    loaded: dict[str, Any] = torch.load(path)
    return loaded


def test_splice_equals_exact_reuse_on_two_ranks(two: Run) -> None:
    skill, tail, key = random_ids("tp-bit", NUM_TOKENS), random_ids("tp-bt", 9), fresh_name()
    two.server.add_skill(fresh_name(), skill)
    spliced = two.server.generate(skill + tail, num_new=8, top=20, kvedit={"seam": 0})
    two.server.generate(skill, kvedit={"splice": "off"}, extra_key=key)
    exact = two.server.generate(
        skill + tail, num_new=8, top=20, kvedit={"splice": "off"}, extra_key=key
    )
    assert spliced.split == (0, NUM_TOKENS, 0, 9) and exact.split == (NUM_TOKENS, 0, 0, 9)
    assert_same(spliced, exact)


def test_a_queue_ordered_by_cached_prefix(two: Run, tmp_path: Path) -> None:
    """Requests at once, ordered by lpm: every one is spliced, and the ranks still agree."""
    skill = random_ids("tp-lpm", NUM_TOKENS)
    two.server.add_skill(fresh_name(), skill)
    heads = [random_ids(("tp-lpm", i % 4), 20 + i) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(lambda head: two.server.generate(head + skill + [5, 6], num_new=4), heads)
        )
    assert all(a.report["composed"] > NUM_TOKENS - 32 for a in answers)
    first, second = ranks(two.server, tmp_path / "lpm.json", 2)
    for what in ("skills", "copies", "cached_slots"):
        assert first[what] == second[what], what
    assert first["audit"] == second["audit"] == []
