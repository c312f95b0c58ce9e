// Rows of the KV cache on their way in: rounded to the cache's format, or scaled and quantized.
//
// Plain loops over a whole row for the compiler to vectorise; every operation is one that torch has too, so that the bytes
// equal the reference's.
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

constexpr float LEAST_SCALE = 0x1p-126f;
constexpr float LARGEST_INT8 = 127.0f, LARGEST_FP8 = 448.0f;

// The largest magnitude, as bits: for numbers that are not negative bits compare as the numbers do, and NaN is the largest.
static float largest_magnitude(const float *x, int64_t size) {
    int32_t most = 0;
    for (int64_t i = 0; i < size; ++i) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float magnitude;
    memcpy(&magnitude, &most, sizeof magnitude);
    return magnitude;
}

static void to_int8(const float *x, float scale, int64_t size, uint8_t *out) {
    for (int64_t i = 0; i < size; ++i) {
        const float shifted = x[i] / scale + 12582912.0f;  // 1.5 * 2^23: rounds to an integer, held in the low bits
        uint32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        out[i] = static_cast<uint8_t>(bits);
    }
}

// To e4m3, nearest even: normal numbers by rounding the mantissa to three bits and moving the exponent's bias from 127 to 7;
// below 2^-6 multiples of 2^-9, which adding 2^14 rounds to.
static void to_fp8(const float *x, float scale, int64_t size, uint8_t *out) {
    for (int64_t i = 0; i < size; ++i) {
        const float scaled = x[i] / scale;
        uint32_t bits, small;
        memcpy(&bits, &scaled, sizeof bits);
        const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
        float absolute;
        memcpy(&absolute, &magnitude, sizeof absolute);
        const float shifted = absolute + 16384.0f;
        memcpy(&small, &shifted, sizeof small);
        const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
        const uint32_t code = magnitude < (121u << 23) ? small - 0x46800000u : normal;
        out[i] = static_cast<uint8_t>(sign | code);
    }
}

static void store_scaled(const void *row, DType dtype, int64_t head_size, KVFormat format, void *to) {
    float x[MAX_HEAD_SIZE];
    convert(row, dtype, x, DType::f32, head_size);
    const float magnitude = largest_magnitude(x, head_size);
    float scale = magnitude / (format == KVFormat::int8 ? LARGEST_INT8 : LARGEST_FP8);
    if (scale < LEAST_SCALE) scale = LEAST_SCALE;
    uint8_t *out = static_cast<uint8_t *>(to);
    format == KVFormat::int8 ? to_int8(x, scale, head_size, out) : to_fp8(x, scale, head_size, out);
    memcpy(out + head_size, &scale, sizeof scale);
}

void store_kv_rows(const void *rows, DType dtype, int64_t num_rows, int64_t head_size, KVFormat format, void *to,
                   int64_t stride) {
    char *out = static_cast<char *>(to);
    for (int64_t r = 0; r < num_rows; ++r, out += stride) {
        const void *row = offset(rows, r * head_size, dtype);
        if (is_scaled(format)) {
            store_scaled(row, dtype, head_size, format, out);
        } else {
            convert(row, dtype, out, format == KVFormat::f32 ? DType::f32 : DType::bf16, head_size);
        }
    }
}

}  // namespace quire::QUIRE_ISA
