// Norms, activations, rotary embedding and embedding lookup: bindings, and the division of rows among threads.
// The arithmetic is in isa/elementwise.cpp.
#include "elementwise.hpp"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "checks.hpp"
#include "timing.hpp"
#include "weight.hpp"

namespace quire {

// What both norms have in common: checked, but for what is added.
static NormRows norm_rows(const Arguments &args, const Memory &x, const Memory &out, uintptr_t weight, DType dtype,
                          DType weight_dtype, int64_t width, float eps) {
    const Memory gain = args.memory("the weight", weight, weight_dtype, {width});
    args.apart_or_same(out, x);
    args.apart(out, gain);
    NormRows norm{};
    norm.x = x.as<const void>();
    norm.weight = gain.as<const void>();
    norm.out = out.as<void>();
    norm.dtype = dtype;
    norm.weight_dtype = weight_dtype;
    norm.width = args.count("the width", width, 1);
    norm.eps = args.magnitude("eps", eps);
    return norm;
}

static void rms_norm(uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t sum, uintptr_t out, int dtype,
                     int weight_dtype, int64_t num_rows, int64_t width, float eps, float weight_offset) {
    const Arguments args("rms_norm");
    const DType type = args.dtype(dtype);
    const Memory from = args.memory("x", x, type, {num_rows, width}), to = args.memory("out", out, type, {num_rows, width});
    NormRows norm = norm_rows(args, from, to, weight, type, args.dtype(weight_dtype), width, eps);
    norm.weight_offset = args.finite("weight_offset", weight_offset);
    if (residual != 0 || sum != 0) {
        const Memory added = args.memory("residual", residual, type, {num_rows, width});
        const Memory total = args.memory("sum", sum, type, {num_rows, width});
        args.apart_or_same(total, added);
        args.apart_or_same(total, from);
        args.apart(to, total);
        args.apart(to, added);
        norm.residual = added.as<const void>();
        norm.sum = total.as<void>();
    }
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(num_rows, width, [&](int64_t first, int64_t last) { table.rms_norm(norm, first, last); });
}

static void layer_norm(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t out, int dtype, int weight_dtype,
                       int64_t num_rows, int64_t width, float eps) {
    const Arguments args("layer_norm");
    const DType type = args.dtype(dtype), weight_type = args.dtype(weight_dtype);
    const Memory from = args.memory("x", x, type, {num_rows, width}), to = args.memory("out", out, type, {num_rows, width});
    NormRows norm = norm_rows(args, from, to, weight, type, weight_type, width, eps);
    if (bias != 0) {
        const Memory added = args.memory("the bias", bias, weight_type, {width});
        args.apart(to, added);
        norm.bias = added.as<const void>();
    }
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(num_rows, width, [&](int64_t first, int64_t last) { table.layer_norm(norm, first, last); });
}

static bool is_finite(uintptr_t x, int dtype, int64_t count) {
    const Arguments args("is_finite");
    const DType type = args.dtype(dtype);
    const Memory from = args.memory("x", x, type, {count});
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    std::atomic<bool> all{true};
    over_rows(count, 1, [&](int64_t first, int64_t last) {
        if (!table.is_finite(from.as<const void>(), type, first, last)) all = false;
    });
    return all;
}

static void activate(uintptr_t x, uintptr_t out, int dtype, int activation, int64_t count) {
    const Arguments args("activate");
    const DType type = args.dtype(dtype);
    const Activation function = args.unary_activation(activation);
    const Memory from = args.memory("x", x, type, {count}), to = args.memory("out", out, type, {count});
    args.apart_or_same(to, from);
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(count, 4, [&](int64_t first, int64_t last) {
        table.activate(from.as<const void>(), to.as<void>(), type, function, first, last);
    });
}

void gate_rows(const void *x, const void *gate, void *out, DType dtype, int64_t num_rows, int64_t width) {
    const KernelTable &table = kernels();
    over_rows(num_rows, width, [&](int64_t first, int64_t last) {
        table.gate_rows(x, gate, out, dtype, width, first, last);
    });
}

static void gate_rows_checked(uintptr_t x, uintptr_t gate, uintptr_t out, int dtype, int64_t num_rows, int64_t width) {
    const Arguments args("gate_rows");
    const DType type = args.dtype(dtype);
    const Memory from = args.memory("x", x, type, {num_rows, width}), to = args.memory("out", out, type, {num_rows, width});
    const Memory gates = args.memory("the gate", gate, type, {num_rows});
    args.apart_or_same(to, from);
    args.apart(to, gates);
    const Stopwatch stopwatch(KernelClass::elementwise);
    gate_rows(from.as<const void>(), gates.as<const void>(), to.as<void>(), type, num_rows, width);
}

static void gated(uintptr_t gate_up, uintptr_t out, int dtype, int activation, int64_t num_rows, int64_t width) {
    const Arguments args("gated");
    const DType type = args.dtype(dtype);
    const Activation function = args.activation(activation);
    const Memory from = args.memory("gate_up", gate_up, type, {num_rows, width, 2});
    const Memory to = args.memory("out", out, type, {num_rows, width});
    args.apart(to, from);
    const KernelTable &table = kernels();
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(num_rows, 4 * width, [&](int64_t first, int64_t last) {
        table.gated(from.as<const void>(), to.as<void>(), type, function, width, first, last);
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
                 int64_t num_heads, int64_t head_size, int64_t half, int64_t num_positions, bool is_interleaved, int64_t start) {
    const Arguments args("rope");
    const DType type = args.dtype(dtype);
    args.between(0, args.count("the head size", head_size, 1), "what is rotated of a head", 2 * args.count("half", half));
    args.between(0, head_size - 2 * half, "where rotated elements begin", start);
    args.count("the number of positions", num_positions);
    const int64_t row = args.product("a row of x", num_heads, head_size);
    const Memory heads = args.rows("x", x, type, num_rows, stride, row, true);
    const Memory table_of_angles = args.memory("cos_sin", cos_sin, int64_t{sizeof(float)}, {num_positions, 2, half});
    const int64_t *at = args.array<const int64_t>("positions", positions, {num_rows});
    args.apart(heads, table_of_angles);
    const RopeRows rows{offset(heads.as<void>(), start, type),
                        at,
                        table_of_angles.as<const float>(),
                        type,
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
    const Arguments args("Lookup");
    const DType type = args.dtype(dtype);
    const Memory rows = args.memory("the table", table, type, {num_rows, width});
    new (self) Lookup{rows.as<const void>(), type, num_rows, width, 0};
}

static void init_packed_lookup(Lookup *self, const LinearWeight &weight) {
    if (weight.has_scales()) throw std::invalid_argument("embedding: rows cannot be had back from a quantized weight");
    check_attached("Lookup", weight);
    const DType dtype = weight.format == WeightFormat::f32 ? DType::f32 : DType::bf16;
    new (self) Lookup{weight.data, dtype, weight.num_outputs, weight.num_inputs, weight.panel_bytes()};
}

static void gather(const Lookup &lookup, uintptr_t token_ids, int64_t num_tokens, uintptr_t out) {
    const Arguments args("embedding");
    const int64_t *ids = args.array<const int64_t>("token_ids", token_ids, {num_tokens});
    const Memory to = args.memory("out", out, lookup.dtype, {num_tokens, lookup.width});
    const Stopwatch stopwatch(KernelClass::elementwise);
    embedding(lookup, ids, num_tokens, to.as<void>());
}

static void bind_elementwise(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.def("rms_norm", &rms_norm, release());
    m.def("layer_norm", &layer_norm, release());
    m.def("is_finite", &is_finite, release());
    m.def("activate", &activate, release());
    m.def("gate_rows", &gate_rows_checked, release());
    m.def("gated", &gated, release());
    m.def("rope", &rope, release());
    nb::class_<Lookup>(m, "Lookup")
        .def("__init__", &init_lookup)
        .def("__init__", &init_packed_lookup);
    m.def("embedding", &gather, release());
}
static const Registration registration(bind_elementwise);

}  // namespace quire
