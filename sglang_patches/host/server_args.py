"""Every field of SGLang 0.5.23's ServerArgs, sorted by what kvedit knows about it.

A test compares the five tables with the installed class: a field that a new host version adds is
in none of them and turns the test red until somebody has looked at it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Rule:
    """A field whose value kvedit refuses: what is accepted, in words and as a test, and why."""

    expected: str
    accepts: Callable[[Any], bool]
    why: str


def _is(value: object) -> Callable[[Any], bool]:
    return lambda got: bool(got == value)


def _off(got: Any) -> bool:
    return not got


_ONE_PIPELINE = "a chunk may be parked in another micro-batch between two spans"
_SECOND_OWNER = "it keeps copies of KV slots under ids that only this server's tree understands"
_OTHER_FRONT_END = "kvedit's routes and reports live in the Python HTTP server"

REFUSED: dict[str, Rule] = {
    "speculative_algorithm": Rule(
        "none", _off, "the draft model's KV has slots of its own, which are not spliced"
    ),
    "pp_size": Rule("1", _is(1), _ONE_PIPELINE),
    "dp_size": Rule("1", _is(1), "skills are compiled into one scheduler's tree"),
    "attn_dp_size": Rule("1", _is(1), "skills are compiled into one scheduler's tree"),
    "enable_dp_attention": Rule("off", _off, "skills are compiled into one scheduler's tree"),
    "disaggregation_mode": Rule(
        "null", _is("null"), "prefill hands its KV over without the seam that splices"
    ),
    "enable_pdmux": Rule("off", _off, "two batches of one scheduler run at the same time"),
    "enable_pd_role_switch": Rule("off", _off, "as disaggregation_mode"),
    "encoder_only": Rule("off", _off, "there is no prefix cache"),
    "language_only": Rule("off", _off, "the encoder's embeddings arrive after intake"),
    "decoupled_spec_role": Rule("null", _is("null"), "as speculative_algorithm"),
    "enable_hierarchical_cache": Rule(
        "off", _off, "both report the tokens that load-back brings as host hits"
    ),
    "hicache_storage_backend": Rule("none", _off, _SECOND_OWNER),
    "enable_hisparse": Rule("off", _off, _SECOND_OWNER),
    "enable_lmcache": Rule("off", _off, _SECOND_OWNER),
    "enable_flexkv": Rule("off", _off, _SECOND_OWNER),
    "enable_unified_cache_external_linker": Rule("off", _off, _SECOND_OWNER),
    "kv_events_config": Rule("none", _off, "events would publish virtual token ids"),
    "enable_mixed_chunk": Rule("off", _off, "a decode batch may join a chunk cut at a span"),
    "enable_priority_scheduling": Rule("off", _off, "preemption takes a splice half-way back"),
    "tokenizer_worker_num": Rule("1", _is(1), "registrations are mirrored in one HTTP process"),
    "grpc_mode": Rule("off", _off, _OTHER_FRONT_END),
    "smg_grpc_mode": Rule("off", _off, _OTHER_FRONT_END),
    "grpc_port": Rule("none", _off, _OTHER_FRONT_END),
    "skip_tokenizer_init": Rule("off", _off, "skills are recognised with the tokenizer"),
    "enable_unified_memory": Rule("off", _off, "slots move between pools behind the tree"),
    "disable_radix_cache": Rule("off", _off, "a skill is a node of the prefix tree"),
    "chunked_prefill_size": Rule(
        "a positive number of tokens",
        lambda got: got is None or got > 0,
        "a span inside a prompt starts at a forced chunk boundary",
    ),
    "enable_session_radix_cache": Rule("off", _off, "a session's next turn copies served ids"),
    "enable_streaming_session": Rule("off", _off, "a session's next turn copies served ids"),
    "elastic_ep_backend": Rule("none", _off, "it renames cache namespaces after intake"),
    "elastic_ep_initial_size": Rule("none", _off, "as elastic_ep_backend"),
    "ep_join_mode": Rule("none", _off, "as elastic_ep_backend"),
    "enable_lora": Rule("off", _off, "a skill's KV is bound to the adapter; untested"),
    "lora_paths": Rule("none", _off, "as enable_lora"),
    "dllm_algorithm": Rule("none", _off, "block diffusion rewrites KV of earlier positions"),
    "enable_multimodal": Rule("off", _off, "image tokens are padded after intake"),
    "is_embedding": Rule("off", _off, "there is no generation to serve from spliced KV"),
    "radix_cache_backend": Rule("kvedit", _is("kvedit"), "the splice is part of that cache"),
}
"""Checked on the resolved value: what SGLang makes of the flag for this model and device."""

ANY = None

TESTED: dict[str, frozenset[Any] | None] = {
    "allow_auto_truncate": ANY,
    # The splice moves KV between forwards and no backend takes part in it. flashinfer is
    # contract-tested only: its imports and signatures, not a server on a GPU.
    "attention_backend": frozenset({None, "torch_native", "flashinfer"}),
    "device": frozenset({"cpu", "cuda"}),
    "disable_overlap_schedule": ANY,
    "max_prefill_tokens": ANY,
    "max_queued_requests": ANY,
    "max_running_requests": ANY,
    "max_total_tokens": ANY,
    "mem_fraction_static": ANY,
    "page_size": frozenset({1, 16}),
    "radix_eviction_policy": frozenset({"lru"}),
    "schedule_policy": frozenset({"fcfs", "lpm"}),
    "sleep_on_idle": ANY,
    "tp_size": frozenset({1, 2}),
}
"""Touch cache, scheduler or attention, and are part of the test matrix with these values."""

CHECK_RESOLVED = frozenset({"device", "page_size"})
"""Of `TESTED`: SGLang chooses these itself, so its choice is checked, not the flag."""

UNTESTED = _names("""
    detokenizer_worker_num model_impl prefill_decode_interval enable_dynamic_chunking
    prefill_max_requests disable_priority_preemption default_priority_value
    abort_on_priority_when_disabled schedule_low_priority_values_first
    priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
    c128_page_size swa_full_tokens_ratio disable_hybrid_swa_memory radix_eviction_policy_config
    prefill_only_disable_kv_cache enable_page_major_kv_layout disable_chunked_prefix_cache
    num_continuous_decode_steps scheduler_recv_interval nnodes node_rank dcp_size
    attn_cp_size moe_dp_size dwdp_size dcp_comm_backend dcp_replicate_q_proj enable_prefill_cp
    cp_strategy enable_dsa_cache_layer_split enable_cp_decode_attn_tp enable_kv_cache_sharding
    enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_attn_tp_input_scattered
    mlx_enable_sampling use_ray strip_thinking_cache decode_attention_backend
    enable_lean_attention prefill_attention_backend dsa_prefill_backend dsv4_prefill_backend
    dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
    cuda_graph_prefill_max_context triton_attention_reduce_in_fp32
    triton_attention_num_kv_splits triton_attention_split_tile_size
    flashinfer_mla_disable_ragged enable_fused_qk_norm_rope enable_deepseek_v4_fp4_indexer
    enable_torch_compile ep_size enable_elastic_expert_backup ep_join_rank_offset max_ep_size
    max_mamba_cache_size mamba_max_states_per_path mamba_full_memory_ratio
    mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
    hicache_host_memory_mode enable_prefix_mm_cache enable_two_batch_overlap
    enable_single_batch_overlap disaggregation_decode_retraction_backup
    num_reserved_decode_tokens language_model_only enable_prefill_delayer min_free_slots_delay
    enable_deterministic_inference rl_on_policy_target kv_canary enable_memory_saver
    enable_return_routed_experts enable_return_indexer_topk enable_mis forward_hooks
    msprobe_dump_config cuda_graph_max_seq_len_prefill prefill_kv_cache_dequant_dtype
    dsv4_attn_backend enable_linker_mla_dedup swa_prefix_tails enable_encoder_swa_bounded_replay
    enable_decoder_swa_bounded_replay qsa_indexer_dtype enable_amd_monokernel dsa_triton_union
    enable_dsa_fused_indexer enable_cp_tp_group_sharing enable_nvidia_megakernel
    prefill_decode_interval_min_bs enable_return_aux_hidden_states aux_hidden_state_capture
""")
"""Touch cache, scheduler or attention and no test of ours sets them: only the default passes."""

INERT = _names("""
    pp_max_micro_batch_size pp_async_batch_depth sidecar sidecar_args mm_attention_backend
    mamba_backend uno_lora_path speculative_draft_model_path speculative_draft_model_revision
    speculative_draft_load_format speculative_num_steps speculative_eagle_topk
    speculative_num_draft_tokens speculative_dflash_block_size speculative_dspark_block_size
    speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
    speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
    speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_token_map
    speculative_attention_mode speculative_draft_attention_backend speculative_dsa_topk_backend
    speculative_draft_kv_cache_dtype speculative_draft_window_size
    speculative_moe_runner_backend speculative_moe_a2a_backend
    speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization
    _speculative_draft_quantization_explicitly_set enable_multi_layer_eagle speculative_adaptive
    speculative_adaptive_config decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints
    decoupled_spec_rank spec_trace_dir speculative_ngram_min_bfs_breadth
    speculative_ngram_max_bfs_breadth speculative_ngram_match_type
    speculative_ngram_max_trie_depth speculative_ngram_capacity
    speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
    speculative_ngram_external_corpus_max_tokens mamba_ssm_dtype
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
    enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend
    linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
    enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec
    hicache_ratio hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
    hicache_storage_prefetch_policy hicache_storage_backend_extra_config
    hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
    unified_cache_external_linker_backend hisparse_config enable_broadcast_mm_inputs_process
    mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num
    allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb
    trust_mm_content_hashes limit_mm_data_per_request enable_mm_global_cache
    image_processor_backend mm_global_cache_backend disable_fast_image_processor
    mm_feature_transport enable_lora_overlap_loading max_lora_rank lora_target_modules
    max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size
    experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading
    lora_drain_wait_threshold lmcache_config_file flexkv_config_file dllm_algorithm_config
    dllm_fdfo disaggregation_transfer_backend disaggregation_bootstrap_port
    disaggregation_ib_device disaggregation_decode_enable_radix_cache
    disaggregation_decode_enable_offload_kvcache disaggregation_decode_extra_slots
    disaggregation_decode_polling_interval optimistic_prefill_attempts encoder_transfer_backend
    encoder_urls encoder_bootstrap_port encoder_register_urls
    enable_adaptive_dispatch_to_encoder pdmux_config_path sm_group_num
    prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
    prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
    prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms kv_canary_real_data
    kv_canary_sweep_interval disaggregation_enable_kv_checksum
    speculative_domino_candidate_pool_size hicache_host_memory_fraction
    disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
    speculative_boundary_reduction speculative_use_block_verification
    speculative_draft_sink_size unified_cache_external_linker_config
""")
"""Mean nothing unless a flag of `REFUSED` is set or the model has a pool kvedit refuses."""

IRRELEVANT = _names("""
    model_path tokenizer_path tokenizer_mode tokenizer_backend load_format
    model_loader_extra_config trust_remote_code context_length revision model_config_parser
    json_model_override_args dtype quantization quantization_param_path kv_cache_dtype
    enable_fp32_lm_head modelopt_quant modelopt_checkpoint_restore_path
    modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile
    enable_tf32_matmul nccl_port dist_timeout dist_init_addr gated_launch_port
    load_balance_method enable_tp_lm_head_all_to_all enable_shared_experts_attn_tp
    shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp disable_attn_tp_gather
    enable_p2p_check base_gpu_id gpu_id_step random_seed watchdog_timeout soft_watchdog_timeout
    custom_sigquit_handler numa_node gc_threshold host port fastapi_root_path
    grpc_worker_threads skip_server_warmup warmups enable_http2 http2_max_concurrent_streams
    http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs
    ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name
    weight_version chat_template trust_request_chat_template hf_chat_template_name
    completion_template file_storage_path enable_cache_report return_input_ids return_output_ids
    reasoning_parser default_chat_template_kwargs enable_strict_thinking tool_call_parser
    tool_server sampling_defaults asr_max_buffer_seconds asr_max_concurrent_sessions
    preferred_sampling_params stream_interval batch_notify_size
    stream_response_default_include_usage incremental_streaming_output log_level log_level_http
    log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics
    smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
    load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
    tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
    bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
    generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
    enable_request_time_stats_logging load_publish_endpoint enable_forward_pass_metrics
    forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules
    otlp_traces_endpoint export_metrics_to_file export_metrics_to_file_dir stat_loggers
    constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt sampling_backend grammar_backend fp8_gemm_runner_backend
    fp4_gemm_runner_backend bf16_gemm_backend disable_flashinfer_autotune
    flashinfer_autotune_skip_ops cuda_graph_config cuda_graph_backend_decode
    cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_bs_decode cuda_graph_bs_prefill disable_prefill_cuda_graph
    disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
    enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph enable_layerwise_nvtx_marker
    enable_nccl_nvls enable_symm_mem enable_precise_embedding_interpolation
    enable_fused_moe_sum_all_reduce disable_custom_all_reduce enable_mscclpp
    enable_torch_symm_mem enable_scattered_sconv pre_warm_nccl boundary_reduction
    enable_quant_communications enable_flashinfer_allreduce_fusion
    enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
    enable_aiter_allreduce_fusion enable_torch_compile_debug_mode torch_compile_max_bs
    moe_a2a_backend enable_w4a4_mxfp4_megamoe deepep_v2_mode moe_runner_backend
    flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode deepep_dispatcher_output_dtype
    ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb
    eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
    eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
    expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config
    moe_dense_tp_size mooncake_ib_device enable_waterfill elastic_ep_scale_timeout
    disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
    enforce_shared_experts_fusion tbo_token_distribution_threshold cpu_offload_gb
    offload_group_size offload_num_in_group offload_prefetch_step offload_mode kt_weight_path
    kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts
    kt_max_deferred_experts_per_token startup_weight_load_mode custom_weight_loader
    weight_loader_disable_mmap weight_loader_prefetch_checkpoints
    weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
    remote_instance_weight_loader_seed_instance_ip
    remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
    remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
    modelexpress_config download_dir model_checksum delete_ckpt_after_loading
    decrypted_config_file decrypted_draft_config_file
    checkpoint_engine_wait_weights_before_ready enable_dynamic_batch_tokenizer
    dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
    enable_tokenizer_batch_encode disable_tokenizer_batch_decode debug_tensor_dump_output_folder
    debug_tensor_dump_layers debug_tensor_dump_input_file enable_weights_cpu_backup
    enable_draft_weights_cpu_backup enable_custom_logit_processor enable_return_hidden_states
    return_hidden_states_mode sampling_mask_max_tokens disable_outlines_disk_cache
    weight_cache_mode weight_cache_socket weight_cache_timeout ple_offload_embedding
    ple_offload_backend ple_offload_dir flashinfer_a2a_dispatch_type otlp_service_name
    _radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set
    enable_response_store disable_aiter_allreduce_fusion_in_prefill
    disable_aiter_allreduce_fusion_in_decode enable_watermark watermark_config watermark_key
    watermark_key_b watermark_context_window watermark_mixing_probability
    watermark_max_probability watermark_default_enabled watermark_enforce_all
    grpc_response_timeout_secs enable_paged_experts paged_experts_num_resident
    enable_megamoe_for_layernorm_sp enable_http_worker_reuseport
    return_aux_hidden_state_layer_ids
""")
"""Touch neither cache, scheduler nor attention, or are judged where the pool and rope are seen."""
