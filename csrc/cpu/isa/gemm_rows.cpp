// The two ends of a projection: rows of x brought into the form that the GEMM multiplies, and finished sums stored.
#include <cfloat>
#include <cmath>

#include "activation.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "outliers.hpp"

namespace quire::QUIRE_ISA {

// ---- inputs ----

template <typename T>
static void convert_row(const T *x, const LinearWeight &weight, float *out) {
    const int64_t group_len = weight.group_size, padded = weight.padded_group();
    for (int64_t group = 0; group < weight.num_groups(); ++group, x += group_len, out += padded) {
        for (int64_t k = 0; k < group_len; k += LANES) store_up_to(out + k, load_up_to(x + k, group_len - k), group_len - k);
        for (int64_t k = group_len; k < padded; ++k) out[k] = 0.0f;
    }
}

#if defined(__AVX512VNNI__)
// 32 elements, or as many as there are and zeros.
QINLINE __m512i load_bf16(const bf16 *x, int64_t n) {
    if (n >= 32) return _mm512_loadu_si512(x);
    return _mm512_maskz_loadu_epi16(n <= 0 ? 0 : (__mmask32{1} << n) - 1, x);
}
QINLINE void store_bytes(Input *to, __m512i x, int64_t n) {
    if (n >= 64) return _mm512_storeu_si512(to, x);
    _mm512_mask_storeu_epi8(to, (__mmask64{1} << n) - 1, x);
}
#endif

// max |x|; not a number where any x is not finite.
template <typename T>
static float largest(const T *x, int64_t n) {
    const Bits magnitude = broadcast_bits(0x7fffffffu);
    Vec most = broadcast(0.0f), check = broadcast(0.0f);
    for (int64_t k = 0; k < n; k += LANES) {
        const Vec value = load_up_to(x + k, n - k);
        most = max(as_float(and_bits(as_bits(value), magnitude)), most);
        check = add(check, mul(value, broadcast(0.0f)));  // 0 unless a value is infinite or not a number
    }
    return reduce_max(most) + reduce_add(check);
}

// What a row is divided by to be quantized. A division takes as long as ten multiplications. The product with the reciprocal,
// corrected by what it leaves of x, is the same number, correctly rounded, for every bfloat16 x: all 2^30 pairs of significands
// were compared (a product alone is another number for every fourth). A divisor below 2^-100 would have what is left underflow.
class Divisor {
   public:
    Divisor(float divisor, bool has_short_inputs)
        : divisor_(broadcast(divisor)), negative_(broadcast(-divisor)), reciprocal_(broadcast(1.0f / divisor)),
          multiplies_(has_short_inputs && HAS_FMA && divisor >= 0x1p-100f && divisor < INFINITY) {}

    bool multiplies() const { return multiplies_; }
    QINLINE_MEMBER Vec quotient(Vec x) const { return multiplies_ ? multiplied(x) : div(x, divisor_); }
    QINLINE_MEMBER Vec multiplied(Vec x) const {
        const Vec product = mul(x, reciprocal_);
        return fma(fma(product, negative_, x), reciprocal_, product);
    }

   private:
    Vec divisor_, negative_, reciprocal_;
    bool multiplies_;
};

// x / scale to the nearest integer, ties to even. What is not a number becomes -128, so that the sums of a row whose scale
// is not a number cannot overflow.
QINLINE Bits quantize(Vec x, const Divisor &scale) {
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
    const Vec quotient = max(scale.quotient(x), broadcast(-128.0f));
    return add_bits(as_bits(add(quotient, magic)), broadcast_bits(0u - 0x4b400000u));
}

// One group, padded with zeros; returns the sum of its integers.
template <typename T, typename Integer>
static int32_t quantize_group(const T *x, int64_t n, int64_t padded, const Divisor &scale, int64_t, Integer *out) {
    Bits total = broadcast_bits(0);
    int64_t k = 0;
    for (; k + LANES <= padded; k += LANES) {
        const Bits integers = quantize(load_up_to(x + k, max64(0, n - k)), scale);
        total = add_bits(total, integers);
        store_inputs(out + k, integers);
    }
    if (k < padded) {
        Integer lanes[LANES];
        const Bits integers = quantize(load_up_to(x + k, max64(0, n - k)), scale);
        total = add_bits(total, integers);
        store_inputs(lanes, integers);
        memcpy(out + k, lanes, (padded - k) * sizeof(Integer));
    }
    int32_t lanes[LANES], sum = 0;
    store(reinterpret_cast<float *>(lanes), as_float(total));
    for (int i = 0; i < LANES; ++i) sum += lanes[i];
    return sum;
}

#if defined(__AVX512VNNI__)

// The same for bfloat16 with a third of the instructions, as many rows of few outputs wait for it a fifth of their time.
static float largest(const bf16 *x, int64_t n) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < n; k += 32) {
        const __m512i magnitudes = _mm512_and_si512(load_bf16(x + k, n - k), _mm512_set1_epi16(0x7fff));
        most = _mm512_max_epu16(most, magnitudes);  // as integers they have the order of what they mean
    }
    const __m512i high = _mm512_srli_epi32(most, 16), low = _mm512_and_si512(most, _mm512_set1_epi32(0xffff));
    const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(high, low));
    constexpr uint32_t INFINITE = 0x7f80;
    if (bits >= INFINITE) return largest<bf16>(x, n);
    const uint32_t wide = bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

// 32 elements as 16-bit integers. Conversion rounds to the nearest integer, ties to even.
QINLINE __m512i quantize_pairs(__m512i x, const Divisor &scale) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const Vec low = scale.multiplied(as_float(shift_left<16>(x)));
    const Vec high = scale.multiplied(as_float(and_bits(x, broadcast_bits(0xffff0000u))));
    const __m512i evens = _mm512_cvt_roundps_epi32(low, NEAREST), odds = _mm512_cvt_roundps_epi32(high, NEAREST);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, evens, shift_left<16>(odds));
}

// 64 inputs at a time. Those `to_next` behind them are prefetched: rows of many inputs otherwise wait for the third-level cache,
// as their largest element must be known first.
static int32_t quantize_group(const bf16 *x, int64_t n, int64_t padded, const Divisor &scale, int64_t to_next, Input *out) {
    if (!scale.multiplies()) return quantize_group<bf16>(x, n, padded, scale, to_next, out);
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i total = _mm512_setzero_si512();
    for (int64_t k = 0; k < padded; k += 64) {
        __builtin_prefetch(x + k + to_next);
        __builtin_prefetch(x + k + to_next + 32);
        const __m512i first = quantize_pairs(load_bf16(x + k, n - k), scale);
        const __m512i second = quantize_pairs(load_bf16(x + k + 32, n - k - 32), scale);
        const __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_packs_epi16(first, second));
        total = _mm512_dpbusd_epi32(total, _mm512_set1_epi8(1), bytes);
        store_bytes(out + k, bytes, padded - k);
    }
    return _mm512_reduce_add_epi32(total);
}

#endif

// Scale max |x| / 127, or 0 where that is below the smallest normal number, and then the integers are 0 as well. `to_next`:
// elements to the row that comes next; 0: none.
template <WeightFormat FORMAT, typename T, typename Integer>
static float quantize_row(const T *x, const LinearWeight &weight, int64_t to_next, Integer *out, int32_t *starts) {
    const float scale = largest(x, weight.num_inputs) / 127.0f;
    const bool is_zero = !(scale >= FLT_MIN);
    const Divisor divisor(is_zero ? INFINITY : scale, sizeof(T) == sizeof(bf16));  // a finite number over infinity is 0
    const int64_t padded = weight.padded_group();
    constexpr bool HAS_OUTLIERS = SHORT_PAIRS && FORMAT == WeightFormat::int8;
    for (int64_t group = 0; group < weight.num_groups(); ++group, out += HAS_OUTLIERS ? 2 * padded : padded) {
        starts[group] = -static_cast<int32_t>(weight.zero_point()) *
                        quantize_group(x + group * weight.group_size, weight.group_size, padded, divisor, to_next, out);
#if SHORT_PAIRS
        if constexpr (HAS_OUTLIERS) set_outliers_aside(out, padded / 4);
#endif
    }
    return scale < FLT_MIN ? 0.0f : scale;
}

// Row r of x, word after word.
template <typename T>
static void convert_one(const LinearWeight &weight, const T *x, int64_t r, const InputRows &out, uint32_t *words) {
    const T *row = x + r * weight.num_inputs;
    if (weight.has_int8_inputs) {
        int32_t *starts = const_cast<int32_t *>(out.starts) + r * weight.num_groups();
        const int64_t to_next = r + 1 < out.num_rows ? weight.num_inputs : 0;
        const_cast<float *>(out.scales)[r] =
            weight.format == WeightFormat::int4
                ? quantize_row<WeightFormat::int4>(row, weight, to_next, reinterpret_cast<Int4Input *>(words), starts)
                : quantize_row<WeightFormat::int8>(row, weight, to_next, reinterpret_cast<Input *>(words), starts);
    } else if (out.is_bf16) {
        bf16 *to = reinterpret_cast<bf16 *>(words);
        memcpy(to, row, weight.num_inputs * sizeof(bf16));
        memset(to + weight.num_inputs, 0, (weight.padded_inputs() - weight.num_inputs) * sizeof(bf16));
    } else {
        convert_row(row, weight, reinterpret_cast<float *>(words));
    }
}

// `height` rows [words] to [words][height].
static void interleave(const uint32_t *rows, int height, int64_t words, uint32_t *out) {
    for (int64_t at = 0; at < words; at += LANES) {
        const int64_t count = min64(LANES, words - at);
        for (int first = 0; first < height; first += LANES) {
            const int some = height - first < LANES ? height - first : LANES;
            Vec block[LANES];
            for (int r = 0; r < some; ++r) {
                block[r] = load_up_to(reinterpret_cast<const float *>(rows + (first + r) * words + at), count);
            }
            for (int r = some; r < LANES; ++r) block[r] = broadcast(0.0f);
            transpose(block);
            uint32_t *to = out + at * height + first;
            for (int i = 0; i < count; ++i) store_up_to(reinterpret_cast<float *>(to + i * height), block[i], some);
        }
    }
}

template <typename T>
static void convert_tile(const LinearWeight &weight, const T *x, int64_t row, int height, const InputRows &out,
                         uint32_t *spare, uint32_t *to) {
    uint32_t *rows = height == 1 ? to : spare;
    for (int r = 0; r < height; ++r) convert_one(weight, x, row + r, out, rows + r * out.row_words);
    if (height > 1) interleave(spare, height, out.row_words, to);
}

// One row of a tile of `height` for tiles of matrices: from words as the weight pads them to padded blocks.
static void store_blocks(const uint32_t *words, int64_t num_groups, int64_t group_words, int height, int depth,
                         uint32_t *to) {
    for (int64_t group = 0; group < num_groups; ++group, words += group_words) {
        int64_t at = 0;
        if (depth == LANES) {
            for (; at + LANES <= group_words; at += LANES, to += int64_t{height} * depth) {
                store(reinterpret_cast<float *>(to), load(reinterpret_cast<const float *>(words + at)));
            }
        }
        for (; at < group_words; at += depth, to += int64_t{height} * depth) {
            const int64_t count = min64(depth, group_words - at);
            for (int64_t i = 0; i < depth; i += LANES) {
                const Vec block = load_up_to(reinterpret_cast<const float *>(words + at + i), max64(0, count - i));
                store_up_to(reinterpret_cast<float *>(to + i), block, depth - i);
            }
        }
    }
}

template <typename T>
static void convert_blocks(const LinearWeight &weight, const T *x, int64_t row, int height, const InputRows &out,
                           uint32_t *spare, uint32_t *to) {
    const int64_t element = weight.has_int8_inputs ? INT8_INPUT_BYTES : int64_t{sizeof(bf16)};
    const int64_t group_words = weight.padded_group() * element / int64_t{sizeof(uint32_t)};
    const bool is_ready = out.is_bf16 && weight.num_inputs == weight.padded_inputs();
    for (int r = 0; r < height; ++r) {
        if (!is_ready) convert_one(weight, x, row + r, out, spare);
        const uint32_t *words = is_ready ? reinterpret_cast<const uint32_t *>(x + (row + r) * weight.num_inputs) : spare;
        store_blocks(words, weight.num_groups(), group_words, height, out.depth, to + int64_t{r} * out.depth);
    }
}

void convert_rows(const LinearWeight &weight, const void *x, DType dtype, int64_t first, int64_t last,
                  const InputRows &out, uint32_t *spare) {
    for (int64_t t = first; t < last; ++t) {
        const int64_t row = out.first_row(t);
        const int height = static_cast<int>(out.first_row(t + 1) - row);
        uint32_t *to = static_cast<uint32_t *>(const_cast<void *>(out.data)) + row * out.row_words;
        if (dtype == DType::f32) {
            const auto convert_some = out.depth > 0 ? convert_blocks<float> : convert_tile<float>;
            convert_some(weight, static_cast<const float *>(x), row, height, out, spare, to);
        } else {
            const auto convert_some = out.depth > 0 ? convert_blocks<bf16> : convert_tile<bf16>;
            convert_some(weight, static_cast<const bf16 *>(x), row, height, out, spare, to);
        }
    }
}

// ---- outputs ----

QINLINE Vec biased(const float *sums, const float *bias, int64_t i, int64_t width) {
    const Vec sum = load(sums + i);
    return bias == nullptr ? sum : add(sum, load_up_to(bias + i, width - i));
}

template <typename T>
static void store_sums_as(const float *sums, const float *bias, const OutputBlock &out) {
    for (int64_t r = 0; r < out.num_rows; ++r, sums += GROUP_WIDTH) {
        T *to = static_cast<T *>(out.data) + r * out.stride + out.first;
        for (int64_t i = 0; i < out.width; i += LANES) {
            store_up_to(to + i, biased(sums, bias, i, out.width), out.width - i);
        }
    }
}

void store_sums(const float *sums, const float *bias, const OutputBlock &out) {
    out.dtype == DType::f32 ? store_sums_as<float>(sums, bias, out) : store_sums_as<bf16>(sums, bias, out);
}

template <typename T, Activation A>
static void store_gated_as(const float *gate, const float *up, const float *gate_bias, const float *up_bias,
                           const OutputBlock &out) {
    for (int64_t r = 0; r < out.num_rows; ++r, gate += GROUP_WIDTH, up += GROUP_WIDTH) {
        T *to = static_cast<T *>(out.data) + r * out.stride + out.first;
        for (int64_t i = 0; i < out.width; i += LANES) {
            const Vec value = gated_product<A>(biased(gate, gate_bias, i, out.width), biased(up, up_bias, i, out.width));
            store_up_to(to + i, value, out.width - i);
        }
    }
}

template <Activation A>
static void store_gated_with(const float *gate, const float *up, const float *gate_bias, const float *up_bias,
                             const OutputBlock &out) {
    if (out.dtype == DType::f32) {
        store_gated_as<float, A>(gate, up, gate_bias, up_bias, out);
    } else {
        store_gated_as<bf16, A>(gate, up, gate_bias, up_bias, out);
    }
}

void store_gated(const float *gate, const float *up, const float *gate_bias, const float *up_bias,
                 Activation activation, const OutputBlock &out) {
    switch (activation) {
        case Activation::silu:
            return store_gated_with<Activation::silu>(gate, up, gate_bias, up_bias, out);
        case Activation::gelu:
            return store_gated_with<Activation::gelu>(gate, up, gate_bias, up_bias, out);
        case Activation::gelu_tanh:
            return store_gated_with<Activation::gelu_tanh>(gate, up, gate_bias, up_bias, out);
        case Activation::gelu_sigmoid:
            return store_gated_with<Activation::gelu_sigmoid>(gate, up, gate_bias, up_bias, out);
        case Activation::clamped_swish:
            return store_gated_with<Activation::clamped_swish>(gate, up, gate_bias, up_bias, out);
    }
}

}  // namespace quire::QUIRE_ISA
