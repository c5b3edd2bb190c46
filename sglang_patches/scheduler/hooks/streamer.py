"""The report leaves the scheduler with the finish of its request: until then it may change."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_patches.guard import contained
from sglang_patches.host.protocols import Scheduler
from sglang_patches.scheduler.request_state import report_of
from sglang_patches.scheduler.splice.tree import KvEditCache

KEY = "kvedit"


@lru_cache
def reporting_streamer(base: type[SchedulerOutputStreamer]) -> type[SchedulerOutputStreamer]:
    class ReportingStreamer(base):
        __slots__ = ()  # the base is a slotted dataclass
        has_additional_customized_info = True  # makes the host call the method below

        def is_request_level_customized_info_key(self, key: str) -> bool:
            return key == KEY or super().is_request_level_customized_info_key(key)

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            """Aligned with ``reqs``. An error here costs these reports only."""
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            if not any(req.finished() for req in reqs):
                return info
            with contained("streamer") as told:  # only one rank streams
                reports = finished_reports(reqs)
            return {**info, KEY: reports} if told.is_well and any(reports) else info

    return ReportingStreamer


def finished_reports(reqs: list[Any]) -> list[list[dict[str, object]]]:
    """For each request a list of its report, empty while it runs and where it has none."""
    reports = [report_of(req) if req.finished() else None for req in reqs]
    return [[] if report is None else [report] for report in reports]


def streamer_hook(
    result: type[SchedulerOutputStreamer], scheduler: Scheduler, *args: Any
) -> type[SchedulerOutputStreamer]:
    """AFTER ``Scheduler.get_output_streamer_class``."""
    if isinstance(scheduler.tree_cache, KvEditCache):
        return reporting_streamer(result)  # type: ignore[arg-type]  # the host's class is hashable
    return result
