"""The ops of this package as data: what goes in, what comes out, how exact, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvedit_kernels.merge_states_ref import merge_states_ref
from kvedit_kernels.relocate_ref import copy_slots_ref, relocate_ref
from kvedit_kernels.rotate_rows_ref import rotate_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Half a unit in the last place of a dtype: relative, and absolute among its denormals."""

    relative: float
    absolute: float


ROUNDING: Mapping[torch.dtype, Rounding] = {
    torch.bfloat16: Rounding(relative=2.0**-8, absolute=0.0),
    torch.float16: Rounding(relative=2.0**-11, absolute=2.0**-25),
    torch.float32: Rounding(relative=2.0**-24, absolute=0.0),
    torch.float8_e4m3fn: Rounding(relative=2.0**-4, absolute=2.0**-10),
    torch.float8_e5m2: Rounding(relative=2.0**-3, absolute=2.0**-17),
}
# fp32 cos and sin, two products and a sum: each within 2^-24 of at most twice the pair's maximum.
ARITHMETIC = 8 * 2.0**-24
# Relative error of two hops (by 700, then in place by -300) against the exact single one.
TWO_HOP_DRIFT: Mapping[torch.dtype, float] = {
    torch.bfloat16: 3.5e-3,
    torch.float16: 4.5e-4,
    torch.float32: 1.5e-7,
    torch.float8_e4m3fn: 5e-2,
    torch.float8_e5m2: 1e-1,
}


def arithmetic_bound(dtype: torch.dtype, want: Tensor, pair: Tensor) -> Tensor:
    """Largest error a correctly rounded rotation may have, per element.

    want: exact result, fp64; pair: larger magnitude of the two elements that were turned.
    """
    unit = ROUNDING[dtype]
    return unit.relative * want.abs() + unit.absolute + ARITHMETIC * pair


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContract:
    """One op. `inputs` and `outputs` give dtype and axes; `edge_cases` what is easily got wrong."""

    name: str
    axes: Mapping[str, str]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    init: str  # how test inputs are drawn
    reference: Callable[..., object]
    tolerance: str
    why: str
    edge_cases: tuple[str, ...] = field(default=())


_POOL_AXES = {
    "L": "layers of one group, 1 or more",
    "N": "tokens of all spans and requests of one batch, 0 or more",
    "H": "KV heads of this rank, any count",
    "D": "elements of a K row; 64, 80, 96, 128, 256, and 512 + 64 for MLA are tested",
    "S": "slots of the pool; L, H and D times S may pass 2^31 elements",
}
_MOVE_INPUTS = {
    "group.k_views": "dtype [S, H, D] or [S / page, H, page, D], L of them",
    "group.v_views": "dtype as k_views, own D; none for MLA",
    "src": "int64 [N], repeats allowed where disjoint from dst",
    "dst": "int64 [N], unique, disjoint from src or equal to it, never in page 0",
}
_MOVE_OUTPUTS = {"group.k_views": "rows at dst", "group.v_views": "rows at dst"}
_DRAWN = "normal values times 3; slots by shuffled pages, scattered, or in place"

OPS: Mapping[str, OpContract] = {
    contract.name: contract
    for contract in (
        OpContract(
            name="relocate",
            axes={**_POOL_AXES, "R": "distinct shifts", "rot": "rotated elements of a row, even"},
            inputs={
                **_MOVE_INPUTS,
                "row": "int32 [N] in [0, R)",
                "cos_sin": "fp32 [R, 2, rot/2], angles formed in fp64, no amplitude",
            },
            outputs=_MOVE_OUTPUTS,
            init=_DRAWN,
            reference=relocate_ref,
            tolerance="rotated: ROUNDING * |want| + ARITHMETIC * max|pair|; all else exact",
            why="the least error that a stored dtype allows: one rounding, and fp32 before it",
            edge_cases=(
                "a row that is exactly (1, 0) copies bytes: -0.0, inf and nan survive",
                "fp8 saturates; nan stays nan",
                "two hops drift (TWO_HOP_DRIFT): relocate from the pristine copy",
            ),
        ),
        OpContract(
            name="copy_slots",
            axes=_POOL_AXES,
            inputs=_MOVE_INPUTS,
            outputs=_MOVE_OUTPUTS,
            init=_DRAWN,
            reference=copy_slots_ref,
            tolerance="exact",
            why="data movement has no arithmetic to be wrong in",
        ),
        OpContract(
            name="rotate_rows",
            axes={"T": "rows", "H": "heads", "D": "elements", "R": "shifts", "rot": "rotated"},
            inputs={
                "x": "dtype [T, H, D]",
                "row": "int32 [T] in [0, R)",
                "cos_sin": "fp32 [R, 2, rot/2]",
            },
            outputs={"x": "dtype [T, H, D], a copy"},
            init="normal values times 3",
            reference=rotate_rows,
            tolerance="as relocate",
            why="queries turned by -delta read a segment where it is stored",
        ),
        OpContract(
            name="merge_states",
            axes={"T": "queries", "G": "key groups", "H": "heads", "D": "elements"},
            inputs={"v": "dtype [T, G, H, D]", "s": "fp32 [T, G, H], base 2"},
            outputs={"v": "dtype [T, H, D]", "s": "fp32 [T, H], base 2"},
            init="attention over random keys, split into groups of which some are empty",
            reference=merge_states_ref,
            tolerance="1e-5 relative to the attention over all keys, fp32",
            why="softmax over a union is a weighted mean of the softmaxes over its parts",
            edge_cases=("an empty group has s = -inf and weighs nothing, whatever its v holds",),
        ),
    )
}
