// Rows of the KV cache on their way out: any format to float32, by keys (transposed blocks) or by values (rows).
#pragma once

#include "kernels.hpp"

namespace quire::QUIRE_ISA {

// Elements that share a 32-bit word, in which rows are loaded and transposed.
template <KVFormat F>
constexpr int PER_WORD = 4 / static_cast<int>(kv_element_bytes(F));

// e4m3 in bits 0 to 7 (the others zero) to float32: normal numbers by moving the exponent's bias; below 2^-6, where the
// exponent is 0, by putting a one in front and taking it away again. No denormal float32 is ever formed.
QINLINE Vec from_fp8(Bits code) {
    const Bits magnitude = shift_left<20>(and_bits(code, broadcast_bits(0x7f)));
    const Bits sign = shift_left<24>(and_bits(code, broadcast_bits(0x80)));
    const Bits one = as_bits(value_where_below(magnitude, 1u << 23, as_float(broadcast_bits(1u << 23))));
    const Vec excess = value_where_below(magnitude, 1u << 23, broadcast(0x1p-6f));
    const Vec value = sub(as_float(add_bits(add_bits(magnitude, broadcast_bits(120u << 23)), one)), excess);
    return as_float(or_bits(as_bits(value), sign));
}

// Element J of each word, unscaled.
template <KVFormat F, int J>
QINLINE Vec element_of(Bits words) {
    if constexpr (F == KVFormat::f32) {
        return as_float(words);
    } else if constexpr (F == KVFormat::bf16) {
        return as_float(J == 0 ? shift_left<16>(words) : and_bits(words, broadcast_bits(0xffff0000u)));
    } else if constexpr (F == KVFormat::int8) {
        return to_float(shift_right_signed<24>(J == 3 ? words : shift_left<24 - 8 * J>(words)));
    } else {
        return from_fp8(and_bits(J == 0 ? words : shift_right<8 * J>(words), broadcast_bits(0xff)));
    }
}

template <KVFormat F>
QINLINE float scale_of(const char *row, int64_t head_size) {
    if constexpr (!is_scaled(F)) return 1.0f;
    float scale;
    memcpy(&scale, row + head_size, sizeof scale);
    return scale;
}

// The words from byte `at` of LANES rows whose elements take `num_bytes`: block[i] holds word i of every row.
QINLINE void load_words(const char *const *rows, int64_t at, int64_t num_bytes, Vec (&block)[LANES]) {
    if (at + 4 * LANES <= num_bytes) {
        QUNROLL
        for (int i = 0; i < LANES; ++i) block[i] = as_float(load_bits(rows[i] + at));
    } else {
        const int count = static_cast<int>(num_bytes - at);  // above zero
        for (int i = 0; i < LANES; ++i) block[i] = as_float(load_bytes(rows[i] + at, count));
    }
    transpose(block);
}

// Elements [d, d + LANES) of a row, all of which it has, unscaled.
template <KVFormat F>
QINLINE Vec load_lanes(const char *row, int64_t d) {
    if constexpr (F == KVFormat::f32) {
        return load(reinterpret_cast<const float *>(row) + d);
    } else if constexpr (F == KVFormat::bf16) {
        return load(reinterpret_cast<const bf16 *>(row) + d);
    } else {
        const Bits words = load_signed_bytes(row + d);
        return F == KVFormat::int8 ? to_float(words) : from_fp8(and_bits(words, broadcast_bits(0xff)));
    }
}

// Elements [d, d + LANES) of a row, zero from `head_size` on.
template <KVFormat F>
QINLINE Vec load_elements(const char *row, int64_t d, int64_t head_size, float scale) {
    if (d >= head_size) return broadcast(0.0f);
    if constexpr (F == KVFormat::f32) {
        return load_up_to(reinterpret_cast<const float *>(row) + d, head_size - d);
    } else if constexpr (F == KVFormat::bf16) {
        return load_up_to(reinterpret_cast<const bf16 *>(row) + d, head_size - d);
    } else {
        char bytes[LANES] = {};
        const char *from = row + d;
        if (d + LANES > head_size) from = static_cast<const char *>(memcpy(bytes, from, head_size - d));
        return mul(load_lanes<F>(from, 0), broadcast(scale));
    }
}

}  // namespace quire::QUIRE_ISA
