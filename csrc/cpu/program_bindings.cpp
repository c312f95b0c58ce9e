// Programs as Python sees them: lists that operations are added to (quire/kernels/cpu/program.py). Whatever
// would let an operation touch memory outside its values is refused here, when it is added. Addresses stay valid because the
// Python side keeps the tensors.
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings.hpp"
#include "checks.hpp"
#include "program.hpp"

namespace quire {

using namespace nb::literals;
using Place = std::pair<int64_t, int64_t>;  // column and width of a value

constexpr int64_t MAX_WEIGHTS = 1 << 20;
constexpr int NUM_KINDS = 22;
// norm: or 2, with as many outputs
constexpr int NUM_INPUTS[NUM_KINDS] = {0, 1, 2, 1, 1, 1, 1, 1, 1, 1, 2, 1, 2, 1, 0, 1, 1, 1, 1, 1, 0, 1};

// The operations of one list, and the room that their values take.
struct Operations {
    DType dtype;
    int64_t width;  // of the result
    int64_t arena_width = 0, num_caches = 0;
    std::vector<Operation> list{};

    Value value(const Arguments &args, const Place &place) {
        const Value found{place.first, args.count("the width of a value", place.second, 1)};
        if (found.column == Value::RESULT) {
            args.require(found.width == width, "the result is not as wide as the program says");
        } else {
            arena_width = max64(arena_width, args.count("a column", found.column) + found.width);
        }
        return found;
    }
};

static bool are_apart(const Value &a, const Value &b) {
    if (a.column == Value::RESULT || b.column == Value::RESULT) return a.column != b.column;
    return a.column + a.width <= b.column || b.column + b.width <= a.column;
}

// As wide as one another, and apart or in one place.
static bool are_elementwise(const Value &x, const Value &out) {
    return x.width == out.width && (x.column == out.column || are_apart(x, out));
}

static void init_norm(NormWeight *self, uintptr_t weight, uintptr_t bias, int dtype, int64_t width, float eps,
                      float offset, bool is_layer) {
    const Arguments args("NormWeight");
    const DType type = args.dtype(dtype);
    args.count("the width", width, 1);
    const Memory gain = args.memory("the weight", weight, type, {width});
    const Memory added = args.memory("the bias", bias, type, {bias == 0 ? 0 : width});
    new (self) NormWeight{gain.as<const void>(), added.as<const void>(), type, width, args.magnitude("eps", eps),
                          args.finite("the offset", offset), is_layer};
}

// Whether the values of an operation are those that its kind takes, and what it writes is nothing that it still reads.
static bool do_values_fit(const Operation &each) {
    const Heads &heads = each.heads;
    switch (each.kind) {
        case Kind::gather:
            return are_apart(each.x, each.out);
        case Kind::embed:
        case Kind::embed_gathered:
            return each.table.width == each.out.width;
        case Kind::add:
            return are_elementwise(each.x, each.out) && are_elementwise(each.y, each.out);
        case Kind::norm:
            if (each.norm.width != each.x.width || !are_elementwise(each.x, each.out)) return false;
            return each.y.width == 0 || (each.y.width == each.x.width && are_elementwise(each.y, each.sum) &&
                                         are_apart(each.out, each.sum) && are_apart(each.out, each.y) && are_apart(each.x, each.sum));
        case Kind::linear:
            return each.weight.num_inputs == each.x.width && are_apart(each.x, each.out);
        case Kind::gated_linear:
            return each.weight.num_inputs == each.x.width && each.weight.num_outputs == 2 * each.out.width &&
                   are_apart(each.x, each.out);
        case Kind::prepare_heads:
            return heads.width() == each.x.width && each.x.column == each.out.column && each.out.width == each.x.width;
        case Kind::attend:
            return heads.query_width() <= each.x.width && are_apart(each.x, each.out) &&
                   heads.num_queries * (each.value_size > 0 ? each.value_size : heads.size) == each.out.width;
        case Kind::head_linear: {
            const HeadWeights weights{each.weight, heads.num_queries, heads.size};
            return are_whole(weights) && heads.query_width() == each.x.width && are_apart(each.x, each.out) &&
                   heads.num_queries * weights.out_size() == each.out.width;
        }
        case Kind::rotate_tails:
            return heads.query_width() == each.x.width && each.x.column == each.out.column && each.out.width == each.x.width;
        case Kind::write_latent:
            return heads.size == each.x.width && each.x.column == each.out.column && each.out.width == each.x.width &&
                   each.norm.width == heads.size - 2 * each.rope_half;
        case Kind::scatter:
            return each.x.width == each.out.width && each.y.width == each.out.width && are_apart(each.x, each.out) &&
                   are_apart(each.y, each.out);
        case Kind::experts:
            return each.layer.hidden() == each.x.width && are_apart(each.x, each.out) && are_whole(each.layer) &&
                   each.layer.own_hidden() == each.out.width && each.router.num_inputs == each.x.width &&
                   each.router.num_outputs == each.layer.num_experts && each.routing.num_experts == each.layer.num_experts;
        case Kind::gate_rows:
            return are_elementwise(each.x, each.out) && each.y.width == 1 && are_apart(each.y, each.out);
        case Kind::take:
            return true;
        default:  // scale, activate, select, place, add_placed, adapt_embedding
            return are_elementwise(each.x, each.out);
    }
}

// Of all heads together, or of each by itself.
static bool is_head_norm(const NormWeight &norm, int64_t head_size, int64_t num_heads) {
    return !norm.is_present() || norm.width == head_size || norm.width == head_size * num_heads;
}

static void check_heads(const Arguments &args, const Operation &each) {
    const Heads &heads = each.heads;
    args.between(1, MAX_HEAD_SIZE, "the head size", heads.size);
    args.between(0, MAX_HEADS, "the number of heads", heads.num_queries);
    args.between(0, MAX_HEADS, "the number of KV heads", heads.num_keys);
    args.between(Operation::NO_CACHE, MAX_HEADS, "the cache", each.cache);
    if (each.kind == Kind::attend) {
        args.require(each.cache != Operation::NO_CACHE || each.x.width == heads.width(), "attention without keys and values");
        args.require(heads.num_keys > 0 && heads.num_queries % heads.num_keys == 0, "heads must be a multiple of KV heads");
    }
    args.between(0, heads.size / 2, "rope_half", each.rope_half);
    args.between(0, heads.size, "the size of a value", each.value_size);
    const bool has_tails = each.kind == Kind::rotate_tails || each.kind == Kind::write_latent;
    args.require(!has_tails || each.rope != nullptr, "no RoPE");
    args.require(each.kind != Kind::write_latent || (each.cache != Operation::NO_CACHE && heads.num_keys == 1 && each.norm.is_present()),
                 "a latent without a norm or a cache");
    const bool are_head_norms =
        is_head_norm(each.norm, heads.size, heads.num_queries) && is_head_norm(each.key_norm, heads.size, heads.num_keys);
    args.require(each.kind == Kind::write_latent || are_head_norms,
                 "a norm of queries or keys spans neither a head nor all of them");
}

// `columns`: first and one past the last, of the output; as many as the input has.
static void add_columns(const Arguments &args, Operation &each, const std::vector<Place> &columns, DType dtype) {
    int64_t width = 0;
    for (const auto &[first, end] : columns) {
        args.between(0, each.out.width, "the first column", first);
        args.between(first, each.out.width, "the last column", end);
        width += end - first;
        each.columns.push_back({first * size_of(dtype), (end - first) * size_of(dtype)});
    }
    args.require(each.kind != Kind::gather || width == each.x.width, "columns that are not the input's");
}

static void add_operation(Operations &operations, int kind, bool is_narrow, const std::vector<Place> &inputs,
                          const std::vector<Place> &outputs, const Lookup *table, bool of_positions, float factor,
                          const NormWeight *norm, const NormWeight *key_norm, const LinearWeight *weight, int64_t first_output,
                          int64_t number, int activation, const std::array<int64_t, 3> &heads, uintptr_t rope, int64_t rope_half, int64_t cache,
                          float scale, float soft_cap, int64_t window, uintptr_t sinks, uintptr_t bias, int64_t bias_reach,
                          const LinearWeight *down, const LinearWeight *router, const ExpertRouting *routing,
                          bool is_interleaved, int64_t value_size, ExpertPool *pool, Gathering *gathering, const std::vector<Place> &columns, int64_t first_id,
                          int64_t num_ids, const std::array<int64_t, 3> &numbers) {
    const Arguments args("Operations.add");
    args.between(0, NUM_KINDS - 1, "the kind", kind);
    const bool has_residual = static_cast<Kind>(kind) == Kind::norm && inputs.size() == 2;
    const size_t num_outputs = has_residual ? 2 : 1, num_inputs = has_residual ? 2 : NUM_INPUTS[kind];
    args.require(inputs.size() == num_inputs && outputs.size() == num_outputs, "another number of values");
    Operation each{};
    each.kind = static_cast<Kind>(kind);
    each.is_narrow = is_narrow;
    if (num_inputs > 0) each.x = operations.value(args, inputs[0]);
    if (num_inputs > 1) each.y = operations.value(args, inputs[1]);
    each.out = operations.value(args, outputs[0]);
    if (has_residual) each.sum = operations.value(args, outputs[1]);
    if (each.kind == Kind::embed || each.kind == Kind::embed_gathered) {
        args.require(table != nullptr && table->dtype == operations.dtype, "a table of another dtype");
        each.table = *table;
    }
    each.of_positions = of_positions;
    if (each.kind == Kind::gather || each.kind == Kind::embed_gathered) {
        args.require(gathering != nullptr, "no ranks to gather from");
        each.gathering = gathering;
        add_columns(args, each, columns, operations.dtype);
        each.first_id = args.count("the first id", first_id);
        each.num_ids = args.count("the number of ids", num_ids);
    }
    each.factor = args.finite("the factor", factor);
    if (norm != nullptr) each.norm = *norm;
    if (key_norm != nullptr) each.key_norm = *key_norm;
    if (each.kind == Kind::linear || each.kind == Kind::gated_linear || each.kind == Kind::head_linear) {
        args.require(weight != nullptr, "no weight");
        check_attached("Operations.add", *weight);
        each.weight = *weight;
    }
    if (each.kind == Kind::linear) {
        args.require(each.out.width <= weight->num_outputs, "values that do not fit");
        args.between(0, weight->num_outputs - each.out.width, "the first output", first_output);
        args.require(first_output % PANEL == 0, "the outputs do not begin with a panel");
        each.weight = weight->part(first_output, each.out.width);
    }
    each.number = args.between(Operation::NO_ADAPTERS, MAX_WEIGHTS, "the number of the weight", number);
    each.first_output = args.count("the first output", first_output);
    each.activation = each.kind == Kind::activate ? args.unary_activation(activation) : args.activation(activation);
    if (each.kind == Kind::experts) {
        args.require(weight != nullptr && down != nullptr && router != nullptr && routing != nullptr, "no weights of experts");
        check_attached("Operations.add", *router);
        each.layer = {*weight, *down, router->num_outputs, each.activation, pool, pool == nullptr ? 0 : number};
        if (gathering != nullptr) {
            args.require(pool == nullptr && num_ids > 0 && columns.size() == 1, "experts of a rank without what it has of them");
            const auto [begin, end] = columns[0];
            each.layer.held = {gathering, args.count("the first expert", first_id), num_ids, {begin, end - begin}};
        }
        each.number = Operation::NO_ADAPTERS;
        for (const int64_t one : numbers) args.between(Operation::NO_ADAPTERS, MAX_WEIGHTS, "the number of a weight", one);
        each.numbers = {nullptr, numbers[0], numbers[1], numbers[2]};
        check_memory("Operations.add", each.layer);
        each.router = *router;
        each.routing = *routing;
    }
    each.heads = {heads[0], heads[1], heads[2]};
    each.rope = args.array<const float>("rope", rope, {rope == 0 ? 0 : 1, 2, rope_half});
    each.rope_half = rope_half;
    each.cache = cache;
    each.scale = args.finite("the scale", scale);
    each.soft_cap = args.magnitude("the soft cap", soft_cap);
    each.window = args.count("the window", window);
    args.require(sinks == 0 || each.cache != Operation::NO_CACHE, "sinks are for attention over a cache");
    each.sinks = args.array<const float>("sinks", sinks, {sinks == 0 ? 0 : heads[0]});
    args.between(0, int64_t{1} << 31, "the reach of the bias", bias_reach);
    args.require(bias == 0 || each.cache == Operation::NO_CACHE, "a bias is for attention without a cache");
    each.bias = args.array<const float>("bias", bias, {bias == 0 ? 0 : heads[0], 2 * bias_reach + 1});
    each.bias_reach = bias_reach;
    each.is_interleaved = is_interleaved;
    each.value_size = value_size;
    if (each.kind == Kind::prepare_heads || each.kind == Kind::attend || (each.kind >= Kind::head_linear && each.kind <= Kind::write_latent)) {
        check_heads(args, each);
    }
    args.require(do_values_fit(each), "values that do not fit");
    operations.num_caches = max64(operations.num_caches, cache + 1);
    operations.list.push_back(each);
}

static void init_cache(KVCache *self, uintptr_t keys, uintptr_t values, int format, int64_t num_blocks,
                       int64_t num_kv_heads, int64_t block_size, int64_t head_size) {
    new (self) KVCache(make_cache(keys, values, format, num_blocks, num_kv_heads, block_size, head_size));
}

static void init_operations(Operations *self, int dtype, int64_t width) {
    const Arguments args("Operations");
    new (self) Operations{args.dtype(dtype), args.count("the width", width, 1)};
}

// Each mixture of a pool learns how the one behind it chooses.
static void link_mixtures(std::vector<Operation> &list) {
    Operation *before = nullptr;
    for (Operation &each : list) {
        if (each.kind != Kind::experts || each.layer.pool == nullptr) continue;
        if (before != nullptr && before->layer.pool == each.layer.pool && before->x.width == each.x.width) {
            before->next = {each.layer.number, each.router, each.routing};
        }
        before = &each;
    }
}

static void init_program(Program *self, const Operations &whole, const Operations &wanted, int64_t num_positions) {
    const Arguments args("Program");
    args.require(whole.dtype == wanted.dtype && whole.width == wanted.width, "both lists must be alike");
    for (const Operation &each : whole.list) {
        args.require(!each.is_narrow && each.kind != Kind::scatter, "the whole list has rows that are wanted alone");
    }
    ProgramLists lists{whole.list, wanted.list, whole.dtype, whole.width, max64(whole.arena_width, wanted.arena_width),
                       max64(whole.num_caches, wanted.num_caches), args.count("the number of positions", num_positions, 1)};
    link_mixtures(lists.whole);
    link_mixtures(lists.wanted);
    new (self) Program(std::move(lists));
}

// `tables`: of each group, its slots and its block tables.
static void forward(Program &program, uintptr_t token_ids, uintptr_t positions, uintptr_t query_start, uintptr_t context_len,
                    int64_t num_sequences, int64_t num_tokens, const std::vector<std::pair<uintptr_t, uintptr_t>> &tables,
                    int64_t table_stride, uintptr_t num_wanted,
                    const std::vector<const Adapter *> &adapters, uintptr_t of_token, uintptr_t placed_tokens,
                    uintptr_t placed_rows, int64_t num_placed, int64_t placed_width, uintptr_t rotated_by, uintptr_t rotations,
                    int64_t num_rotations, int64_t rotated_half, uintptr_t key_ends, uintptr_t out) {
    constexpr int64_t MOST = (int64_t{1} << 31) - 1;  // both are counted in 32 bits
    const Arguments args("Program.forward");
    args.between(0, MOST, "the number of tokens", num_tokens);
    args.between(0, MOST, "the number of sequences", num_sequences);
    const Sequences sequences{args.array<const int32_t>("query_start", query_start, {num_sequences + 1}),
                              args.array<const int32_t>("context_len", context_len, {num_sequences}), num_sequences,
                              num_tokens};
    const AdaptedRows adapted(adapters, args.array<const int32_t>("of_token", of_token, {adapters.empty() ? 0 : num_tokens}),
                              adapters.empty() ? 0 : num_tokens);
    program.check(adapters);
    args.between(0, num_tokens, "the number of placed rows", num_placed);
    const PlacedRows placed{args.array<const int64_t>("placed_tokens", placed_tokens, {num_placed}),
                            args.memory("placed_rows", placed_rows, program.lists().dtype, {num_placed, placed_width}).as<const void>(),
                            num_placed, placed_width};
    program.check(placed, num_tokens);
    const int64_t num_turned = rotations == 0 ? 0 : num_tokens;
    const Rotations turned{args.array<const int64_t>("rotated_by", rotated_by, {num_turned}),
                           args.array<const float>("rotations", rotations, {num_rotations, 2, rotated_half}), num_rotations,
                           rotated_half};
    program.check(turned, num_tokens);
    std::vector<GroupTables> groups;
    for (const auto &[slots, block_tables] : tables) {
        groups.push_back({args.array<const int64_t>("slots", slots, {num_tokens}),
                          args.array<const int32_t>("block_tables", block_tables, {num_sequences, table_stride})});
    }
    const StepInputs step{args.array<const int64_t>("token_ids", token_ids, {num_tokens}),
                          args.array<const int64_t>("positions", positions, {num_tokens}),
                          sequences,
                          std::move(groups),
                          table_stride,
                          args.array<const int32_t>("num_wanted", num_wanted, {num_wanted == 0 ? 0 : num_sequences}),
                          adapted.is_empty() ? nullptr : &adapted,
                          placed,
                          turned,
                          args.array<const int32_t>("key_ends", key_ends, {key_ends == 0 ? 0 : num_tokens})};
    program.forward(step, args.memory("out", out, program.lists().dtype, {num_tokens, program.lists().width}).as<void>());
}

static void bind_program(nb::module_ &m) {
    nb::class_<NormWeight>(m, "NormWeight")
        .def("__init__", &init_norm, "weight"_a, "bias"_a, "dtype"_a, "width"_a, "eps"_a, "offset"_a, "is_layer"_a);
    nb::class_<KVCache>(m, "KVCache")
        .def("__init__", &init_cache, "keys"_a, "values"_a, "format"_a, "num_blocks"_a, "num_kv_heads"_a,
             "block_size"_a, "head_size"_a);
    nb::class_<Operations>(m, "Operations")
        .def("__init__", &init_operations, "dtype"_a, "width"_a)
        .def("add", &add_operation, "kind"_a, "is_narrow"_a, "inputs"_a, "outputs"_a, "table"_a.none(), "of_positions"_a,
             "factor"_a, "norm"_a.none(), "key_norm"_a.none(), "weight"_a.none(), "first_output"_a, "number"_a, "activation"_a, "heads"_a,
             "rope"_a, "rope_half"_a, "cache"_a, "scale"_a, "soft_cap"_a, "window"_a, "sinks"_a, "bias"_a, "bias_reach"_a,
             "down"_a.none(), "router"_a.none(), "routing"_a.none(), "is_interleaved"_a, "value_size"_a, "pool"_a.none(), "gathering"_a.none(), "columns"_a,
             "first_id"_a, "num_ids"_a, "numbers"_a);
    nb::class_<Program>(m, "Program")
        .def("__init__", &init_program, "whole"_a, "wanted"_a, "num_positions"_a)
        .def("set_caches", &Program::set_caches, "caches"_a, "groups"_a)
        .def("forward", &forward, nb::call_guard<nb::gil_scoped_release>());
}
static const Registration registration(bind_program);

}  // namespace quire
