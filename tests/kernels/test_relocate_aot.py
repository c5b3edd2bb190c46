"""The production builds for sm_80, sm_90 and sm_100, read from their machine code; no GPU needed.

Runs without TRITON_INTERPRET: interpreted kernels cannot be compiled, so never beside
test_relocate.py in one process.
"""

from __future__ import annotations

import pytest
import torch
import triton

from kvedit_kernels import aot
from kvedit_kernels.relocate_triton import Specialisation, specialise
from kvedit_kernels.testing import Case, build

ARCHITECTURES = (80, 90, 100)
FIRST_WITH_FP8 = 89
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LLAMA_8B = Case(num_heads=8, head_dim=128, v_head_dim=128, rot_dim=128, num_layers=1)


def shape(**changes: object) -> Case:
    return Case(num_layers=1, num_tokens=1, **changes)


PRODUCTION = {
    "8b": LLAMA_8B,
    "8b_gptj": shape(num_heads=8, head_dim=128, v_head_dim=128, rot_dim=128, is_neox=False),
    "8b_tp8": shape(num_heads=1, head_dim=128, v_head_dim=128, rot_dim=128),
    "8b_hnd": shape(num_heads=8, head_dim=128, v_head_dim=128, rot_dim=128, is_hnd=True),
    "8b_fp16": shape(num_heads=8, head_dim=128, v_head_dim=128, rot_dim=128, dtype=torch.float16),
    "8b_fp32": shape(num_heads=8, head_dim=128, v_head_dim=128, rot_dim=128, dtype=torch.float32),
    "8b_e4m3": shape(num_heads=8, head_dim=128, v_head_dim=128, rot_dim=128, dtype=E4M3),
    "8b_e5m2": shape(num_heads=8, head_dim=128, v_head_dim=128, rot_dim=128, dtype=E5M2),
    "three_heads": shape(num_heads=3),
    "partial": shape(num_heads=8, head_dim=128, v_head_dim=128, rot_dim=64),
    "d80": shape(num_heads=8, head_dim=80, v_head_dim=80, rot_dim=80),
    "d96": shape(num_heads=8, head_dim=96, v_head_dim=96, rot_dim=96),
    "d256": shape(num_heads=4, head_dim=256, v_head_dim=256, rot_dim=256),
    "mla": shape(
        num_heads=1, head_dim=576, v_head_dim=0, rot_offset=512, rot_dim=64, is_neox=False
    ),
}


def chosen_for(case: Case, capability: int, *, rotate: bool = True) -> Specialisation:
    group, _ = build(case)
    soft = case.dtype.itemsize == 1 and capability < FIRST_WITH_FP8
    return specialise(group, rotate=rotate, soft=soft)


@pytest.fixture(autouse=True)
def compiled_not_interpreted() -> None:
    assert not triton.knobs.runtime.interpret, "run this file in a process of its own"


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("name", PRODUCTION)
def test_production_build_has_no_fault(name: str, capability: int) -> None:
    chosen = chosen_for(PRODUCTION[name], capability)
    code = aot.compile_relocate(capability, chosen)
    assert aot.faults(code, chosen) == []


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("name", ["8b", "8b_hnd", "mla"])
def test_copy_build_moves_bytes_only(name: str, capability: int) -> None:
    chosen = chosen_for(PRODUCTION[name], capability, rotate=False)
    code = aot.compile_relocate(capability, chosen)
    assert aot.faults(code, chosen) == []
    assert not {"F2FP", "FMUL", "BAR"} & set(code.opcodes), "a copy converts and exchanges nothing"


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_too_large_a_block_is_caught_as_a_spill(capability: int) -> None:
    group, _ = build(LLAMA_8B)
    chosen = specialise(group, rotate=True, soft=False, block_tokens=32)
    code = aot.compile_relocate(capability, chosen)
    assert any(fault.startswith("spills") for fault in aot.faults(code, chosen))


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_missing_divisibility_is_caught_as_narrow_access(capability: int) -> None:
    chosen = chosen_for(LLAMA_8B, capability)
    code = aot.compile_relocate(capability, chosen, aligned_strides=False)
    found = " ".join(aot.faults(code, chosen))
    assert "narrow stores" in found and "LDG.128" in found and "STG.128" in found


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_fused_multiply_add_is_caught(capability: int) -> None:
    """Allowed contraction would change results: the reference rounds each product."""
    chosen = chosen_for(LLAMA_8B, capability)
    code = aot.compile_relocate(capability, chosen, fuse_multiply_add=True)
    assert any(fault.startswith("fused multiply-add") for fault in aot.faults(code, chosen))


def test_a_program_of_mla_fills_its_warps() -> None:
    """Four tokens of a latent row leave 2-byte accesses: the block is chosen by elements."""
    group, _ = build(PRODUCTION["mla"])
    chosen = specialise(group, rotate=True, soft=False, block_tokens=4)
    code = aot.compile_relocate(90, chosen)
    assert any(fault.startswith("narrow stores") for fault in aot.faults(code, chosen))
