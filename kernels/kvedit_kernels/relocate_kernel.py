"""Triton: gather, rotate, scatter. One program is one layer and BLOCK_TOKENS tokens of the plan."""

import triton
import triton.language as tl

from kvedit_kernels.relocate_codec import _decode, _encode


@triton.jit
def _slot_offset(slot, page_stride, token_stride, PAGE_SIZE: tl.constexpr):
    """int64 element offset of a slot. Widened before multiplying: pools pass 2^31 elements."""
    slot = slot.to(tl.int64)
    if PAGE_SIZE == 0:
        return slot * token_stride
    else:
        return (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * token_stride


@triton.jit
def _lanes(at, head_stride, DIM_START: tl.constexpr, NUM_HEADS: tl.constexpr,
           HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):  # fmt: skip
    """Offsets and mask [tokens, heads, dims] of a rectangle of every token's rows."""
    head = tl.arange(0, HEADS_PAD)[None, :, None]
    dim = tl.arange(0, DIM_PAD)[None, None, :]
    inside = (head < NUM_HEADS) & (dim < DIM)
    return at[:, None, None] + head * head_stride + DIM_START + dim, inside


@triton.jit
def _copy(base, at_src, at_dst, live, head_stride, DIM_START: tl.constexpr,
          NUM_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
          DIM: tl.constexpr, DIM_PAD: tl.constexpr):  # fmt: skip
    src, inside = _lanes(at_src, head_stride, DIM_START, NUM_HEADS, HEADS_PAD, DIM, DIM_PAD)
    dst, _ = _lanes(at_dst, head_stride, DIM_START, NUM_HEADS, HEADS_PAD, DIM, DIM_PAD)
    mask = live[:, None, None] & inside
    tl.store(base + dst, tl.load(base + src, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def relocate_kernel(
    k_ptrs, v_ptrs,                    # int64 [num_layers] base addresses
    src_ptr, dst_ptr,                  # int64 [num_tokens] slots
    row_ptr,                           # int32 [num_tokens] row of the tables below
    cos_sin_ptr,                       # fp32 [num_rows, 2, ROT_DIM // 2]
    still_ptr,                         # uint8 [num_rows] 1: the row turns nothing
    num_tokens,
    k_page_stride, k_token_stride, k_head_stride,      # elements
    v_page_stride, v_token_stride, v_head_stride,
    K_DTYPE: tl.constexpr, BITS: tl.constexpr,         # arithmetic type; integer of its width
    NUM_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,  # *_PAD: next power of two
    HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    ROT_OFFSET: tl.constexpr, HEAD_PART_PAD: tl.constexpr,
    ROT_DIM: tl.constexpr, TAIL_PAD: tl.constexpr,     # ROT_DIM 0: K is copied
    IS_NEOX: tl.constexpr, PAGE_SIZE: tl.constexpr,
    K_ROWS: tl.constexpr, K_ROWS_PAD: tl.constexpr, K_ROW: tl.constexpr, K_ROW_PAD: tl.constexpr,
    V_ROWS: tl.constexpr, V_ROWS_PAD: tl.constexpr, V_ROW: tl.constexpr, V_ROW_PAD: tl.constexpr,
    SOFT: tl.constexpr, BASE_ALIGN: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Tokens on grid axis 0 (its limit is 2^31), layers on axis 1."""
    layer = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live = token < num_tokens
    src = tl.load(src_ptr + token, mask=live, other=0)
    dst = tl.load(dst_ptr + token, mask=live, other=0)
    k = tl.load(k_ptrs + layer).to(tl.pointer_type(BITS))
    k = tl.multiple_of(k, BASE_ALIGN)
    k_src = _slot_offset(src, k_page_stride, k_token_stride, PAGE_SIZE)
    k_dst = _slot_offset(dst, k_page_stride, k_token_stride, PAGE_SIZE)

    # V is loaded first and stored last: its loads and those of the rotated part of K are in flight
    # before the first store. What stands beside that part is copied behind it.
    if V_ROWS > 0:
        v = tl.load(v_ptrs + layer).to(tl.pointer_type(BITS))
        v = tl.multiple_of(v, BASE_ALIGN)
        v_src = _slot_offset(src, v_page_stride, v_token_stride, PAGE_SIZE)
        v_dst = _slot_offset(dst, v_page_stride, v_token_stride, PAGE_SIZE)
        v_from, inside = _lanes(v_src, v_head_stride, 0, V_ROWS, V_ROWS_PAD, V_ROW, V_ROW_PAD)
        v_to, _ = _lanes(v_dst, v_head_stride, 0, V_ROWS, V_ROWS_PAD, V_ROW, V_ROW_PAD)
        v_mask = live[:, None, None] & inside
        value = tl.load(v + v_from, mask=v_mask)

    if ROT_DIM == 0:
        _copy(k, k_src, k_dst, live, k_head_stride, 0, K_ROWS, K_ROWS_PAD, K_ROW, K_ROW_PAD)
    else:
        HALF: tl.constexpr = ROT_DIM // 2
        row = tl.load(row_ptr + token, mask=live, other=0)
        still = tl.load(still_ptr + row, mask=live, other=0) != 0
        pair = tl.arange(0, HALF_PAD)[None, :]
        table = cos_sin_ptr + row.to(tl.int64)[:, None] * ROT_DIM + pair
        known = live[:, None] & (pair < HALF)
        cos = tl.load(table, mask=known, other=1.0)[:, None, :]
        sin = tl.load(table + HALF, mask=known, other=0.0)[:, None, :]
        turns = (live & ~still)[:, None, None]
        stays = (live & still)[:, None, None]
        if IS_NEOX:
            k_from, inside = _lanes(k_src, k_head_stride, ROT_OFFSET,
                                    NUM_HEADS, HEADS_PAD, HALF, HALF_PAD)  # fmt: skip
            k_to, _ = _lanes(k_dst, k_head_stride, ROT_OFFSET,
                             NUM_HEADS, HEADS_PAD, HALF, HALF_PAD)  # fmt: skip
            mask = live[:, None, None] & inside
            a_bits = tl.load(k + k_from, mask=mask, other=0)
            b_bits = tl.load(k + k_from + HALF, mask=mask, other=0)
        else:
            k_from, inside = _lanes(k_src, k_head_stride, ROT_OFFSET,
                                    NUM_HEADS, HEADS_PAD, ROT_DIM, 2 * HALF_PAD)  # fmt: skip
            k_to, _ = _lanes(k_dst, k_head_stride, ROT_OFFSET,
                             NUM_HEADS, HEADS_PAD, ROT_DIM, 2 * HALF_PAD)  # fmt: skip
            both_bits = tl.load(k + k_from, mask=live[:, None, None] & inside, other=0)
            paired = tl.reshape(both_bits, (BLOCK_TOKENS, HEADS_PAD, HALF_PAD, 2))
            a_bits, b_bits = tl.split(paired)
        a = _decode(a_bits, K_DTYPE, SOFT)
        b = _decode(b_bits, K_DTYPE, SOFT)
        new_a = _encode(a * cos - b * sin, K_DTYPE, BITS, SOFT)
        new_b = _encode(b * cos + a * sin, K_DTYPE, BITS, SOFT)
        # Two masked stores, not a select: selecting 16-bit values unpacks them. The unturned go
        # first: their registers are free before the conversion (90 registers against 115).
        if IS_NEOX:
            tl.store(k + k_to, a_bits, mask=stays & inside)
            tl.store(k + k_to + HALF, b_bits, mask=stays & inside)
            tl.store(k + k_to, new_a, mask=turns & inside)
            tl.store(k + k_to + HALF, new_b, mask=turns & inside)
        else:
            new = tl.reshape(tl.join(new_a, new_b), (BLOCK_TOKENS, HEADS_PAD, 2 * HALF_PAD))
            tl.store(k + k_to, both_bits, mask=stays & inside)
            tl.store(k + k_to, new, mask=turns & inside)
        if ROT_OFFSET > 0:
            _copy(k, k_src, k_dst, live, k_head_stride, 0,
                  NUM_HEADS, HEADS_PAD, ROT_OFFSET, HEAD_PART_PAD)  # fmt: skip
        TAIL: tl.constexpr = HEAD_DIM - ROT_OFFSET - ROT_DIM
        if TAIL > 0:
            _copy(k, k_src, k_dst, live, k_head_stride, ROT_OFFSET + ROT_DIM,
                  NUM_HEADS, HEADS_PAD, TAIL, TAIL_PAD)  # fmt: skip

    if V_ROWS > 0:
        tl.store(v + v_to, value, mask=v_mask)
