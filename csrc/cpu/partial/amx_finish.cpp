#include "amx_finish.hpp"

#include "../isa/activation.hpp"

namespace quire::QUIRE_ISA {

// ---- sums ----

// What a row's sums of two panels are before the bias.
struct FloatSums {
    QINLINE void load_row(const Finish &finish, int64_t row, Vec (&sums)[2]) {
        for (int p = 0; p < 2; ++p) sums[p] = as_float(load_bits(finish.products[0][row] + p * PANEL));
    }
};

QINLINE Vec scale_of(const Finish &finish, int64_t group, int panel) {
    const char *header = finish.headers + group * finish.header_group_stride + panel * finish.header_stride;
    return load(reinterpret_cast<const float *>(header));
}

// All inputs are one group, without offsets: as add_group (groups.hpp), then times the row's scale. Zero plus a product that
// was rounded is what the fused operation gives: a scale times an integer is zero or no less than the scale.
template <bool IS_SIGNED>
struct WholeSums {
    QINLINE void load_row(const Finish &finish, int64_t row, Vec (&sums)[2]) {
        const Bits begin = IS_SIGNED ? broadcast_bits(0) : broadcast_bits(static_cast<uint32_t>(finish.starts[row]));
        const Vec row_scale = broadcast(finish.row_scales[row]);
        for (int p = 0; p < 2; ++p) {
            const Bits product = load_bits(finish.products[0][row] + p * PANEL);
            const Vec integers = to_float(IS_SIGNED ? product : add_bits(begin, product));
            sums[p] = mul(fma(integers, scale_of(finish, 0, p), broadcast(0.0f)), row_scale);
        }
    }
};

// All groups have been added.
struct GroupSums {
    QINLINE void load_row(const Finish &finish, int64_t row, Vec (&sums)[2]) {
        const Vec row_scale = broadcast(finish.row_scales[row]);
        for (int p = 0; p < 2; ++p) sums[p] = mul(load(finish.sums + row * GROUP_WIDTH + p * PANEL), row_scale);
    }
};

// ---- outputs ----

QINLINE void store_pair(float *to, Vec first, Vec second, uint32_t columns) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>(columns), first);
    _mm512_mask_storeu_ps(to + PANEL, static_cast<__mmask16>(columns >> PANEL), second);
}

// As `store` rounds. The instruction that does it takes subnormal numbers as zero and keeps what a not-a-number says.
QINLINE __m512i round_pair(Vec first, Vec second) {
#if defined(__AVX512BF16__)
    constexpr int NOT_A_NUMBER = 0x81, SUBNORMAL = 0x20;
    const __mmask16 is_other = _mm512_fpclass_ps_mask(first, NOT_A_NUMBER | SUBNORMAL);
    if (__builtin_expect(_kortestz_mask16_u8(is_other, _mm512_fpclass_ps_mask(second, NOT_A_NUMBER | SUBNORMAL)), 1)) {
        return (__m512i)_mm512_cvtne2ps_pbh(second, first);
    }
#endif
    const __m512i in_turns = _mm512_packus_epi32(round_to_bf16_bits(first), round_to_bf16_bits(second));  // four of each
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), in_turns);
}

QINLINE void store_pair(bf16 *to, Vec first, Vec second, uint32_t columns) {
    _mm512_mask_storeu_epi16(to, columns, round_pair(first, second));
}

QINLINE Vec biased(const Finish &finish, Vec sum, int panel, uint32_t columns) {
    if (finish.bias[panel] == nullptr) return sum;
    return add(sum, _mm512_maskz_loadu_ps(static_cast<__mmask16>(columns), finish.bias[panel]));
}

// Where a row's outputs go. What is stored later is prefetched: a store that waits for its line keeps one of the few buffers
// that tiles are loaded through. Of 512 rows and more that saves 3 to 14 %, and far more while outputs come from memory.
template <typename T>
QINLINE T *place_of(const Finish &finish, int64_t row) {
    char *out = finish.out + row * finish.out_stride;
    if (finish.to_next != 0) __builtin_prefetch(out + finish.to_next, 0, 2);
    return reinterpret_cast<T *>(out);
}

template <typename T>
struct Plain {
    QINLINE void put(const Finish &finish, int64_t row, const Vec (&sums)[2]) {
        T *to = place_of<T>(finish, row);
        const uint32_t columns = finish.columns;
        store_pair(to, biased(finish, sums[0], 0, columns), biased(finish, sums[1], 1, columns >> PANEL), columns);
    }
};

// Whole lines of bfloat16, past the caches: half as much goes to and from the memory, and no store waits for its line.
struct Streamed {
    QINLINE void put(const Finish &finish, int64_t row, const Vec (&sums)[2]) {
        const uint32_t columns = finish.columns;
        _mm512_stream_si512(reinterpret_cast<__m512i *>(finish.out + row * finish.out_stride),
                            round_pair(biased(finish, sums[0], 0, columns), biased(finish, sums[1], 1, columns)));
    }
};

static bool can_stream(const Outputs &outputs) {
    const OutputBlock &out = outputs.out;
    const auto first = reinterpret_cast<uintptr_t>(out.data) + out.first * sizeof(bf16);
    return outputs.is_streamed && out.dtype == DType::bf16 && out.width % PAIR == 0 && out.stride % PAIR == 0 && first % 64 == 0;
}

template <typename T, Activation A>
struct Gated {
    QINLINE void put(const Finish &finish, int64_t row, const Vec (&sums)[2]) {
        T *to = place_of<T>(finish, row);
        constexpr uint32_t ALL = (1u << PANEL) - 1;
        store(to, gated_product<A>(biased(finish, sums[0], 0, ALL), biased(finish, sums[1], 1, ALL)));
    }
};

template <typename Sums, typename Output>
static void finish_rows(const Finish &finish, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        Vec sums[2];
        Sums::load_row(finish, row, sums);
        Output::put(finish, row, sums);
    }
}

template <typename Sums, typename T>
static FinishRows gated_of(Activation activation) {
    switch (activation) {
        case Activation::silu:
            return finish_rows<Sums, Gated<T, Activation::silu>>;
        case Activation::gelu:
            return finish_rows<Sums, Gated<T, Activation::gelu>>;
        case Activation::gelu_sigmoid:
            return finish_rows<Sums, Gated<T, Activation::gelu_sigmoid>>;
        case Activation::gelu_tanh:
            return finish_rows<Sums, Gated<T, Activation::gelu_tanh>>;
        default:
            return finish_rows<Sums, Gated<T, Activation::clamped_swish>>;
    }
}

template <typename Sums>
static FinishRows finish_of(const Outputs &outputs) {
    const bool is_bf16 = outputs.out.dtype == DType::bf16;
    if (!outputs.is_gated && can_stream(outputs)) return finish_rows<Sums, Streamed>;
    if (!outputs.is_gated) return is_bf16 ? finish_rows<Sums, Plain<bf16>> : finish_rows<Sums, Plain<float>>;
    return is_bf16 ? gated_of<Sums, bf16>(outputs.activation) : gated_of<Sums, float>(outputs.activation);
}

FinishRows finish_of(SumKind kind, const Outputs &outputs, bool is_whole) {
    if (kind == SumKind::floats) return finish_of<FloatSums>(outputs);
    if (!is_whole) return finish_of<GroupSums>(outputs);
    return kind == SumKind::integers ? finish_of<WholeSums<false>>(outputs) : finish_of<WholeSums<true>>(outputs);
}

// ---- groups ----

// As add_group, with what rows share in registers.
template <bool IS_SIGNED>
static void add_group_of(const Finish &finish, int64_t group, int64_t first, int64_t last) {
    const Vec scales[2] = {scale_of(finish, group, 0), scale_of(finish, group, 1)};
    const float *offsets = reinterpret_cast<const float *>(finish.headers + group * finish.header_group_stride) + PANEL;
    const float *second_offsets = offsets + finish.header_stride / int64_t{sizeof(float)};
    const bool is_first = finish.is_first && group == 0, has_offsets = finish.has_offsets;
    const int64_t count = finish.count;
    const int32_t *start = finish.starts + first * count + group;
    const uint32_t *products = finish.products[group][first];
    float *to = finish.sums + first * GROUP_WIDTH;
    for (int64_t row = first; row < last; ++row, start += count, products += PAIR, to += GROUP_WIDTH) {
        const Bits begin = IS_SIGNED ? broadcast_bits(0) : broadcast_bits(static_cast<uint32_t>(*start));
        Vec sums[2];
        for (int p = 0; p < 2; ++p) {
            const Bits product = load_bits(products + p * PANEL);
            const Vec integers = to_float(IS_SIGNED ? product : add_bits(begin, product));
            sums[p] = add(is_first ? broadcast(0.0f) : load(to + p * PANEL), mul(scales[p], integers));
        }
        if (has_offsets) {
            const Vec inputs = broadcast(static_cast<float>(*start) * finish.per_start);
            sums[0] = add(sums[0], mul(load(offsets), inputs));
            sums[1] = add(sums[1], mul(load(second_offsets), inputs));
        }
        for (int p = 0; p < 2; ++p) store(to + p * PANEL, sums[p]);
    }
}

template <bool IS_SIGNED>
static void add_groups(const Finish &finish, int64_t first, int64_t last) {
    for (int64_t group = 0; group < finish.num_groups; ++group) add_group_of<IS_SIGNED>(finish, group, first, last);
    if (finish.finish != nullptr) finish.finish(finish, first, last);
}

FinishRows addition_of(SumKind kind) { return kind == SumKind::integers ? add_groups<false> : add_groups<true>; }

}  // namespace quire::QUIRE_ISA
