"""Evicted skills come back: one compile at a time per segment, pauses after failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvedit.config import Config
from sglang_patches.http.services.auth import Caller
from sglang_patches.http.services.recompile import FIRST_PAUSE_S, LONGEST_PAUSE_S, Recompiler
from sglang_patches.http.services.skill_service import SkillService


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def evicted_skill(manager: Any) -> None:
    service = SkillService(manager, Config())
    await service.register({"name": "policy", "text": "refunds"}, Caller(admin=True))
    manager.registry.evicted(1)
    manager.compiles.clear()


def test_many_requests_start_one_recompile(manager: Any, clock: Clock) -> None:
    async def scenario() -> None:
        await evicted_skill(manager)
        recompiler = Recompiler(manager, "secret", clock=clock)
        manager.held = asyncio.Event()
        tasks = {id(task) for _ in range(5) for task in recompiler.start([1])}
        assert len(tasks) == 1
        manager.held.set()
        assert await recompiler.ready([1], timeout_s=5)
        assert len(manager.compiles) == 1
        assert manager.registry.by_number(1).state.value == "ready"

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ValueError("no room"), RuntimeError("a bug")])
def test_pauses_double_after_each_failure_until_a_success(
    manager: Any, clock: Clock, error: Exception
) -> None:
    async def scenario() -> None:
        await evicted_skill(manager)
        recompiler = Recompiler(manager, "secret", clock=clock)
        manager.compile_error = error
        for expected in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
            assert not await recompiler.ready([1], timeout_s=5)
            clock.now += expected * 0.99
            assert recompiler.start([1]) == []
            clock.now += expected * 0.01
        assert len(manager.compiles) == 3
        for _ in range(20):
            await recompiler.ready([1], timeout_s=5)
            clock.now += LONGEST_PAUSE_S
        assert len(manager.compiles) == 23  # the pause never grows past the longest
        manager.compile_error = None
        assert await recompiler.ready([1], timeout_s=5)
        manager.registry.evicted(1)
        assert recompiler.start([1])  # no pause is left over

    asyncio.run(scenario())


def test_a_wait_that_ends_does_not_cancel_the_recompile(manager: Any, clock: Clock) -> None:
    async def scenario() -> None:
        await evicted_skill(manager)
        recompiler = Recompiler(manager, "secret", clock=clock)
        manager.held = asyncio.Event()
        assert not await recompiler.ready([1], timeout_s=0.01)
        manager.held.set()
        assert await recompiler.ready([1], timeout_s=5)

    asyncio.run(scenario())


def test_a_skill_that_is_gone_is_not_ready_and_no_failure(manager: Any, clock: Clock) -> None:
    async def scenario() -> None:
        recompiler = Recompiler(manager, "secret", clock=clock)
        assert not await recompiler.ready([7], timeout_s=5)
        assert manager.compiles == []
        assert recompiler.start([7])
        assert not await recompiler.ready([], timeout_s=5)

    asyncio.run(scenario())
