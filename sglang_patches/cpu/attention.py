"""Attention of SGLang's `torch_native` backend without the O(L^2) padding of its extend loop.

The stock loop attends from every cached position again and throws those rows away. Here only the
new tokens are queries. Both compute softmax(q k^T * scaling) v over the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_BLOCK_QUERIES = 512
MAX_MASK_ELEMENTS = 4 << 20


def forward_extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """AROUND hook of `TorchNativeAttnBackend.forward_extend`: attend with K and V that are given
    but not stored.

    The stock method reads the pool in every case. An MLA model keeps latent rows there, and
    hands a prompt without cached prefix its full K and V (save_kv_cache=False): [num_new_tokens,
    num_heads * head_dim] each. Everything else goes to the stock method.
    """
    if save_kv_cache or k is None or v is None or any(forward_batch.extend_prefix_lens_cpu):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    key = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
    value = v.view(-1, layer.tp_k_head_num, layer.v_head_dim)
    enable_gqa = layer.tp_q_head_num != layer.tp_k_head_num
    requests = query.split(forward_batch.extend_seq_lens_cpu)
    parts, start = [], 0
    for part in requests:
        rows = slice(start, start + len(part))
        parts.append(attend(part, key[rows], value[rows], 0, True, -1, layer.scaling, enable_gqa))
        start = rows.stop
    return torch.cat(parts).reshape(query.shape[0], -1)


def extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """AROUND hook of `TorchNativeAttnBackend._run_sdpa_forward_extend`, same result and arguments.

    Args:
        original: the stock method; it still serves encoder-decoder models.
        query, output: [num_new_tokens, num_heads, head_dim], requests one after the other.
        k_cache, v_cache: [num_slots, num_kv_heads, head_dim] of one layer.
        req_to_token: [num_rows, context_len] int slot ids.
        seq_lens, extend_prefix_lens, extend_seq_lens: [num_requests] int, in tokens;
            seq_len = prefix_len + extend_len.

    Returns:
        `output`, filled in place.
    """
    if encoder_lens is not None or is_cross_attn:
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            extend_prefix_lens, extend_seq_lens, encoder_lens=encoder_lens, scaling=scaling,
            enable_gqa=enable_gqa, causal=causal, is_cross_attn=is_cross_attn,
            sliding_window_size=sliding_window_size,
        )  # fmt: skip
    window = sliding_window_size if sliding_window_size is not None else -1
    start = 0
    for row, kv_len, prefix_len, num_new in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_prefix_lens.tolist(),
        extend_seq_lens.tolist(),
        strict=True,
    ):
        slot_ids = pool_slots(backend, req_to_token[row, :kv_len], window)
        key = k_cache.index_select(0, slot_ids).to(query.dtype)
        value = v_cache.index_select(0, slot_ids).to(query.dtype)
        for block in query_blocks(num_new, prefix_len, causal, window):
            rows = slice(start + block.start, start + block.stop)
            output[rows] = attend(
                query[rows], key, value, prefix_len + block.start, causal, window, scaling,
                enable_gqa,
            )  # fmt: skip
        start += num_new
    return output


def decode(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """AROUND hook of `_run_sdpa_forward_decode`: one query per request, arguments as `extend`."""
    if encoder_lens is not None or is_cross_attn:
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            encoder_lens=encoder_lens, scaling=scaling, enable_gqa=enable_gqa, causal=causal,
            is_cross_attn=is_cross_attn, sliding_window_size=sliding_window_size,
        )  # fmt: skip
    window = sliding_window_size if sliding_window_size is not None else -1
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for index, (row, kv_len) in enumerate(requests):
        first_key = max(0, kv_len - 1 - window) if window >= 0 else 0
        slot_ids = pool_slots(backend, req_to_token[row, first_key:kv_len], window)
        key = k_cache.index_select(0, slot_ids).to(query.dtype)
        value = v_cache.index_select(0, slot_ids).to(query.dtype)
        output[index : index + 1] = attend_one(query[index : index + 1], key, value, scaling)
    return output


def pool_slots(backend: Any, slot_ids: torch.Tensor, window: int) -> torch.Tensor:
    """Where a layer's rows stand for slots as the request holds them.

    A model with a hybrid pool keeps the rows of windowed layers in slots of their own; the stock
    loop writes them there and reads them at the request's. Rows outside the window read the dummy
    slot 0, which the mask hides.
    """
    if window < 0 or not backend.use_sliding_window_kv_pool:
        return slot_ids
    own: torch.Tensor = backend.token_to_kv_pool.translate_loc_from_full_to_swa(slot_ids)
    return own


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_offset: int,
    causal: bool,
    window: int,
    scaling: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention of consecutive queries of one request over its keys.

    Args:
        query: [num_queries, num_heads, head_dim]; its first row has position `query_offset`.
        key, value: [kv_len, num_kv_heads, head_dim] for positions [0, kv_len).
        window: a query sees itself and this many positions before it; negative: no limit. As in
            the stock method a window implies causal masking.

    Returns:
        [num_queries, num_heads, value_dim].
    """
    num_queries = query.shape[0]
    # Keys behind the last query, or before the first query's window, are masked in every row.
    masked_ahead = causal or window >= 0
    first_key = max(0, query_offset - window) if window >= 0 else 0
    stop_key = query_offset + num_queries if masked_ahead else key.shape[0]
    num_keys = stop_key - first_key

    if num_queries == 1:
        return attend_one(query, key[first_key:stop_key], value[first_key:stop_key], scaling)
    plain_causal = causal and query_offset == 0 and window < 0
    mask = None
    if masked_ahead and not plain_causal:
        mask = band_mask(num_queries, num_keys, query_offset - first_key, window, query.dtype)
    return (
        scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key[first_key:stop_key].transpose(0, 1).unsqueeze(0),
            value[first_key:stop_key].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            enable_gqa=enable_gqa,
            scale=scaling,
            is_causal=plain_causal,
        )
        .squeeze(0)
        .transpose(0, 1)
    )


def attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of one query [1, num_heads, head_dim] that sees every key.

    The heads of a group become the rows of one query matrix, which the kernel of torch runs about
    6x faster than one row per head. Returns [1, num_heads, value_dim].
    """
    num_kv_heads = key.shape[1]
    grouped = query.reshape(num_kv_heads, query.shape[1] // num_kv_heads, query.shape[2])
    out = scaled_dot_product_attention(
        grouped.unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        scale=scaling,
    )
    return out.reshape(1, query.shape[1], value.shape[2])


def query_blocks(num_new: int, prefix_len: int, causal: bool, window: int) -> Iterator[slice]:
    """Cut [0, num_new) so that no block needs a large mask; one block where none needs a mask."""
    needs_mask = window >= 0 or (causal and prefix_len > 0)
    size = num_new
    if needs_mask:
        rows_in_budget = MAX_MASK_ELEMENTS // (prefix_len + num_new)
        size = max(1, min(MAX_BLOCK_QUERIES, rows_in_budget))
    for begin in range(0, num_new, max(1, size)):
        yield slice(begin, min(num_new, begin + size))


@lru_cache(maxsize=16)
def band_mask(
    num_queries: int, num_keys: int, query_offset: int, window: int, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask [num_queries, num_keys]: 0 where key <= query (and inside the window).

    Cached because every layer of a forward asks for the same ones; callers must not write to it.
    """
    query_pos = torch.arange(query_offset, query_offset + num_queries).unsqueeze(1)
    key_pos = torch.arange(num_keys).unsqueeze(0)
    visible = key_pos <= query_pos
    if window >= 0:
        visible &= key_pos >= query_pos - window
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(~visible, float("-inf"))
