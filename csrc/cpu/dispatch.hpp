// The kernels of one instruction set, as a table of functions, and the table in use.
//
// csrc/cpu/isa/*.cpp is compiled once per instruction set; each copy fills one `KernelTable` (isa/table.cpp). These
// functions compute a piece of work on the calling thread; the callers in csrc/cpu/*.cpp divide the work into pieces.
// Dividing it differently never changes a bit of the result.
#pragma once

#include <cstdint>

#include "dtypes.hpp"
#include "weight.hpp"

namespace quire {

// clamped_swish is no function of one number: it limits both sides of a gated product (isa/activation.hpp).
enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2, gelu_sigmoid = 3, clamped_swish = 4 };

// ---- projections (gemm*.cpp) ----

constexpr int GROUP_PANELS = 4;                    // panels that one call computes, at most
constexpr int GROUP_WIDTH = GROUP_PANELS * PANEL;  // and outputs
constexpr int CHUNK = 512;  // inputs that are made float32 at a time, where weights have to be: 128 KiB, in L2

// Rows of x as the GEMM wants them, in 32-bit words: a float32 input, two of bfloat16 (where both sides are, and the
// instruction set multiplies pairs of them), or integers in whatever form the instruction set multiplies (four or two to
// a word); each group padded with zeros as in the weight. Rows are divided evenly into tiles of at most `tile_rows`, as a
// tile of few rows is slower by row; a tile of h rows, the first of them row r, begins at word r * row_words and holds word
// 0 of its h rows, then word 1, and so on.
//
// For tiles of matrices (`depth` above 0) every tile but the last has `tile_rows` rows, each group is padded to whole
// blocks of `depth` words, and a tile holds the first block of its rows, row after row, then the second, and so on. Behind the
// last row there is memory for the rows that the last tile lacks.
struct InputRows {
    const void *data;
    int64_t row_words;
    int tile_rows, depth;
    bool is_bf16;
    const float *scales;    // [T], with integers: x = scale * integer
    const int32_t *starts;  // [T][groups], with integers: the sum of each group, times -(the weight's zero point)
    int64_t num_rows, num_tiles;
    int64_t least_height, num_taller;  // of a tile; so many, the first ones, have a row more

    // Called for each tile, and a division takes as long as twenty steps of one.
    int64_t first_row(int64_t tile) const {
        return depth > 0 ? min64(tile * tile_rows, num_rows) : tile * least_height + min64(tile, num_taller);
    }
};

constexpr int MATRIX_ROWS = 16;  // of x in a tile of a matrix, at most: AMX's

// Where finished sums go: columns [first, first + width) of out, whose rows are `stride` elements apart.
struct OutputBlock {
    void *data;
    DType dtype;
    int64_t stride, first, width, num_rows;
};

// What becomes of the sums of a block: sum + bias, or activation(gate) * up.
struct Outputs {
    OutputBlock out;
    const float *bias, *up_bias;  // of the first column; null: none
    bool is_gated;
    Activation activation;
    int64_t up_panels;  // gated: the panels of `up` lie so many behind those of the gate
    bool is_streamed;   // past the caches, as there are more than these hold
};

// The block of float32 sums that one call computes. All scratch is the calling thread's.
struct GemmBlock {
    int64_t first_tile, num_tiles;
    int64_t first_panel;
    int num_panels;          // <= GROUP_PANELS; gated `outputs`: of the gate, and as many of `up`
    float *sums;             // out: [rows of the tiles][GROUP_WIDTH], without bias
    void *panels;            // scratch for weights in the form that is multiplied: expanded_bytes(weight)
    const Outputs *outputs;  // tiles of matrices: outputs are stored, and `sums` is scratch. Null: sums are kept
};

// What the weights of one call take where they are not used as they lie: bytes as 16-bit integers, at most.
inline int64_t expanded_bytes(const LinearWeight &weight) {
    if (!weight.has_scales()) return 0;
    return GROUP_WIDTH * (weight.has_int8_inputs ? 2 * weight.padded_inputs() : CHUNK * int64_t{sizeof(float)});
}

// ---- mixtures of experts (isa/experts.cpp) ----

// From logits to experts: the largest few, which weigh their share of the softmax over all, or over those chosen; or their
// sigmoids, as they are or over their sum.
struct ExpertRouting {
    int64_t num_experts, num_chosen;
    bool is_normalised;
    bool is_sigmoid = false;
    int64_t num_groups = 1, num_groups_chosen = 1;  // of experts, even ones; others than the best groups' are not chosen
    bool sums_best_two = false;                     // of a group: what it counts as, or else its best one
    float factor = 1.0f;                            // on weights
    const float *bias = nullptr;                    // [E]: added to sigmoids for the choice alone; null: none

    // Scratch that the choice for one token takes, in floats.
    int64_t spare_floats() const { return 2 * num_experts + 4 * num_groups + 4; }
};

// What experts gave for some columns: float32 [places][width], and which of it belongs to a token, in the order of its choices.
struct ExpertSums {
    const float *data;
    int64_t width, num_chosen;
    const int32_t *places;  // [T][num_chosen]; below zero: nothing
    const float *weights;   // [T][num_chosen]
};

// ---- attention (isa/attention.cpp, isa/attention_tile.cpp) ----

constexpr int TILE = 64;       // key positions per step of the online softmax, aligned to absolute positions
constexpr int SPLIT = 1024;    // positions whose tiles share one softmax state before states are merged, in order
constexpr int MAX_HEAD_SIZE = 576;  // latent attention has the largest heads: 512 values, and 64 beside them

// How the cache stores a row: the keys, or the values, of one token and one KV head. int8 and fp8 (e4m3) rows are their
// elements and then a float32, the scale; quire/kernels/interface.py (write_kv) has the arithmetic.
enum class KVFormat : int { f32 = 0, bf16 = 1, int8 = 2, fp8 = 3 };

constexpr int64_t kv_element_bytes(KVFormat format) {
    return format == KVFormat::f32 ? 4 : format == KVFormat::bf16 ? 2 : 1;
}
constexpr bool is_scaled(KVFormat format) { return format == KVFormat::int8 || format == KVFormat::fp8; }
constexpr int64_t kv_row_bytes(KVFormat format, int64_t head_size) {
    return head_size * kv_element_bytes(format) + (is_scaled(format) ? 4 : 0);
}

// The cache of one layer: keys and values are [B, KV heads, block size] rows each. Where both are the same memory, a row is key
// and value at once.
struct KVCache {
    void *keys, *values;
    KVFormat format;
    int64_t num_blocks, num_kv_heads, block_size, head_size;

    int64_t row_bytes() const { return kv_row_bytes(format, head_size); }
    int64_t num_slots() const { return num_blocks * block_size; }
    bool has_values() const { return values != keys; }  // apart from the keys
};

struct AttentionProblem {
    const void *query;  // [T, heads, D], rows query_stride elements apart
    void *out;          // [T, heads, value_size]
    DType dtype;        // of query and out
    int64_t num_heads, query_stride;
    KVCache cache;
    const int32_t *block_tables;  // [S], rows table_stride entries apart
    int64_t table_stride;
    float scale, soft_cap;  // soft_cap 0: none
    int64_t window;         // 0: none
    const float *sinks;     // [heads]: scores of their own, without a value, that join each softmax's total; null: none
    // Attention without a cache: every position sees all of its sequence, or, with a window, the positions less than that
    // away. Keys and values are then rows [T, KV heads, D] of the step's own tokens, `row_stride` elements apart, which
    // `cache` points to in a format of floats; there are no blocks. 0: causal, by blocks.
    int64_t row_stride;
    const float *bias;   // [heads][2 * bias_reach + 1], added to scores by key position - query position; null: none
    int64_t bias_reach;
    int64_t value_size;  // elements that a value has, the first ones of its row; 0: all of them
    // Causal: of each query row, one behind the last position that it sees, its own or a later one of its sequence; never less
    // than of the row before. Null: its own.
    const int32_t *key_ends;

    bool is_bidirectional() const { return row_stride > 0; }
    bool has_one_cache() const { return cache.keys == cache.values; }  // values are the first elements of keys
    int64_t out_size() const { return value_size > 0 ? value_size : cache.head_size; }
};

// A decoding sequence of several that begin with the same blocks.
struct Member {
    int32_t sequence;
    int64_t row, position;  // of its one query
};

// Some query rows of one sequence that share a KV head, against the keys of splits [first_split, last_split); or one row of
// each of several sequences, against the keys that they share and then, sequence by sequence, their own.
struct AttentionTask {
    int32_t sequence, kv_head;
    int32_t first_head, num_heads;  // query heads
    int32_t num_positions;          // query positions
    int64_t first_row;              // of `query`
    int64_t first_position;         // absolute position of first_row
    int64_t context_len;
    int32_t first_split, last_split;
    float *partial;  // null: finish the rows; else store their softmax states here, for finish_rows
    const Member *members;  // [num_positions], or null: one sequence. Blocks are looked up in the first one's table
    int64_t shared_end;     // of the keys that the members share: a multiple of TILE that each of them sees whole
    int64_t begin;          // keys before it have been attended to
    int64_t cost;           // an estimate, in rows times keys

    int64_t num_rows() const { return int64_t{num_heads} * num_positions; }
    int64_t row(int64_t p) const { return members != nullptr ? members[p].row : first_row + p; }
    int64_t position(int64_t p) const { return members != nullptr ? members[p].position : first_position + p; }
    // One behind the last position that the query at `at` sees.
    int64_t end_of_sight(const AttentionProblem &problem, int64_t at) const {
        if (problem.key_ends != nullptr) return problem.key_ends[first_row + at - first_position];
        if (!problem.is_bidirectional()) return at + 1;
        return problem.window > 0 ? min64(context_len, at + problem.window) : context_len;
    }
    // The same of all its queries.
    int64_t end_of_keys(const AttentionProblem &problem) const {
        return end_of_sight(problem, first_position + num_positions - 1);
    }

    // What is left of a member behind the shared keys.
    AttentionTask rest_of(int64_t p) const {
        AttentionTask rest = *this;
        rest.sequence = members[p].sequence;
        rest.num_positions = 1;
        rest.first_row = members[p].row;
        rest.first_position = members[p].position;
        rest.context_len = members[p].position + 1;
        rest.last_split = static_cast<int32_t>((members[p].position + SPLIT) / SPLIT);
        rest.members = nullptr;
        rest.begin = shared_end;
        return rest;
    }
};

// ---- adapters (isa/lora.cpp) ----

constexpr int64_t LORA_PANEL = 64;  // outputs of `up` that lie next to each other, rank by rank
// `down` in blocks of so many ranks, or what is left: for each chunk of inputs, or what is left, the ranks' weights in turn.
constexpr int LORA_RANKS = 4, LORA_CHUNK = 16;

// Some rows that use one adapter, and a part of one of its weights (lora.hpp). All scratch is the caller's.
struct LoraRows {
    const int64_t *rows;         // of x and y
    int64_t first_row, last_row;  // places in `rows`
    int64_t first_rank, last_rank;  // down: whole blocks
    DType dtype;                    // of the adapter
    float *products;              // [places][num_ranks], scaled
    int64_t num_ranks;
    // down
    const void *x, *down;
    DType x_dtype;
    int64_t num_inputs;
    const float *scales;
    // up: panels [first_output, last_output) of a part of num_outputs, which begins at column y_column of y
    const void *up;
    const float *bias, *replaced;  // of the part; null: none
    void *y;
    DType y_dtype;
    int64_t num_outputs, first_output, last_output, y_column, y_stride;
};

struct KernelTable {
    const char *name;
    // projections
    int tile_rows, int8_tile_rows;  // of a tile, at most, unless it is one of matrices; the latter for int8 weights and inputs
    int64_t int8_input_bytes, int4_input_bytes;  // that an element of rows takes that are quantized for such weights
    bool has_bf16_dots;  // multiplies pairs of bfloat16 with pairs of bfloat16
    // The `depth` of InputRows that this projection of so many rows wants; null: always 0
    int (*matrix_depth)(const LinearWeight &weight, bool is_bf16, int64_t num_rows);
    // Rows of x [T, K] to tiles [first, last) of `out`; `spare`: out.tile_rows * row_words words of scratch.
    void (*convert_rows)(const LinearWeight &weight, const void *x, DType dtype, int64_t first, int64_t last,
                         const InputRows &out, uint32_t *spare);
    void (*gemm)(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block);
    void (*end_gemms)();  // of the calling thread, which then holds nothing of the processor; null: it never does
    void (*store_sums)(const float *sums, const float *bias, const OutputBlock &out);
    // activation(gate) * up; the biases (null: none) begin at the block's first column
    void (*store_gated)(const float *gate, const float *up, const float *gate_bias, const float *up_bias,
                        Activation activation, const OutputBlock &out);
    // adapters: products of x with rows of `down`; what parts add to y
    void (*lora_down)(const LoraRows &task);
    void (*lora_up)(const LoraRows &task);
    // mixtures of experts
    // Tokens [first, last) of logits [T, E]; a row that is not finite gets weights that are not. `spare`: spare_floats()
    void (*choose_experts)(const ExpertRouting &routing, const float *logits, int64_t first, int64_t last, int64_t *ids,
                           float *weights, float *spare);
    // Tokens [first, last): weighed and added in the order of the choices, from zero; each operation rounds by itself
    void (*combine_experts)(const ExpertSums &from, int64_t first, int64_t last, void *out, DType dtype, int64_t out_stride);
    // attention
    int64_t (*max_task_rows)(const AttentionProblem &problem);  // query rows (positions x heads of one KV head)
    int64_t (*attention_scratch)(int64_t head_size);  // floats that attend needs
    int64_t (*state_size)(int64_t out_size);          // floats of one row's softmax state
    // `next_task`: what the caller's thread will probably attend to next; its keys are prefetched. Null: unknown
    void (*attend)(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                   float *scratch);
    void (*finish_rows)(const AttentionProblem &problem, const AttentionTask &task, int num_partials,
                        int64_t partial_stride, float *scratch);
    // A token's keys, or values, one head after the other; `to`: the first one's row, the others `stride` bytes apart
    void (*store_kv_rows)(const void *rows, DType dtype, int64_t num_rows, int64_t head_size, KVFormat format, void *to,
                          int64_t stride);
    // rows [first, last) of elementwise operations
    void (*rms_norm)(const struct NormRows &norm, int64_t first, int64_t last);
    void (*layer_norm)(const struct NormRows &norm, int64_t first, int64_t last);
    void (*add)(const void *x, const void *y, void *out, DType dtype, int64_t first, int64_t last);  // elements
    void (*scale)(const void *x, float factor, void *out, DType dtype, int64_t first, int64_t last);
    // x [T, width] times the sigmoid of gate [T, 1]
    void (*gate_rows)(const void *x, const void *gate, void *out, DType dtype, int64_t width, int64_t first, int64_t last);
    bool (*is_finite)(const void *x, DType dtype, int64_t first, int64_t last);
    void (*activate)(const void *x, void *out, DType dtype, Activation activation, int64_t first, int64_t last);
    void (*gated)(const void *gate_up, void *out, DType dtype, Activation activation, int64_t width, int64_t first,
                  int64_t last);
    void (*rope)(const struct RopeRows &rope, int64_t first, int64_t last);
    void (*prepare_heads)(const struct HeadRows &rows, int64_t first, int64_t last);
    void (*convert)(const void *from, DType from_dtype, void *to, DType to_dtype, int64_t count);
    const struct SamplingTable *sampling;  // sampling.hpp
    // rooflines: operations done in so many rounds, and a reading of memory (probe.cpp)
    int64_t (*probe_floats)(int64_t rounds);
    int64_t (*probe_pairs)(int64_t rounds);  // of bfloat16
    int64_t (*probe_integers)(int64_t rounds);
    int64_t (*probe_half_bytes)(int64_t rounds);  // weights of four bits
    void (*probe_read)(const void *data, int64_t num_bytes);
};

struct NormRows {
    const void *x;
    const void *residual;  // null: none
    void *sum;             // x + residual, where residual is not null
    void *out;
    const void *weight, *bias;  // bias: layer norm only, may be null
    DType dtype, weight_dtype;
    int64_t width;
    float eps, weight_offset;
};

struct RopeRows {
    void *x;  // [T, heads, D], rows `stride` elements apart
    const int64_t *positions;
    const float *cos_sin;  // [P, 2, half]
    DType dtype;
    int64_t stride, num_heads, head_size, half;
    bool is_interleaved;
};

// Queries and then keys of each token. RMS norm of each head (weight null: none), RoPE (cos_sin null: none).
struct HeadRows {
    RopeRows rope;
    NormRows query_norm, key_norm;  // x and out are not looked at
    int64_t num_query_heads;
};

const KernelTable &kernels();  // of the instruction set in use

}  // namespace quire
