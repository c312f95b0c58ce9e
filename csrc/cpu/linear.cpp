// Projections: packing of weights, and the division of a GEMM into blocks and threads. The arithmetic is in
// isa/gemm.cpp.
//
// Few rows (one tile) are bound by the bandwidth of the weights: each thread streams its share of the panels once, all
// inputs in a row. Many rows are bound by arithmetic: blocks of BLOCK_ROWS rows x GROUP_PANELS panels x BLOCK_INPUTS
// inputs stay in the second-level cache (x: 120 KiB, weights: 64 KiB, sums: 30 KiB).
#include <cstring>

#include "bindings.hpp"
#include "dispatch.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "timing.hpp"

namespace quire {

constexpr int64_t BLOCK_ROWS = 120;  // a multiple of every table's tile_rows (3 and 6)
constexpr int64_t BLOCK_INPUTS = 256;
constexpr int64_t PASS_ROWS = 480;  // rows packed at a time, so that scratch stays small
constexpr int64_t GROUP_WIDTH = GROUP_PANELS * PANEL;

template <typename T>
static void pack_panel(const T *weight, int64_t num_inputs, int64_t first, int64_t width, T *out) {
    constexpr int64_t PAIR = sizeof(T) == 2 ? 2 : 1;
    for (int64_t i = 0; i < width; ++i) {
        const T *row = weight + (first + i) * num_inputs;
        for (int64_t k = 0; k < num_inputs; ++k) out[(k / PAIR * PANEL + i) * PAIR + k % PAIR] = row[k];
    }
}

template <typename T>
static void pack_weight(const void *weight, int64_t num_outputs, int64_t num_inputs, void *packed) {
    const PackedWeight layout{packed, sizeof(T) == 2 ? DType::bf16 : DType::f32, num_outputs, num_inputs, nullptr};
    T *to = static_cast<T *>(packed);
    const int64_t panel_elements = layout.panel_elements();
#pragma omp parallel for schedule(static) num_threads(team_size(num_outputs *num_inputs))
    for (int64_t panel = 0; panel < layout.num_panels(); ++panel) {
        T *panel_to = to + panel * panel_elements;
        const int64_t first = panel * PANEL, width = min64(PANEL, num_outputs - first);
        std::memset(static_cast<void *>(panel_to), 0, panel_elements * sizeof(T));
        pack_panel(static_cast<const T *>(weight), num_inputs, first, width, panel_to);
    }
}

static void pack(uintptr_t weight, int dtype, int64_t num_outputs, int64_t num_inputs, uintptr_t packed) {
    const void *from = reinterpret_cast<const void *>(weight);
    void *to = reinterpret_cast<void *>(packed);
    if (static_cast<DType>(dtype) == DType::f32) {
        pack_weight<float>(from, num_outputs, num_inputs, to);
    } else {
        pack_weight<bf16>(from, num_outputs, num_inputs, to);
    }
}

static int64_t packed_bytes(int dtype, int64_t num_outputs, int64_t num_inputs) {
    const PackedWeight layout{nullptr, static_cast<DType>(dtype), num_outputs, num_inputs, nullptr};
    return layout.num_panels() * layout.panel_elements() * size_of(layout.dtype);
}

// Even shares of whole items: item `index` of `parts` begins here.
static int64_t share(int64_t count, int64_t parts, int64_t index) { return count * index / parts; }

// One tile of rows: the panels are divided evenly, and each thread goes through all inputs of its panels.
static void linear_few(const KernelTable &table, const PackedWeight &weight, const PackedRows &rows, void *out,
                       DType out_dtype) {
    const int64_t num_panels = weight.num_panels(), inputs = weight.padded_inputs();
    const int team = team_size(num_panels * weight.panel_elements());
#pragma omp parallel for schedule(static) num_threads(team)
    for (int part = 0; part < team; ++part) {
        alignas(64) float sums[MAX_TILE_ROWS * GROUP_WIDTH];
        const int64_t end = share(num_panels, team, part + 1);
        for (int64_t panel = share(num_panels, team, part); panel < end; panel += GROUP_PANELS) {
            const int width = static_cast<int>(min64(GROUP_PANELS, end - panel));
            table.gemm(weight, rows, GemmBlock{0, rows.num_rows, panel, width, max64(inputs, 2), sums}, out, out_dtype);
        }
    }
}

// Many rows: blocks are handed out as threads become free. Neighbouring blocks share their weights.
static void linear_many(const KernelTable &table, const PackedWeight &weight, const PackedRows &rows, void *out,
                        DType out_dtype) {
    const int64_t num_groups = ceil_div(weight.num_panels(), GROUP_PANELS);
    const int64_t row_blocks = ceil_div(rows.num_rows, BLOCK_ROWS);
    const int team = team_size(rows.num_rows * weight.num_panels() * weight.panel_elements());
#pragma omp parallel for schedule(dynamic) num_threads(team)
    for (int64_t index = 0; index < num_groups * row_blocks; ++index) {
        alignas(64) float sums[BLOCK_ROWS * GROUP_WIDTH];
        const int64_t panel = index / row_blocks * GROUP_PANELS, row = index % row_blocks * BLOCK_ROWS;
        const int width = static_cast<int>(min64(GROUP_PANELS, weight.num_panels() - panel));
        const int64_t num_rows = min64(BLOCK_ROWS, rows.num_rows - row);
        table.gemm(weight, rows, GemmBlock{row, num_rows, panel, width, BLOCK_INPUTS, sums}, out, out_dtype);
    }
}

static const float *pack_pass(const KernelTable &table, const PackedWeight &weight, const void *x, DType dtype,
                              int64_t num_rows) {
    const int64_t inputs = weight.num_inputs, padded = weight.padded_inputs();
    if (num_rows == 1 && dtype == DType::f32 && inputs == padded) return static_cast<const float *>(x);
    float *packed = scratch(PACKED_ROWS, num_rows * padded);
    const int64_t tile = table.tile_rows;
#pragma omp parallel for schedule(static) num_threads(team_size(num_rows *padded))
    for (int64_t row = 0; row < num_rows; row += tile) {
        table.pack_rows(offset(x, row * inputs, dtype), dtype, inputs, min64(tile, num_rows - row), padded,
                        packed + row * padded);
    }
    return packed;
}

static void linear(uintptr_t x, int x_dtype, int64_t num_rows, uintptr_t packed, int weight_dtype, int64_t num_outputs,
                   int64_t num_inputs, uintptr_t bias, uintptr_t out, int out_dtype) {
    const Stopwatch stopwatch(KernelClass::linear);
    const KernelTable &table = kernels();
    const DType from = static_cast<DType>(x_dtype), to = static_cast<DType>(out_dtype);
    const PackedWeight weight{reinterpret_cast<const void *>(packed), static_cast<DType>(weight_dtype), num_outputs,
                              num_inputs, reinterpret_cast<const float *>(bias)};
    for (int64_t row = 0; row < num_rows; row += PASS_ROWS) {
        const int64_t count = min64(PASS_ROWS, num_rows - row);
        const void *pass_x = offset(reinterpret_cast<const void *>(x), row * num_inputs, from);
        void *pass_out = offset(reinterpret_cast<void *>(out), row * num_outputs, to);
        const PackedRows rows{pack_pass(table, weight, pass_x, from, count), count};
        if (count <= table.tile_rows) {
            linear_few(table, weight, rows, pass_out, to);
        } else {
            linear_many(table, weight, rows, pass_out, to);
        }
    }
}

static void bind_linear(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.def("packed_bytes", &packed_bytes);
    m.def("pack", &pack, release());
    m.def("linear", &linear, release());
}
static const Registration registration(bind_linear);

}  // namespace quire
