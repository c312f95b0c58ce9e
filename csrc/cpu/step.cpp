// The forward pass of a decoder; see step.hpp. Reads like quire/nn/layers.py: Stream, Block, Attention, Mlp.
#include "step.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "elementwise.hpp"
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

constexpr int64_t TOKENS_AT_ONCE = 4;  // of which a product of queries, keys and values takes some 32 KiB

// The activations of one layer; the next layer uses the same memory.
struct Activations {
    void *total;     // [T, H] what has been summed so far
    void *pending;   // [T, H] the last sublayer's output, still to be added; then what the next one reads
    void *wide;      // [T, widest product]
    void *attended;  // [T, heads * D]
};

struct Widths {
    int64_t hidden, wide, attended;

    Widths(int64_t hidden, const std::vector<BlockWeights> &blocks) : hidden(hidden), wide(0), attended(0) {
        for (const BlockWeights &block : blocks) {
            const int64_t raised = block.mlp.up.num_outputs / (block.mlp.is_gated ? 2 : 1);
            wide = max64(wide, max64(block.attention.qkv.num_outputs, raised));
            attended = max64(attended, block.attention.query_width());
        }
    }
};

Activations lay_out(Arena &arena, const Widths &widths, int64_t num_tokens, DType dtype) {
    const auto part = [&](int64_t width) { return round_up(num_tokens * width * size_of(dtype), 64); };
    const int64_t hidden = part(widths.hidden), wide = part(widths.wide);
    char *at = arena.take(2 * hidden + wide + part(widths.attended));
    return Activations{at, at + hidden, at + 2 * hidden, at + 2 * hidden + wide};
}

// ---- what is asked for ----

// The tokens whose hidden states are asked for, as a step of their own: the same positions of the same sequences. Sequences of
// which nothing is asked for are not in it.
class WantedTokens {
   public:
    explicit WantedTokens(const StepInputs &step);

    // Whether leaving the others out saves more than a product of keys and values more costs: at least as many are others.
    bool are_few() const { return num_tokens_ >= 2 * count(); }
    int64_t count() const { return static_cast<int64_t>(tokens_.size()); }
    const std::vector<int64_t> &tokens() const { return tokens_; }  // of the whole step, ascending
    StepInputs inputs() const {                                     // valid as long as this is
        const Sequences sequences{query_start_.data(), context_len_.data(), static_cast<int64_t>(context_len_.size()), count()};
        return {nullptr, positions_.data(), slots_.data(), sequences, block_tables_.data(), table_stride_, nullptr};
    }

   private:
    int64_t num_tokens_, table_stride_;
    std::vector<int64_t> tokens_, positions_, slots_;
    std::vector<int32_t> query_start_{0}, context_len_, block_tables_;
};

WantedTokens::WantedTokens(const StepInputs &step)
    : num_tokens_(step.sequences.num_tokens), table_stride_(step.table_stride) {
    for (int64_t s = 0; s < step.sequences.count; ++s) {
        const int64_t first = step.sequences.query_start[s], end = step.sequences.query_start[s + 1];
        const int64_t wanted = step.num_wanted[s];
        if (first < 0 || wanted < 0 || wanted > end - first || end > num_tokens_) {
            throw std::invalid_argument("step: " + std::to_string(wanted) + " hidden states are asked for of sequence " +
                                        std::to_string(s) + ", which has " + std::to_string(end - first) + " tokens");
        }
        if (wanted == 0) continue;
        for (int64_t t = end - wanted; t < end; ++t) {
            tokens_.push_back(t);
            positions_.push_back(step.positions[t]);
            slots_.push_back(step.slots[t]);
        }
        query_start_.push_back(static_cast<int32_t>(count()));
        context_len_.push_back(step.sequences.context_len[s]);
        const int32_t *table = step.block_tables + s * table_stride_;
        block_tables_.insert(block_tables_.end(), table, table + table_stride_);
    }
}

// ---- the residual stream ----

// One forward pass. The stream's value is `total`, and `pending` on top of it if has_pending_.
class Pass {
   public:
    Pass(const StepInputs &step, DType dtype, int64_t width, const Activations &activations)
        : table_(kernels()), step_(step), num_tokens_(step.sequences.num_tokens), dtype_(dtype), width_(width),
          to_(activations) {}

    void embed(const EmbeddingWeights &weights);
    void run(const BlockWeights &block, const KVCache &cache);
    void finish(void *out);  // the stream's value
    // The last block and `finish`, for some tokens: of the others, `out` has what comes to the block.
    void finish_wanted(const WantedTokens &wanted, const BlockWeights &block, const KVCache &cache, void *out);

   private:
    const void *enter(const NormWeight &norm);
    void run_sublayers(const BlockWeights &block, const KVCache &cache, const void *x);
    void attend(const AttentionWeights &attention, const KVCache &cache, const void *x);
    void store_keys(const AttentionWeights &attention, const KVCache &cache, const void *x);
    void prepare(const AttentionWeights &attention, const KVCache &cache, int64_t num_query_heads, int64_t stride, void *rows);
    void feed_forward(const MlpWeights &mlp, const void *x);
    void leave(const NormWeight &norm);
    void keep(const WantedTokens &wanted, void *rows) const;

    NormRows rows_of(const NormWeight &norm, const void *x, void *out) const;
    void norm_rows(const NormWeight &norm, const NormRows &rows, int64_t first, int64_t last) const;
    void norm_all(const NormWeight &norm, const NormRows &rows) const;

    const KernelTable &table_;
    StepInputs step_;
    int64_t num_tokens_;
    const DType dtype_;
    const int64_t width_;
    const Activations to_;
    bool has_pending_ = false;
};

void Pass::embed(const EmbeddingWeights &weights) {
    const Stopwatch stopwatch(KernelClass::elementwise);
    embedding(weights.tokens, step_.token_ids, num_tokens_, to_.total);
    if (weights.scale != 1.0f) {
        over_rows(num_tokens_, width_, [&](int64_t first, int64_t last) {
            table_.scale(to_.total, weights.scale, to_.total, dtype_, first * width_, last * width_);
        });
    }
    if (weights.positions.table != nullptr) {
        embedding(weights.positions, step_.positions, num_tokens_, to_.pending);
        over_rows(num_tokens_, width_, [&](int64_t first, int64_t last) {
            table_.add(to_.total, to_.pending, to_.total, dtype_, first * width_, last * width_);
        });
    }
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

void Pass::norm_all(const NormWeight &norm, const NormRows &rows) const {
    const Stopwatch stopwatch(KernelClass::elementwise);
    over_rows(num_tokens_, width_, [&](int64_t first, int64_t last) { norm_rows(norm, rows, first, last); });
}

// What the next sublayer reads. Nothing is pending afterwards.
const void *Pass::enter(const NormWeight &norm) {
    if (!norm.is_present()) {
        finish(to_.total);
        return to_.total;
    }
    NormRows rows = rows_of(norm, to_.total, to_.pending);
    if (has_pending_) {
        rows.x = to_.pending;
        rows.residual = rows.sum = to_.total;
    }
    norm_all(norm, rows);
    has_pending_ = false;
    return to_.pending;
}

// The sublayer's output is in `pending`: norm it, if there is a norm, and leave it to be added.
void Pass::leave(const NormWeight &norm) {
    if (norm.is_present()) norm_all(norm, rows_of(norm, to_.pending, to_.pending));
    has_pending_ = true;
}

void Pass::finish(void *out) {
    const Stopwatch stopwatch(KernelClass::elementwise);
    const void *pending = has_pending_ ? to_.pending : nullptr;
    if (pending == nullptr && out == to_.total) return;
    over_rows(num_tokens_, width_, [&](int64_t first, int64_t last) {
        first *= width_, last *= width_;
        if (pending != nullptr) {
            table_.add(to_.total, pending, out, dtype_, first, last);
        } else {
            table_.convert(offset(to_.total, first, dtype_), dtype_, offset(out, first, dtype_), dtype_, last - first);
        }
    });
    has_pending_ = false;
}

// ---- sublayers ----

void Pass::run(const BlockWeights &block, const KVCache &cache) {
    run_sublayers(block, cache, enter(block.attention_norm));
}

void Pass::run_sublayers(const BlockWeights &block, const KVCache &cache, const void *x) {
    attend(block.attention, cache, x);
    leave(block.post_attention_norm);
    feed_forward(block.mlp, enter(block.mlp_norm));
    leave(block.post_mlp_norm);
}

void Pass::attend(const AttentionWeights &attention, const KVCache &cache, const void *x) {
    const int64_t stride = attention.qkv.num_outputs;
    linear(attention.qkv, x, dtype_, num_tokens_, to_.wide, dtype_);
    prepare(attention, cache, attention.num_heads, stride, to_.wide);
    AttentionProblem problem{};
    problem.query = to_.wide;
    problem.out = to_.attended;
    problem.dtype = dtype_;
    problem.num_heads = attention.num_heads;
    problem.query_stride = stride;
    problem.cache = cache;
    problem.block_tables = step_.block_tables;
    problem.table_stride = step_.table_stride;
    problem.scale = attention.scale;
    problem.soft_cap = attention.soft_cap;
    problem.window = attention.window;
    paged_attention(problem, step_.sequences);
    linear(attention.output, to_.attended, dtype_, num_tokens_, to_.pending, dtype_);
}

// Whether it is applied to each head by itself, as `prepare_heads` does.
static bool is_of_heads(const NormWeight &norm, int64_t head_size) {
    return norm.is_present() && !norm.is_layer && norm.width == head_size;
}

// Keys and values to the cache, and nothing else of the layer.
void Pass::store_keys(const AttentionWeights &attention, const KVCache &cache, const void *x) {
    const bool are_apart = attention.query_width() % PANEL == 0;  // else they share a panel with queries
    const int64_t first = are_apart ? attention.query_width() : 0;
    const LinearWeight weight = attention.qkv.part(first, attention.qkv.num_outputs - first);
    linear(weight, x, dtype_, num_tokens_, to_.wide, dtype_);
    prepare(attention, cache, are_apart ? 0 : attention.num_heads, weight.num_outputs, to_.wide);
}

// Norms of queries and keys, then RoPE, in place, then keys and values to the cache: so few tokens at a time that their
// rows stay in the first-level cache. `rows`: of each token the query heads, if there are any, the keys and the values.
void Pass::prepare(const AttentionWeights &attention, const KVCache &cache, int64_t num_query_heads, int64_t stride,
                   void *rows) {
    const Stopwatch stopwatch(KernelClass::elementwise);
    const int64_t query_width = num_query_heads * attention.head_size, key_width = attention.key_width();
    const void *key = offset(rows, query_width, dtype_), *value = offset(key, key_width, dtype_);
    const KVRows kv{key, value, dtype_, num_tokens_, stride, stride, step_.slots};
    check_slots(kv, cache);
    const NormWeight &query_norm = attention.query_norm, &key_norm = attention.key_norm;
    HeadRows heads{};
    heads.rope = RopeRows{rows, step_.positions, attention.rope, dtype_, stride, num_query_heads + attention.num_kv_heads,
                          attention.head_size, attention.rope_half, false};
    heads.num_query_heads = num_query_heads;
    if (is_of_heads(query_norm, attention.head_size)) heads.query_norm = rows_of(query_norm, nullptr, nullptr);
    if (is_of_heads(key_norm, attention.head_size)) heads.key_norm = rows_of(key_norm, nullptr, nullptr);
    const auto norm_part = [&](const NormWeight &norm, int64_t t, int64_t start, int64_t width) {
        if (!norm.is_present() || is_of_heads(norm, attention.head_size)) return;
        void *part = offset(rows, t * stride + start, dtype_);
        norm_rows(norm, rows_of(norm, part, part), 0, width / norm.width);
    };
    over_rows(num_tokens_, 2 * stride, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t += TOKENS_AT_ONCE) {
            const int64_t end = min64(last, t + TOKENS_AT_ONCE);
            for (int64_t i = t; i < end; ++i) {
                norm_part(query_norm, i, 0, query_width);
                norm_part(key_norm, i, query_width, key_width);
            }
            fetch_tokens(kv.slots, cache, t, end);
            table_.prepare_heads(heads, t, end);
            write_tokens(kv, cache, t, end);
        }
    });
}

void Pass::feed_forward(const MlpWeights &mlp, const void *x) {
    if (mlp.is_gated) {
        linear_gated(mlp.up, mlp.activation, x, dtype_, num_tokens_, to_.wide, dtype_);
    } else {
        const int64_t width = mlp.up.num_outputs;
        linear(mlp.up, x, dtype_, num_tokens_, to_.wide, dtype_);
        const Stopwatch stopwatch(KernelClass::elementwise);
        over_rows(num_tokens_ * width, 4, [&](int64_t first, int64_t last) {
            table_.activate(to_.wide, to_.wide, dtype_, mlp.activation, first, last);
        });
    }
    linear(mlp.down, to_.wide, dtype_, num_tokens_, to_.pending, dtype_);
}

// ---- the last block ----

// Brings the wanted tokens' rows to the front.
void Pass::keep(const WantedTokens &wanted, void *rows) const {
    void *to = rows;
    for (const int64_t token : wanted.tokens()) {
        std::memmove(to, offset(rows, token * width_, dtype_), width_ * size_of(dtype_));
        to = offset(to, width_, dtype_);
    }
}

void Pass::finish_wanted(const WantedTokens &wanted, const BlockWeights &block, const KVCache &cache, void *out) {
    const void *x = enter(block.attention_norm);
    store_keys(block.attention, cache, x);
    finish(out);
    keep(wanted, to_.total);
    if (x == to_.pending) keep(wanted, to_.pending);
    step_ = wanted.inputs();
    num_tokens_ = wanted.count();
    if (num_tokens_ == 0) return;
    run_sublayers(block, cache, x);
    finish(to_.total);
    for (int64_t i = 0; i < num_tokens_; ++i) {
        std::memcpy(offset(out, wanted.tokens()[i] * width_, dtype_), offset(to_.total, i * width_, dtype_),
                    width_ * size_of(dtype_));
    }
}

}  // namespace

// ---- the decoder ----

void Decoder::set_caches(const std::vector<KVCache> &caches) {
    if (caches.size() != blocks_.size()) {
        throw std::invalid_argument("step: " + std::to_string(caches.size()) + " caches for " +
                                    std::to_string(blocks_.size()) + " layers");
    }
    for (size_t i = 0; i < caches.size(); ++i) {
        const AttentionWeights &attention = blocks_[i].attention;
        if (caches[i].num_kv_heads != attention.num_kv_heads || caches[i].head_size != attention.head_size) {
            throw std::invalid_argument("step: the cache of layer " + std::to_string(i) + " has another shape");
        }
    }
    const std::lock_guard<std::mutex> guard(is_running_);
    caches_ = caches;
}

void Decoder::forward(const StepInputs &step, void *out) {
    const std::lock_guard<std::mutex> guard(is_running_);
    if (caches_.size() != blocks_.size()) throw std::invalid_argument("step: there are no caches");
    check_positions(step.positions, step.sequences.num_tokens, embedding_.num_positions);
    const Widths widths(embedding_.tokens.width, blocks_);
    Pass pass(step, embedding_.tokens.dtype, embedding_.tokens.width,
              lay_out(arena_, widths, step.sequences.num_tokens, embedding_.tokens.dtype));
    pass.embed(embedding_);
    for (size_t i = 0; i + 1 < blocks_.size(); ++i) pass.run(blocks_[i], caches_[i]);
    if (!blocks_.empty() && step.num_wanted != nullptr) {
        const WantedTokens wanted(step);
        if (wanted.are_few()) return pass.finish_wanted(wanted, blocks_.back(), caches_.back(), out);
    }
    if (!blocks_.empty()) pass.run(blocks_.back(), caches_.back());
    pass.finish(out);
}

}  // namespace quire
