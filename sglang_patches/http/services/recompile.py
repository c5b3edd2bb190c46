"""Background recompiles of evicted skills: one at a time per segment, with growing pauses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from kvedit.errors import KvEditError
from kvedit.wire.commands import RecompileSkill
from sglang_patches.host.protocols import TokenizerManager
from sglang_patches.http.services import compile_request, rpc

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
_BUSY_POLL_S = 0.1
_BUSY_LIMIT_S = 600.0


class Recompiler:
    """Starts recompiles by segment number and lets callers wait for them."""

    def __init__(
        self, manager: TokenizerManager, secret: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._manager = manager
        self._secret = secret
        self._clock = clock
        self._running: dict[int, asyncio.Task[bool]] = {}
        self._failures: dict[int, tuple[int, float]] = {}  # number -> (failures, not before)

    def start(self, numbers: Iterable[int]) -> list[asyncio.Task[bool]]:
        """Recompile each segment unless it runs already or its pause has not passed.

        Returns the tasks to wait for; each gives whether its segment is ready. Needs a running
        event loop.
        """
        return [task for number in numbers if (task := self._start(number)) is not None]

    async def ready(self, numbers: Iterable[int], *, timeout_s: float) -> bool:
        """Whether all segments became ready within ``timeout_s`` seconds. Cancels nothing."""
        numbers = list(numbers)
        tasks = self.start(numbers)
        if len(tasks) < len(numbers) or not tasks:
            return False
        done, waiting = await asyncio.wait(set(tasks), timeout=timeout_s)
        return not waiting and all(task.result() for task in done)

    def _start(self, number: int) -> asyncio.Task[bool] | None:
        if number in self._running:
            return self._running[number]
        if number in self._failures and self._clock() < self._failures[number][1]:
            return None
        task = asyncio.create_task(self._recompile(number))
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number))
        return task

    async def _recompile(self, number: int) -> bool:
        try:
            is_ready = await self._run(number)
        except Exception as error:  # the boundary of a background task: nobody awaits it
            expected = isinstance(error, KvEditError)
            self._note_failure(number, error, trace=not expected)
            return False
        self._failures.pop(number, None)
        return is_ready

    async def _run(self, number: int) -> bool:
        deadline = self._clock() + _BUSY_LIMIT_S
        while True:
            rid = compile_request.new_rid()
            command = RecompileSkill(number=number, rid=rid, secret=self._secret)
            answer = await rpc.call(self._manager, command)
            if answer.outcome == "compile":
                await compile_request.run(self._manager, rid, answer.prefix, answer.ids)
            elif answer.outcome == "busy" and self._clock() < deadline:
                await asyncio.sleep(_BUSY_POLL_S)
                continue
            return answer.outcome in ("compile", "ready")

    def _note_failure(self, number: int, error: Exception, *, trace: bool) -> None:
        failures = self._failures.get(number, (0, 0.0))[0] + 1
        pause = min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S)
        self._failures[number] = (failures, self._clock() + pause)
        logger.warning(
            "kvedit: recompile of segment %d failed (%d times), next try in %.0f s or later: %s",
            number,
            failures,
            pause,
            error,
            exc_info=trace,
        )
