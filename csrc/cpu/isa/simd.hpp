// One vector type, `Vec` (LANES float32), and the operations that kernels are written in, for the instruction set that
// this file is being compiled for: AVX-512 (16 lanes), AVX2 + FMA (8), NEON (4) or GCC's generic vectors (4).
//
// Everything is in a namespace per instruction set and forced inline: two copies of one inline function, compiled with
// different flags, must never be merged by the linker. For the same reason kernels use no standard library templates.
#pragma once

#include <cstdint>
#include <cstring>

#include "../dtypes.hpp"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(QUIRE_NEON)
#include <arm_neon.h>
#endif

#define QINLINE static inline __attribute__((always_inline))
#define QINLINE_MEMBER inline __attribute__((always_inline))
// For loops over register tiles: inlined into a large function, GCC 12 keeps some accumulators on the stack.
#define QNOINLINE static __attribute__((noinline))
#define QUNROLL _Pragma("GCC unroll 64")

namespace quire::QUIRE_ISA {

template <int N>
struct Constant {
    QINLINE_MEMBER constexpr operator int() const { return N; }
};

// Calls `f` with `count`, from 1 to MAX, as a Constant: for kernels whose register tile has its size as a template argument.
template <int MAX, typename F>
QINLINE void with_constant(int64_t count, const F &f) {
    if (count == MAX) return f(Constant<MAX>{});
    if constexpr (MAX > 1) with_constant<MAX - 1>(count, f);
}

// Whether this copy has `dot_bf16`: as an instruction, or (for tests on machines that lack it) as what it does.
#if defined(__AVX512BF16__) || defined(QUIRE_EMULATE_BF16) || (defined(QUIRE_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define QUIRE_BF16_DOTS
constexpr bool HAS_BF16_DOTS = true;
#else
constexpr bool HAS_BF16_DOTS = false;
#endif

// Vector registers, which bound the tiles that are kept in them.
#if defined(__AVX512F__) || defined(QUIRE_NEON)
constexpr int NUM_REGISTERS = 32;
#else
constexpr int NUM_REGISTERS = 16;
#endif

// Whether `fma` rounds once.
#if defined(__AVX2__) || defined(__AVX512F__) || defined(QUIRE_NEON)
constexpr bool HAS_FMA = true;
#else
constexpr bool HAS_FMA = false;
#endif

// Makes the compiler take a vector for changed, and keep it in a register where its name for them is known.
#if defined(__SSE2__)
#define QUIRE_KEEP(x) asm volatile("" : "+x"(x))
#elif defined(__aarch64__)
#define QUIRE_KEEP(x) asm volatile("" : "+w"(x))
#else
#define QUIRE_KEEP(x) asm volatile("" : "+m"(x))
#endif

#if defined(__AVX512F__)

constexpr int LANES = 16;
using Vec = __m512;
using Bits = __m512i;

QINLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
QINLINE Bits broadcast_bits(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
QINLINE Vec load(const float *p) { return _mm512_loadu_ps(p); }
QINLINE Bits load_bits(const void *p) { return _mm512_loadu_si512(p); }
QINLINE void store(float *p, Vec x) { _mm512_storeu_ps(p, x); }
QINLINE Vec load_partial(const float *p, int n) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
QINLINE void store_partial(float *p, Vec x, int n) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), x);
}
QINLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
QINLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
QINLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
QINLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
QINLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// sum = fma(a, b, sum), in sum's register: left to itself, GCC 12 moves accumulators about and spills them.
QINLINE void fma_into(Vec &sum, Vec a, Vec b) { asm("vfmadd231ps %1, %2, %0" : "+v"(sum) : "v"(a), "v"(b)); }
// The same with a float in memory for all lanes: one instruction to decode where a register needs two.
QINLINE void fma_into(Vec &sum, const uint32_t *word, Vec b) {
    asm("vfmadd231ps %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*word), "v"(b));
}
// min and max return the second operand where either is not a number.
QINLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
QINLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
QINLINE Vec zero_where_less(Vec x, Vec limit, Vec value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
}
QINLINE Vec where_less(Vec x, Vec limit, Vec less, Vec other) {
    return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), less);
}
QINLINE Bits as_bits(Vec x) { return _mm512_castps_si512(x); }
QINLINE Vec as_float(Bits x) { return _mm512_castsi512_ps(x); }
QINLINE Bits add_bits(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
QINLINE Bits and_bits(Bits a, Bits b) { return _mm512_and_si512(a, b); }
QINLINE Bits or_bits(Bits a, Bits b) { return _mm512_or_si512(a, b); }
template <int N>
QINLINE Bits shift_left(Bits x) {
    return _mm512_slli_epi32(x, N);
}
template <int N>
QINLINE Bits shift_right(Bits x) {
    return _mm512_srli_epi32(x, N);
}
QINLINE Vec load(const bf16 *p) {
    return as_float(shift_left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))));
}
QINLINE Bits round_to_bf16_bits(Vec x) {  // nearest, ties to even; the result is in the low halves
    const Bits bits = as_bits(x), half = add_bits(bits, broadcast_bits(0x7fff));
    const __mmask16 is_odd = _mm512_test_epi32_mask(bits, broadcast_bits(0x10000));
    const Bits rounded = _mm512_mask_add_epi32(half, is_odd, half, broadcast_bits(1));
    return _mm512_mask_srli_epi32(broadcast_bits(0x7fc0), _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), rounded, 16);
}
QINLINE void store(bf16 *p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(round_to_bf16_bits(x)));
}
QINLINE Vec store_rounded(bf16 *p, Vec x) {
    const Bits bits = round_to_bf16_bits(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(bits));
    return as_float(shift_left<16>(bits));
}
QINLINE Vec round_to_bf16(Vec x) { return as_float(shift_left<16>(round_to_bf16_bits(x))); }
#if defined(QUIRE_EMULATE_BF16)
QINLINE Vec without_subnormals(Vec x) {
    const Bits magnitude = and_bits(as_bits(x), broadcast_bits(0x7fffffffu)), sign = broadcast_bits(0x80000000u);
    const __mmask16 is_tiny = _mm512_cmplt_epu32_mask(magnitude, broadcast_bits(0x00800000u));
    return as_float(_mm512_mask_and_epi32(as_bits(x), is_tiny, as_bits(x), sign));
}
#endif
// Where this copy has `dot_bf16`, subnormal numbers are stored as zero, which is what it takes them for.
QINLINE void store_normal(bf16 *p, Vec x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), (__m256i)_mm512_cvtneps_pbh(x));
#elif defined(QUIRE_EMULATE_BF16)
    store(p, without_subnormals(x));
#else
    store(p, x);
#endif
}
// Elements of 16 bits of x and y in turns: those of their lower halves, those of their higher ones.
QINLINE Bits interleave_low(Bits x, Bits y) {
    const Bits order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                        4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(x, order, y);
}
QINLINE Bits interleave_high(Bits x, Bits y) {
    const Bits order = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53, 21,
                                        52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return _mm512_permutex2var_epi16(x, order, y);
}
QINLINE float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }

// sum + x.high * w.high, then + x.low * w.low, for the pairs of bfloat16 in each lane: two fused multiply-adds that round to
// nearest, take subnormal numbers as zero and give none (Intel's manual, VDPBF16PS).
#if defined(__AVX512BF16__)
QINLINE Vec dot_bf16(Vec sum, Bits x, Bits w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
#elif defined(QUIRE_EMULATE_BF16)
// Not inline: thousands of copies of what is for tests alone took 29 of the 65 s in which bf16_attention.cpp compiled.
__attribute__((noinline)) inline Vec dot_bf16(Vec sum, Bits x, Bits w) {
    const Bits high = broadcast_bits(0xffff0000u);
    const Vec x_high = without_subnormals(as_float(and_bits(x, high))), x_low = without_subnormals(as_float(shift_left<16>(x)));
    const Vec w_high = without_subnormals(as_float(and_bits(w, high))), w_low = without_subnormals(as_float(shift_left<16>(w)));
    sum = without_subnormals(fma(x_high, w_high, without_subnormals(sum)));
    return without_subnormals(fma(x_low, w_low, sum));
}
#endif
template <int N>
QINLINE Bits shift_right_signed(Bits x) {
    return _mm512_srai_epi32(x, N);
}
QINLINE Vec to_float(Bits x) { return _mm512_cvtepi32_ps(x); }  // of signed integers
QINLINE Bits load_signed_bytes(const void *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
}
QINLINE Vec value_where_below(Bits x, uint32_t limit, Vec value) {  // else 0; x and limit below 2^31
    return _mm512_maskz_mov_ps(_mm512_cmplt_epi32_mask(x, broadcast_bits(limit)), value);
}
QINLINE Bits load_bytes(const void *p, int count) {
    return _mm512_maskz_loadu_epi8(count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1, p);
}

// Transposes a LANES x LANES block of 32-bit values in place.
QINLINE void transpose(Vec (&r)[LANES]) {
    Vec t[16];
    QUNROLL
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    QUNROLL
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
        const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
        r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    QUNROLL
    for (int i = 0; i < 4; ++i) {  // r[4 g + i] holds column 4 l + i of rows 4 g .. 4 g + 3 in 128-bit lane l
        const Vec low = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88), high = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
        const Vec low2 = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
        const Vec high2 = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
        r[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
        r[4 + i] = _mm512_shuffle_f32x4(high, high2, 0x88);
        r[8 + i] = _mm512_shuffle_f32x4(low, low2, 0xdd);
        r[12 + i] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
}

#elif defined(__AVX2__)

constexpr int LANES = 8;
using Vec = __m256;
using Bits = __m256i;

QINLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
QINLINE Bits broadcast_bits(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
QINLINE Vec load(const float *p) { return _mm256_loadu_ps(p); }
QINLINE Bits load_bits(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
QINLINE void store(float *p, Vec x) { _mm256_storeu_ps(p, x); }
QINLINE Bits first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
QINLINE Vec load_partial(const float *p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
QINLINE void store_partial(float *p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
QINLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
QINLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
QINLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
QINLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
QINLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
QINLINE void fma_into(Vec &sum, Vec a, Vec b) { sum = fma(a, b, sum); }
QINLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
QINLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
QINLINE Vec zero_where_less(Vec x, Vec limit, Vec value) {
    return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), value);
}
QINLINE Vec where_less(Vec x, Vec limit, Vec less, Vec other) {
    return _mm256_blendv_ps(other, less, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
QINLINE Bits as_bits(Vec x) { return _mm256_castps_si256(x); }
QINLINE Vec as_float(Bits x) { return _mm256_castsi256_ps(x); }
QINLINE Bits add_bits(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
QINLINE Bits and_bits(Bits a, Bits b) { return _mm256_and_si256(a, b); }
QINLINE Bits or_bits(Bits a, Bits b) { return _mm256_or_si256(a, b); }
template <int N>
QINLINE Bits shift_left(Bits x) {
    return _mm256_slli_epi32(x, N);
}
template <int N>
QINLINE Bits shift_right(Bits x) {
    return _mm256_srli_epi32(x, N);
}
QINLINE Vec load(const bf16 *p) {
    return as_float(shift_left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))));
}
QINLINE void store(bf16 *p, Vec x) {  // nearest, ties to even
    const Bits bits = as_bits(x);
    const Bits odd = and_bits(shift_right<16>(bits), broadcast_bits(1));
    const Bits rounded = shift_right<16>(add_bits(bits, add_bits(odd, broadcast_bits(0x7fff))));
    const Vec unordered = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const Bits checked = as_bits(_mm256_blendv_ps(as_float(rounded), as_float(broadcast_bits(0x7fc0)), unordered));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(checked, checked), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(packed));
}
template <int N>
QINLINE Bits shift_right_signed(Bits x) {
    return _mm256_srai_epi32(x, N);
}
QINLINE Vec to_float(Bits x) { return _mm256_cvtepi32_ps(x); }
QINLINE Bits load_signed_bytes(const void *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)));
}
QINLINE Vec value_where_below(Bits x, uint32_t limit, Vec value) {
    return _mm256_and_ps(as_float(_mm256_cmpgt_epi32(broadcast_bits(limit), x)), value);
}
QINLINE float reduce_max(Vec x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

QINLINE void transpose(Vec (&r)[LANES]) {
    Vec t[8];
    QUNROLL
    for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    QUNROLL
    for (int i = 0; i < 2; ++i) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    QUNROLL
    for (int i = 0; i < 4; ++i) {
        const Vec low = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
        r[4 + i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
        r[i] = low;
    }
}

#elif defined(QUIRE_NEON)

constexpr int LANES = 4;
using Vec = float32x4_t;
using Bits = uint32x4_t;

QINLINE Vec broadcast(float x) { return vdupq_n_f32(x); }
QINLINE Bits broadcast_bits(uint32_t x) { return vdupq_n_u32(x); }
QINLINE Vec load(const float *p) { return vld1q_f32(p); }
QINLINE Bits load_bits(const void *p) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t *>(p))); }
QINLINE void store(float *p, Vec x) { vst1q_f32(p, x); }
QINLINE Vec load_partial(const float *p, int n) {
    float lanes[LANES] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
QINLINE void store_partial(float *p, Vec x, int n) {
    float lanes[LANES];
    store(lanes, x);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
QINLINE Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
QINLINE Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
QINLINE Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
QINLINE Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
QINLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
QINLINE void fma_into(Vec &sum, Vec a, Vec b) { sum = fma(a, b, sum); }
// sum = fma(w, x[LANE], sum), in sum's register: one load brings the inputs of four rows, and none is broadcast.
template <int LANE>
QINLINE void fma_lane(Vec &sum, Vec w, Bits x) {
    asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(w), "w"(x), "i"(LANE));
}
// COUNT words, or the first four; what lies in other lanes is not set.
template <int COUNT>
QINLINE Bits load_words(const uint32_t *p) {
    if constexpr (COUNT >= LANES) return vld1q_u32(p);
    if constexpr (COUNT == 1) return vdupq_n_u32(*p);
    const uint32x2_t low = vld1_u32(p);
    return vcombine_u32(low, COUNT == 2 ? low : vdup_n_u32(p[COUNT - 1]));
}
// As on x86, the second operand where either is not a number; the instructions for it give that number.
QINLINE Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
QINLINE Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
QINLINE Vec zero_where_less(Vec x, Vec limit, Vec value) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, limit)));
}
QINLINE Vec where_less(Vec x, Vec limit, Vec less, Vec other) { return vbslq_f32(vcltq_f32(x, limit), less, other); }
QINLINE Bits as_bits(Vec x) { return vreinterpretq_u32_f32(x); }
QINLINE Vec as_float(Bits x) { return vreinterpretq_f32_u32(x); }
QINLINE Bits add_bits(Bits a, Bits b) { return vaddq_u32(a, b); }
QINLINE Bits and_bits(Bits a, Bits b) { return vandq_u32(a, b); }
QINLINE Bits or_bits(Bits a, Bits b) { return vorrq_u32(a, b); }
template <int N>
QINLINE Bits shift_left(Bits x) {
    return vshlq_n_u32(x, N);
}
template <int N>
QINLINE Bits shift_right(Bits x) {
    if constexpr (N == 0) return x;  // the instruction shifts by 1 at least
    else return vshrq_n_u32(x, N);
}
template <int N>
QINLINE Bits shift_right_signed(Bits x) {
    return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(x), N));
}
QINLINE Vec load(const bf16 *p) { return as_float(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t *>(p)), 16)); }
QINLINE void store(bf16 *p, Vec x) {  // nearest, ties to even
    const Bits bits = as_bits(x), odd = and_bits(shift_right<16>(bits), broadcast_bits(1));
    const Bits rounded = add_bits(bits, add_bits(odd, broadcast_bits(0x7fff)));
    const Bits checked = vbslq_u32(vceqq_f32(x, x), rounded, broadcast_bits(0x7fc00000u));
    vst1_u16(reinterpret_cast<uint16_t *>(p), vshrn_n_u32(checked, 16));
}
QINLINE Vec to_float(Bits x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }
QINLINE Bits load_signed_bytes(const void *p) {
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(static_cast<uint32_t>(bytes))))));
}
QINLINE Vec value_where_below(Bits x, uint32_t limit, Vec value) {
    const Bits is_below = vcltq_s32(vreinterpretq_s32_u32(x), vreinterpretq_s32_u32(broadcast_bits(limit)));
    return as_float(and_bits(as_bits(value), is_below));
}
QINLINE float reduce_max(Vec x) {
    const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
}
QINLINE void transpose(Vec (&r)[LANES]) {
    const float32x4x2_t first = vtrnq_f32(r[0], r[1]), second = vtrnq_f32(r[2], r[3]);
    QUNROLL
    for (int i = 0; i < 2; ++i) {
        r[i] = vcombine_f32(vget_low_f32(first.val[i]), vget_low_f32(second.val[i]));
        r[2 + i] = vcombine_f32(vget_high_f32(first.val[i]), vget_high_f32(second.val[i]));
    }
}

#else

constexpr int LANES = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
typedef int32_t Mask __attribute__((vector_size(16)));

QINLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
QINLINE Bits broadcast_bits(uint32_t x) { return Bits{x, x, x, x}; }
QINLINE Vec load(const float *p) {
    Vec x;
    memcpy(&x, p, sizeof x);
    return x;
}
QINLINE Bits load_bits(const void *p) {
    Bits x;
    memcpy(&x, p, sizeof x);
    return x;
}
QINLINE void store(float *p, Vec x) { memcpy(p, &x, sizeof x); }
QINLINE Vec load_partial(const float *p, int n) {
    float lanes[LANES] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
QINLINE void store_partial(float *p, Vec x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x[i];
}
QINLINE Vec add(Vec a, Vec b) { return a + b; }
QINLINE Vec sub(Vec a, Vec b) { return a - b; }
QINLINE Vec mul(Vec a, Vec b) { return a * b; }
QINLINE Vec div(Vec a, Vec b) { return a / b; }
QINLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // two roundings: the baseline has no fused operation
QINLINE void fma_into(Vec &sum, Vec a, Vec b) { sum = fma(a, b, sum); }
QINLINE Vec select(Mask where, Vec a, Vec b) { return (Vec)(((Mask)a & where) | ((Mask)b & ~where)); }
QINLINE Vec min(Vec a, Vec b) { return select(a < b, a, b); }
QINLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }
QINLINE Vec zero_where_less(Vec x, Vec limit, Vec value) { return select(x < limit, broadcast(0), value); }
QINLINE Vec where_less(Vec x, Vec limit, Vec less, Vec other) { return select(x < limit, less, other); }
QINLINE Bits as_bits(Vec x) { return (Bits)x; }
QINLINE Vec as_float(Bits x) { return (Vec)x; }
QINLINE Bits add_bits(Bits a, Bits b) { return a + b; }
QINLINE Bits and_bits(Bits a, Bits b) { return a & b; }
QINLINE Bits or_bits(Bits a, Bits b) { return a | b; }
template <int N>
QINLINE Bits shift_left(Bits x) {
    return x << N;
}
template <int N>
QINLINE Bits shift_right(Bits x) {
    return x >> N;
}
QINLINE Vec load(const bf16 *p) { return as_float(Bits{p[0].bits, p[1].bits, p[2].bits, p[3].bits} << 16); }
QINLINE void store(bf16 *p, Vec x) {  // nearest, ties to even
    const Bits bits = as_bits(x);
    const Bits rounded = (bits + ((bits >> 16) & 1) + 0x7fff) >> 16;
    const Bits checked = as_bits(select(x != x, as_float(broadcast_bits(0x7fc0)), as_float(rounded)));
    for (int i = 0; i < LANES; ++i) p[i].bits = static_cast<uint16_t>(checked[i]);
}
template <int N>
QINLINE Bits shift_right_signed(Bits x) {
    return (Bits)((Mask)x >> N);
}
QINLINE Vec to_float(Bits x) { return __builtin_convertvector((Mask)x, Vec); }
QINLINE Bits load_signed_bytes(const void *p) {
    const int8_t *bytes = static_cast<const int8_t *>(p);
    return (Bits)Mask{bytes[0], bytes[1], bytes[2], bytes[3]};
}
QINLINE Vec value_where_below(Bits x, uint32_t limit, Vec value) {
    return (Vec)((Mask)value & ((Mask)x < (Mask)broadcast_bits(limit)));
}
QINLINE float reduce_max(Vec x) {
    const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
}
QINLINE void transpose(Vec (&r)[LANES]) {
    const Vec a = r[0], b = r[1], c = r[2], d = r[3];
    QUNROLL
    for (int i = 0; i < LANES; ++i) r[i] = Vec{a[i], b[i], c[i], d[i]};
}

#endif

#if !defined(__AVX512F__)
QINLINE Bits load_bytes(const void *p, int count) {
    char bytes[4 * LANES] = {};
    memcpy(bytes, p, count < 4 * LANES ? count : 4 * LANES);
    return load_bits(bytes);
}
QINLINE Vec store_rounded(bf16 *p, Vec x) {
    store(p, x);
    return load(p);
}
QINLINE Vec round_to_bf16(Vec x) {
    bf16 lanes[LANES];
    return store_rounded(lanes, x);
}
#endif

// Stores x and gives what a load would: x as T holds it.
QINLINE Vec store_rounded(float *p, Vec x) {
    store(p, x);
    return x;
}
template <typename T>
QINLINE Vec rounded_to(Vec x) {
    return sizeof(T) == sizeof(float) ? x : round_to_bf16(x);
}

// A 32-bit word in all lanes, as a float32 or as bits.
QINLINE Vec broadcast_float(const uint32_t *word) {
    float value;
    memcpy(&value, word, sizeof value);
    return broadcast(value);
}
#if !defined(__AVX512F__)
QINLINE void fma_into(Vec &sum, const uint32_t *word, Vec b) { fma_into(sum, broadcast_float(word), b); }
#endif
QINLINE Bits broadcast_word(const uint32_t *word) {
    uint32_t bits;
    memcpy(&bits, word, sizeof bits);
    return broadcast_bits(bits);
}

QINLINE Vec load_partial(const bf16 *p, int n) {
    bf16 lanes[LANES] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
QINLINE void store_partial(bf16 *p, Vec x, int n) {
    bf16 lanes[LANES];
    store(lanes, x);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
template <typename T>
QINLINE Vec load_up_to(const T *p, int64_t n) {
    return n >= LANES ? load(p) : load_partial(p, static_cast<int>(n));
}
template <typename T>
QINLINE void store_up_to(T *p, Vec x, int64_t n) {
    n >= LANES ? store(p, x) : store_partial(p, x, static_cast<int>(n));
}

// The sum of all lanes, in a fixed tree: halves, quarters, ...
#if defined(__AVX512F__)
QINLINE float reduce_add(Vec x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}
#else
QINLINE float reduce_add(Vec x) {
    float lanes[LANES];
    store(lanes, x);
    QUNROLL
    for (int width = LANES / 2; width > 0; width /= 2) {
        QUNROLL
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}
#endif

// exp(x) by range reduction to r in [-ln2/2, ln2/2] and the degree-5 polynomial of Cephes' expf (S. Moshier): relative
// error below 2^-23 where the result is a normal number. 0 below -87.33 (denormals are flushed), infinity above 88.37,
// not-a-number where x is. The same code serves every path that needs an exponential.
QINLINE Vec exp(Vec x) {
    const Vec clamped = min(broadcast(89.0f), max(broadcast(-87.33f), x));
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
    const Vec shifted = fma(clamped, broadcast(1.44269504088896341f), magic);
    const Vec n = sub(shifted, magic);
    Vec r = fma(n, broadcast(-0.693359375f), clamped);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Vec p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), broadcast(1.0f));
    const Vec scale = as_float(add_bits(shift_left<23>(as_bits(shifted)), broadcast_bits(127u << 23)));
    return zero_where_less(x, broadcast(-87.33f), mul(p, scale));
}

// 2^r for r in [-1/2, 1/2]: minimax in relative error (9.3e-8) among the polynomials of degree 5 that are 1 at 0.
QINLINE Vec exp2_near_zero(Vec r) {
    Vec p = broadcast(1.3269521296e-3f);
    p = fma(p, r, broadcast(9.6712913364e-3f));
    p = fma(p, r, broadcast(5.5507108569e-2f));
    p = fma(p, r, broadcast(2.4022246897e-1f));
    p = fma(p, r, broadcast(6.9314700365e-1f));
    return fma(p, r, broadcast(1.0f));
}

// 2^x for x up to 127: relative error below 2^-22, and 2^0 is 1. 0 below -126 (denormals are flushed), not-a-number where x
// is. Half the operations of `exp`, which matters to the softmax alone.
QINLINE Vec exp2(Vec x) {
    const Vec lowest = broadcast(-126.0f);
#if defined(__AVX512F__)
    const Vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // x less its nearest integer
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ), exp2_near_zero(r), sub(x, r));
#else
    const Vec clamped = max(lowest, x), magic = broadcast(12582912.0f);  // as in `exp`
    const Vec shifted = add(clamped, magic), r = sub(clamped, sub(shifted, magic));
    const Vec scale = as_float(add_bits(shift_left<23>(as_bits(shifted)), broadcast_bits(127u << 23)));
    return zero_where_less(x, lowest, mul(exp2_near_zero(r), scale));
#endif
}

QINLINE Vec negate(Vec x) { return sub(broadcast(0.0f), x); }

// tanh(x) as (1 - e) / (1 + e), e = exp(-2 |x|), with x's sign: absolute error below 1e-7.
QINLINE Vec tanh(Vec x) {
    const Bits sign = and_bits(as_bits(x), broadcast_bits(0x80000000u));
    const Vec magnitude = as_float(and_bits(as_bits(x), broadcast_bits(0x7fffffffu)));
    const Vec e = exp(mul(magnitude, broadcast(-2.0f)));
    const Vec one = broadcast(1.0f);
    return as_float(or_bits(as_bits(div(sub(one, e), add(one, e))), sign));
}

// erf(x) by Abramowitz and Stegun 7.1.26: absolute error below 7e-7 in float32.
QINLINE Vec erf(Vec x) {
    const Bits sign = and_bits(as_bits(x), broadcast_bits(0x80000000u));
    const Vec magnitude = as_float(and_bits(as_bits(x), broadcast_bits(0x7fffffffu)));
    const Vec one = broadcast(1.0f);
    const Vec t = div(one, fma(magnitude, broadcast(0.3275911f), one));
    Vec p = broadcast(1.061405429f);
    p = fma(p, t, broadcast(-1.453152027f));
    p = fma(p, t, broadcast(1.421413741f));
    p = fma(p, t, broadcast(-0.284496736f));
    p = mul(fma(p, t, broadcast(0.254829592f)), t);
    const Vec tail = mul(p, exp(negate(mul(magnitude, magnitude))));
    return as_float(or_bits(as_bits(sub(one, tail)), sign));
}

}  // namespace quire::QUIRE_ISA
