// Products of bytes: LANES outputs at a time, four inputs each, summed into 32-bit integers. Always exact: nothing here
// saturates (which is why AVX2's multiply of bytes, whose 16-bit sums do, is not used on 8-bit weights).
//
// `Quad` is LANES outputs' weights of four inputs, unsigned bytes, ready to be multiplied; `InputQuad` is one row's four
// inputs, for all lanes, from QUAD_WORDS words that lie `stride` words apart. Rows are stored in the form that
// `load_inputs` wants (`Input`, LANES of them written by `store_inputs` from 32-bit integers).
#pragma once

#include "simd.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace quire::QUIRE_ISA {

#if defined(__AVX512VNNI__) && defined(__AVX512F__)

using Input = int8_t;
using Quad = Bits;
using InputQuad = Bits;

QINLINE Quad unpack(Bits bytes) { return bytes; }
QINLINE InputQuad load_inputs(const uint32_t *x, int) { return broadcast_word(x); }
// In the sums' register: left to itself, GCC 12 moves accumulators about and spills them.
QINLINE Bits multiply_add(Bits sums, Quad w, InputQuad x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
    return sums;
}
QINLINE void store_inputs(Input *out, Bits x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm512_cvtepi32_epi8(x));
}

#else

// Inputs as 16-bit pairs (x0, x2), (x1, x3), which meet the even and the odd bytes of a word of weights.
using Input = int16_t;
struct Quad {
    Bits even, odd;
};
struct InputQuad {
    Bits even, odd;
};

#if defined(__AVX512BW__)
QINLINE Bits multiply_pairs(Bits a, Bits b) { return _mm512_madd_epi16(a, b); }
#elif defined(__AVX2__)
QINLINE Bits multiply_pairs(Bits a, Bits b) { return _mm256_madd_epi16(a, b); }
#elif defined(__SSE2__)
QINLINE Bits multiply_pairs(Bits a, Bits b) { return (Bits)_mm_madd_epi16((__m128i)a, (__m128i)b); }
#else
QINLINE Bits multiply_pairs(Bits a, Bits b) {
    typedef int32_t Signed __attribute__((vector_size(16)));
    const Signed low = ((Signed)(a << 16) >> 16) * ((Signed)(b << 16) >> 16);
    return (Bits)(low + ((Signed)a >> 16) * ((Signed)b >> 16));
}
#endif

QINLINE Quad unpack(Bits bytes) {
    const Bits mask = broadcast_bits(0x00ff00ffu);
    return {and_bits(bytes, mask), and_bits(shift_right<8>(bytes), mask)};
}
QINLINE InputQuad load_inputs(const uint32_t *x, int stride) { return {broadcast_word(x), broadcast_word(x + stride)}; }
QINLINE Bits multiply_add(Bits sums, Quad w, InputQuad x) {
    return add_bits(sums, add_bits(multiply_pairs(w.even, x.even), multiply_pairs(w.odd, x.odd)));
}
QINLINE void store_inputs(Input *out, Bits x) {
    int32_t lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < LANES; i += 4) {
        for (int j = 0; j < 4; ++j) out[i + j] = static_cast<Input>(lanes[i + (j & 1) * 2 + j / 2]);
    }
}

#endif

constexpr int64_t INTEGER_BYTES = sizeof(Input);
constexpr int QUAD_WORDS = sizeof(Input);  // four inputs are so many words

}  // namespace quire::QUIRE_ISA
