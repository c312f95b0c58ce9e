// Norms, activations, rotary embedding and embedding lookup: bindings, and the division of rows among threads.
// The arithmetic is in isa/elementwise.cpp.
#include "elementwise.hpp"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "timing.hpp"
#include "weight.hpp"

namespace quire {

static NormRows norm_rows(uintptr_t x, uintptr_t weight, uintptr_t out, int dtype, int weight_dtype, int64_t width,
                          float eps) {
    NormRows norm{};
    norm.x = reinterpret_cast<const void *>(x);
    norm.weight = reinterpret_cast<const void *>(weight);
    norm.out = reinterpret_cast<void *>(out);
    norm.dtype = static_cast<DType>(dtype);
    norm.weight_dtype = static_cast<DType>(weight_dtype);
    norm.width = width;
    norm.eps = eps;
    return norm;
}

static void rms_norm(uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t sum, uintptr_t out, int dtype,
                     int weight_dtype, int64_t num_rows, int64_t width, float eps, float weight_offset) {
    NormRows norm = norm_rows(x, weight, out, dtype, weight_dtype, width, eps);
    norm.residual = reinterpret_cast<const void *>(residual);
    norm.sum = reinterpret_cast<void *>(sum);
    norm.weight_offset = weight_offset;
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(num_rows, width, [&](int64_t first, int64_t last) { table.rms_norm(norm, first, last); });
}

static void layer_norm(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t out, int dtype, int weight_dtype,
                       int64_t num_rows, int64_t width, float eps) {
    NormRows norm = norm_rows(x, weight, out, dtype, weight_dtype, width, eps);
    norm.bias = reinterpret_cast<const void *>(bias);
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(num_rows, width, [&](int64_t first, int64_t last) { table.layer_norm(norm, first, last); });
}

static bool is_finite(uintptr_t x, int dtype, int64_t count) {
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    std::atomic<bool> all{true};
    over_rows(count, 1, [&](int64_t first, int64_t last) {
        if (!table.is_finite(reinterpret_cast<const void *>(x), static_cast<DType>(dtype), first, last)) all = false;
    });
    return all;
}

static void activate(uintptr_t x, uintptr_t out, int dtype, int activation, int64_t count) {
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(count, 4, [&](int64_t first, int64_t last) {
        table.activate(reinterpret_cast<const void *>(x), reinterpret_cast<void *>(out), static_cast<DType>(dtype),
                       static_cast<Activation>(activation), first, last);
    });
}

static void gated(uintptr_t gate_up, uintptr_t out, int dtype, int activation, int64_t num_rows, int64_t width) {
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(num_rows, 4 * width, [&](int64_t first, int64_t last) {
        table.gated(reinterpret_cast<const void *>(gate_up), reinterpret_cast<void *>(out), static_cast<DType>(dtype),
                    static_cast<Activation>(activation), width, first, last);
    });
}

void check_positions(const int64_t *positions, int64_t count, int64_t num_positions) {
    for (int64_t r = 0; r < count; ++r) {
        if (positions[r] < 0 || positions[r] >= num_positions) {
            throw std::invalid_argument("rope: position " + std::to_string(positions[r]) +
                                        " is outside the table of " + std::to_string(num_positions));
        }
    }
}

static void rope(uintptr_t x, uintptr_t positions, uintptr_t cos_sin, int dtype, int64_t num_rows, int64_t stride,
                 int64_t num_heads, int64_t head_size, int64_t half, int64_t num_positions, bool is_interleaved) {
    const RopeRows rows{reinterpret_cast<void *>(x),
                        reinterpret_cast<const int64_t *>(positions),
                        reinterpret_cast<const float *>(cos_sin),
                        static_cast<DType>(dtype),
                        stride,
                        num_heads,
                        head_size,
                        half,
                        is_interleaved};
    check_positions(rows.positions, num_rows, num_positions);
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(num_rows, 2 * num_heads * half, [&](int64_t first, int64_t last) { table.rope(rows, first, last); });
}

// The inverse of pack_panel (weight.cpp). A row is spread over its whole panel, 32 bytes for each of its own: measured
// against the layers that follow, nothing.
template <typename T>
static void unpack_row(const T *panel, int64_t i, int64_t width, T *out) {
    constexpr int64_t PAIR = sizeof(T) == 2 ? 2 : 1;
    for (int64_t k = 0; k < width; ++k) out[k] = panel[(k / PAIR * PANEL + i) * PAIR + k % PAIR];
}

static void copy_row(const Lookup &lookup, int64_t id, void *out) {
    const char *from = static_cast<const char *>(lookup.table);
    if (lookup.panel_bytes == 0) {
        const int64_t row_bytes = lookup.width * size_of(lookup.dtype);
        std::memcpy(out, from + id * row_bytes, row_bytes);
        return;
    }
    const char *panel = from + id / PANEL * lookup.panel_bytes;
    if (lookup.dtype == DType::f32) {
        unpack_row(reinterpret_cast<const float *>(panel), id % PANEL, lookup.width, static_cast<float *>(out));
    } else {
        unpack_row(reinterpret_cast<const bf16 *>(panel), id % PANEL, lookup.width, static_cast<bf16 *>(out));
    }
}

void embedding(const Lookup &lookup, const int64_t *ids, int64_t count, void *out) {
    for (int64_t t = 0; t < count; ++t) {
        if (ids[t] < 0 || ids[t] >= lookup.num_rows) {
            throw std::out_of_range("embedding: token id " + std::to_string(ids[t]) + " is outside the table of " +
                                    std::to_string(lookup.num_rows) + " rows");
        }
    }
    const int64_t row_bytes = lookup.width * size_of(lookup.dtype);
    char *to = static_cast<char *>(out);
    over_rows(count, lookup.width, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) copy_row(lookup, ids[t], to + t * row_bytes);
    });
}

static void init_lookup(Lookup *self, uintptr_t table, int dtype, int64_t num_rows, int64_t width) {
    new (self) Lookup{reinterpret_cast<const void *>(table), static_cast<DType>(dtype), num_rows, width, 0};
}

static void init_packed_lookup(Lookup *self, const LinearWeight &weight) {
    if (weight.is_integer()) throw std::invalid_argument("embedding: rows cannot be had back from a weight of integers");
    const DType dtype = weight.format == WeightFormat::f32 ? DType::f32 : DType::bf16;
    new (self) Lookup{weight.data, dtype, weight.num_outputs, weight.num_inputs, weight.panel_bytes()};
}

static void gather(const Lookup &lookup, uintptr_t token_ids, int64_t num_tokens, uintptr_t out) {
    const Stopwatch stopwatch(KernelClass::elementwise);
    embedding(lookup, reinterpret_cast<const int64_t *>(token_ids), num_tokens, reinterpret_cast<void *>(out));
}

static void bind_elementwise(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.def("rms_norm", &rms_norm, release());
    m.def("layer_norm", &layer_norm, release());
    m.def("is_finite", &is_finite, release());
    m.def("activate", &activate, release());
    m.def("gated", &gated, release());
    m.def("rope", &rope, release());
    nb::class_<Lookup>(m, "Lookup")
        .def("__init__", &init_lookup)
        .def("__init__", &init_packed_lookup);
    m.def("embedding", &gather, release());
}
static const Registration registration(bind_elementwise);

}  // namespace quire
