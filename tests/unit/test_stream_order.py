"""Copies run on the forward stream, behind what the scheduler queued, in front of the forward."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from kvedit.splice.sources import SkillSource
from kvedit_kernels.testing import Case, build, expect_moved, snapshot
from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang.srt.plugins.hook_registry import HookType, _wrap_fn  # noqa: E402

from sglang_patches.pools import GroupWithRope  # noqa: E402
from sglang_patches.scheduler.hooks import forward  # noqa: E402
from sglang_patches.scheduler.splice import copies as copies_module  # noqa: E402
from sglang_patches.scheduler.splice.copies import CopyQueue  # noqa: E402
from sglang_patches.scheduler.splice.copy_runner import CopyRunner  # noqa: E402
from sglang_patches.scheduler.splice.in_flight import InFlight  # noqa: E402

CASE = Case(num_tokens=24, deltas=(17, 0, 4096), page_size=1, placement="scattered")


class FakeDevice:
    """Records what a device module is asked for. It has no ``synchronize``: a host wait fails."""

    def __init__(self):
        self.log = []
        self.running = "schedule"
        self.forward_stream = FakeStream("forward", self)

    def current_stream(self):
        return self.running

    @contextmanager
    def stream(self, stream):
        self.running, outer = stream.name, self.running
        yield
        self.running = outer


class FakeStream:
    def __init__(self, name, device):
        self.name = name
        self.device = device

    def wait_stream(self, other):
        self.device.log.append(f"{self.name} waits for {other}")


class FakeEvent:
    is_done = False

    def query(self):
        return self.is_done


class Batch:
    def __init__(self, cache):
        self.tree_cache = cache
        self.reqs = []


def make(monkeypatch, device, unlocked, has_overlap=True):
    """A runner over the kernels' test pool, on the fake device; every launch is recorded."""
    group, plan = build(CASE)
    relocate = copies_module.relocate

    def recorded(**kwargs):
        device.log.append(f"relocate {len(kwargs['plan'].dst)} tokens on {device.running}")
        assert not unlocked, "donor and target stay locked until their copy was launched"
        relocate(**kwargs)

    monkeypatch.setattr(copies_module, "relocate", recorded)
    described = GroupWithRope(group, CASE.inv_freq, "full", (0, SkillSource(1)), "rope")
    queue = CopyQueue([described], None, unlocked.append)
    stream = device.forward_stream if has_overlap else None
    runner = CopyRunner(queue, device, stream, on_unwritten=fail)
    monkeypatch.setattr(forward, "rooms_of", lambda tree: SimpleNamespace(copies=tree))
    return group, plan, queue, Batch(runner)


def fail(sources):
    raise AssertionError(f"{sources} were not written")


def test_every_span_of_a_batch_is_one_launch_on_the_forward_stream_before_the_forward(monkeypatch):
    device, unlocked = FakeDevice(), []
    group, plan, queue, batch = make(monkeypatch, device, unlocked)
    for number, delta in enumerate(CASE.deltas):  # as if three requests of one batch spliced
        mine = plan.row == number
        copy = queue.plan(plan.src[mine], plan.dst[mine], delta, SkillSource(40 + number))
        queue.put([copy], [f"donor{number}", f"target{number}"])
    before = snapshot(group)

    def forward_batch_generation(worker, batch):
        device.log.append("forward")

    _wrap_fn(forward_batch_generation, forward.forward_hook, HookType.BEFORE)(None, batch)
    assert device.log == [
        "forward waits for schedule",
        "relocate 24 tokens on forward",
        "forward",
    ]
    assert len(unlocked) == 6
    expect_moved(CASE, before, group, plan)


def test_a_forward_without_copies_touches_no_stream(monkeypatch):
    device, unlocked = FakeDevice(), []
    _, _, _, batch = make(monkeypatch, device, unlocked)
    forward.forward_hook(None, batch)
    assert device.log == []


def test_without_overlap_copies_run_on_the_current_stream(monkeypatch):
    device, unlocked = FakeDevice(), []
    _, plan, queue, batch = make(monkeypatch, device, unlocked, has_overlap=False)
    copy = queue.plan(plan.src[:4], plan.dst[:4], 0, SkillSource(1))
    queue.put([copy], [])
    forward.forward_hook(None, batch)
    assert device.log == ["relocate 4 tokens on schedule"]
    assert torch.equal(plan.dst[:4], copy.target)


def test_what_a_launch_reads_is_released_when_the_forward_stream_has_passed_it(monkeypatch):
    """Events are recorded on the forward stream, behind the relocation, and asked, not awaited."""
    device, unlocked = FakeDevice(), []
    _, plan, queue, batch = make(monkeypatch, device, unlocked)
    events = []

    def recorded():
        device.log.append(f"event on {device.running}")
        events.append(FakeEvent())
        return events[-1]

    queue.in_flight = InFlight(recorded)
    for _ in range(2):
        queue.put([queue.plan(plan.src[:4], plan.dst[:4], 0, SkillSource(1))], [])
        unlocked.clear()
        forward.forward_hook(None, batch)
    assert device.log[1:3] == ["relocate 4 tokens on forward", "event on forward"]
    assert len(queue.in_flight) == 2
    for event in events:
        event.is_done = True
    forward.forward_hook(None, batch)  # nothing is queued, and still they go
    assert len(queue.in_flight) == 0
