"""Weight epochs: after any change of weights or adapters, no skill compiled before is spliced."""

from __future__ import annotations

from typing import Any

from sglang_patches.guard import agree, boundary
from sglang_patches.host.protocols import Scheduler
from sglang_patches.scheduler.wiring.rooms import rooms_of

WEIGHT_UPDATES = tuple(
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager." + name
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    )
)
ADAPTER_UPDATES = tuple(
    "sglang.srt.managers.scheduler.Scheduler." + name
    for name in ("load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter")
)


def weights_hook(result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER each weight update. A failed one may have changed some layers already: it counts."""
    _bump(updater.scheduler.tree_cache, "weights")


def adapters_hook(result: Any, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """AFTER each adapter load or unload."""
    if result.success:
        _bump(scheduler.tree_cache, "adapters")


def _bump(cache: Any, why: str) -> None:
    rooms = rooms_of(cache)
    if rooms is not None:
        with boundary("epoch", rooms.distrust_everything):
            agree("new_epoch")  # the epoch changes on every rank or on none
            rooms.new_epoch(why)
