"""The copy queue: what it launches, when it unlocks, and what it keeps alive."""

from __future__ import annotations

import pytest
import torch

from kvedit_kernels.testing import Case, build, expect_moved, snapshot
from sglang_patches import cpu, guard

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches import copies as copies_module  # noqa: E402
from sglang_patches.copies import CopyQueue  # noqa: E402
from sglang_patches.pools import GroupWithRope  # noqa: E402

CASE = Case(num_tokens=24, deltas=(17, 0, 4096), page_size=1, placement="scattered")


class Setup:
    """A pool of the kernels' own test case, and a queue over it whose locks are names."""

    def __init__(self):
        self.group, self.plan = build(CASE)
        self.unlocked = []
        described = GroupWithRope(self.group, CASE.inv_freq, "full", (0, 1), "rope")
        self.queue = CopyQueue([described], None, self.unlocked.append)

    def put_everything(self):
        """One copy per shift; together they are the case's plan."""
        for number, delta in enumerate(CASE.deltas):
            mine = self.plan.row == number
            copy = self.queue.plan(self.plan.src[mine], self.plan.dst[mine], delta, 40 + number)
            self.queue.put([copy], [f"donor{number}", f"path{number}"])


@pytest.fixture
def setup():
    yield Setup()
    guard.errors.clear()
    guard._faults.clear()


LOCKS = ["donor0", "path0", "donor1", "path1", "donor2", "path2"]


def test_one_launch_moves_every_queued_span_by_its_own_shift(setup):
    setup.put_everything()
    before = snapshot(setup.group)
    assert (len(setup.queue), setup.queue.segments()) == (3, {40, 41, 42})
    assert torch.cat(setup.queue.targets()).sort().values.equal(setup.plan.dst.sort().values)
    setup.queue.launch()
    expect_moved(CASE, before, setup.group, setup.plan)
    assert (len(setup.queue), setup.queue.num_launched) == (0, 3)


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
    guard.arm("relocate")
    setup.queue.launch()
    expect_moved(CASE, before, setup.group, setup.plan)
    assert guard.errors["relocate"] == 1


def test_when_both_fail_the_caller_learns_it_and_no_lock_stays(setup):
    setup.put_everything()
    before = snapshot(setup.group)
    guard.arm("relocate")
    guard.arm("relocate_ref")
    with pytest.raises(guard.InjectedFault):
        setup.queue.launch()
    assert (len(setup.queue), setup.unlocked) == (0, LOCKS)
    for old, new in zip(before[0] + before[1], sum(snapshot(setup.group), []), strict=True):
        assert old.equal(new)


def test_discard_forgets_the_locks_of_an_emptied_tree(setup):
    setup.put_everything()
    setup.queue.discard()
    assert (len(setup.queue), setup.unlocked) == (0, [])


def test_a_launch_keeps_its_tensors_alive_while_the_stream_may_read_them(setup, monkeypatch):
    """Several launches may be on their way before the first one has run."""
    plans = []
    monkeypatch.setattr(copies_module, "relocate", lambda group, plan: plans.append(id(plan.src)))
    for _ in range(3):
        setup.put_everything()
        setup.queue.launch()
    kept = [id(plan.src) for plan, _ in setup.queue._in_flight]
    assert kept == plans


def test_the_same_shifts_share_one_table(setup, monkeypatch):
    tables = []
    monkeypatch.setattr(copies_module, "relocate", lambda group, plan: tables.append(plan.cos_sin))
    for _ in range(2):
        setup.put_everything()
        setup.queue.launch()
    assert tables[0].equal(tables[1]) and tables[0].shape == (3, 2, CASE.rot_dim // 2)
