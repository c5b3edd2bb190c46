"""The report leaves the scheduler once per request, not sliced per output token."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer


@lru_cache
def reporting_streamer(base: type[SchedulerOutputStreamer]) -> type[SchedulerOutputStreamer]:
    class ReportingStreamer(base):  # type: ignore[valid-type, misc]
        __slots__ = ()  # the base is a slotted dataclass

        def is_request_level_customized_info_key(self, key: str) -> bool:
            return key == "kvedit" or super().is_request_level_customized_info_key(key)

    return ReportingStreamer


def streamer_hook(
    result: type[SchedulerOutputStreamer], scheduler: Any, *args: Any
) -> type[SchedulerOutputStreamer]:
    """AFTER ``Scheduler.get_output_streamer_class``."""
    return reporting_streamer(result)
