// The layout of a packed weight: a projection [N, K] as the GEMM reads it. One layout for every instruction set, so that
// a packed weight can be kept in a file and mapped into memory as it is. Changing anything here that a stored byte
// depends on means a new WEIGHT_LAYOUT.
#pragma once

#include <cstdint>

#include "dtypes.hpp"

namespace quire {

// Version of everything below, as part of the tag that weights are stored under.
constexpr char WEIGHT_LAYOUT[] = "panel16/1";

enum class WeightFormat : int { f32 = 0, bf16 = 1, int8 = 2, int4 = 3, mxfp4 = 4 };

constexpr int PANEL = 16;  // outputs that lie next to each other

// Inputs of a group whose products of int8 inputs fit a 32-bit sum: (2^31 - 1) / (127 * 128), rounded down.
constexpr int64_t MAX_INT8_GROUP = 132000;

// Panels of 16 outputs follow one another, the last one padded with zeros. A panel is a sequence of groups of
// `group_size` inputs (float formats: one group, all inputs), each padded to whole units:
//
//   f32    [K][16]
//   bf16   [K / 2][16][2]: a 32-bit word holds two neighbouring inputs of one output
//   int8   scales [16] float32, offsets [16] float32 (with has_offsets), then [group / 4][16][4] bytes: value + 128
//   int4   scales and offsets likewise, then [group / 8][16][4] bytes; byte j of an output holds value + 8 of input j in
//          its low half, of input j + 4 in its high half
//   mxfp4  scales [16] bytes (e8m0: two to the power of the byte less 127), then as int4, with numbers of four bits (e2m1: a
//          sign, two bits of exponent, one of mantissa) in place of integers
//
// Unsigned bytes because the dot product instructions of x86 take one unsigned and one signed side.
struct LinearWeight {
    WeightFormat format;
    bool has_offsets;      // integers: w = scale * value + offset, else (and mxfp4) w = scale * value
    bool has_int8_inputs;  // integers: x is quantized row by row; else it stays float32
    int64_t num_outputs, num_inputs;
    int64_t group_size;  // inputs that share a scale; divides num_inputs, and is num_inputs in the float formats
    const void *data;    // num_bytes() of them
    const float *bias;   // [N] or null

    bool is_integer() const { return format == WeightFormat::int8 || format == WeightFormat::int4; }
    bool has_scales() const { return is_integer() || format == WeightFormat::mxfp4; }
    int64_t bits() const { return format == WeightFormat::mxfp4 ? 4 : 32 >> static_cast<int>(format); }
    int64_t unit() const { return 32 / bits(); }  // inputs that are packed together
    int64_t zero_point() const { return format == WeightFormat::int8 ? 128 : 8; }
    // Mostly one, and a division costs as much as thirty multiplications.
    int64_t num_groups() const { return group_size == num_inputs ? 1 : num_inputs / group_size; }
    int64_t padded_group() const { return round_up(group_size, unit()); }
    int64_t padded_inputs() const { return num_groups() * padded_group(); }
    int64_t header_bytes() const {
        if (format == WeightFormat::mxfp4) return PANEL;
        return is_integer() ? (has_offsets ? 2 : 1) * PANEL * int64_t{sizeof(float)} : 0;
    }
    int64_t group_bytes() const { return header_bytes() + padded_group() * PANEL * bits() / 8; }
    int64_t panel_bytes() const { return num_groups() * group_bytes(); }
    int64_t num_panels() const { return ceil_div(num_outputs, PANEL); }
    int64_t num_bytes() const { return num_panels() * panel_bytes(); }
    const char *panel(int64_t index) const { return static_cast<const char *>(data) + index * panel_bytes(); }
    // Some of its outputs as a weight of their own; `first` is a multiple of PANEL.
    LinearWeight part(int64_t first, int64_t count) const {
        LinearWeight part = *this;
        part.num_outputs = count;
        part.data = panel(first / PANEL);
        part.bias = bias == nullptr ? nullptr : bias + first;
        return part;
    }
};

// std::invalid_argument, in the name of `function`, for a weight without memory.
void check_attached(const char *function, const LinearWeight &weight);

}  // namespace quire
