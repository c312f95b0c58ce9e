// The sums of norms: over a row's own elements, in an order fixed by its length alone.
#pragma once

#include <cmath>

#include "simd.hpp"

namespace quire::QUIRE_ISA {

constexpr int CHAINS = 4;  // independent sums, to hide the latency of an addition

QINLINE float sum_chains(const Vec (&sums)[CHAINS]) {
    return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

QINLINE float inverse_root(float squares, int64_t width, float eps) {
    return 1.0f / sqrtf(squares / static_cast<float>(width) + eps);
}

}  // namespace quire::QUIRE_ISA
