// A decoder step behind one call: the operations of quire/program/operations.py, one after the other.
//
// They call the very kernels that quire/kernels/interpreter.py calls one by one, row for row, so both give the same bits; what
// is saved are the calls, the allocations (one arena for all values) and passes over memory (norms of queries and keys, RoPE
// and the cache write are one).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "attention.hpp"
#include "elementwise.hpp"
#include "experts.hpp"
#include "gathering.hpp"
#include "head_linear.hpp"
#include "linear.hpp"
#include "lora.hpp"

namespace quire {

// An activation [T, width]: at column c of the arena, element c * T of it. The result lies outside, in the caller's memory.
struct Value {
    static constexpr int64_t RESULT = -1;
    int64_t column, width;
};

// RMS norm or layer norm over `width` values; absent where `weight` is null.
struct NormWeight {
    const void *weight, *bias;  // bias: layer norm only, may be null
    DType dtype;
    int64_t width;
    float eps, offset;
    bool is_layer;

    bool is_present() const { return weight != nullptr; }
};

// Rows of query heads, key heads and as many value heads.
struct Heads {
    int64_t num_queries, num_keys, size;

    int64_t query_width() const { return num_queries * size; }
    int64_t key_width() const { return num_keys * size; }
    int64_t width() const { return query_width() + 2 * key_width(); }
};

enum class Kind : int {
    embed, scale, add, norm, linear, gated_linear, activate, prepare_heads, attend, select, scatter, experts, gate_rows, place,
    take, head_linear, rotate_tails, write_latent, add_placed, gather, embed_gathered, adapt_embedding
};

// One operation, and of the fields those that its kind has.
struct Operation {
    static constexpr int64_t NO_CACHE = -1, NO_ADAPTERS = -1;

    Kind kind;
    bool is_narrow;  // computes the wanted tokens' rows alone
    Value x, y;      // inputs; norm: y is a residual, if y.width is not 0; prepare_heads: x is changed in place
    Value out, sum;  // outputs; sum: norm with a residual
    // embed: of positions, or else of token ids; embed_gathered: the rows of `first_id` and those behind it, of `num_ids` in all
    Lookup table;
    bool of_positions;
    int64_t first_id, num_ids;
    Gathering *gathering;          // gather, embed_gathered: the other ranks
    std::vector<Columns> columns;  // gather: of the output, that this rank has
    float factor;            // scale
    NormWeight norm;         // norm; prepare_heads: of queries, or absent
    NormWeight key_norm;     // prepare_heads, or absent
    LinearWeight weight;     // linear; gated_linear: the gate's outputs before the other ones
    Activation activation;   // gated_linear, activate
    int64_t number;          // linear, gated_linear, adapt_embedding: by which adapters know the weight, or NO_ADAPTERS
    int64_t first_output;    // linear: of the weight, at the first column; add_placed: of the rows from outside
    ExpertLayer layer;       // experts
    LinearWeight router;
    ExpertRouting routing;
    ExpertAdapters numbers;  // without rows
    NextMixture next;        // experts: which the list has behind it
    // prepare_heads: norms, then RoPE, then keys and values to a cache; attend: x's rows begin with the queries; head_linear,
    // rotate_tails: queries alone; write_latent: one key, normed but for its tail, which is rotated, to a cache
    Heads heads;
    const float *rope;  // [positions, 2, rope_half]; null: none, or, where rope_half is not 0, the step brings rotations
    int64_t rope_half;
    bool is_interleaved;    // rotate_tails, write_latent: of RoPE
    int64_t cache;          // its number, or NO_CACHE; attend: then keys and values are x's own, and attention bidirectional
    float scale, soft_cap;  // attend; soft_cap 0: none
    int64_t window;         // attend; 0: none
    const float *sinks;     // attend over a cache: [queries], see AttentionProblem; null: none
    int64_t value_size;     // attend: elements of a value, the first ones of its row; 0: all
    const float *bias;      // attend without a cache: [queries][2 * bias_reach + 1]; null: none
    int64_t bias_reach;
};

// Where the layers of one group keep keys and values: a slot for each token, and a block table for each sequence.
struct GroupTables {
    const int64_t *slots;         // [T]
    const int32_t *block_tables;  // [S], rows StepInputs::table_stride entries apart
};

// Rows that a step brings from outside, in the program's dtype.
struct PlacedRows {
    const int64_t *tokens;  // [count] that they belong to
    const void *rows;       // [count, width]
    int64_t count, width;
};

// What turns each token in place of the tables of RoPE: of the token t, row rows[t] of `table`.
struct Rotations {
    const int64_t *rows;  // [T]
    const float *table;   // [count, 2, half]: cosines, then sines; null: RoPE's own, by positions
    int64_t count, half;

    bool is_present() const { return table != nullptr; }
};

// The tokens of one step, and where everything of them is.
struct StepInputs {
    const int64_t *token_ids, *positions;  // [T]
    Sequences sequences;
    std::vector<GroupTables> groups;
    int64_t table_stride;
    const int32_t *num_wanted;  // [S] hidden states that are wanted, of each sequence's last tokens; null: all
    const AdaptedRows *adapted;  // the tokens that use an adapter; null: none does
    PlacedRows placed;           // that `place`, `take` and `add_placed` put where their tokens are; count 0: none
    Rotations rotations;
    const int32_t *key_ends;  // [T] of attention over caches, see AttentionProblem; null: each token sees up to itself
};

// Memory that is kept from call to call and grows as needed.
class Arena {
   public:
    char *take(size_t num_bytes);  // 64-byte aligned; what it held before is lost if it has to grow

   private:
    struct Free {
        void operator()(char *data) const;
    };
    std::unique_ptr<char, Free> data_;
    size_t capacity_ = 0;
};

// What a step runs: `whole`, or, if no more than half of its hidden states are wanted, `wanted`.
struct ProgramLists {
    std::vector<Operation> whole, wanted;
    DType dtype;
    int64_t width;          // of the result
    int64_t arena_width;    // of all values
    int64_t num_caches;
    int64_t num_positions;  // valid positions are below it; every table holds as many
};

class Program {
   public:
    explicit Program(ProgramLists lists) : lists_(std::move(lists)) {}

    const ProgramLists &lists() const { return lists_; }
    void set_caches(const std::vector<KVCache> &caches, const std::vector<int64_t> &groups);  // by their numbers

    // std::invalid_argument for an adapter that was made for other weights.
    void check(const std::vector<const Adapter *> &adapters) const;
    // The same for rows of another width, or of tokens that the step does not have.
    void check(const PlacedRows &placed, int64_t num_tokens) const;
    // The same for rotations of heads of another size, by rows that the table does not have, or that are missing.
    void check(const Rotations &rotations, int64_t num_tokens) const;

    // Token ids to hidden states [T, width]; those that are not wanted may be of an earlier layer. Checks every index first:
    // std::out_of_range for a token id, std::invalid_argument for anything else. One call at a time: others wait.
    void forward(const StepInputs &step, void *out);

   private:
    ProgramLists lists_;
    std::vector<KVCache> caches_;
    std::vector<int64_t> groups_;  // of each cache: whose block tables it is read by
    Arena arena_;
    std::mutex is_running_;
};

}  // namespace quire
