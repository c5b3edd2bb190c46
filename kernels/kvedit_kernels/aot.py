"""Compiles the Triton kernel for a GPU that is not here and reads its machine code.

Needs Triton's own ptxas and cuobjdump and no driver. Not for processes with TRITON_INTERPRET=1:
there the kernel is a Python function.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvedit_kernels.relocate_kernel import relocate_kernel
from kvedit_kernels.relocate_triton import NUM_WARPS, Specialisation

THREADS_PER_WARP = 32
WIDE_BYTES = 16
# Registers a thread may hold with 4 warps a block and four blocks on a multiprocessor.
MAX_REGISTERS = 128
_POINTERS = {"k_ptrs": "*i64", "v_ptrs": "*i64", "src_ptr": "*i64", "dst_ptr": "*i64"}
_TABLES = {"row_ptr": "*i32", "cos_sin_ptr": "*fp32", "still_ptr": "*u8"}
_STRIDES = tuple(f"{x}_{unit}_stride" for x in "kv" for unit in ("page", "token", "head"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """What one build does, as ptxas and cuobjdump tell it."""

    registers: int
    stack_bytes: int
    opcodes: Counter[str]  # of SASS, with width suffix: "LDG.128", "STG.U16"
    ptx: str

    @property
    def local_accesses(self) -> int:
        """Loads and stores of local memory in the code: spills."""
        return sum(count for opcode, count in self.opcodes.items() if opcode[:3] in ("LDL", "STL"))


def compile_relocate(
    compute_capability: int,
    chosen: Specialisation,
    *,
    num_warps: int = NUM_WARPS,
    aligned_strides: bool = True,
    fuse_multiply_add: bool = False,
) -> MachineCode:
    """Build for sm_<compute_capability>, as the JIT does on that device.

    aligned_strides: promise that strides and tables are multiples of 16, as the JIT does where
    they are; without the promise every access is narrow. fuse_multiply_add: never in production.
    """
    strides = dict.fromkeys(_STRIDES, "i32")
    signature = {**_POINTERS, **_TABLES, "num_tokens": "i32", **strides}
    constants = chosen.as_kwargs()
    signature |= dict.fromkeys(constants, "constexpr")
    promised = [*_POINTERS, *_TABLES, *_STRIDES] if aligned_strides else []
    position = {name: index for index, name in enumerate(relocate_kernel.arg_names)}
    attributes = {(position[name],): [["tt.divisibility", 16]] for name in promised}
    source = ASTSource(relocate_kernel, signature, constants, attributes)
    built = triton.compile(
        source,
        target=GPUTarget("cuda", compute_capability, THREADS_PER_WARP),
        options={"num_warps": num_warps, "enable_fp_fusion": fuse_multiply_add},
    )
    return _read(built.asm["cubin"], built.asm["ptx"])


def payload_accesses(chosen: Specialisation, num_warps: int = NUM_WARPS) -> int:
    """16-byte accesses one thread needs to move a program's K and V once, without padding."""
    elements = chosen.NUM_HEADS * chosen.HEAD_DIM + chosen.V_ROWS * chosen.V_ROW
    num_bytes: int = chosen.BLOCK_TOKENS * elements * chosen.BITS.primitive_bitwidth // 8
    return num_bytes // (WIDE_BYTES * THREADS_PER_WARP * num_warps)


def faults(code: MachineCode, chosen: Specialisation, num_warps: int = NUM_WARPS) -> list[str]:
    """What is found against a build; empty is a pass. Of speed: spills, registers, narrow accesses,
    unpacked conversions. Of the result: 32-bit slot offsets, fused multiply-add."""
    found = []
    if code.stack_bytes or code.local_accesses:
        found.append(f"spills: stack {code.stack_bytes} B, {code.local_accesses} local accesses")
    if code.registers > MAX_REGISTERS:
        found.append(f"registers: expected at most {MAX_REGISTERS}, got {code.registers}")
    wide = max(1, payload_accesses(chosen, num_warps))
    for access in ("LDG", "STG"):
        got = code.opcodes[f"{access}.128"]
        if got < wide:
            found.append(f"{access}.128: expected at least {wide}, got {got}")
    narrow = {op: n for op, n in code.opcodes.items() if _is_narrow_store(op)}
    if narrow:
        found.append(f"narrow stores: {narrow}")
    unpacked = [opcode for opcode in code.opcodes if opcode.startswith("F2F.")]
    if unpacked:
        found.append(f"conversions: expected packed ones, got {unpacked}")
    if not re.search(r"(mul\.lo|mad\.lo)\.s64|mul\.wide|mad\.wide", code.ptx):
        found.append("slot offsets: expected 64-bit multiplication, got none")
    if re.search(r"\bfma\.rn\.f32", code.ptx) or code.opcodes["FFMA"]:
        found.append("fused multiply-add: rounds differently from the reference")
    return found


def _is_narrow_store(opcode: str) -> bool:
    return opcode.startswith("STG") and not opcode.endswith((".128", ".256"))


def _read(cubin: bytes, ptx: str) -> MachineCode:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "relocate.cubin")
        path.write_bytes(cubin)
        usage, sass = (_run(tool, flag, str(path)) for flag in ("-res-usage", "-sass"))
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if numbers is None:
        raise RuntimeError(f"kvedit: cuobjdump: expected REG and STACK, got {usage!r}")
    # LOCAL of -res-usage stays 0 in builds that spill; STACK and the LDL/STL opcodes tell.
    return MachineCode(
        registers=int(numbers[1]),
        stack_bytes=int(numbers[2]),
        opcodes=Counter(_opcodes(sass)),
        ptx=ptx,
    )


def _opcodes(sass: str) -> list[str]:
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.M)
    return [_shortened(name) for name in names]


def _shortened(opcode: str) -> str:
    """STG.E.EL.128 -> STG.128: the mnemonic, and the width where it is one of memory."""
    mnemonic, *suffixes = opcode.split(".")
    if mnemonic not in ("LDG", "STG", "LDL", "STL", "F2F"):
        return mnemonic
    widths = [s for s in suffixes if re.fullmatch(r"[US]?(8|16|32|64|128|256)|BF16", s)]
    return ".".join([mnemonic, *(widths or ["32"])])


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
