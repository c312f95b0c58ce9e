// A whole decoder step behind one call: the native mirror of quire/nn/layers.py, part for part and in the same order.
//
// It calls the very kernels that the Python walk calls one by one, row for row, so both give the same bits; what it saves
// are the calls, the allocations (one arena for the activations of all layers) and passes over memory (norms of queries
// and keys, RoPE and the cache write are one).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "attention.hpp"
#include "elementwise.hpp"
#include "linear.hpp"

namespace quire {

// RMS norm or layer norm over `width` values; absent where `weight` is null.
struct NormWeight {
    const void *weight, *bias;  // bias: layer norm only, may be null
    DType dtype;
    int64_t width;
    float eps, offset;
    bool is_layer;

    bool is_present() const { return weight != nullptr; }
};

struct AttentionWeights {
    LinearWeight qkv, output;  // qkv: queries, keys and values in one product
    NormWeight query_norm, key_norm;
    const float *rope;  // [positions, 2, rope_half]; null: none
    int64_t rope_half;
    int64_t num_heads, num_kv_heads, head_size;
    float scale, soft_cap;  // soft_cap 0: none
    int64_t window;         // 0: none

    int64_t query_width() const { return num_heads * head_size; }
    int64_t key_width() const { return num_kv_heads * head_size; }
};

struct MlpWeights {
    LinearWeight up, down;  // up: gate and up in one product where there is a gate
    bool is_gated;
    Activation activation;
};

struct BlockWeights {
    NormWeight attention_norm, post_attention_norm, mlp_norm, post_mlp_norm;
    AttentionWeights attention;
    MlpWeights mlp;
};

// What comes before the blocks.
struct EmbeddingWeights {
    Lookup tokens, positions;  // of the same dtype and width; positions.table may be null
    int64_t num_positions;     // those that may be asked for; every table of RoPE holds as many
    float scale;
};

// The tokens of one step, and where everything of them is.
struct StepInputs {
    const int64_t *token_ids, *positions, *slots;  // [T]
    Sequences sequences;
    const int32_t *block_tables;  // [S], rows table_stride entries apart
    int64_t table_stride;
    const int32_t *num_wanted;  // [S] hidden states that are asked for, of each sequence's last tokens; null: all
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

class Decoder {
   public:
    explicit Decoder(const EmbeddingWeights &embedding) : embedding_(embedding) {}

    int64_t width() const { return embedding_.tokens.width; }
    DType dtype() const { return embedding_.tokens.dtype; }
    void add_block(const BlockWeights &block) { blocks_.push_back(block); }
    void set_caches(const std::vector<KVCache> &caches);  // one for each block

    // Token ids to hidden states [T, H] before the final norm; those that nobody asks for may be of an earlier layer. Checks
    // every index first: std::out_of_range for a token id, std::invalid_argument for anything else. One call at a time:
    // others wait.
    void forward(const StepInputs &step, void *out);

   private:
    EmbeddingWeights embedding_;
    std::vector<BlockWeights> blocks_;
    std::vector<KVCache> caches_;
    Arena arena_;
    std::mutex is_running_;
};

}  // namespace quire
