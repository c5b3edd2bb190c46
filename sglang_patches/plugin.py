"""The entry point ``sglang.srt.plugins: kvedit``. Called once in every process of the host.

Every hook of kvedit, in the order a request meets them. Without ``--radix-cache-backend kvedit``
they find a stock cache and do nothing.
"""

from __future__ import annotations

from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_MANAGERS = "sglang.srt.managers."
_SCHEDULER = _MANAGERS + "scheduler.Scheduler."


def register() -> None:
    """Register the cache backend and every hook, of the HTTP process and of the scheduler."""
    from sglang_patches.http import register_http_hooks
    from sglang_patches.scheduler.wiring.build import create_cache

    register_radix_cache_backend("kvedit", create_cache)
    _register_start_hooks()
    register_http_hooks(HookRegistry, HookType)
    _register_scheduler_hooks()


def _register_start_hooks() -> None:
    from sglang_patches.host import refusals

    HookRegistry.register(refusals.RESOLVE_TARGET, refusals.resolved_hook, HookType.AFTER)


def _register_scheduler_hooks() -> None:
    from sglang_patches.scheduler.commands import dispatch
    from sglang_patches.scheduler.hooks import admission, forward, intake, streamer, weight_epoch

    def after(target: str, hook: object) -> None:
        HookRegistry.register(target, hook, HookType.AFTER)

    def before(target: str, hook: object) -> None:
        HookRegistry.register(target, hook, HookType.BEFORE)

    def around(target: str, hook: object) -> None:
        HookRegistry.register(target, hook, HookType.AROUND)

    # a request comes, and is planned
    after(_SCHEDULER + "_create_generation_req", intake.intake_hook)
    # each time it is tried for admission: which prompt; then the tree is asked (KvEditCache)
    before(_MANAGERS + "schedule_batch.Req.init_next_round_input", intake.prompt_hook)
    after(_SCHEDULER + "get_prefill_adder_class", admission.adder_hook)
    # it runs: copies before the forward, and pins yield to what has no room
    before(_MANAGERS + "tp_worker.TpModelWorker.forward_batch_generation", forward.forward_hook)
    around(
        _MANAGERS + "schedule_batch.ScheduleBatch.check_decode_mem", admission.decode_memory_hook
    )
    # it ends (KvEditCache records it), and its report leaves
    after(_SCHEDULER + "get_output_streamer_class", streamer.streamer_hook)

    # between two passes: commands of the HTTP process; weights and adapters change
    around(
        _MANAGERS + "scheduler_components.internal_state.SchedulerInternalStateController."
        "get_internal_state",
        dispatch.internal_state_hook,
    )
    for target in weight_epoch.WEIGHT_UPDATES:
        after(target, weight_epoch.weights_hook)
    for target in weight_epoch.ADAPTER_UPDATES:
        after(target, weight_epoch.adapters_hook)
