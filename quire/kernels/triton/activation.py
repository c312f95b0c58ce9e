"""Activations as Triton functions, in float32;
used by the elementwise kernels and at the end of projections."""

from __future__ import annotations

import triton
import triton.language as tl

NO_ACTIVATION = -1


@triton.jit
def activated(x, KIND: tl.constexpr):
    """`Kernels.activate` of float32 x; KIND is an `activation_code`."""
    if KIND == 0:
        result = tl.div_rn(x, 1.0 + tl.exp(-x))
    elif KIND == 1:
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 3:
        result = tl.div_rn(x, 1.0 + tl.exp(-1.702 * x))
    else:  # 0.5 x (1 + tanh(y)) is x - x / (exp(2 y) + 1)
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        result = x - tl.div_rn(x, tl.exp(2.0 * y) + 1.0)
    return result


@triton.jit
def gated_product(gate, up, KIND: tl.constexpr):
    """`Kernels.gated` of float32 gate and up."""
    if KIND == 4:  # swish(min(gate, 7)) * (clamp(up, -7, 7) + 1); what is not a number stays so
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        result = tl.div_rn(gate, 1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        result = activated(gate, KIND) * up
    return result
