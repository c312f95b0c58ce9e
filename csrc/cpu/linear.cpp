// The division of a projection into blocks and threads. The arithmetic is in isa/gemm*.cpp.
//
// Few rows (one tile) are bound by the bandwidth of the weights: each thread streams its share of the panels once, all
// inputs in a row. Many rows are bound by arithmetic: blocks of BLOCK_ROWS rows x GROUP_PANELS panels x CHUNK inputs stay
// in the second-level cache (x: 240 KiB, weights: 128 KiB, sums: 30 KiB).
#include "linear.hpp"

#include "bindings.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "timing.hpp"

namespace quire {

constexpr int64_t BLOCK_ROWS = 120;  // a multiple of every table's tile_rows (3 and 6)
constexpr int64_t PASS_ROWS = 480;   // rows converted at a time, so that scratch stays small
constexpr int64_t CACHE_LINE = 64;   // bytes
constexpr int64_t BLOCK_SUMS = BLOCK_ROWS * GROUP_WIDTH;
constexpr int64_t BLOCK_SCRATCH = 3 * BLOCK_SUMS + CHUNK * GROUP_WIDTH;  // sums (two), partial sums, expanded panels

struct Destination {
    void *data;
    DType dtype;
    bool is_gated;
    Activation activation;
};

// One projection of rows that are ready to be multiplied.
struct Projection {
    const KernelTable &table;
    const LinearWeight &weight;
    InputRows rows;
    Destination out;

    int64_t num_columns() const { return out.is_gated ? weight.num_outputs / 2 : weight.num_outputs; }
    int64_t num_panels() const { return ceil_div(num_columns(), PANEL); }  // of `out`
    // A block of gated columns whose `up` rows do not begin with a panel needs one panel more of them.
    int64_t max_panels() const { return out.is_gated && num_columns() % PANEL != 0 ? GROUP_PANELS - 1 : GROUP_PANELS; }
    int64_t work() const { return rows.num_rows * weight.num_outputs * weight.padded_inputs(); }
};

// Sums of `num_panels` panels into `sums`.
static void multiply(const Projection &task, int64_t first_row, int64_t num_rows, int64_t first_panel,
                     int64_t num_panels, float *sums, float *memory) {
    const GemmBlock block{first_row,
                          num_rows,
                          first_panel,
                          static_cast<int>(num_panels),
                          sums,
                          reinterpret_cast<int32_t *>(memory + 2 * BLOCK_SUMS),
                          memory + 3 * BLOCK_SUMS};
    task.table.gemm(task.weight, task.rows, block);
}

// A block of the result: rows x panels of columns of `out`.
static void compute(const Projection &task, int64_t first_row, int64_t num_rows, int64_t panel, int64_t num_panels) {
    float *memory = scratch(GEMM_BLOCK, BLOCK_SCRATCH);
    const int64_t columns = task.num_columns(), first = panel * PANEL;
    const OutputBlock out{offset(task.out.data, first_row * columns, task.out.dtype), task.out.dtype, columns, first,
                          min64(num_panels * PANEL, columns - first), num_rows};
    const float *bias = task.weight.bias == nullptr ? nullptr : task.weight.bias + first;
    multiply(task, first_row, num_rows, panel, num_panels, memory, memory);
    if (!task.out.is_gated) return task.table.store_sums(memory, bias, out);
    const int64_t up = columns + first, up_panel = up / PANEL, up_end = ceil_div(up + out.width, PANEL);
    float *up_sums = memory + BLOCK_SUMS;
    multiply(task, first_row, num_rows, up_panel, up_end - up_panel, up_sums, memory);
    task.table.store_gated(memory, up_sums + up % PANEL, bias, bias == nullptr ? nullptr : bias + columns,
                           task.out.activation, out);
}

// Even shares of whole items: item `index` of `parts` begins here.
static int64_t share(int64_t count, int64_t parts, int64_t index) { return count * index / parts; }

// One tile of rows: the panels are divided evenly, and each thread goes through all inputs of its panels.
static void project_few(const Projection &task) {
    const int team = team_size(task.work());
#pragma omp parallel for schedule(static) num_threads(team)
    for (int part = 0; part < team; ++part) {
        const int64_t end = share(task.num_panels(), team, part + 1);
        for (int64_t panel = share(task.num_panels(), team, part); panel < end; panel += task.max_panels()) {
            compute(task, 0, task.rows.num_rows, panel, min64(task.max_panels(), end - panel));
        }
    }
}

// Many rows: blocks are handed out as threads become free. Neighbouring blocks share their weights.
static void project_many(const Projection &task) {
    const int64_t num_groups = ceil_div(task.num_panels(), task.max_panels());
    const int64_t row_blocks = ceil_div(task.rows.num_rows, BLOCK_ROWS);
#pragma omp parallel for schedule(dynamic) num_threads(team_size(task.work()))
    for (int64_t index = 0; index < num_groups * row_blocks; ++index) {
        const int64_t panel = index / row_blocks * task.max_panels(), row = index % row_blocks * BLOCK_ROWS;
        compute(task, row, min64(BLOCK_ROWS, task.rows.num_rows - row), panel,
                min64(task.max_panels(), task.num_panels() - panel));
    }
}

// Rows in the form that is multiplied: x itself where it is that already and so few rows need no padding.
static InputRows convert(const KernelTable &table, const LinearWeight &weight, const void *x, DType dtype,
                         int64_t num_rows) {
    const int64_t padded = weight.padded_inputs();
    const bool is_bf16 = table.has_bf16_dots && weight.format == WeightFormat::bf16 && dtype == DType::bf16;
    const bool is_ready = !weight.has_int8_inputs && (dtype == DType::f32 || is_bf16) && weight.num_inputs == padded;
    if (is_ready && num_rows <= table.tile_rows) return InputRows{x, padded, is_bf16, nullptr, nullptr, num_rows};
    // An odd number of cache lines, so that rows do not meet in the same sets.
    const int64_t element = weight.has_int8_inputs ? table.integer_bytes : size_of(is_bf16 ? DType::bf16 : DType::f32);
    const int64_t row_bytes = (ceil_div(padded * element, CACHE_LINE) | 1) * CACHE_LINE;
    InputRows rows{nullptr, row_bytes / element, is_bf16, nullptr, nullptr, num_rows};
    rows.data = scratch(INPUT_ROWS, num_rows * row_bytes / int64_t{sizeof(float)});
    if (weight.has_int8_inputs) {
        float *scales = scratch(INPUT_SCALES, num_rows * (1 + weight.num_groups()));
        rows.scales = scales;
        rows.sums = reinterpret_cast<int32_t *>(scales + num_rows);
    }
    const int team = team_size(num_rows * padded);
#pragma omp parallel for schedule(static) num_threads(team)
    for (int part = 0; part < team; ++part) {
        table.convert_rows(weight, x, dtype, share(num_rows, team, part), share(num_rows, team, part + 1), rows);
    }
    return rows;
}

static void project(const LinearWeight &weight, const void *x, DType x_dtype, int64_t num_rows,
                    const Destination &out) {
    const Stopwatch stopwatch(KernelClass::linear);
    const KernelTable &table = kernels();
    const int64_t columns = out.is_gated ? weight.num_outputs / 2 : weight.num_outputs;
    for (int64_t row = 0; row < num_rows; row += PASS_ROWS) {
        const int64_t count = min64(PASS_ROWS, num_rows - row);
        const InputRows rows = convert(table, weight, offset(x, row * weight.num_inputs, x_dtype), x_dtype, count);
        Destination pass = out;
        pass.data = offset(out.data, row * columns, out.dtype);
        const Projection task{table, weight, rows, pass};
        count <= table.tile_rows ? project_few(task) : project_many(task);
    }
}

void linear(const LinearWeight &weight, const void *x, DType x_dtype, int64_t num_rows, void *out, DType out_dtype) {
    project(weight, x, x_dtype, num_rows, Destination{out, out_dtype, false, Activation::silu});
}

void linear_gated(const LinearWeight &weight, Activation activation, const void *x, DType x_dtype, int64_t num_rows,
                  void *out, DType out_dtype) {
    project(weight, x, x_dtype, num_rows, Destination{out, out_dtype, true, activation});
}

static void bind_linear(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    const auto run = [](const LinearWeight &weight, uintptr_t x, int x_dtype, int64_t num_rows, uintptr_t out,
                        int out_dtype) {
        linear(weight, reinterpret_cast<const void *>(x), static_cast<DType>(x_dtype), num_rows,
               reinterpret_cast<void *>(out), static_cast<DType>(out_dtype));
    };
    const auto run_gated = [](const LinearWeight &weight, int activation, uintptr_t x, int x_dtype, int64_t num_rows,
                              uintptr_t out, int out_dtype) {
        linear_gated(weight, static_cast<Activation>(activation), reinterpret_cast<const void *>(x),
                     static_cast<DType>(x_dtype), num_rows, reinterpret_cast<void *>(out),
                     static_cast<DType>(out_dtype));
    };
    m.def("linear", run, release());
    m.def("linear_gated", run_gated, release());
}
static const Registration registration(bind_linear);

}  // namespace quire
