// Runs the operations of a decoder step; see program.hpp. Each may use the whole team of threads and waits for it.
#include "program.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "scratch.hpp"
#include "timing.hpp"

namespace quire {

// ---- memory ----

char *Arena::take(size_t num_bytes) {
    if (capacity_ < num_bytes) {
        capacity_ = 0;
        data_.reset();
        data_.reset(static_cast<char *>(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64)));
        if (!data_) throw std::bad_alloc();
        capacity_ = num_bytes;
    }
    return data_.get();
}

void Arena::Free::operator()(char *data) const { std::free(data); }

namespace {

constexpr int64_t GATED_BYTES = 8 << 20;  // of float32 products of gate and up that are kept at a time for adapters
constexpr int64_t LEAST_GATED_ROWS = 128;
constexpr int64_t TOKENS_AT_ONCE = 4;  // of which a product of queries, keys and values takes some 32 KiB

// ---- wanted tokens ----

// The tokens whose hidden states are wanted, as a step of their own: the same positions of the same sequences. Sequences
// without such tokens are not in it.
class WantedTokens {
   public:
    explicit WantedTokens(const StepInputs &step);

    // Whether leaving the others out saves more than a product of keys and values more costs: at least as many are others.
    bool are_few() const { return num_tokens_ >= 2 * count(); }
    int64_t count() const { return static_cast<int64_t>(tokens_.size()); }
    const std::vector<int64_t> &tokens() const { return tokens_; }  // of the whole step, ascending
    StepInputs inputs() const;                                      // valid as long as this is

   private:
    struct Group {
        std::vector<int64_t> slots;
        std::vector<int32_t> block_tables;
    };

    int64_t num_tokens_, table_stride_;
    std::vector<int64_t> tokens_, positions_, turned_by_;
    std::vector<int32_t> query_start_{0}, context_len_, key_ends_;
    std::vector<Group> groups_;
    AdaptedRows adapted_;
    const Rotations &rotations_;  // of the whole step
};

WantedTokens::WantedTokens(const StepInputs &step)
    : num_tokens_(step.sequences.num_tokens), table_stride_(step.table_stride), groups_(step.groups.size()),
      rotations_(step.rotations) {
    for (int64_t s = 0; s < step.sequences.count; ++s) {
        const int64_t first = step.sequences.query_start[s], end = step.sequences.query_start[s + 1];
        const int64_t wanted = step.num_wanted[s];
        if (first < 0 || wanted < 0 || wanted > end - first || end > num_tokens_) {
            throw std::invalid_argument("step: " + std::to_string(wanted) + " hidden states are wanted of sequence " +
                                        std::to_string(s) + ", which has " + std::to_string(end - first) + " tokens");
        }
        if (wanted == 0) continue;
        for (int64_t t = end - wanted; t < end; ++t) {
            tokens_.push_back(t);
            positions_.push_back(step.positions[t]);
            if (step.key_ends != nullptr) key_ends_.push_back(step.key_ends[t]);
            if (rotations_.is_present()) turned_by_.push_back(rotations_.rows[t]);
            for (size_t g = 0; g < groups_.size(); ++g) groups_[g].slots.push_back(step.groups[g].slots[t]);
        }
        query_start_.push_back(static_cast<int32_t>(count()));
        context_len_.push_back(step.sequences.context_len[s]);
        for (size_t g = 0; g < groups_.size(); ++g) {
            const int32_t *table = step.groups[g].block_tables + s * table_stride_;
            groups_[g].block_tables.insert(groups_[g].block_tables.end(), table, table + table_stride_);
        }
    }
    if (step.adapted != nullptr) adapted_ = step.adapted->chosen(tokens_);
}

StepInputs WantedTokens::inputs() const {
    const Sequences sequences{query_start_.data(), context_len_.data(), static_cast<int64_t>(context_len_.size()), count()};
    std::vector<GroupTables> groups;
    for (const Group &each : groups_) groups.push_back({each.slots.data(), each.block_tables.data()});
    return {nullptr, positions_.data(), sequences, std::move(groups), table_stride_, nullptr,
            adapted_.is_empty() ? nullptr : &adapted_, {}, {turned_by_.data(), rotations_.table, rotations_.count, rotations_.half},
            key_ends_.empty() ? nullptr : key_ends_.data()};
}

// ---- operations ----

// One forward pass: what all operations need, and each of them as a call.
class Pass {
   public:
    Pass(const ProgramLists &lists, const std::vector<KVCache> &caches, const std::vector<int64_t> &groups,
         const StepInputs &step, const WantedTokens *wanted, char *arena, void *result)
        : table_(kernels()), dtype_(lists.dtype), caches_(caches), groups_(groups), all_(step), wanted_(wanted), step_(&step),
          arena_(arena), result_(result) {}

    void run(const std::vector<Operation> &operations) {
        const StepInputs narrow = wanted_ == nullptr ? StepInputs{} : wanted_->inputs();
        for (const Operation &each : operations) {
            step_ = each.is_narrow ? &narrow : &all_;
            if (num_tokens() > 0) run(each);
        }
    }

   private:
    int64_t num_tokens() const { return step_->sequences.num_tokens; }
    const GroupTables &tables_of(int64_t cache) const { return step_->groups[groups_[cache]]; }
    void *at(const Value &value) const {
        return value.column == Value::RESULT ? result_ : offset(arena_, value.column * all_.sequences.num_tokens, dtype_);
    }
    NormRows rows_of(const NormWeight &norm, const void *x, void *out) const;
    void norm_rows(const NormWeight &norm, const NormRows &rows, int64_t first, int64_t last) const;

    void run(const Operation &operation) const;
    void gate(const Operation &operation) const;
    void gate_adapted(const Operation &operation, int64_t first, int64_t last) const;
    void project(const Operation &operation) const;
    void normalise(const Operation &operation) const;
    void prepare_heads(const Operation &operation) const;
    void attend(const Operation &operation) const;
    // The same rows, turned by what the step brings, if it brings anything.
    RopeRows turned(RopeRows rows) const {
        const Rotations &own = step_->rotations;
        if (own.is_present() && rows.half > 0) rows.positions = own.rows, rows.cos_sin = own.table;
        return rows;
    }
    RopeRows tails_of(const Operation &operation) const;
    void write_latent(const Operation &operation) const;
    void select(const Operation &operation) const;
    void scatter(const Operation &operation) const;
    void place(const Operation &operation) const;
    void add_placed(const Operation &operation) const;
    void embed_gathered(const Operation &operation) const;
    void adapt_embedding(const Operation &operation) const;

    const KernelTable &table_;
    const DType dtype_;
    const std::vector<KVCache> &caches_;
    const std::vector<int64_t> &groups_;
    const StepInputs &all_;
    const WantedTokens *wanted_;
    const StepInputs *step_;  // of the rows that the operation computes
    char *arena_;
    void *result_;
};

void Pass::run(const Operation &operation) const {
    const void *const x = at(operation.x), *const y = at(operation.y);
    void *const out = at(operation.out);
    const int64_t width = operation.x.width;
    switch (operation.kind) {
        case Kind::linear:
            return project(operation);
        case Kind::gated_linear:
            return gate(operation);
        case Kind::attend:
            return attend(operation);
        case Kind::experts:
            return mix_experts(operation.layer, operation.routing, operation.router, x, dtype_, num_tokens(), out,
                               {step_->adapted, operation.numbers.router, operation.numbers.up, operation.numbers.down}, operation.next);
        case Kind::head_linear:
            return head_linear({operation.weight, operation.heads.num_queries, operation.heads.size}, x, dtype_, num_tokens(), out);
        case Kind::gather:
            return operation.gathering->columns(x, num_tokens(), operation.columns, operation.out.width * size_of(dtype_), out);
        case Kind::embed_gathered:
            return embed_gathered(operation);
        case Kind::adapt_embedding:
            return adapt_embedding(operation);
        default:
            break;
    }
    const Stopwatch stopwatch(KernelClass::elementwise);
    switch (operation.kind) {
        case Kind::embed:
            return embedding(operation.table, operation.of_positions ? step_->positions : step_->token_ids, num_tokens(), out);
        case Kind::scale:
            return over_rows(num_tokens(), width, [&](int64_t first, int64_t last) {
                table_.scale(x, operation.factor, out, dtype_, first * width, last * width);
            });
        case Kind::add:
            return over_rows(num_tokens(), width, [&](int64_t first, int64_t last) {
                table_.add(x, y, out, dtype_, first * width, last * width);
            });
        case Kind::activate:
            return over_rows(num_tokens() * width, 4, [&](int64_t first, int64_t last) {
                table_.activate(x, out, dtype_, operation.activation, first, last);
            });
        case Kind::norm:
            return normalise(operation);
        case Kind::prepare_heads:
            return prepare_heads(operation);
        case Kind::select:
            return select(operation);
        case Kind::place:
        case Kind::take:
            return place(operation);
        case Kind::add_placed:
            return add_placed(operation);
        case Kind::rotate_tails:
            return over_rows(num_tokens(), 2 * width, [&](int64_t first, int64_t last) {
                table_.rope(tails_of(operation), first, last);
            });
        case Kind::write_latent:
            return write_latent(operation);
        case Kind::gate_rows:
            return gate_rows(x, y, out, dtype_, num_tokens(), width);
        default:
            return scatter(operation);
    }
}

// What adapters add must be there before the activation: where a row uses one, products are kept in float32 as the projection
// would have had them before it rounded, so that the other rows' bits are those of `linear_gated`.
void Pass::gate(const Operation &operation) const {
    const bool is_adaptable = step_->adapted != nullptr && operation.number != Operation::NO_ADAPTERS;
    const int64_t at_once = is_adaptable ? max64(LEAST_GATED_ROWS, GATED_BYTES / (operation.weight.num_outputs * 4)) : num_tokens();
    for (int64_t first = 0; first < num_tokens(); first += at_once) {
        const int64_t last = min64(first + at_once, num_tokens());
        if (is_adaptable && step_->adapted->concern(operation.number, first, last)) {
            gate_adapted(operation, first, last);
        } else {
            linear_gated(operation.weight, operation.activation, offset(at(operation.x), first * operation.x.width, dtype_), dtype_,
                         last - first, offset(at(operation.out), first * operation.out.width, dtype_), dtype_);
        }
    }
}

void Pass::gate_adapted(const Operation &operation, int64_t first, int64_t last) const {
    const int64_t width = operation.out.width, count = last - first;
    const void *const x = offset(at(operation.x), first * operation.x.width, dtype_);
    void *const out = offset(at(operation.out), first * width, dtype_);
    float *const products = scratch(GATE_PRODUCTS, count * 2 * width);
    linear(operation.weight, x, dtype_, count, products, DType::f32);
    step_->adapted->between(first, last).add_to(operation.number, x, dtype_, products, DType::f32, 0, 2 * width);
    over_rows(count, 4 * width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float *const row = products + r * 2 * width;
            table_.gated(row, row, DType::f32, operation.activation, width, 0, 1);  // over the gate's products
            table_.convert(row, DType::f32, offset(out, r * width, dtype_), dtype_, width);
        }
    });
}

void Pass::project(const Operation &operation) const {
    const void *const x = at(operation.x);
    void *const out = at(operation.out);
    linear(operation.weight, x, dtype_, num_tokens(), out, dtype_);
    if (step_->adapted == nullptr || operation.number == Operation::NO_ADAPTERS) return;
    step_->adapted->add_to(operation.number, x, dtype_, out, dtype_, operation.first_output, operation.out.width);
}

NormRows Pass::rows_of(const NormWeight &norm, const void *x, void *out) const {
    NormRows rows{};
    rows.x = x;
    rows.out = out;
    rows.weight = norm.weight;
    rows.bias = norm.bias;
    rows.dtype = dtype_;
    rows.weight_dtype = norm.dtype;
    rows.width = norm.width;
    rows.eps = norm.eps;
    rows.weight_offset = norm.offset;
    return rows;
}

void Pass::norm_rows(const NormWeight &norm, const NormRows &rows, int64_t first, int64_t last) const {
    norm.is_layer ? table_.layer_norm(rows, first, last) : table_.rms_norm(rows, first, last);
}

void Pass::normalise(const Operation &operation) const {
    NormRows rows = rows_of(operation.norm, at(operation.x), at(operation.out));
    if (operation.y.width > 0) {
        rows.residual = at(operation.y);
        rows.sum = at(operation.sum);
    }
    over_rows(num_tokens(), rows.width, [&](int64_t first, int64_t last) { norm_rows(operation.norm, rows, first, last); });
}

// Whether it is applied to each head by itself, as `prepare_heads` does.
bool is_of_heads(const NormWeight &norm, int64_t head_size) {
    return norm.is_present() && !norm.is_layer && norm.width == head_size;
}

// So few tokens at a time that their rows stay in the first-level cache.
void Pass::prepare_heads(const Operation &operation) const {
    const Heads &shape = operation.heads;
    const int64_t stride = shape.width(), query_width = shape.query_width(), key_width = shape.key_width();
    void *rows = at(operation.out);
    const KVCache *cache = operation.cache == Operation::NO_CACHE ? nullptr : &caches_[operation.cache];
    const void *key = offset(rows, query_width, dtype_), *value = offset(key, key_width, dtype_);
    const int64_t *slots = cache == nullptr ? nullptr : tables_of(operation.cache).slots;
    const KVRows kv{key, value, dtype_, num_tokens(), stride, stride, slots};
    if (cache != nullptr) check_slots(kv, *cache);
    const NormWeight &query_norm = operation.norm, &key_norm = operation.key_norm;
    HeadRows heads{};
    heads.rope = turned(RopeRows{rows, step_->positions, operation.rope, dtype_, stride, shape.num_queries + shape.num_keys,
                                 shape.size, operation.rope_half, false});
    heads.num_query_heads = shape.num_queries;
    if (is_of_heads(query_norm, shape.size)) heads.query_norm = rows_of(query_norm, nullptr, nullptr);
    if (is_of_heads(key_norm, shape.size)) heads.key_norm = rows_of(key_norm, nullptr, nullptr);
    const auto norm_part = [&](const NormWeight &norm, int64_t t, int64_t start, int64_t width) {
        if (!norm.is_present() || is_of_heads(norm, shape.size)) return;
        void *part = offset(rows, t * stride + start, dtype_);
        norm_rows(norm, rows_of(norm, part, part), 0, width / norm.width);
    };
    over_rows(num_tokens(), 2 * stride, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t += TOKENS_AT_ONCE) {
            const int64_t end = min64(last, t + TOKENS_AT_ONCE);
            for (int64_t i = t; i < end; ++i) {
                norm_part(query_norm, i, 0, query_width);
                norm_part(key_norm, i, query_width, key_width);
            }
            if (cache != nullptr) fetch_tokens(kv.slots, *cache, t, end);
            table_.prepare_heads(heads, t, end);
            if (cache != nullptr) write_tokens(kv, *cache, t, end);
        }
    });
}

// The last elements of each head, or of the one key.
RopeRows Pass::tails_of(const Operation &operation) const {
    const Heads &heads = operation.heads;
    void *const tails = offset(at(operation.out), heads.size - 2 * operation.rope_half, dtype_);
    return turned(RopeRows{tails, step_->positions, operation.rope, dtype_, operation.out.width, max64(heads.num_queries, 1),
                           heads.size, operation.rope_half, operation.is_interleaved});
}

void Pass::write_latent(const Operation &operation) const {
    void *const rows = at(operation.out);
    const int64_t width = operation.out.width;
    const KVCache &cache = caches_[operation.cache];
    const KVRows kv{rows, rows, dtype_, num_tokens(), width, width, tables_of(operation.cache).slots};
    check_slots(kv, cache);
    const RopeRows tails = tails_of(operation);
    over_rows(num_tokens(), 2 * width, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
            void *const row = offset(rows, t * width, dtype_);
            norm_rows(operation.norm, rows_of(operation.norm, row, row), 0, 1);
            table_.rope(tails, t, t + 1);
            write_tokens(kv, cache, t, t + 1);
        }
    });
}

void Pass::attend(const Operation &operation) const {
    AttentionProblem problem{};
    problem.query = at(operation.x);
    problem.out = at(operation.out);
    problem.dtype = dtype_;
    problem.num_heads = operation.heads.num_queries;
    problem.query_stride = operation.x.width;
    if (operation.cache == Operation::NO_CACHE) {
        const Heads &heads = operation.heads;
        void *const keys = offset(at(operation.x), heads.query_width(), dtype_);
        problem.cache = rows_as_cache(keys, offset(keys, heads.key_width(), dtype_), dtype_, heads.num_keys, heads.size);
        problem.row_stride = heads.width();
        problem.bias = operation.bias;
        problem.bias_reach = operation.bias_reach;
    } else {
        problem.cache = caches_[operation.cache];
        problem.block_tables = tables_of(operation.cache).block_tables;
        problem.table_stride = step_->table_stride;
        problem.key_ends = step_->key_ends;
    }
    problem.scale = operation.scale;
    problem.soft_cap = operation.soft_cap;
    problem.window = operation.window;
    problem.sinks = operation.sinks;
    problem.value_size = operation.value_size;
    paged_attention(problem, step_->sequences);
}

// `out` may be where `x` is: rows move to the front, in order.
void Pass::select(const Operation &operation) const {
    const int64_t width = operation.x.width;
    void *to = at(operation.out);
    for (const int64_t token : wanted_->tokens()) {
        std::memmove(to, offset(at(operation.x), token * width, dtype_), width * size_of(dtype_));
        to = offset(to, width, dtype_);
    }
}

void Pass::scatter(const Operation &operation) const {
    const int64_t width = operation.x.width;
    void *const base = at(operation.x), *const rows = at(operation.y), *const out = at(operation.out);
    over_rows(num_tokens(), width, [&](int64_t first, int64_t last) {
        std::memcpy(offset(out, first * width, dtype_), offset(base, first * width, dtype_),
                    (last - first) * width * size_of(dtype_));
    });
    for (int64_t i = 0; i < wanted_->count(); ++i) {
        std::memcpy(offset(out, wanted_->tokens()[i] * width, dtype_), offset(rows, i * width, dtype_), width * size_of(dtype_));
    }
}

// Over x's rows, or, of an operation without inputs, over zeros. `out` may be where `x` is.
void Pass::place(const Operation &operation) const {
    const int64_t width = operation.out.width, row_bytes = width * size_of(dtype_);
    void *const base = at(operation.x), *const out = at(operation.out);
    over_rows(num_tokens(), width, [&](int64_t first, int64_t last) {
        void *const to = offset(out, first * width, dtype_);
        if (operation.kind == Kind::take) {
            std::memset(to, 0, (last - first) * row_bytes);
        } else if (base != out) {
            std::memcpy(to, offset(base, first * width, dtype_), (last - first) * row_bytes);
        }
    });
    const PlacedRows &placed = step_->placed;
    over_rows(placed.count, width, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            std::memcpy(offset(out, placed.tokens[i] * width, dtype_), offset(placed.rows, i * placed.width, dtype_), row_bytes);
        }
    });
}

// Some columns of the rows from outside to their tokens, each of which has one. `out` may be where `x` is.
void Pass::add_placed(const Operation &operation) const {
    const int64_t width = operation.out.width;
    const void *const base = at(operation.x);
    void *const out = at(operation.out);
    if (base != out) {
        over_rows(num_tokens(), width, [&](int64_t first, int64_t last) {
            std::memcpy(offset(out, first * width, dtype_), offset(base, first * width, dtype_), (last - first) * width * size_of(dtype_));
        });
    }
    const PlacedRows &placed = step_->placed;
    over_rows(placed.count, width, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            void *const row = offset(out, placed.tokens[i] * width, dtype_);
            table_.add(row, offset(placed.rows, i * placed.width + operation.first_output, dtype_), row, dtype_, 0, width);
        }
    });
}

// What adapters add to the embeddings of their tokens. `out` may be where `x` is.
void Pass::adapt_embedding(const Operation &operation) const {
    const int64_t width = operation.out.width;
    void *const base = at(operation.x), *const out = at(operation.out);
    if (base != out) {
        over_rows(num_tokens(), width, [&](int64_t first, int64_t last) {
            std::memcpy(offset(out, first * width, dtype_), offset(base, first * width, dtype_), (last - first) * width * size_of(dtype_));
        });
    }
    if (step_->adapted != nullptr) step_->adapted->add_embedding(operation.number, step_->token_ids, out, dtype_, width);
}

// Each rank looks up the ids whose rows it has.
void Pass::embed_gathered(const Operation &operation) const {
    const int64_t count = num_tokens(), row_bytes = operation.out.width * size_of(dtype_);
    char *const out = static_cast<char *>(at(operation.out));
    std::vector<uint8_t> is_own(count);
    for (int64_t t = 0; t < count; ++t) {
        const int64_t id = step_->token_ids[t], place = id - operation.first_id;
        if (id < 0 || id >= operation.num_ids) {
            throw std::out_of_range("embedding: token id " + std::to_string(id) + " is outside the table of " +
                                    std::to_string(operation.num_ids) + " rows");
        }
        is_own[t] = place >= 0 && place < operation.table.num_rows;
        if (is_own[t]) embedding(operation.table, &place, 1, out + t * row_bytes);
    }
    operation.gathering->rows(out, is_own, row_bytes, out);
}

}  // namespace

// ---- the program ----

void Program::set_caches(const std::vector<KVCache> &caches, const std::vector<int64_t> &groups) {
    const int64_t count = static_cast<int64_t>(caches.size());
    if (count != lists_.num_caches || groups.size() != caches.size()) {
        throw std::invalid_argument("step: " + std::to_string(count) + " caches for " + std::to_string(lists_.num_caches) +
                                    " layers");
    }
    for (const std::vector<Operation> *list : {&lists_.whole, &lists_.wanted}) {
        for (const Operation &each : *list) {
            if (each.cache == Operation::NO_CACHE) continue;
            const KVCache &cache = caches[each.cache];
            if (cache.num_kv_heads != each.heads.num_keys || cache.head_size != each.heads.size) {
                throw std::invalid_argument("step: the cache of layer " + std::to_string(each.cache) + " has another shape");
            }
        }
    }
    for (const int64_t group : groups) {
        if (group < 0) throw std::invalid_argument("step: there is no group " + std::to_string(group));
    }
    const std::lock_guard<std::mutex> guard(is_running_);
    caches_ = caches;
    groups_ = groups;
}

namespace {

// ANY_SIZE: of what is known only when a token is looked up.
constexpr int64_t ANY_SIZE = -1;

void check_shape(const std::vector<const Adapter *> &adapters, int64_t number, int64_t num_inputs, int64_t num_outputs) {
    for (const Adapter *adapter : adapters) {
        const LoraWeight *weight = adapter == nullptr || number == Operation::NO_ADAPTERS ? nullptr : adapter->of(number);
        if (weight == nullptr) continue;
        if ((num_inputs == ANY_SIZE || weight->num_inputs == num_inputs) && weight->num_outputs == num_outputs) continue;
        throw std::invalid_argument("step: an adapter for another shape of weight " + std::to_string(number));
    }
}

}  // namespace

void Program::check(const std::vector<const Adapter *> &adapters) const {
    if (adapters.empty()) return;
    for (const Operation &each : lists_.whole) {
        if (each.kind == Kind::experts) {
            check_shape(adapters, each.numbers.router, each.x.width, each.layer.num_experts);
            check_shape(adapters, each.numbers.up, each.x.width, each.layer.up.num_outputs);
            check_shape(adapters, each.numbers.down, each.layer.inner(), each.layer.down.num_outputs);
            continue;
        }
        const int64_t num_outputs = each.kind == Kind::gated_linear ? 2 * each.out.width : each.out.width;
        check_shape(adapters, each.number, each.kind == Kind::adapt_embedding ? ANY_SIZE : each.x.width, num_outputs);
    }
}

void Program::check(const PlacedRows &placed, int64_t num_tokens) const {
    if (placed.count == 0) return;
    int64_t width = 0;
    for (const Operation &each : lists_.whole) {
        if (each.kind == Kind::place || each.kind == Kind::take) width = max64(width, each.out.width);
        if (each.kind == Kind::add_placed) width = max64(width, each.first_output + each.out.width);
    }
    if (width == 0) throw std::invalid_argument("step: this program takes no rows from outside");
    if (width != placed.width) {
        throw std::invalid_argument("step: rows of " + std::to_string(placed.width) + " to be placed where it takes " +
                                    std::to_string(width));
    }
    for (int64_t i = 0; i < placed.count; ++i) {
        if (placed.tokens[i] >= 0 && placed.tokens[i] < num_tokens) continue;
        throw std::invalid_argument("step: a row is to be placed at token " + std::to_string(placed.tokens[i]) + " of " +
                                    std::to_string(num_tokens));
    }
}

void Program::check(const Rotations &rotations, int64_t num_tokens) const {
    for (const Operation &each : lists_.whole) {
        if (each.rope_half == 0) continue;
        if (!rotations.is_present()) {
            if (each.rope == nullptr) throw std::invalid_argument("step: this program takes rotations from outside");
        } else if (each.rope_half != rotations.half) {
            throw std::invalid_argument("step: rotations of " + std::to_string(rotations.half) + " pairs for heads that have " +
                                        std::to_string(each.rope_half));
        }
    }
    for (int64_t t = 0; rotations.is_present() && t < num_tokens; ++t) {
        if (rotations.rows[t] >= 0 && rotations.rows[t] < rotations.count) continue;
        throw std::invalid_argument("step: token " + std::to_string(t) + " is turned by row " + std::to_string(rotations.rows[t]) +
                                    " of " + std::to_string(rotations.count));
    }
}

void Program::forward(const StepInputs &step, void *out) {
    const std::lock_guard<std::mutex> guard(is_running_);
    if (static_cast<int64_t>(caches_.size()) != lists_.num_caches) throw std::invalid_argument("step: there are no caches");
    for (const int64_t group : groups_) {
        if (group >= static_cast<int64_t>(step.groups.size())) {
            throw std::invalid_argument("step: no block tables for group " + std::to_string(group));
        }
    }
    check_positions(step.positions, step.sequences.num_tokens, lists_.num_positions);
    char *arena = arena_.take(step.sequences.num_tokens * lists_.arena_width * size_of(lists_.dtype));
    if (step.num_wanted != nullptr) {
        const WantedTokens wanted(step);
        if (wanted.are_few()) return Pass(lists_, caches_, groups_, step, &wanted, arena, out).run(lists_.wanted);
    }
    Pass(lists_, caches_, groups_, step, nullptr, arena, out).run(lists_.whole);
}

}  // namespace quire
