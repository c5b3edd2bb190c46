"""The relocation runs once for every group at start; one that cannot refuses the start."""

from __future__ import annotations

import pytest
import torch

from kvedit.errors import Unsupported
from kvedit_kernels.testing import Case, build, snapshot
from sglang_patches import cpu

cpu.prepare()  # before the first import of sglang on a host without a GPU

from sglang_patches.pools import GroupWithRope  # noqa: E402
from sglang_patches.scheduler.splice import warm_up  # noqa: E402

CASES = (
    Case(num_tokens=8, deltas=(1,), page_size=1),
    Case(num_tokens=8, deltas=(1,), page_size=16, is_hnd=True),
    Case(num_tokens=8, deltas=(1,), rotate=False),
)


def groups():
    kinds = ("full", "swa", "full")
    return [
        GroupWithRope(build(case)[0], case.inv_freq, kind, (2 * n, 2 * n + 1), "rope")
        for n, (case, kind) in enumerate(zip(CASES, kinds, strict=True))
    ]


def test_every_group_is_run_and_only_its_first_writable_slot_is_touched():
    ready = groups()
    before = [snapshot(group.group) for group in ready]
    warm_up.warm_up(ready, None)
    for group, old in zip(ready, before, strict=True):
        slot = group.group.first_writable_slot
        for was, now in zip(old[0] + old[1], sum(snapshot(group.group), []), strict=True):
            changed = (was != now).flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert set(changed) <= {slot}


def test_the_groups_that_fail_are_named(monkeypatch):
    relocate = warm_up.relocate

    def fails_on_the_window(group, plan):
        if group.page_size:
            raise RuntimeError("no kernel image")
        relocate(group=group, plan=plan)

    monkeypatch.setattr(warm_up, "relocate", fails_on_the_window)
    with pytest.raises(Unsupported) as refusal:
        warm_up.warm_up(groups(), None)
    assert refusal.value.reasons == (
        "relocation kernel: expected it to run on the swa pool's layers 2..3, "
        "got RuntimeError: no kernel image",
    )


def test_a_failure_that_the_device_reports_late_refuses_too(monkeypatch):
    class Device:
        def synchronize(self):
            raise RuntimeError("illegal address")

    class OnDevice:
        device = torch.device("meta")
        first_writable_slot = 1

    monkeypatch.setattr(warm_up, "relocate", lambda group, plan: None)
    monkeypatch.setattr(warm_up, "_plan", lambda group: None)
    described = GroupWithRope(OnDevice(), CASES[0].inv_freq, "full", (0,), None)
    with pytest.raises(Unsupported, match="layers 0..0, got RuntimeError: illegal address"):
        warm_up.warm_up([described], Device())
