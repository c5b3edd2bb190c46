"""Triton: stored bits to fp32 and back, rounding to nearest even.

SOFT computes the conversions from integers. It is needed where Triton's own are absent or wrong:
fp8 before sm_89, and bf16 and fp8 in the interpreter, whose casts truncate (Triton 3.8.0; drop
the interpreter's part when its casts round).
"""

import triton
import triton.language as tl


@triton.jit
def _decode(bits, dtype: tl.constexpr, SOFT: tl.constexpr):
    """fp32 value of stored bits; exact."""
    if SOFT and dtype == tl.bfloat16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif SOFT and dtype == tl.float8e5:
        # e5m2 is the upper byte of fp16.
        return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif SOFT and dtype == tl.float8e4nv:
        wide = bits.to(tl.uint32)
        # The magnitude read as fp32 is short by the difference of the exponent biases, 127 - 7.
        scale: tl.constexpr = 2.0**120
        value = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * scale
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
        return tl.where((wide & 0x80) != 0, -value, value)
    else:
        return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _round_fp8(x, DROP: tl.constexpr, MIN_NORMAL: tl.constexpr, GRID: tl.constexpr):
    """fp32 value of x on an fp8 grid: DROP mantissa bits fall; GRID is the denormals' step."""
    bits = x.to(tl.uint32, bitcast=True)
    half: tl.constexpr = (1 << (DROP - 1)) - 1
    kept = (bits + half + ((bits >> DROP) & 1)) >> DROP << DROP
    normal = kept.to(tl.float32, bitcast=True)
    # Adding 1.5 * 2^23 steps leaves a float whose own last bit is one step.
    magic: tl.constexpr = 1.5 * 8388608.0 * GRID
    return tl.where(tl.abs(x) < MIN_NORMAL, (x + magic) - magic, normal)


@triton.jit
def _encode(value, dtype: tl.constexpr, bits_dtype: tl.constexpr, SOFT: tl.constexpr):
    """Stored bits of an fp32 value, rounded once to nearest even; fp8 saturates, nan stays nan."""
    if dtype == tl.float8e4nv or dtype == tl.float8e5:
        limit: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
        value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    if SOFT and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value != value, 0x7FC0, rounded).to(bits_dtype)
    elif SOFT and dtype == tl.float8e5:
        sign = (value.to(tl.uint32, bitcast=True) >> 24) & 0x80
        near = _round_fp8(tl.abs(value), 21, 2.0**-14, 2.0**-16)
        rebias: tl.constexpr = 2.0**-112
        magnitude = (near * rebias).to(tl.uint32, bitcast=True) >> 21
        return tl.where(value != value, 0x7F, magnitude | sign).to(bits_dtype)
    elif SOFT and dtype == tl.float8e4nv:
        sign = (value.to(tl.uint32, bitcast=True) >> 24) & 0x80
        near = _round_fp8(tl.abs(value), 20, 2.0**-6, 2.0**-9)
        rebias: tl.constexpr = 2.0**-120
        magnitude = (near * rebias).to(tl.uint32, bitcast=True) >> 20
        return tl.where(value != value, 0x7F, magnitude | sign).to(bits_dtype)
    else:
        return value.to(dtype).to(bits_dtype, bitcast=True)
