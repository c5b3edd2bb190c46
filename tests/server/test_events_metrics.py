"""Events on the socket, counters on /metrics, and that both agree with the reports."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from tests.server.harness import BASE, Server, ServerPool, fresh_name, random_ids

pytestmark = pytest.mark.real_server

KVEDIT = Path(sys.executable).with_name("kvedit")
CLASSES = ("exact", "composed", "derived", "computed", "repaired", "erratum", "copied")
SAMPLE = re.compile(r"^kvedit_(tokens|splices)_total\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


@pytest.fixture(scope="module")
def server(servers: ServerPool) -> Server:
    return servers.get(BASE)


@dataclass
class Follower:
    """What `kvedit events` has printed so far."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.lines.append(json.loads(line))

    def of(self, skill: str) -> list[dict[str, Any]]:
        return [event for event in self.lines if event.get("skill") == skill]

    def await_kinds(self, skill: str, kinds: list[str]) -> list[dict[str, Any]]:
        """The events of one skill, once as many came as are wanted."""
        deadline = time.monotonic() + 30
        while len(self.of(skill)) < len(kinds) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [event["event"] for event in self.of(skill)] == kinds
        return self.of(skill)


@pytest.fixture
def follower(server: Server) -> Iterator[Follower]:
    """`kvedit events`, connected: one that is not yet misses what happens."""
    follower = Follower()
    command = [KVEDIT, "events", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=follower.read, args=[process.stdout])
        reader.start()
        try:
            deadline = time.monotonic() + 60
            while not follower.lines and time.monotonic() < deadline:
                register_and_drop(server)
            assert follower.lines, "no event came out"
            yield follower
        finally:
            process.terminate()
            process.wait()
            reader.join()


def register_and_drop(server: Server) -> None:
    name = fresh_name()
    server.add_skill(name, random_ids(name, 20))
    server.call("DELETE", f"/kvedit/skills/{name}?purge=1")


def test_the_life_of_a_skill_comes_out_as_events(server: Server, follower: Follower) -> None:
    name = fresh_name()
    ids = random_ids(name, 100)
    view = server.add_skill(name, ids)
    server.generate(random_ids((name, "head"), 30) + ids + [5])
    server.generate(random_ids((name, "short"), 30) + ids[:20] + [5])
    server.call("DELETE", f"/kvedit/skills/{name}")
    ready, realised, *refused, retired = follower.await_kinds(
        name,
        ["skill_ready", "splice_realised", "splice_refused", "splice_refused", "skill_retired"],
    )
    assert ready["segment"] == view["segment"]
    assert (realised["start"], realised["stop"]) == (46, 130)
    assert {event["reason"] for event in refused} == {"differs_at", "too_short"}
    assert retired["dropped"] == 0
    assert all(abs(event["time"] - time.time()) < 600 for event in follower.of(name))


def test_a_flush_comes_out_as_a_new_epoch(server: Server, follower: Follower) -> None:
    epoch = server.status()["weight_epoch"]
    server.flush()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        epochs = [event for event in follower.lines if event["event"] == "weight_epoch"]
        if epochs:
            break
        time.sleep(0.05)
    assert [(event["epoch"], event["why"]) for event in epochs] == [(epoch + 1, "flush")]


def test_only_this_user_can_reach_the_socket(server: Server) -> None:
    path = Path(server.status()["events"].removeprefix("ipc://"))
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def counters(server: Server) -> Counter[tuple[str, ...]]:
    """(family, label value, ...) -> value, summed over what else is labelled."""
    found: Counter[tuple[str, ...]] = Counter()
    for family, labels, value in SAMPLE.findall(server.call("GET", "/metrics")):
        named = dict(LABEL.findall(labels))
        assert named["model_name"]
        wanted = ("kind",) if family == "tokens" else ("outcome", "reason")
        found[(family, *(named[label] for label in wanted))] += float(value)
    return found


def status_counters(server: Server) -> Counter[tuple[str, ...]]:
    answer = server.status()["counters"]
    found: Counter[tuple[str, ...]] = Counter()
    for kind, value in answer["tokens"].items():
        found[("tokens", kind)] += value
    for row in answer["splices"]:
        found[("splices", row["outcome"], row["reason"])] += row["count"]
    return found


def test_counters_grow_by_what_the_reports_say(server: Server) -> None:
    """Health checks, compiles and the prefix warmer of n = 2 are no requests of anybody."""
    name = fresh_name()
    ids = random_ids(name, 100)
    server.add_skill(name, ids)
    prompt = random_ids((name, "head"), 30) + ids + [5]
    before, status_before = counters(server), status_counters(server)
    assert server.status_of("GET", "/health_generate")[0] == 200
    other = fresh_name()
    server.add_skill(other, random_ids(other, 50))
    answers = [
        server.generate(prompt).meta,
        server.generate(prompt).meta,
        server.generate(prompt, kvedit={"seam": 101}).meta,
        server.generate(random_ids((name, "plain"), 40)).meta,
    ]
    two = {"max_new_tokens": 1, "temperature": 0.5, "n": 2}
    body = {"input_ids": random_ids((name, "n2"), 25) + ids + [5], "sampling_params": two}
    answers += [sample["meta_info"] for sample in server.call("POST", "/generate", body)]
    wanted: Counter[tuple[str, ...]] = Counter()
    for meta in answers:
        [report] = meta["kvedit"]
        for kind in CLASSES:
            wanted[("tokens", kind)] += report[kind]
        for refusal in report["refused"]:
            wanted[("splices", "refused", refusal["reason"])] += 1
    grown, status_grown = counters(server), status_counters(server)
    grown.subtract(before)
    status_grown.subtract(status_before)
    realised = ("splices", "realised", "")
    assert grown.pop(realised) == status_grown.pop(realised) > 0
    assert {k: v for k, v in grown.items() if v} == {k: v for k, v in wanted.items() if v}
    assert {k: v for k, v in status_grown.items() if v} == {k: v for k, v in wanted.items() if v}
    split = sum(wanted["tokens", kind] for kind in CLASSES[:4])
    assert split == sum(meta["prompt_tokens"] for meta in answers)
