"""Copies in flight, with real streams: what a launch reads stays alive until the stream ran it.

A stand-in for a long forward keeps the stream busy while more launches are enqueued than any fixed
count of kept tensors would cover, and freed memory is overwritten at once. On the CPU (a dry run)
there are no streams: the same launches run at once and nothing is kept.
"""

from __future__ import annotations

import importlib.util
import time
from contextlib import nullcontext
from typing import Any

import torch

from kvedit_kernels import RelocationPlan, relocate_ref
from kvedit_kernels.testing import Case, build, snapshot

NUM_LAUNCHES = 12
TOKENS_PER_LAUNCH = 40
BUSY_CYCLES = 2_000_000_000  # about a second on a device of today
CASE = Case(num_tokens=NUM_LAUNCHES * TOKENS_PER_LAUNCH, deltas=(17,), placement="scattered")


def copy_checks(*, on_gpu: bool) -> list[dict[str, object]]:
    if importlib.util.find_spec("sglang") is None:
        return [{"check": "copies", "result": "SGLang is not installed: not compared"}]
    from sglang_patches.cpu import prepare

    if not on_gpu:
        prepare()  # before the first import of sglang on a host without a GPU
    device = "cuda" if on_gpu else "cpu"
    return [warm_up_check(device), storm_check(device)]


def warm_up_check(device: str) -> dict[str, object]:
    """As a server does at its start. Then no launch compiles anything: its time is given."""
    from sglang_patches.scheduler.splice.warm_up import warm_up

    group, plan = build(CASE, device=device)
    started = time.perf_counter()
    warm_up([described(group)], torch.get_device_module(device))
    warmed = time.perf_counter()
    queue = new_queue(group, device)
    queue.put([queue.plan(plan.src, plan.dst, 17, 1)], [])
    queue.launch()
    launched = time.perf_counter()
    return {
        "check": "warm-up, then the first launch",
        "warm_up_ms": round((warmed - started) * 1e3, 1),
        "first_launch_ms": round((launched - warmed) * 1e3, 1),
        "passed": True,  # a warm-up that fails raises
    }


def storm_check(device: str) -> dict[str, object]:
    want_group, want_plan = build(CASE)
    for part in parts():
        src, dst, row = (t[part] for t in (want_plan.src, want_plan.dst, want_plan.row))
        moved = RelocationPlan(src=src, dst=dst, row=row, cos_sin=want_plan.cos_sin)
        relocate_ref(group=want_group, plan=moved)
    group, plan = build(CASE, device=device)
    queue = new_queue(group, device)
    with busy_stream(device):
        for part in parts():
            enqueue(queue, plan, part)
        queue.release_done()
        num_kept = len(queue.in_flight)
    if device == "cuda":
        torch.cuda.synchronize()
    queue.release_done()
    same = all(
        torch.equal(a, b)
        for a, b in zip(sum(snapshot(want_group), []), sum(snapshot(group), []), strict=True)
    )
    expected = NUM_LAUNCHES if device == "cuda" else 0
    return {
        "check": f"{NUM_LAUNCHES} launches behind a busy stream",
        "kept_while_busy": num_kept,
        "kept_at_the_end": len(queue.in_flight),
        "same_bits": same,
        "passed": same and num_kept == expected and len(queue.in_flight) == 0,
    }


def enqueue(queue: Any, plan: RelocationPlan, part: slice) -> None:
    """Launch one part with tensors of its own; overwrite whatever memory comes free."""
    src, dst = (allocated_outside(t[part]) for t in (plan.src, plan.dst))
    queue.put([queue.plan(src, dst, 17, 1)], [])
    del src, dst
    queue.launch()
    for _ in range(8):
        allocated_outside(torch.zeros_like(plan.src[part]))


def allocated_outside(values: torch.Tensor) -> torch.Tensor:
    """A copy made on the default stream, as the scheduler makes its slots."""
    if values.device.type == "cpu":
        return values.clone()
    with torch.cuda.stream(torch.cuda.default_stream()):
        copied = values.clone()
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    return copied


def busy_stream(device: str) -> Any:
    """A stream of its own that has a second of work before it."""
    if device == "cpu":
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
    return torch.cuda.stream(stream)


def new_queue(group: Any, device: str) -> Any:
    from sglang_patches.scheduler.splice.copies import CopyQueue
    from sglang_patches.scheduler.splice.in_flight import event_maker

    new_event = event_maker(torch.get_device_module(device))
    return CopyQueue([described(group)], None, lambda lock: None, new_event)


def described(group: Any) -> Any:
    from sglang_patches.pools import GroupWithRope

    layers = tuple(range(group.num_layers))
    return GroupWithRope(group, CASE.inv_freq, "full", layers, "rope")


def parts() -> list[slice]:
    return [slice(n, n + TOKENS_PER_LAUNCH) for n in range(0, CASE.num_tokens, TOKENS_PER_LAUNCH)]
