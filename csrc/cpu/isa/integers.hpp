// Products of bytes: LANES outputs at a time, four inputs each, summed into 32-bit integers. Always exact: nothing here
// saturates (which is why AVX2's multiply of bytes, whose 16-bit sums do, is used on weights of four bits alone).
//
// A line of weights (LANES outputs, four inputs each, unsigned bytes) meets one row's four inputs, broadcast, in NUM_PARTS
// multiplications: all four at once where there is an instruction for it, else two and two. Part by part, the weights of one
// part and the sums of a tile fit the registers. Rows are stored as `load_inputs` wants them (`Input`, LANES of them written
// by `store_inputs` from 32-bit integers): QUAD_WORDS words for four inputs, `stride` words apart.
#pragma once

#include "simd.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// Whether products of half bytes are summed in 16 bits: with AVX2 or AVX-512, where no instruction sums them in 32.
#if (defined(__AVX2__) || defined(__AVX512BW__)) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define NARROW_SUMS 1
#else
#define NARROW_SUMS 0
#endif

namespace quire::QUIRE_ISA {

#if defined(__AVX512BW__)
QINLINE void store_inputs(int8_t *out, Bits x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm512_cvtepi32_epi8(x));
}
#elif defined(__AVX2__)
QINLINE void store_inputs(int8_t *out, Bits x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(out), _mm_packs_epi16(words, words));
}
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

using Input = int8_t;
constexpr int NUM_PARTS = 1;

template <int>
QINLINE Bits part_of(Bits bytes) {
    return bytes;
}
// In the sums' register: left to itself, GCC 12 moves accumulators about and spills them.
#if defined(__AVX512VNNI__)
QINLINE Bits multiply_add(Bits sums, Bits w, Bits x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
    return sums;
}
#else
QINLINE Bits multiply_add(Bits sums, Bits w, Bits x) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(x));
    return sums;
}
#endif

#else

// Inputs as 16-bit pairs (x0, x2), (x1, x3), which meet the even and the odd bytes of a word of weights.
using Input = int16_t;
constexpr int NUM_PARTS = 2;

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

template <int PART>
QINLINE Bits part_of(Bits bytes) {
    return and_bits(PART == 0 ? bytes : shift_right<8>(bytes), broadcast_bits(0x00ff00ffu));
}
#if defined(__AVX2__) && !defined(__AVX512F__)
// In the sums' register: left to itself, GCC 12 spills a third of a tile's accumulators.
QINLINE Bits multiply_add(Bits sums, Bits w, Bits x) {
    Bits product;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(product) : "x"(w), "x"(x));
    return sums;
}
#else
QINLINE Bits multiply_add(Bits sums, Bits w, Bits x) { return add_bits(sums, multiply_pairs(w, x)); }
#endif
QINLINE void store_inputs(Input *out, Bits x) {
    int32_t lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < LANES; i += 4) {
        for (int j = 0; j < 4; ++j) out[i + j] = static_cast<Input>(lanes[i + (j & 1) * 2 + j / 2]);
    }
}

#endif

// Half bytes times bytes: sums of 16 bits, which `widen` adds to those of 32 before they could overflow.
#if NARROW_SUMS
using Int4Input = int8_t;
constexpr int NARROW_PRODUCTS = 8;  // that a sum holds: a multiplication adds up to 2 * 15 * 128 to it
static_assert(NARROW_PRODUCTS * 2 * 15 * 128 < 1 << 15);

// In the sums' register, as above.
QINLINE Bits multiply_add_narrow(Bits sums, Bits w, Bits x) {
    Bits product;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sums), "=&v"(product) : "v"(w), "v"(x));
    return sums;
}
QINLINE Bits widen(Bits sums, Bits narrow) { return add_bits(sums, multiply_pairs(narrow, broadcast_bits(0x00010001u))); }
#else
using Int4Input = Input;
#endif

constexpr int64_t INT8_INPUT_BYTES = sizeof(Input), INT4_INPUT_BYTES = sizeof(Int4Input);
constexpr int QUAD_WORDS = sizeof(Input);  // four inputs are so many words
static_assert(QUAD_WORDS == NUM_PARTS);

template <int PART>
QINLINE Bits load_inputs(const uint32_t *x, int stride) {
    return broadcast_word(x + PART * stride);
}

}  // namespace quire::QUIRE_ISA
