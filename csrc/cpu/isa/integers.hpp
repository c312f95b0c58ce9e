// Products of bytes: LANES outputs at a time, four inputs each, summed into 32-bit integers. Always exact: nothing here
// saturates. (AVX2's multiply of bytes, whose 16-bit sums do, gets no pair of inputs that could make it; see outliers.hpp.)
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

// Arm's products of bytes: four and four summed into 32 bits, both sides signed (ARMv8.2's dot product) or weights unsigned (i8mm,
// which also has products of matrices; gemm_integers.cpp).
#if defined(QUIRE_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
#define NEON_MIXED_DOTS 1
#elif defined(QUIRE_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define NEON_SIGNED_DOTS 1
#endif

// Whether products of half bytes are summed in 16 bits: with AVX2 or AVX-512, where no instruction sums them in 32.
#if (defined(__AVX2__) || defined(__AVX512BW__)) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define NARROW_SUMS 1
#else
#define NARROW_SUMS 0
#endif

// Whether int8 weights are multiplied as bytes whose products are added up in 16 bits, two and two: with AVX2 alone.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define SHORT_PAIRS 1
#else
#define SHORT_PAIRS 0
#endif

namespace quire::QUIRE_ISA {

// Whether int8 weights are multiplied as what they are stored for, value + 128 less 128: then no start makes up for the 128.
#if defined(NEON_SIGNED_DOTS)
constexpr bool HAS_SIGNED_BYTES = true;
QINLINE Bits as_multiplied(Bits bytes) { return veorq_u32(bytes, broadcast_bits(0x80808080u)); }
#else
constexpr bool HAS_SIGNED_BYTES = false;
QINLINE Bits as_multiplied(Bits bytes) { return bytes; }
#endif

#if defined(__AVX512BW__)
QINLINE void store_inputs(int8_t *out, Bits x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm512_cvtepi32_epi8(x));
}
#elif defined(__AVX2__)
QINLINE void store_inputs(int8_t *out, Bits x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(out), _mm_packs_epi16(words, words));
}
#elif defined(QUIRE_NEON)
QINLINE void store_inputs(int8_t *out, Bits x) {
    const int16x4_t words = vmovn_s32(vreinterpretq_s32_u32(x));
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    memcpy(out, &bytes, LANES);
}
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

using Input = int8_t;
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

#elif defined(NEON_MIXED_DOTS) || defined(NEON_SIGNED_DOTS)

using Input = int8_t;
QINLINE Bits multiply_add(Bits sums, Bits w, Bits x) {
    const int32x4_t from = vreinterpretq_s32_u32(sums);
#if defined(NEON_MIXED_DOTS)
    return vreinterpretq_u32_s32(vusdotq_s32(from, vreinterpretq_u8_u32(w), vreinterpretq_s8_u32(x)));
#else
    return vreinterpretq_u32_s32(vdotq_s32(from, vreinterpretq_s8_u32(w), vreinterpretq_s8_u32(x)));
#endif
}
// The same with one word of x, in the sums' register.
template <int LANE>
QINLINE void multiply_add_lane(Bits &sums, Bits w, Bits x) {
#if defined(NEON_MIXED_DOTS)
    asm("usdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sums) : "w"(w), "w"(x), "i"(LANE));
#else
    asm("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sums) : "w"(w), "w"(x), "i"(LANE));
#endif
}

#elif SHORT_PAIRS

using Input = int8_t;
QINLINE Bits multiply_pairs(Bits a, Bits b) { return _mm256_madd_epi16(a, b); }
// Two products and an addition for 32 values, where pairs of 16 bits take two and two. That is more than it seems: Zen 3 begins
// two products and four additions a cycle, but additions take units that products need, and both forms run at 3.3 to 3.6
// instructions a cycle, loads included: 28.8 against 21.4 values a cycle in tiles (float32 multiply-adds: 15.8).
QINLINE Bits multiply_add(Bits sums, Bits w, Bits x) {
    Bits product;
    asm("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
        : "+x"(sums), "=&x"(product)
        : "x"(w), "x"(x), "x"(broadcast_bits(0x00010001u)));
    return sums;
}
// Of two vectors of weights. Products before additions: 2 % faster than one vector after the other.
QINLINE void multiply_add_both(Bits (&sums)[2], const Bits (&w)[2], Bits x) {
    Bits product;
    asm("vpmaddubsw %2, %4, %3\n\tvpmaddubsw %2, %5, %2\n\tvpmaddwd %6, %3, %3\n\tvpmaddwd %6, %2, %2\n\t"
        "vpaddd %3, %0, %0\n\tvpaddd %2, %1, %1"
        : "+x"(sums[0]), "+x"(sums[1]), "+x"(x), "=&x"(product)
        : "x"(w[0]), "x"(w[1]), "x"(broadcast_bits(0x00010001u)));
}
// The same with values of 16 bits. In the sums' register: left to itself, GCC 12 spills a third of a tile's accumulators.
QINLINE Bits multiply_add_pairs(Bits sums, Bits w, Bits x) {
    Bits product;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(product) : "x"(w), "x"(x));
    return sums;
}

#else

// Inputs as 16-bit pairs (x0, x2), (x1, x3), which meet the even and the odd bytes of a word of weights.
using Input = int16_t;

#if defined(__AVX512BW__)
QINLINE Bits multiply_pairs(Bits a, Bits b) { return _mm512_madd_epi16(a, b); }
#elif defined(__SSE2__)
QINLINE Bits multiply_pairs(Bits a, Bits b) { return (Bits)_mm_madd_epi16((__m128i)a, (__m128i)b); }
#elif defined(QUIRE_NEON)
QINLINE Bits multiply_pairs(Bits a, Bits b) {
    const int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
    return vreinterpretq_u32_s32(vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
}
#else
QINLINE Bits multiply_pairs(Bits a, Bits b) {
    typedef int32_t Signed __attribute__((vector_size(16)));
    const Signed low = ((Signed)(a << 16) >> 16) * ((Signed)(b << 16) >> 16);
    return (Bits)(low + ((Signed)a >> 16) * ((Signed)b >> 16));
}
#endif

QINLINE Bits multiply_add(Bits sums, Bits w, Bits x) { return add_bits(sums, multiply_pairs(w, x)); }
QINLINE void store_inputs(Input *out, Bits x) {
    int32_t lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < LANES; i += 4) {
        for (int j = 0; j < 4; ++j) out[i + j] = static_cast<Input>(lanes[i + (j & 1) * 2 + j / 2]);
    }
}

#endif

// Bytes meet four weights at once, 16-bit inputs the even and then the odd ones.
constexpr int NUM_PARTS = sizeof(Input);

template <int PART>
QINLINE Bits part_of(Bits bytes) {
    if constexpr (NUM_PARTS == 1) return bytes;
    return and_bits(PART == 0 ? bytes : shift_right<8>(bytes), broadcast_bits(0x00ff00ffu));
}

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
#if SHORT_PAIRS
// Of two vectors of weights, products before additions: 4 % faster than one vector after the other.
QINLINE void multiply_add_narrow_both(Bits (&sums)[2], const Bits (&w)[2], Bits x) {
    Bits product;
    asm("vpmaddubsw %2, %4, %3\n\tvpmaddubsw %2, %5, %2\n\tvpaddw %3, %0, %0\n\tvpaddw %2, %1, %1"
        : "+x"(sums[0]), "+x"(sums[1]), "+x"(x), "=&x"(product)
        : "x"(w[0]), "x"(w[1]));
}
// Both halves of a line of bytes, for one row. Left to itself, GCC 12 keeps a quarter of the sums on the stack.
QINLINE void multiply_add_halves(Bits &first, Bits &second, const char *line, Bits low, Bits high, Bits mask) {
    Bits a, b, c, d;
    asm("vmovdqu %[line], %[a]\n\tvmovdqu %[rest], %[b]\n\t"
        "vpand %[a], %[mask], %[c]\n\tvpand %[b], %[mask], %[d]\n\t"
        "vpsrlw $4, %[a], %[a]\n\tvpsrlw $4, %[b], %[b]\n\t"
        "vpmaddubsw %[low], %[c], %[c]\n\tvpmaddubsw %[low], %[d], %[d]\n\t"
        "vpand %[a], %[mask], %[a]\n\tvpand %[b], %[mask], %[b]\n\t"
        "vpmaddubsw %[high], %[a], %[a]\n\tvpmaddubsw %[high], %[b], %[b]\n\t"
        "vpaddw %[c], %[first], %[first]\n\tvpaddw %[d], %[second], %[second]\n\t"
        "vpaddw %[a], %[first], %[first]\n\tvpaddw %[b], %[second], %[second]"
        : [first] "+x"(first), [second] "+x"(second), [a] "=&x"(a), [b] "=&x"(b), [c] "=&x"(c), [d] "=&x"(d)
        : [line] "m"(*reinterpret_cast<const Bits *>(line)), [rest] "m"(*reinterpret_cast<const Bits *>(line + 32)),
          [low] "x"(low), [high] "x"(high), [mask] "x"(mask));
}
#endif
QINLINE Bits widen(Bits sums, Bits narrow) { return add_bits(sums, multiply_pairs(narrow, broadcast_bits(0x00010001u))); }
#else
using Int4Input = Input;
#endif

// Rows for int8 weights have room for their outliers behind each group: a word for every four inputs.
constexpr int64_t INT8_INPUT_BYTES = SHORT_PAIRS ? 2 : sizeof(Input), INT4_INPUT_BYTES = sizeof(Int4Input);
constexpr int QUAD_WORDS = NUM_PARTS;  // four inputs are so many words

template <int PART>
QINLINE Bits load_inputs(const uint32_t *x, int stride) {
    return broadcast_word(x + PART * stride);
}

}  // namespace quire::QUIRE_ISA
