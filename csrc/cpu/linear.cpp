// The division of a projection into blocks and threads. The arithmetic is in isa/gemm*.cpp.
//
// Rows are brought into tiles once (dispatch.hpp, InputRows). Each thread goes through neighbouring panels of the weight in
// order, and multiplies a few of them with all rows of a block before it goes on: a weight is read from memory once, and
// the block's rows come from the second-level cache, or the third where inputs are many.
#include "linear.hpp"

#include "bindings.hpp"
#include "checks.hpp"
#include "projection.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "timing.hpp"

namespace quire {

constexpr int64_t PASS_BLOCKS = 4;   // whose rows are converted at a time, so that scratch stays small
// Of rows that are multiplied as matrices: half of the second-level cache, whose other half weights pass through.
constexpr int64_t PASS_BYTES = 1 << 20;
// Outputs of that size are gone from the second-level caches before they are read, and a store of theirs that first reads
// its line would wait for the memory (docs/lab/kernels-cpu.md).
constexpr int64_t STREAMED_BYTES = 4 << 20;

// Sums of `num_panels` panels into `sums`.
static void multiply(const Projection &task, const Block &block, int64_t first_panel, int64_t num_panels, float *sums,
                     void *expanded) {
    const GemmBlock gemm{block.first_tile, block.num_tiles, first_panel, static_cast<int>(num_panels), sums, expanded, nullptr};
    task.table.gemm(task.weight, task.rows, gemm);
}

void compute(const Projection &task, const Block &block) {
    const int64_t columns = task.num_columns(), first = block.first_panel * PANEL;
    const int64_t row = task.rows.first_row(block.first_tile), end = task.rows.first_row(block.first_tile + block.num_tiles);
    const int64_t num_sums = (end - row) * GROUP_WIDTH;
    float *memory = scratch(GEMM_BLOCK, 2 * num_sums + expanded_bytes(task.weight) / sizeof(float));
    float *up_sums = memory + num_sums, *expanded = up_sums + num_sums;
    const OutputBlock out{offset(task.out.data, row * task.out.stride, task.out.dtype), task.out.dtype, task.out.stride,
                          first - task.out.first_column, min64(block.num_panels * PANEL, columns - first), end - row};
    const float *bias = task.weight.bias == nullptr ? nullptr : task.weight.bias + first;
    const float *up_bias = bias == nullptr ? nullptr : bias + columns;
    if (task.is_fused()) {
        const Outputs outputs{out, bias, up_bias, task.out.is_gated, task.out.activation, columns / PANEL,
                              task.out.is_streamed};
        return task.table.gemm(task.weight, task.rows, GemmBlock{block.first_tile, block.num_tiles, block.first_panel,
                                                                 static_cast<int>(block.num_panels), memory, expanded,
                                                                 &outputs});
    }
    multiply(task, block, block.first_panel, block.num_panels, memory, expanded);
    if (!task.out.is_gated) return task.table.store_sums(memory, bias, out);
    const int64_t up = columns + first, up_panel = up / PANEL, up_end = ceil_div(up + out.width, PANEL);
    multiply(task, block, up_panel, up_end - up_panel, up_sums, expanded);
    task.table.store_gated(memory, up_sums + up % PANEL, bias, up_bias, task.out.activation, out);
}

// Blocks of the same panels are neighbours, so that a thread has them from its cache.
static void multiply_all(const Projection &task) {
    const int team = team_size(task.rows.num_rows * task.weight.num_outputs * task.weight.padded_inputs());
    const int64_t block_tiles = task.has_matrices() ? task.rows.num_tiles : BLOCK_ROWS / task.rows.tile_rows;
    const int64_t panels = task.num_panels(), row_blocks = ceil_div(task.rows.num_tiles, block_tiles);
    int64_t groups = ceil_div(panels, task.max_panels());
    if (groups * row_blocks < FEW_ITEMS * team) groups = min64(panels, round_up(groups, team));
    Shares shares(groups * row_blocks, team);
#pragma omp parallel num_threads(team)
    {
        for (int64_t item; (item = shares.take(thread_index())) >= 0;) {
            const int64_t group = item / row_blocks, part = item % row_blocks;
            const int64_t panel = share(panels, groups, group), tile = share(task.rows.num_tiles, row_blocks, part);
            compute(task, Block{tile, share(task.rows.num_tiles, row_blocks, part + 1) - tile, panel,
                                share(panels, groups, group + 1) - panel});
        }
        if (task.table.end_gemms != nullptr) task.table.end_gemms();
    }
}

InputRows form_of(const KernelTable &table, const LinearWeight &weight, DType dtype, int64_t num_rows) {
    const bool is_bf16 = table.has_bf16_dots && weight.format == WeightFormat::bf16 && dtype == DType::bf16;
    const int64_t integer = weight.format == WeightFormat::int4 ? table.int4_input_bytes : table.int8_input_bytes;
    const int64_t element = weight.has_int8_inputs ? integer : size_of(is_bf16 ? DType::bf16 : DType::f32);
    const int depth = table.matrix_depth == nullptr ? 0 : table.matrix_depth(weight, is_bf16, num_rows);
    const int64_t group_words = weight.padded_group() * element / int64_t{sizeof(float)};
    const bool is_int8 = weight.has_int8_inputs && weight.format == WeightFormat::int8;
    const int height = depth > 0 ? MATRIX_ROWS : is_int8 ? table.int8_tile_rows : table.tile_rows;
    const int64_t num_tiles = ceil_div(num_rows, height);
    const int tile_rows = depth > 0 ? static_cast<int>(ceil_div(num_rows, num_tiles)) : height;
    return {nullptr, weight.num_groups() * (depth > 0 ? round_up(group_words, depth) : group_words), tile_rows, depth,
            is_bf16, nullptr, nullptr, num_rows, num_tiles, num_rows / num_tiles, num_rows % num_tiles};
}

bool is_in_form(const InputRows &form, const LinearWeight &weight, DType dtype) {
    const bool is_own_dtype = !weight.has_int8_inputs && dtype == (form.is_bf16 ? DType::bf16 : DType::f32);
    return form.num_rows == 1 && is_own_dtype && form.row_words * int64_t{sizeof(float)} == weight.num_inputs * size_of(dtype);
}

// Rows in the form that is multiplied: x itself where it is that already.
static InputRows convert(const KernelTable &table, const LinearWeight &weight, const void *x, DType dtype,
                         int64_t num_rows) {
    InputRows rows = form_of(table, weight, dtype, num_rows);
    rows.data = x;
    if (is_in_form(rows, weight, dtype)) return rows;
    rows.data = scratch(INPUT_ROWS, rows.num_tiles * rows.tile_rows * rows.row_words);
    if (weight.has_int8_inputs) {
        float *scales = scratch(INPUT_SCALES, num_rows * (1 + weight.num_groups()));
        rows.scales = scales;
        rows.starts = reinterpret_cast<int32_t *>(scales + num_rows);
    }
    const int team = team_size(num_rows * weight.padded_inputs());
#pragma omp parallel for schedule(static) num_threads(team)
    for (int part = 0; part < team; ++part) {
        uint32_t *spare = reinterpret_cast<uint32_t *>(scratch(GEMM_BLOCK, rows.tile_rows * rows.row_words));
        table.convert_rows(weight, x, dtype, share(rows.num_tiles, team, part), share(rows.num_tiles, team, part + 1), rows,
                           spare);
    }
    return rows;
}

// Rows that are converted at a time. Products of tiles are so fast that the third-level cache cannot keep up with them, so
// each pass goes through the whole weight with rows that stay nearer, and as many as in any other pass: a last one of few rows
// would wait for the weight.
static int64_t rows_of_pass(const InputRows &rows) {
    if (rows.depth == 0) return PASS_BLOCKS * (BLOCK_ROWS / rows.tile_rows * rows.tile_rows);
    const int64_t block_bytes = BLOCK_ROWS * rows.row_words * int64_t{sizeof(uint32_t)};
    const int64_t most = BLOCK_ROWS * max64(1, min64(PASS_BLOCKS, PASS_BYTES / block_bytes));
    return round_up(ceil_div(rows.num_rows, ceil_div(rows.num_rows, most)), 2 * MATRIX_ROWS);
}

static void project(const LinearWeight &weight, const void *x, DType x_dtype, int64_t num_rows,
                    const Destination &out) {
    if (num_rows == 0) return;
    const Stopwatch stopwatch(KernelClass::linear);
    const KernelTable &table = kernels();
    const int64_t columns = out.is_gated ? weight.num_outputs / 2 : weight.num_outputs;
    const int64_t pass_rows = rows_of_pass(form_of(table, weight, x_dtype, num_rows));
    Destination pass = out;
    pass.is_streamed = num_rows * columns * size_of(out.dtype) >= STREAMED_BYTES;
    for (int64_t row = 0; row < num_rows; row += pass_rows) {
        const int64_t count = min64(pass_rows, num_rows - row);
        const InputRows rows = convert(table, weight, offset(x, row * weight.num_inputs, x_dtype), x_dtype, count);
        pass.data = offset(out.data, row * columns, out.dtype);
        multiply_all(Projection{table, weight, rows, pass});
    }
}

void linear(const LinearWeight &weight, const void *x, DType x_dtype, int64_t num_rows, void *out, DType out_dtype) {
    project(weight, x, x_dtype, num_rows, Destination{out, out_dtype, weight.num_outputs, false, Activation::silu});
}

void linear_gated(const LinearWeight &weight, Activation activation, const void *x, DType x_dtype, int64_t num_rows,
                  void *out, DType out_dtype) {
    project(weight, x, x_dtype, num_rows, Destination{out, out_dtype, weight.num_outputs / 2, true, activation});
}

// x and `out` of a projection, checked.
struct Ends {
    Memory x, out;
    DType x_dtype, out_dtype;
};

static Ends checked(const Arguments &args, const LinearWeight &weight, uintptr_t x, int x_dtype, int64_t num_rows,
                    uintptr_t out, int out_dtype, int64_t num_columns) {
    Ends ends{{}, {}, args.dtype(x_dtype), args.dtype(out_dtype)};
    ends.x = args.memory("x", x, ends.x_dtype, {num_rows, weight.num_inputs});
    ends.out = args.memory("out", out, ends.out_dtype, {num_rows, num_columns});
    args.apart(ends.out, ends.x);
    return ends;
}

static void run(const LinearWeight &weight, uintptr_t x, int x_dtype, int64_t num_rows, uintptr_t out, int out_dtype) {
    check_attached("linear", weight);
    const Ends ends = checked(Arguments("linear"), weight, x, x_dtype, num_rows, out, out_dtype, weight.num_outputs);
    linear(weight, ends.x.as<const void>(), ends.x_dtype, num_rows, ends.out.as<void>(), ends.out_dtype);
}

static void run_gated(const LinearWeight &weight, int activation, uintptr_t x, int x_dtype, int64_t num_rows,
                      uintptr_t out, int out_dtype) {
    const Arguments args("linear_gated");
    check_attached("linear_gated", weight);
    args.require(weight.num_outputs % 2 == 0, "the weight must have as many outputs for gate as for up");
    const Activation function = args.activation(activation);
    const Ends ends = checked(args, weight, x, x_dtype, num_rows, out, out_dtype, weight.num_outputs / 2);
    linear_gated(weight, function, ends.x.as<const void>(), ends.x_dtype, num_rows, ends.out.as<void>(), ends.out_dtype);
}

static void bind_linear(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.def("linear", &run, release());
    m.def("linear_gated", &run_gated, release());
}
static const Registration registration(bind_linear);

}  // namespace quire
