// What bindings check of the arguments that Python gives them, before anything is read or written.
//
// Python passes addresses and numbers that it has taken from tensors. A wrong one is a bug of the
// caller's; it must become an exception, not an access outside a tensor. An address does not say how
// much memory lies behind it: comparing shapes is for Python (quire/kernels/cpu/checks.py). All else is
// checked here: codes of types, counts, products that overflow, null addresses, alignment, numbers that
// are not finite, and memory that would be written while another argument is read from it. Each check
// is a few comparisons, whatever the sizes; indices that come from tensors are checked by those who use
// them, at a comparison for each.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "dispatch.hpp"

namespace quire {

// The bytes that an argument stands for.
struct Memory {
    uintptr_t address = 0;
    int64_t num_bytes = 0;

    template <typename T>
    T *as() const {
        return reinterpret_cast<T *>(address);
    }
    uintptr_t end() const { return address + static_cast<uintptr_t>(num_bytes); }
    bool overlaps(const Memory &other) const {
        return num_bytes > 0 && other.num_bytes > 0 && address < other.end() && other.address < end();
    }
    bool is(const Memory &other) const { return address == other.address && num_bytes == other.num_bytes; }
};

// The arguments of one function; every method throws std::invalid_argument (in Python ValueError).
class Arguments {
   public:
    explicit constexpr Arguments(const char *function) : function_(function) {}

    void require(bool is_met, const char *what) const {
        if (!is_met) refuse(what);
    }

    DType dtype(int code) const { return static_cast<DType>(code_below(2, "dtype", code)); }
    Activation activation(int code) const { return static_cast<Activation>(code_below(5, "activation", code)); }
    // One that is a function of one number.
    Activation unary_activation(int code) const {
        return static_cast<Activation>(code_below(4, "activation of one number", code));
    }
    KVFormat kv_format(int code) const { return static_cast<KVFormat>(code_below(4, "KV format", code)); }

    int64_t between(int64_t least, int64_t most, const char *name, int64_t value) const {
        if (value < least || value > most) refuse_number(name, value, least, most);
        return value;
    }
    int64_t count(const char *name, int64_t value, int64_t least = 0) const {
        return between(least, MAX_COUNT, name, value);
    }
    float finite(const char *name, float value) const {
        if (!std::isfinite(value)) refuse_not_finite(name);
        return value;
    }
    // A finite number that is not negative.
    float magnitude(const char *name, float value) const {
        if (!(finite(name, value) >= 0.0f)) refuse_negative(name);
        return value;
    }

    int64_t product(const char *name, int64_t a, int64_t b) const {
        int64_t result = 0;
        if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &result) || result > MAX_COUNT) refuse_size(name);
        return result;
    }

    // `shape` elements of `size` bytes, which lie at a multiple of their size.
    Memory memory(const char *name, uintptr_t address, int64_t size, std::initializer_list<int64_t> shape) const {
        int64_t num_bytes = size;
        bool overflows = false;
        for (const int64_t extent : shape) {
            overflows = overflows || extent < 0 || __builtin_mul_overflow(num_bytes, extent, &num_bytes);
        }
        if (overflows || num_bytes > MAX_BYTES) refuse_size(name);
        if (num_bytes == 0) return {};
        if (address == 0 || address % static_cast<uintptr_t>(size) != 0 || address + static_cast<uintptr_t>(num_bytes) < address) {
            refuse_address(name, address, size);
        }
        return {address, num_bytes};
    }
    Memory memory(const char *name, uintptr_t address, DType dtype, std::initializer_list<int64_t> shape) const {
        return memory(name, address, size_of(dtype), shape);
    }
    template <typename T>
    T *array(const char *name, uintptr_t address, std::initializer_list<int64_t> shape) const {
        return memory(name, address, int64_t{sizeof(T)}, shape).template as<T>();
    }
    // Rows of `width` elements, `stride` apart, which are not to overlap where they are written.
    Memory rows(const char *name, uintptr_t address, DType dtype, int64_t num_rows, int64_t stride, int64_t width,
                bool are_written = false) const {
        if (num_rows == 0) return {};
        if (num_rows == 1) return memory(name, address, dtype, {width});
        between(are_written ? width : 0, MAX_COUNT, "a stride", stride);
        int64_t behind = 0;
        if (__builtin_mul_overflow(num_rows - 1, stride, &behind) || behind > MAX_BYTES) refuse_size(name);
        return memory(name, address, dtype, {behind + width});
    }

    // What is written shares no byte with what is read.
    void apart(const Memory &written, const Memory &read) const {
        if (written.overlaps(read)) refuse_overlap();
    }
    // The same, or one is written over the other, element by element.
    void apart_or_same(const Memory &written, const Memory &read) const {
        if (written.overlaps(read) && !written.is(read)) refuse_overlap();
    }

   private:
    static constexpr int64_t MAX_COUNT = int64_t{1} << 40;
    static constexpr int64_t MAX_BYTES = int64_t{1} << 47;  // what an address space holds

    int code_below(int count, const char *name, int code) const {
        if (code < 0 || code >= count) refuse_number(name, code, 0, count - 1);
        return code;
    }

    [[noreturn]] void refuse(const char *what) const;
    [[noreturn]] void refuse_number(const char *name, int64_t value, int64_t least, int64_t most) const;
    [[noreturn]] void refuse_not_finite(const char *name) const;
    [[noreturn]] void refuse_negative(const char *name) const;
    [[noreturn]] void refuse_size(const char *name) const;
    [[noreturn]] void refuse_address(const char *name, uintptr_t address, int64_t size) const;
    [[noreturn]] void refuse_overlap() const;

    const char *function_;
};

}  // namespace quire
