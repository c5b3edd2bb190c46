"""What we touch of the host's objects, attribute by attribute.

Each protocol names the class of the host that it stands for (``HOST_CLASSES``); a contract test
looks every attribute up there. The host is not type-checked here, so a protocol is what keeps a
misspelt attribute from reaching a scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

# ---- the scheduler process


class KvState(Protocol):
    """How far a request's KV is. Positions in its prompt and output; ``req_pool_idx`` is its row
    of the table from positions to slots."""

    req_pool_idx: int
    cache_protected_len: int
    cache_inserted_len: int
    kv_committed_len: int
    kv_allocated_len: int

    @property
    def holds_kv(self) -> bool: ...


class SamplingParams(Protocol):
    max_new_tokens: int
    custom_params: dict[str, Any] | None


class Request(Protocol):
    """Token ids are real ones. [prefix_len, extend_end) is forwarded next."""

    rid: str
    origin_input_ids: array[int]
    origin_input_ids_unpadded: array[int]
    output_ids: array[int]
    full_untruncated_fill_ids: array[int]
    extra_key: str | None
    cache_salt: str | None
    priority: int | None
    sampling_params: SamplingParams
    logprob_start_len: int
    extend_end: int
    kv: KvState
    last_node: Any
    lock: Any
    host_hit_length: int
    host_loaded_length: int
    skip_radix_cache_insert: bool
    finished_reason: Any
    to_finish: Any
    discard_output_reason: Any

    @property
    def prefix_len(self) -> int: ...

    def finished(self) -> bool: ...

    def init_next_round_input(self, tree_cache: Any = None) -> None: ...

    def set_finish_with_abort(
        self, error_msg: str, status_code: int = ..., err_type: str = ...
    ) -> None: ...


class ReceivedRequest(Protocol):
    """A generate request as it comes from the HTTP process."""

    rid: str
    sampling_params: SamplingParams
    cache_salt: str | None
    extra_key: str | None
    lora_id: str | None
    session_params: object
    session_id: str | None
    input_embeds: object
    positional_embed_overrides: object
    token_type_ids: object
    mm_inputs: object
    multi_item_delimiter_indices: object
    token_indices_to_pool: object
    return_routed_experts: bool
    return_indexer_topk: bool
    return_hidden_states: bool
    return_logprob: bool
    logprob_start_len: int


class SlotTable(Protocol):
    """req_to_token: int [rows, positions], slots."""

    req_to_token: torch.Tensor


class Allocator(Protocol):
    """Sizes in tokens; slots are int64."""

    size: int
    page_size: int

    def alloc(self, need_size: int) -> torch.Tensor | None: ...

    def free(self, free_index: torch.Tensor) -> None: ...

    def available_size(self) -> int: ...

    def get_all_free_pages(self) -> torch.Tensor: ...


class Batch(Protocol):
    reqs: list[Request]
    tree_cache: object
    req_to_token_pool: SlotTable


class Scheduler(Protocol):
    tree_cache: Any
    token_to_kv_pool_allocator: Allocator
    req_to_token_pool: SlotTable
    running_batch: Batch
    last_batch: Batch | None
    waiting_queue: list[Request]
    chunked_req: Request | None


# ---- the HTTP process


class ModelConfig(Protocol):
    vocab_size: int


class ServerArgs(Protocol):
    radix_cache_backend: str | None


class TokenizerManager(Protocol):
    """Where requests leave for the scheduler, and commands."""

    tokenizer: Any
    model_config: ModelConfig
    server_args: ServerArgs
    context_len: int
    num_reserved_tokens: int
    max_req_input_len: int
    get_internal_state_communicator: Any
    serving_chat_class: Any

    def auto_create_handle_loop(self) -> None: ...

    def generate_request(
        self, obj: Any, request: Any = None
    ) -> AsyncGenerator[dict[str, Any], None]: ...


class GenerateRequest(Protocol):
    """What /generate got, and what every other route makes of its body. Of several prompts most
    fields may be a list with one entry each."""

    rid: str | list[str] | None
    text: str | list[str] | None
    input_ids: Sequence[Any] | None
    input_embeds: Sequence[Any] | None
    sampling_params: Any
    return_logprob: bool | list[bool] | None
    logprob_start_len: int | list[int] | None
    return_prompt_token_ids: bool
    cache_salt: str | list[str] | None
    extra_key: str | list[str] | None
    positional_embed_overrides: object
    stream: bool
    is_single: bool
    batch_size: int
    parallel_sample_num: int


# Below sglang.srt.
HOST_CLASSES: dict[type, str] = {
    KvState: "managers.schedule_batch.ReqKvInfo",
    SamplingParams: "sampling.sampling_params.SamplingParams",
    Request: "managers.schedule_batch.Req",
    ReceivedRequest: "managers.io_struct.TokenizedGenerateReqInput",
    SlotTable: "mem_cache.memory_pool.ReqToTokenPool",
    Allocator: "mem_cache.allocator.TokenToKVPoolAllocator",
    Batch: "managers.schedule_batch.ScheduleBatch",
    Scheduler: "managers.scheduler.Scheduler",
    ModelConfig: "configs.model_config.ModelConfig",
    ServerArgs: "server_args.ServerArgs",
    TokenizerManager: "managers.tokenizer_manager.TokenizerManager",
    GenerateRequest: "managers.io_struct.GenerateReqInput",
}
