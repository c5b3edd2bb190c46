"""The copy queue: what it launches, when it unlocks, and what it keeps alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvedit.splice.sources import SkillSource
from kvedit_kernels.testing import Case, build, expect_moved, snapshot
from sglang_patches import cpu, faults, guard

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches.pools import GroupWithRope  # noqa: E402
from sglang_patches.scheduler.splice import copies as copies_module  # noqa: E402
from sglang_patches.scheduler.testing.faulty_queue import FaultyQueue  # noqa: E402

CASE = Case(num_tokens=24, deltas=(17, 0, 4096), page_size=1, placement="scattered")


class LateEvent:
    """Behind a launch on a stream that has not come that far, until the test says so."""

    def __init__(self):
        self.is_done = False

    def query(self):
        return self.is_done


class Setup:
    """A pool of the kernels' own test case, and a queue over it whose locks are names."""

    def __init__(self, *, num_groups=1, has_streams=False):
        self.group, self.plan = build(CASE)
        self.unlocked, self.events = [], []
        described = GroupWithRope(self.group, CASE.inv_freq, "full", (0, 1), "rope")
        new_event = self.recorded if has_streams else None
        self.queue = FaultyQueue([described] * num_groups, None, self.unlocked.append, new_event)

    def recorded(self):
        self.events.append(LateEvent())
        return self.events[-1]

    def put_everything(self):
        """One copy per shift; together they are the case's plan."""
        for number, delta in enumerate(CASE.deltas):
            mine = self.plan.row == number
            copy = self.queue.plan(
                self.plan.src[mine], self.plan.dst[mine], delta, SkillSource(40 + number)
            )
            locks = [f"donor{number}", f"path{number}"]
            self.queue.put([copy], locks, holder=f"request{number}")


@pytest.fixture
def setup():
    yield Setup()
    guard.errors.clear()
    faults.disarm()


LOCKS = ["donor0", "path0", "donor1", "path1", "donor2", "path2"]


def test_one_launch_moves_every_queued_span_by_its_own_shift(setup):
    setup.put_everything()
    before = snapshot(setup.group)
    pending = setup.queue.pending()
    assert (len(setup.queue), pending.num_copies) == (3, 3)
    assert pending.sources == {SkillSource(number) for number in (40, 41, 42)}
    assert torch.cat(pending.targets).sort().values.equal(setup.plan.dst.sort().values)
    assert pending.holders == ("request0", "request1", "request2")
    setup.queue.launch()
    expect_moved(CASE, before, setup.group, setup.plan)
    assert len(setup.queue) == 0 and setup.queue.pending().holders == ()


def test_locks_are_held_until_the_launch_and_given_back_once(setup):
    setup.put_everything()
    assert setup.unlocked == []
    setup.queue.launch()
    assert setup.unlocked == LOCKS
    setup.queue.release_pending()
    assert setup.unlocked == LOCKS


def test_a_failed_fast_path_is_replaced_by_the_reference(setup):
    setup.put_everything()
    before = snapshot(setup.group)
    faults.arm("relocate")
    setup.queue.launch()
    expect_moved(CASE, before, setup.group, setup.plan)
    assert guard.errors["relocate"] == 1


def test_when_both_fail_the_caller_learns_it_and_no_lock_stays(setup):
    setup.put_everything()
    before = snapshot(setup.group)
    faults.arm("relocate")
    faults.arm("relocate_ref")
    with pytest.raises(faults.InjectedFault):
        setup.queue.launch()
    assert (len(setup.queue), setup.unlocked) == (0, LOCKS)
    for old, new in zip(before[0] + before[1], sum(snapshot(setup.group), []), strict=True):
        assert old.equal(new)


def test_discard_forgets_the_locks_of_an_emptied_tree(setup):
    setup.put_everything()
    setup.queue.discard()
    assert (len(setup.queue), setup.unlocked) == (0, [])


NUM_OUTSTANDING = 12
READ_BY_A_LAUNCH = ("src", "dst", "row", "cos_sin")


def launch_often(setup, monkeypatch):
    """By launch: weak references to all that its kernels read, slots of the queue's included."""
    launches = []

    def enqueued(group, plan):
        launches[-1] += [weakref.ref(getattr(plan, name)) for name in READ_BY_A_LAUNCH]

    monkeypatch.setattr(copies_module, "relocate", enqueued)
    for _ in range(NUM_OUTSTANDING):
        src, dst = setup.plan.src.clone(), setup.plan.dst.clone()
        launches.append([weakref.ref(src), weakref.ref(dst)])
        setup.queue.put([setup.queue.plan(src, dst, 17, SkillSource(1))], [])
        del src, dst
        setup.queue.launch()
    gc.collect()
    return launches


def alive(launch):
    return [tensor() is not None for tensor in launch]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_launch_keeps_what_it_reads_until_the_stream_has_passed_it(monkeypatch, num_groups):
    """However many stand in line, and in their order. Nothing waits for the stream."""
    setup = Setup(num_groups=num_groups, has_streams=True)
    launches = launch_often(setup, monkeypatch)
    setup.queue.release_done()
    assert all(all(alive(launch)) for launch in launches), "none has run yet"
    for number, event in enumerate(setup.events):
        event.is_done = True
        setup.queue.release_done()
        gc.collect()
        assert not any(alive(launches[number]))
        assert all(all(alive(launch)) for launch in launches[number + 1 :])
    assert len(setup.queue.in_flight) == 0


def test_an_event_out_of_order_releases_nothing_before_it(monkeypatch):
    setup = Setup(has_streams=True)
    launches = launch_often(setup, monkeypatch)
    setup.events[1].is_done = True
    setup.queue.release_done()
    assert all(all(alive(launch)) for launch in launches)


def test_a_host_without_streams_keeps_nothing(monkeypatch):
    launches = launch_often(Setup(), monkeypatch)
    assert not any(any(alive(launch)) for launch in launches)


def test_a_launch_that_failed_half_way_keeps_what_it_may_have_enqueued():
    setup = Setup(num_groups=2, has_streams=True)
    setup.put_everything()
    for hook in ("relocate", "relocate_ref"):
        faults.arm(hook)
    with pytest.raises(faults.InjectedFault):
        setup.queue.launch()
    assert len(setup.queue.in_flight) == 1


def test_the_same_shifts_share_one_table(setup, monkeypatch):
    tables = []
    monkeypatch.setattr(copies_module, "relocate", lambda group, plan: tables.append(plan.cos_sin))
    for _ in range(2):
        setup.put_everything()
        setup.queue.launch()
    assert tables[0].equal(tables[1]) and tables[0].shape == (3, 2, CASE.rot_dim // 2)
