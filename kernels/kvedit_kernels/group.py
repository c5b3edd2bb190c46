"""PoolGroup: the layers of one KV pool that share layout and rope."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvedit_kernels.errors import KernelArgumentError, require

MATH_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
BASE_ALIGN_BYTES = 16  # one 128-bit access; the Triton kernel promises it to the compiler
_OP = "PoolGroup"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGroup:
    """L layers that one launch serves. Built once per pool, with `from_views`.

    A slot is one token's place in the pool. Address of element (slot, head, d) of K, in elements:
    NHD (`page_size` 0): slot*token + head*head_stride + d;
    HND: (slot // page_size)*page + (slot % page_size)*token + head*head_stride + d.
    """

    k_ptrs: Tensor  # [L] int64 base addresses, on the pool's device, 16-byte aligned
    v_ptrs: Tensor | None  # [L] int64; None where a row holds both (MLA)
    k_views: tuple[Tensor, ...]  # L views; they keep the buffers alive
    v_views: tuple[Tensor, ...]
    dtype: torch.dtype  # dtype of the arithmetic: e4m3 where the store dtype is uint8
    page_size: int  # 0: NHD rows; else tokens in one HND page
    k_stride: tuple[int, int, int]  # (page, token, head) in elements
    v_stride: tuple[int, int, int]
    num_heads: int
    head_dim: int
    v_row: int  # V elements of one token over all heads; 0 without V
    rot_offset: int  # first rotated element inside a head's row
    rot_dim: int  # rotated elements, even
    is_neox: bool  # True: pairs (i, i + rot/2); False: pairs (2i, 2i + 1)
    rotate: bool  # False: layers without rope, K is copied like V

    @classmethod
    def from_views(
        cls,
        k_views: tuple[Tensor, ...] | list[Tensor],
        v_views: tuple[Tensor, ...] | list[Tensor],
        *,
        dtype: torch.dtype | None = None,
        page_size: int = 0,
        rot_offset: int = 0,
        rot_dim: int,
        is_neox: bool,
        rotate: bool = True,
    ) -> PoolGroup:
        """Group of the layers whose buffers are given, in the layers' order.

        k_views, v_views: [num_slots, num_heads, dim] each, or [num_pages, num_heads, page_size,
        dim] where `page_size` > 0; V may have another dim than K; no v_views for MLA.
        dtype: arithmetic dtype, default the views' own; needed where the store dtype is uint8.
        Raises KernelArgumentError on a mixed, strided, unaligned or unknown layout.
        """
        k_views, v_views = tuple(k_views), tuple(v_views)
        require(len(k_views) > 0, _OP, "k_views", "one view per layer, at least one", 0)
        require(
            len(v_views) in (0, len(k_views)),
            _OP,
            "v_views",
            f"0 or {len(k_views)} views",
            len(v_views),
        )
        require(page_size >= 0, _OP, "page_size", ">= 0", page_size)
        dtype = dtype or k_views[0].dtype
        _check_views("k_views", k_views, dtype, page_size)
        _check_views("v_views", v_views, dtype, page_size)
        num_heads, head_dim = k_views[0].shape[1], k_views[0].shape[-1]
        if v_views:
            same = _num_slots(v_views[0], page_size) == _num_slots(k_views[0], page_size)
            require(same, _OP, "v_views", "as many slots as K", tuple(v_views[0].shape))
            require(
                v_views[0].shape[1] == num_heads,
                _OP,
                "v_views",
                f"{num_heads} heads as K",
                v_views[0].shape[1],
            )
            require(
                v_views[0].device == k_views[0].device,
                _OP,
                "v_views",
                f"device {k_views[0].device}",
                v_views[0].device,
            )
        _check_rotation(rotate, rot_offset, rot_dim, head_dim)
        return cls(
            k_ptrs=_pointer_table(k_views),
            v_ptrs=_pointer_table(v_views) if v_views else None,
            k_views=k_views,
            v_views=v_views,
            dtype=dtype,
            page_size=page_size,
            k_stride=_strides(k_views[0], page_size),
            v_stride=_strides(v_views[0], page_size) if v_views else (0, 0, 0),
            num_heads=num_heads,
            head_dim=head_dim,
            v_row=num_heads * v_views[0].shape[-1] if v_views else 0,
            rot_offset=rot_offset,
            rot_dim=rot_dim,
            is_neox=is_neox,
            rotate=rotate,
        )

    @property
    def device(self) -> torch.device:
        """Of all its buffers and of the pointer tables."""
        return self.k_views[0].device

    @property
    def num_layers(self) -> int:
        """L, the layers that one launch moves."""
        return len(self.k_views)

    @property
    def num_slots(self) -> int:
        """Tokens that a buffer has room for, the sink in page 0 included."""
        return _num_slots(self.k_views[0], self.page_size)

    @property
    def v_head_dim(self) -> int:
        """V elements of one head; 0 without V."""
        return self.v_row // self.num_heads

    @property
    def first_writable_slot(self) -> int:
        """Page 0 is the host's sink for padded tokens and no target. NHD rows know no pages:
        there this keeps slot 0 out, the rest of page 0 is for the caller."""
        return max(1, self.page_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token holds over all layers of the group."""
        itemsize: int = self.dtype.itemsize
        return self.num_layers * (self.num_heads * self.head_dim + self.v_row) * itemsize


def _check_views(name: str, views: tuple[Tensor, ...], dtype: torch.dtype, page_size: int) -> None:
    if not views:
        return
    first = views[0]
    num_dims = 4 if page_size else 3
    require(dtype in MATH_DTYPES, _OP, "dtype", " | ".join(map(str, MATH_DTYPES)), dtype)
    require(first.dim() == num_dims, _OP, name, f"{num_dims} dims", f"{first.dim()} dims")
    if page_size:
        require(first.shape[2] == page_size, _OP, name, f"page {page_size}", first.shape[2])
    stored = first.dtype == dtype or (first.dtype == torch.uint8 and dtype.itemsize == 1)
    require(stored, _OP, name, f"{dtype} (or uint8 for one byte)", first.dtype)
    for index, view in enumerate(views):
        where = f"{name}[{index}]"
        layout = (view.shape, view.stride(), view.dtype, view.device)
        expected = (first.shape, first.stride(), first.dtype, first.device)
        if layout != expected:
            raise KernelArgumentError(_OP, where, f"layer 0's layout {expected}", layout)
        require(view.stride(-1) == 1, _OP, where, "last stride 1", view.stride(-1))
        require(
            view.data_ptr() % BASE_ALIGN_BYTES == 0,
            _OP,
            where,
            f"base aligned to {BASE_ALIGN_BYTES} bytes",
            hex(view.data_ptr()),
        )


def _check_rotation(rotate: bool, rot_offset: int, rot_dim: int, head_dim: int) -> None:
    if not rotate:
        return
    require(rot_dim > 0 and rot_dim % 2 == 0, _OP, "rot_dim", "an even number > 0", rot_dim)
    fits = rot_offset >= 0 and rot_offset + rot_dim <= head_dim
    span = f"[{rot_offset}, {rot_offset + rot_dim})"
    require(fits, _OP, "rot_offset + rot_dim", f"a range inside [0, {head_dim})", span)


def _num_slots(view: Tensor, page_size: int) -> int:
    num_slots: int = view.shape[0] * (page_size or 1)
    return num_slots


def _strides(view: Tensor, page_size: int) -> tuple[int, int, int]:
    if page_size:
        return view.stride(0), view.stride(2), view.stride(1)
    return 0, view.stride(0), view.stride(1)


def _pointer_table(views: tuple[Tensor, ...]) -> Tensor:
    addresses = [view.data_ptr() for view in views]
    return torch.tensor(addresses, dtype=torch.int64, device=views[0].device)
