// The division of adapters' products into pieces and threads, and the bindings. The arithmetic is in isa/lora.cpp.
#include "lora.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings.hpp"
#include "checks.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "timing.hpp"

namespace quire {

// Of one piece of work: rows stay in the second-level cache beside the weights that they are multiplied by.
constexpr int64_t PIECE_ROWS = 32;
constexpr int64_t PIECE_RANKS = 8;
constexpr int64_t PIECE_OUTPUTS = 8 * LORA_PANEL;
constexpr int64_t MAX_ADAPTERS = 1 << 20;
// Operations for each byte of weights that decide whether a fork pays: one row of one adapter of rank 16 takes 10 us, which two
// threads do not shorten.
constexpr int64_t WORK_PER_BYTE = 8;

// ---- rows ----

AdaptedRows::AdaptedRows(const std::vector<const Adapter *> &adapters, const int32_t *of_row, int64_t num_rows) {
    const int64_t count = static_cast<int64_t>(adapters.size());
    if (std::find(adapters.begin(), adapters.end(), nullptr) != adapters.end()) throw std::invalid_argument("lora: no adapter");
    std::vector<std::vector<int64_t>> rows(count);
    for (int64_t r = 0; r < num_rows; ++r) {
        if (of_row[r] < -1 || of_row[r] >= count) {
            throw std::invalid_argument("lora: row " + std::to_string(r) + " names adapter " + std::to_string(of_row[r]) +
                                        " of " + std::to_string(count));
        }
        if (of_row[r] >= 0) rows[of_row[r]].push_back(r);
    }
    for (int64_t a = 0; a < count; ++a) {
        if (!rows[a].empty()) groups_.push_back({adapters[a], std::move(rows[a])});
    }
}

bool AdaptedRows::concern(int64_t weight, int64_t first, int64_t last) const {
    for (const Group &group : groups_) {
        if (group.adapter->of(weight) == nullptr) continue;
        const auto found = std::lower_bound(group.rows.begin(), group.rows.end(), first);
        if (found != group.rows.end() && *found < last) return true;
    }
    return false;
}

AdaptedRows AdaptedRows::between(int64_t first, int64_t last) const {
    AdaptedRows part;
    for (const Group &group : groups_) {
        Group inside{group.adapter, {}};
        for (const int64_t row : group.rows) {
            if (row >= first && row < last) inside.rows.push_back(row - first);
        }
        if (!inside.rows.empty()) part.groups_.push_back(std::move(inside));
    }
    return part;
}

AdaptedRows AdaptedRows::chosen(const std::vector<int64_t> &rows) const {
    AdaptedRows part;
    for (const Group &group : groups_) {
        Group inside{group.adapter, {}};
        for (size_t place = 0; place < rows.size(); ++place) {
            if (std::binary_search(group.rows.begin(), group.rows.end(), rows[place])) {
                inside.rows.push_back(static_cast<int64_t>(place));
            }
        }
        if (!inside.rows.empty()) part.groups_.push_back(std::move(inside));
    }
    return part;
}

// ---- products ----

namespace {

// What one call computes, cut into pieces that threads take: first all of `down`, then all of `up`.
struct Pieces {
    std::vector<LoraRows> down, up;
    int64_t work = 0;  // operations, an estimate
};

template <typename Cut>
void over_blocks(int64_t first, int64_t last, int64_t size, Cut cut) {
    for (int64_t at = first; at < last; at += size) cut(at, min64(at + size, last));
}

bool is_within(const LoraPart &part, int64_t first_column, int64_t width) {
    return part.first_output >= first_column && part.first_output + part.num_outputs <= first_column + width;
}

// `task` has what all pieces of the group and the weight have in common.
void cut_pieces(const LoraWeight &weight, LoraRows task, int64_t num_rows, int64_t first_column, int64_t width, Pieces &pieces) {
    int64_t first_rank = weight.num_ranks, last_rank = 0;
    for (const LoraPart &part : weight.parts) {
        if (!is_within(part, first_column, width)) continue;
        first_rank = min64(first_rank, part.first_rank);
        last_rank = max64(last_rank, part.first_rank + part.rank);
        pieces.work += num_rows * part.rank * (part.num_outputs + weight.num_inputs);
    }
    over_blocks(0, num_rows, PIECE_ROWS, [&](int64_t first, int64_t last) {
        task.first_row = first;
        task.last_row = last;
        const int64_t first_block = first_rank / LORA_RANKS * LORA_RANKS;
        over_blocks(first_block, min64(round_up(last_rank, LORA_RANKS), weight.num_ranks), PIECE_RANKS, [&](int64_t rank, int64_t end) {
            LoraRows piece = task;
            piece.first_rank = rank;
            piece.last_rank = end;
            pieces.down.push_back(piece);
        });
        for (const LoraPart &part : weight.parts) {
            if (!is_within(part, first_column, width)) continue;
            LoraRows piece = task;
            piece.first_rank = part.first_rank;
            piece.last_rank = part.first_rank + part.rank;
            piece.up = part.up;
            piece.bias = part.bias;
            piece.replaced = part.replaced;
            piece.num_outputs = part.num_outputs;
            piece.y_column = part.first_output - first_column;
            over_blocks(0, part.num_outputs, PIECE_OUTPUTS, [&](int64_t output, int64_t end) {
                piece.first_output = output;
                piece.last_output = end;
                pieces.up.push_back(piece);
            });
        }
    });
}

void run(const Pieces &pieces) {
    const KernelTable &table = kernels();
    const int64_t num_down = static_cast<int64_t>(pieces.down.size()), num_up = static_cast<int64_t>(pieces.up.size());
#pragma omp parallel num_threads(team_size(pieces.work / WORK_PER_BYTE))
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_down; ++i) table.lora_down(pieces.down[i]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_up; ++i) table.lora_up(pieces.up[i]);
    }
}

}  // namespace

int64_t AdaptedRows::num_products(int64_t weight) const {
    int64_t count = 0;
    for (const Group &group : groups_) {
        const LoraWeight *lora = group.adapter->of(weight);
        if (lora != nullptr) count += static_cast<int64_t>(group.rows.size()) * lora->num_ranks;
    }
    return count;
}

void AdaptedRows::add_to(int64_t weight, const void *x, DType x_dtype, void *y, DType y_dtype, int64_t first_column,
                         int64_t y_width) const {
    const int64_t count = num_products(weight);
    if (count == 0) return;
    const Stopwatch stopwatch(KernelClass::linear);
    float *products = scratch(LORA_PRODUCTS, count);
    Pieces pieces;
    for (const Group &group : groups_) {
        const LoraWeight *lora = group.adapter->of(weight);
        if (lora == nullptr) continue;
        const int64_t num_rows = static_cast<int64_t>(group.rows.size());
        LoraRows task{};
        task.rows = group.rows.data();
        task.dtype = group.adapter->dtype;
        task.products = products;
        task.num_ranks = lora->num_ranks;
        task.x = x;
        task.down = lora->down;
        task.x_dtype = x_dtype;
        task.num_inputs = lora->num_inputs;
        task.scales = lora->scales;
        task.y = y;
        task.y_dtype = y_dtype;
        task.y_stride = y_width;
        cut_pieces(*lora, task, num_rows, first_column, y_width, pieces);
        products += num_rows * lora->num_ranks;
    }
    run(pieces);
}

// One row of an adapter's table, as floats.
static void read_row(const LoraWeight &lora, DType dtype, int64_t id, float *out) {
    if (id < 0 || id >= lora.num_inputs) {
        throw std::out_of_range("lora: token id " + std::to_string(id) + " is outside an embedding of " +
                                std::to_string(lora.num_inputs) + " rows");
    }
    kernels().convert(offset(lora.down, id * lora.num_ranks, dtype), dtype, out, DType::f32, lora.num_ranks);
    for (int64_t rank = 0; rank < lora.num_ranks; ++rank) out[rank] *= lora.scales[rank];
}

void AdaptedRows::add_embedding(int64_t weight, const int64_t *ids, void *y, DType y_dtype, int64_t y_width) const {
    const int64_t count = num_products(weight);
    if (count == 0) return;
    const Stopwatch stopwatch(KernelClass::elementwise);
    float *products = scratch(LORA_PRODUCTS, count);
    Pieces pieces;
    for (const Group &group : groups_) {
        const LoraWeight *lora = group.adapter->of(weight);
        if (lora == nullptr) continue;
        LoraRows task{};
        task.rows = group.rows.data();
        task.dtype = group.adapter->dtype;
        task.products = products;
        task.num_ranks = lora->num_ranks;
        task.y = y;
        task.y_dtype = y_dtype;
        task.y_stride = y_width;
        cut_pieces(*lora, task, static_cast<int64_t>(group.rows.size()), 0, y_width, pieces);
        for (const int64_t row : group.rows) {
            read_row(*lora, task.dtype, ids[row], products);
            products += lora->num_ranks;
        }
    }
    pieces.down.clear();
    run(pieces);
}

// ---- bindings ----

// (first output, outputs, first rank, rank, addresses of `up`, of a bias and of the one that it replaces, or 0)
using Part = std::tuple<int64_t, int64_t, int64_t, int64_t, uintptr_t, uintptr_t, uintptr_t>;

static void init_adapter(Adapter *self, int dtype, int64_t num_weights) {
    const Arguments args("Adapter");
    const DType type = args.dtype(dtype);
    new (self) Adapter{type, std::vector<LoraWeight>(args.between(0, MAX_ADAPTERS, "the number of weights", num_weights))};
}

static void set_weight(Adapter &adapter, int64_t number, int64_t num_ranks, int64_t num_inputs, int64_t num_outputs,
                       uintptr_t down, uintptr_t scales, const std::vector<Part> &parts) {
    const Arguments args("Adapter.set_weight");
    args.between(0, static_cast<int64_t>(adapter.weights.size()) - 1, "the number of a weight", number);
    LoraWeight weight;
    weight.num_ranks = args.count("the ranks", num_ranks, 1);
    weight.num_inputs = args.count("the inputs", num_inputs, 1);
    weight.num_outputs = args.count("the outputs", num_outputs, 1);
    weight.down = args.memory("down", down, adapter.dtype, {num_ranks, num_inputs}).as<const void>();
    weight.scales = args.array<const float>("scales", scales, {num_ranks});
    for (const auto &[first_output, outputs, first_rank, rank, up, bias, replaced] : parts) {
        args.between(0, num_outputs, "the first output", first_output);
        args.between(1, num_outputs - first_output, "the outputs of a part", outputs);
        args.between(0, num_ranks, "the first rank", first_rank);
        args.between(1, num_ranks - first_rank, "the ranks of a part", rank);
        const Memory memory = args.memory("up", up, adapter.dtype, {outputs, rank});
        weight.parts.push_back({first_output, outputs, first_rank, rank,
                                args.array<const float>("the bias", bias, {bias == 0 ? 0 : outputs}),
                                args.array<const float>("the replaced bias", replaced, {replaced == 0 ? 0 : outputs}),
                                memory.as<const void>()});
    }
    adapter.weights[number] = std::move(weight);
}

static void check_width(const Arguments &args, const std::vector<const Adapter *> &adapters, int64_t number,
                        int64_t num_inputs) {
    for (const Adapter *adapter : adapters) {
        const LoraWeight *weight = adapter->of(number);
        if (weight != nullptr) args.require(weight->num_inputs == num_inputs, "an adapter for another width of x");
    }
}

static void add_lora(const std::vector<const Adapter *> &adapters, uintptr_t of_row, int64_t weight, uintptr_t x, int x_dtype,
                     int64_t num_rows, int64_t num_inputs, uintptr_t y, int y_dtype, int64_t first_column, int64_t num_columns) {
    const Arguments args("lora");
    check_width(args, adapters, weight, num_inputs);
    args.count("the weight", weight);
    args.count("the first column", first_column);
    const DType from_type = args.dtype(x_dtype), to_type = args.dtype(y_dtype);
    const Memory from = args.memory("x", x, from_type, {num_rows, num_inputs});
    const Memory to = args.memory("y", y, to_type, {num_rows, num_columns});
    args.apart(to, from);
    const AdaptedRows rows(adapters, args.array<const int32_t>("of_row", of_row, {num_rows}), num_rows);
    rows.add_to(weight, from.as<const void>(), from_type, to.as<void>(), to_type, first_column, num_columns);
}

static void add_lora_embedding(const std::vector<const Adapter *> &adapters, uintptr_t of_row, int64_t weight, uintptr_t ids,
                               int64_t num_rows, uintptr_t y, int y_dtype, int64_t num_columns) {
    const Arguments args("lora");
    args.count("the weight", weight);
    const DType type = args.dtype(y_dtype);
    const Memory to = args.memory("y", y, type, {num_rows, num_columns});
    const AdaptedRows rows(adapters, args.array<const int32_t>("of_row", of_row, {num_rows}), num_rows);
    rows.add_embedding(weight, args.array<const int64_t>("the ids", ids, {num_rows}), to.as<void>(), type, num_columns);
}

static void bind_lora(nb::module_ &m) {
    m.attr("LORA_PANEL") = LORA_PANEL;
    m.attr("LORA_RANKS") = LORA_RANKS;
    m.attr("LORA_CHUNK") = LORA_CHUNK;
    nb::class_<Adapter>(m, "Adapter")
        .def("__init__", &init_adapter)
        .def("set_weight", &set_weight);
    m.def("add_lora", &add_lora, nb::call_guard<nb::gil_scoped_release>());
    m.def("add_lora_embedding", &add_lora_embedding, nb::call_guard<nb::gil_scoped_release>());
}
static const Registration registration(bind_lora);

}  // namespace quire
