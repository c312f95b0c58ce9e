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
    } else if constexpr (A == Activation::gelu_sigmoid) {  // x / (1 + exp(-1.702 x))
        return div(x, add(one, exp(mul(x, broadcast(-1.702f)))));
    } else {  // x / 2 (1 + tanh u) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        const Vec cube = mul(mul(x, x), x);
        const Vec u = mul(fma(cube, broadcast(0.044715f), x), broadcast(0.79788456080286536f));
        return div(x, add(one, exp(mul(u, broadcast(-2.0f)))));
    }
}

// What a gate makes of the other product: activation(gate) * up, but where the activation says otherwise.
template <Activation A>
QINLINE Vec gated_product(Vec gate, Vec up) {
    if constexpr (A == Activation::clamped_swish) {  // g / (1 + exp(-1.702 g)) (u + 1), both limited; keeps what is not a number
        const Vec most = broadcast(7.0f), least = broadcast(-7.0f), one = broadcast(1.0f);
        const Vec g = where_less(most, gate, most, gate);
        const Vec limited = where_less(most, up, most, up), u = where_less(limited, least, least, limited);
        return mul(div(g, add(one, exp(mul(g, broadcast(-1.702f))))), add(u, one));
    } else {
        return mul(apply<A>(gate), up);
    }
}

}  // namespace quire::QUIRE_ISA
