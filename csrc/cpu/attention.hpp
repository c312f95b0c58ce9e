// The KV cache and attention over it, callable from C++: what the bindings expose, without Python.
//
// Both functions check every index that comes from data and throw std::invalid_argument before they touch any memory;
// pointers, strides and shapes have been checked by the bindings (checks.hpp). Both divide their work over the process's threads
// (threads.hpp), so they are called from outside a parallel region. The bits of a result never depend on that division.
#pragma once

#include "dispatch.hpp"

namespace quire {

constexpr int64_t MAX_HEADS = 1 << 16;  // so that products with sizes of heads and blocks do not overflow

// A ragged batch: sequence s owns the query rows [query_start[s], query_start[s + 1]), which end its context.
struct Sequences {
    const int32_t *query_start;  // [count + 1]
    const int32_t *context_len;  // [count]
    int64_t count, num_tokens;   // num_tokens: query rows
};

// The keys and values of a problem without a cache (`row_stride`): rows of the step's own tokens.
KVCache rows_as_cache(void *keys, void *values, DType dtype, int64_t num_kv_heads, int64_t head_size);

// Attention of the batch, from problem.query to problem.out. Causal: keys and values of all positions below context_len
// are in the cache already. Bidirectional: each sequence's context is its rows.
void paged_attention(const AttentionProblem &problem, const Sequences &sequences);

// New keys and values [T, KV heads, D] (keys alone, where a row of the cache is both), tokens `*_stride` elements apart, and the
// slots (block * block size + offset) that they go to.
struct KVRows {
    const void *key, *value;
    DType dtype;
    int64_t num_tokens, key_stride, value_stride;
    const int64_t *slots;
};

// Store rows in the cache, in its format.
void write_kv(const KVRows &rows, const KVCache &cache);

// The same of tokens [first, last) on the calling thread, with slots that have been checked.
void check_slots(const KVRows &rows, const KVCache &cache);
void write_tokens(const KVRows &rows, const KVCache &cache, int64_t first, int64_t last);
// Prefetches the cache lines that these tokens will be written to.
void fetch_tokens(const int64_t *slots, const KVCache &cache, int64_t first, int64_t last);

// A cache from the numbers that a binding passes; std::invalid_argument where there can be no such cache.
KVCache make_cache(uintptr_t keys, uintptr_t values, int format, int64_t num_blocks, int64_t num_kv_heads,
                   int64_t block_size, int64_t head_size);

}  // namespace quire
