// The sampling kernels of one instruction set, as a table of functions. What they compute, to the bit, is defined by
// quire/kernels/sampling.py; each works on one row of logits on the calling thread.
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace quire {

// A row, and the scaled distance of its tokens: d = (logit - max_logit) * scale.
struct ScaledRow {
    const float *logits;
    int64_t num_tokens;
    float max_logit, scale;
};

// A token is kept if its logit is above `value`, or equal and its id at most `token_id`; never if it is -inf.
struct FilterThreshold {
    float value;
    int64_t token_id;
};

struct DrawKey {
    uint64_t seed, position;
};

// A token that may be drawn: its score is its scaled distance and its noise.
struct Hit {
    int64_t index;
    float score, noise;
};

constexpr int NUM_BUCKETS = 2048;
constexpr float BUCKETS_PER_NAT = 64.0f;  // the last bucket holds all that is 32 nats or more below the max_logit

// Tokens with d >= floor, by bucket of distance; bucket 0 holds the best.
struct Bucket {
    int64_t count, weight;
};
struct Histogram {
    Bucket buckets[NUM_BUCKETS];
};

struct SamplingTable {
    // The first index at or after `start` whose logit is not <= threshold (it may be NaN); num_tokens where there is none.
    int64_t (*next_above)(const float *logits, int64_t start, int64_t num_tokens, float threshold);
    int64_t (*count_above)(const float *logits, int64_t num_tokens, float value);
    int64_t (*draw)(const ScaledRow &row, const FilterThreshold *threshold, const DrawKey &key);  // threshold may be null
    // In logits of tokens first_id, first_id + 1, ... (first_id a multiple of 4): the first one at or after `start` whose score is
    // above `least`; num_tokens where there is none.
    Hit (*next_hit)(const ScaledRow &row, int64_t first_id, const DrawKey &key, int64_t start, float least);
    // Of the weights; -1 where a logit is above the row's max logit.
    int64_t (*total)(const ScaledRow &row, const FilterThreshold *threshold);
    // False where a logit is above the row's max logit.
    bool (*histogram)(const ScaledRow &row, float floor, Histogram &out);
    // Ids of a bucket's tokens, ascending; returns their number.
    int64_t (*collect)(const ScaledRow &row, float floor, int bucket, int32_t *ids);
    void (*weigh)(const ScaledRow &row, const int32_t *ids, int64_t count, int64_t *weights);
    void (*noise)(int64_t num_tokens, const DrawKey &key, float *out);  // for tests
};

inline const SamplingTable &sampling_kernels() { return *kernels().sampling; }  // of the instruction set in use

// The best token of those seen so far: the lowest id of the largest logit, or a NaN, which nothing surpasses.
struct MaxLogit {
    int64_t token_id;
    float value;
};
constexpr MaxLogit NO_MAX_LOGIT{0, -__builtin_inff()};

// The max logit once tokens first_id, first_id + 1, ... with these logits have been seen, too.
MaxLogit updated(const SamplingTable &table, MaxLogit max_logit, const float *logits, int64_t first_id, int64_t num_tokens);

}  // namespace quire
