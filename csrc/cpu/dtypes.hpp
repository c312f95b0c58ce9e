// Element types, and where values of unknown type live. No code here depends on an instruction set.
#pragma once

#include <cstdint>

namespace quire {

enum class DType : int { f32 = 0, bf16 = 1 };

// The upper half of a float32. All arithmetic is done in float32.
struct bf16 {
    uint16_t bits;
};

constexpr int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

inline const void *offset(const void *base, int64_t elements, DType dtype) {
    return static_cast<const char *>(base) + elements * size_of(dtype);
}
inline void *offset(void *base, int64_t elements, DType dtype) {
    return static_cast<char *>(base) + elements * size_of(dtype);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }
constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace quire
