// The online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): scores of a tile to weights,
// and states of several tiles to one.
#include "attention_tile.hpp"

namespace quire::QUIRE_ISA {

static void cap_scores(float *scores, float soft_cap) {
    for (int i = 0; i < TILE; i += LANES) store(scores + i, mul(tanh(load(scores + i)), broadcast(soft_cap * LOG2_E)));
}

static void hide(float *scores, Range seen) {
    for (int i = 0; i < seen.from; ++i) scores[i] = NONE;
    for (int i = seen.to; i < TILE; ++i) scores[i] = NONE;
}

QINLINE Vec highest_scores(const float *scores) {
    Vec highest = load(scores);
    QUNROLL
    for (int v = 1; v < TILE_VECS; ++v) highest = max(load(scores + v * LANES), highest);
    return highest;
}

// The highest score of `count` <= LANES rows, one in a lane; many of them by a transposition.
QINLINE Vec highest_of_rows(const float *scores, int64_t count) {
    if (count < LANES) {
        float lanes[LANES] = {};
        for (int64_t r = 0; r < count; ++r) lanes[r] = reduce_max(highest_scores(scores + r * TILE));
        return load(lanes);
    }
    Vec block[LANES];
    QUNROLL
    for (int r = 0; r < LANES; ++r) block[r] = highest_scores(scores + r * TILE);
    transpose(block);
    Vec highest = block[0];
    QUNROLL
    for (int i = 1; i < LANES; ++i) highest = max(block[i], highest);
    return highest;
}

// Scores of one row to weights; their sum joins the row's total.
QINLINE void soften_row(float *scores, float highest, float rescale, float *total) {
    Vec sum = broadcast(0.0f);
    QUNROLL
    for (int v = 0; v < TILE_VECS; ++v) {
        const Vec weights = exp2(sub(load(scores + v * LANES), broadcast(highest)));
        store(scores + v * LANES, weights);
        sum = add(sum, weights);
    }
    store(total, fma(load(total), broadcast(rescale), sum));
}

// Scores of `count` <= LANES rows from `first` on to weights, their states' max and total brought up to date, and what their
// outputs are rescaled by.
static void soften_rows(const Turn &turn, int64_t first, int64_t count) {
    const Workspace &w = turn.w;
    float *scores = w.scores + first * TILE, *max_seen = w.split.max + first, *rescale = w.rescale + first;
    const Range *ranges = turn.ranges + first;
    for (int64_t r = 0; r < count; ++r) {
        if (turn.problem.soft_cap > 0.0f) cap_scores(scores + r * TILE, turn.problem.soft_cap);
        if (!turn.is_whole) hide(scores + r * TILE, ranges[r]);
    }
    const Vec before = load(max_seen), now = max(highest_of_rows(scores, count), before);
    store(max_seen, now);
    store(rescale, exp2(sub(before, now)));
    for (int64_t r = 0; r < count; ++r) {
        if (ranges[r].is_empty()) {
            rescale[r] = 1.0f;
        } else {
            soften_row(scores + r * TILE, max_seen[r], rescale[r], w.split.total + (first + r) * LANES);
        }
    }
}

void soften_all(const Turn &turn, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; r += LANES) soften_rows(turn, r, min64(LANES, num_rows - r));
}

void merge(float *max_to, float *total_to, float *out_to, const float *max_from, const float *total_from,
           const float *out_from, int64_t padded) {
    if (*max_from == NONE) return;
    if (*max_to == NONE) {
        *max_to = *max_from;
        memcpy(total_to, total_from, LANES * sizeof(float));
        memcpy(out_to, out_from, padded * sizeof(float));
        return;
    }
    const float highest = *max_from > *max_to ? *max_from : *max_to;
    const Vec to = exp2(broadcast(*max_to - highest)), from = exp2(broadcast(*max_from - highest));
    *max_to = highest;
    store(total_to, fma(load(total_from), from, mul(load(total_to), to)));
    for (int64_t d = 0; d < padded; d += LANES) {
        store(out_to + d, fma(load(out_from + d), from, mul(load(out_to + d), to)));
    }
}

}  // namespace quire::QUIRE_ISA
