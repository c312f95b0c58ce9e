// The activations of MLPs, on a vector of float32.
#pragma once

#include "../dispatch.hpp"
#include "simd.hpp"

namespace quire::QUIRE_ISA {

template <Activation A>
QINLINE Vec apply(Vec x) {
    const Vec one = broadcast(1.0f);
    if constexpr (A == Activation::silu) {
        return div(x, add(one, exp(negate(x))));
    } else if constexpr (A == Activation::gelu) {  // x / 2 (1 + erf(x / sqrt 2))
        return mul(mul(x, broadcast(0.5f)), add(one, erf(mul(x, broadcast(0.70710678118654752f)))));
    } else {  // x / 2 (1 + tanh u) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        const Vec cube = mul(mul(x, x), x);
        const Vec u = mul(fma(cube, broadcast(0.044715f), x), broadcast(0.79788456080286536f));
        return div(x, add(one, exp(mul(u, broadcast(-2.0f)))));
    }
}

}  // namespace quire::QUIRE_ISA
