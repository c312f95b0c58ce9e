"""Random words, Gumbel noise and integer weights as Triton functions: `reference.sampling`
operation by operation.

Every operation is a single float32 or integer one and launches forbid contraction, so the bits are
the reference's.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e400p-1"))
LN2_LOW = tl.constexpr(float.fromhex("0x1.7f7d1cp-20"))
LOG2_E = tl.constexpr(float.fromhex("0x1.715476p+0"))
LOG_0 = tl.constexpr(float.fromhex("-0x1.392f30p-4"))
LOG_1 = tl.constexpr(float.fromhex("0x1.05b75cp-3"))
LOG_2 = tl.constexpr(float.fromhex("-0x1.0d9a40p-3"))
LOG_3 = tl.constexpr(float.fromhex("0x1.22cf4ep-3"))
LOG_4 = tl.constexpr(float.fromhex("-0x1.546f2ap-3"))
LOG_5 = tl.constexpr(float.fromhex("0x1.99a060p-3"))
LOG_6 = tl.constexpr(float.fromhex("-0x1.000232p-2"))
LOG_7 = tl.constexpr(float.fromhex("0x1.555554p-2"))
EXP_0 = tl.constexpr(float.fromhex("0x1.6a2352p-10"))
EXP_1 = tl.constexpr(float.fromhex("0x1.123a6cp-7"))
EXP_2 = tl.constexpr(float.fromhex("0x1.5558f4p-5"))
EXP_3 = tl.constexpr(float.fromhex("0x1.555490p-3"))
EXP_4 = tl.constexpr(float.fromhex("0x1.fffffcp-2"))
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a small float32 to the nearest integer,
half to even."""


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10: four uint32 words of uint32 counters and keys."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c2 = high1 ^ c1 ^ k0, high0 ^ c3 ^ k1
        c1, c3 = low1, low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def log_reduced(f, exponent):
    """log((1 + f) * 2**exponent)"""
    power = (
        (((((LOG_0 * f + LOG_1) * f + LOG_2) * f + LOG_3) * f + LOG_4) * f + LOG_5) * f + LOG_6
    ) * f + LOG_7
    square = f * f
    tail = (power * f) * square + exponent * LN2_LOW
    return (f + (tail - square * 0.5)) + exponent * LN2_HIGH


@triton.jit
def split_float(x):
    """f and exponent of positive normal x = (1 + f) * 2**exponent, 1 + f from sqrt(1/2)
    up to sqrt(2)."""
    shifted = x.to(tl.int32, bitcast=True) - SQRT_HALF_BITS
    mantissa = (shifted & 0x7FFFFF) + SQRT_HALF_BITS
    return mantissa.to(tl.float32, bitcast=True) - 1.0, (shifted >> 23).to(tl.float32)


@triton.jit
def gumbel(word):
    """Gumbel noise of uint32 words."""
    is_high = word >= 0x80000000
    x = (
        tl.where(is_high, 0xFFFFFFFF - word, word).to(tl.int32).to(tl.float32) + 0.5
    ) * 2.3283064365386963e-10
    low_f, low_exponent = split_float(x)
    is_halved = x > 0.2928932188134524
    f = tl.where(is_high, tl.where(is_halved, 1.0 - (x + x), -x), low_f)
    exponent = tl.where(is_high, tl.where(is_halved, -1.0, 0.0), low_exponent)
    f, exponent = split_float(-log_reduced(f, exponent))
    return -log_reduced(f, exponent)


@triton.jit
def weigh(distance):
    """int(exp(d) * 2**40), int64, of scaled distances d <= 0."""
    d = tl.maximum(distance, -80.0)
    n = (d * LOG2_E + ROUNDER) - ROUNDER
    r = (d - n * LN2_HIGH) - n * LN2_LOW
    power = (((EXP_0 * r + EXP_1) * r + EXP_2) * r + EXP_3) * r + EXP_4
    mantissa = ((power * (r * r)) + r) + 1.0
    two_to_n = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return ((mantissa * two_to_n) * 1099511627776.0).to(tl.int64)
