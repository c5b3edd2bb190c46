"""Every host symbol kvedit stands on, with the signature it was written against.

``broken()`` compares the installed host with this table; a server with kvedit refuses to start
on a difference, and a test prints it. When the host moves, this file says what to look at.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SRT = "sglang.srt."
_CACHE = "mem_cache.unified_radix_cache.UnifiedRadixCache."
_ADDER = "managers.schedule_policy.PrefillAdder."
_SCHEDULER = "managers.scheduler.Scheduler."
_TOKENIZER = "managers.tokenizer_manager.TokenizerManager."


@dataclass(frozen=True, slots=True)
class Symbol:
    """path: dotted, below sglang.srt. parameters: names in order. use: where we stand on it."""

    path: str
    parameters: tuple[str, ...]
    use: str


def _symbol(path: str, parameters: str, use: str) -> Symbol:
    return Symbol(path, tuple(parameters.split()), use)


HOOKED = (
    _symbol(_SCHEDULER + "_create_generation_req", "self recv_req args kwargs", "hooks.intake"),
    _symbol(_SCHEDULER + "get_prefill_adder_class", "self", "hooks.admission"),
    _symbol(_SCHEDULER + "get_output_streamer_class", "self", "hooks.streamer"),
    _symbol(_SCHEDULER + "load_lora_adapter", "self recv_req", "hooks.weight_epoch"),
    _symbol(_SCHEDULER + "load_lora_adapter_from_tensors", "self recv_req", "hooks.weight_epoch"),
    _symbol(_SCHEDULER + "unload_lora_adapter", "self recv_req", "hooks.weight_epoch"),
    *(
        _symbol(
            "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager." + name,
            "self recv_req",
            "hooks.weight_epoch",
        )
        for name in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
    _symbol(
        "managers.scheduler_components.internal_state."
        "SchedulerInternalStateController.get_internal_state",
        "self recv_req",
        "commands.dispatch",
    ),
    _symbol(
        "managers.tp_worker.TpModelWorker.forward_batch_generation",
        "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init "
        "capture_hidden_mode return_kv_loc_plan",
        "forward",
    ),
    _symbol(
        "managers.schedule_batch.ScheduleBatch.check_decode_mem",
        "self selected_indices",
        "admission (pins yield)",
    ),
    _symbol(
        "managers.schedule_batch.Req.init_next_round_input",
        "self tree_cache cow_mamba",
        "intake (which prompt is served), admission",
    ),
    _symbol(_TOKENIZER + "generate_request", "self obj request", "http.gate"),
    _symbol(
        _TOKENIZER + "_handle_abort_finish_reason",
        "self out state is_stream",
        "http.answers.reports",
    ),
    *(
        _symbol(f"entrypoints.{path}", "self request raw_request", use)
        for path, use in (
            ("openai.serving_base.OpenAIServingBase.handle_request", "http.answers.openai"),
            ("anthropic.serving.AnthropicServing.handle_messages", "http.answers.other_ids"),
            ("ollama.serving.OllamaServing.handle_chat", "http.answers.other_ids"),
            ("ollama.serving.OllamaServing.handle_generate", "http.answers.other_ids"),
        )
    ),
    _symbol(
        _TOKENIZER + "update_request_meta_info",
        "self meta_info state customized_info index finish_reason",
        "http.answers.reports",
    ),
    _symbol(
        "utils.request_logger.RequestLogger.log_openai_received_request",
        "self obj request",
        "http.request.request_log",
    ),
)

CALLED = (
    _symbol(_CACHE + "match_prefix", "self params", "splice.tree"),
    _symbol(_CACHE + "init_load_back", "self params", "splice.tree"),
    _symbol(_CACHE + "load_back_is_cache_owned", "self", "splice.tree"),
    _symbol(_CACHE + "checkpoint_into_tree", "self req up_to kwargs", "splice.tree"),
    _symbol(_CACHE + "inc_host_lock_ref", "self node_id", "splice.tree"),
    _symbol(_CACHE + "dec_host_lock_ref", "self node_id params", "splice.tree"),
    _symbol(_CACHE + "reset", "self", "splice.tree"),
    _symbol(_CACHE + "sanity_check", "self", "splice.tree"),
    _symbol(_CACHE + "evict_for_alloc", "self params allocation_reclaim_satisfied", "splice.tree"),
    _symbol(_CACHE + "insert", "self params", "realise"),
    _symbol(_CACHE + "lock", "self node_id skip_lock_components", "realise, donors, pins"),
    _symbol(_CACHE + "unlock", "self lock", "realise, donors, pins"),
    _symbol(_CACHE + "path_device_indices", "self node", "realise, donors"),
    _symbol(_CACHE + "all_values_flatten", "self", "commands.audit"),
    _symbol("mem_cache.common.evict_from_tree_cache", "tree_cache num_tokens", "realise"),
    _symbol("mem_cache.common.checkpoint_kv_cache", "req tree_cache", "splice.tree (call site)"),
    _symbol("mem_cache.registry.create_unified_radix_cache", "ctx cache_class", "wiring.build"),
    _symbol("mem_cache.registry.register_radix_cache_backend", "name factory", "plugin"),
    _symbol(
        "mem_cache.radix_cache.RadixKey.__init__",
        "self token_ids extra_key is_bigram limit cache_salt",
        "splice.tree, donors, realise, desk, request_state",
    ),
    _symbol(
        _ADDER + "add_one_req", "self req has_chunked_req truncation_align_size", "hooks.admission"
    ),
    _symbol(_ADDER + "add_chunked_req", "self req", "hooks.admission"),
    _symbol(
        _ADDER + "_select_prefill_admission",
        "self req total_tokens host_hit_length swa_host_hit_length truncation_align_size "
        "has_chunked_req",
        "hooks.admission",
    ),
    _symbol(
        _ADDER + "_commit_prefill_admission",
        "self req admission mamba_gap_reserve",
        "hooks.admission",
    ),
    _symbol(
        "mem_cache.prefill_budget.PrefillBudget.reserve",
        "self extend_input_len max_new_tokens extra_tokens chunk_limit is_chunked_continuation",
        "admission (R1)",
    ),
    _symbol(
        "managers.schedule_batch.Req.set_finish_with_abort",
        "self error_msg status_code err_type",
        "hooks.intake",
    ),
    _symbol(
        "managers.scheduler_components.output_streamer."
        "SchedulerOutputStreamer.is_request_level_customized_info_key",
        "self key",
        "hooks.streamer",
    ),
    _symbol(
        "managers.scheduler_components.output_streamer."
        "SchedulerOutputStreamer.build_additional_customized_info",
        "self reqs",
        "hooks.streamer",
    ),
)

KEY_BUILDERS = {
    "mem_cache/common.py": 1,  # match_kv_cache: goes through match_prefix
    "mem_cache/unified_radix_cache.py": 7,  # checkpoint twice; requests barred from the tree
    # once; the storage tier, which kvedit refuses, four times
    "managers/schedule_policy.py": 2,  # the waiting queue's own tree, of real ids
}
"""Host files on our path that spell a RadixKey, with the number of places. Each was read."""

ID_READERS = {
    "mem_cache/common.py": 3,  # match and touch (real ids in), one length
    "mem_cache/radix_cache.py": 1,  # not our tree
    "mem_cache/unified_radix_cache.py": 1,  # checkpoint, under ServedIds
}
"""Where cache code reads ``req.origin_input_ids``. Only what runs inside ``ServedIds`` can see a
virtual id, and that is the third line; everything outside mem_cache always sees real ids."""


def broken() -> list[str]:
    """Differences between the table and the installed host; empty when it holds."""
    return [reason for symbol in (*HOOKED, *CALLED) for reason in _differences(symbol)]


def _differences(symbol: Symbol) -> Iterator[str]:
    found = find(symbol.path)
    if found is None:
        yield f"{symbol.path}: expected a host symbol (used by {symbol.use}), got none"
        return
    parameters = tuple(inspect.signature(inspect.unwrap(found)).parameters)
    if parameters != symbol.parameters:
        yield (
            f"{symbol.path}: expected parameters {symbol.parameters} (used by {symbol.use}), "
            f"got {parameters}"
        )


def find(path: str) -> Any | None:
    try:
        return pkgutil.resolve_name(_SRT + path)
    except (ImportError, AttributeError):
        return None


def unapplied_hooks() -> list[str]:
    """Hooks that were registered but did not take: the host logs that and goes on, we do not."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [
        f"hook {target}: expected to be applied, got an error (see the log)"
        for target in sorted(HookRegistry._hooks)
        if target not in HookRegistry._patched
    ]
