"""The entry point ``sglang.srt.plugins: kvedit``. Called once in every process of the host."""

from __future__ import annotations

from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."


def register() -> None:
    """Register the cache backend and every hook. Without ``--radix-cache-backend kvedit`` the
    hooks find a stock cache and do nothing."""
    from sglang_patches.http import register_http_hooks
    from sglang_patches.scheduler.splice.tree import create_cache

    register_radix_cache_backend("kvedit", create_cache)
    _register_scheduler_hooks()
    register_http_hooks(HookRegistry, HookType)


def _register_scheduler_hooks() -> None:
    from sglang_patches.host import refusals
    from sglang_patches.scheduler.commands import dispatch
    from sglang_patches.scheduler.hooks import admission, forward, intake, streamer, weight_epoch

    after = {
        _SCHEDULER + "_create_generation_req": intake.intake_hook,
        _SCHEDULER + "get_prefill_adder_class": admission.adder_hook,
        _SCHEDULER + "get_output_streamer_class": streamer.streamer_hook,
        refusals.RESOLVE_TARGET: refusals.resolved_hook,
        **dict.fromkeys(weight_epoch.WEIGHT_UPDATES, weight_epoch.weights_hook),
        **dict.fromkeys(weight_epoch.ADAPTER_UPDATES, weight_epoch.adapters_hook),
    }
    for target, hook in after.items():
        HookRegistry.register(target, hook, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        forward.forward_hook,
        HookType.BEFORE,
    )
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        intake.prompt_hook,
        HookType.BEFORE,
    )
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        admission.decode_memory_hook,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.internal_state."
        "SchedulerInternalStateController.get_internal_state",
        dispatch.internal_state_hook,
        HookType.AROUND,
    )
