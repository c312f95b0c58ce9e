// The online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): scores of a tile to weights.
//
// A kind of scores says what is still to be done to them and how weights are kept, in the place of the scores:
//     cappable(x)         what the hyperbolic tangent is taken of, where scores are capped
//     scaled(x)           scores in powers of two
//     exponent(x, high)   how far these are above `high`
//     keep(row, v, w)     stores vector v of a row's weights
//     forget(row)         stores the weights of a row that sees nothing
#pragma once

#include "attention_tile.hpp"

namespace quire::QUIRE_ISA {

template <typename Kind>
static void cap_scores(const Kind &kind, float *scores, float soft_cap) {
    for (int i = 0; i < TILE; i += LANES) {
        store(scores + i, mul(tanh(kind.cappable(load(scores + i))), broadcast(soft_cap * LOG2_E)));
    }
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
template <typename Kind>
QINLINE void soften_row(const Kind &kind, float *scores, float highest, float rescale, float *total) {
    Vec sum = broadcast(0.0f);
    QUNROLL
    for (int v = 0; v < TILE_VECS; ++v) {
        const Vec weights = exp2(kind.exponent(load(scores + v * LANES), highest));
        kind.keep(scores, v, weights);
        sum = add(sum, weights);
    }
    store(total, fma(load(total), broadcast(rescale), sum));
}

// Scores of `count` <= LANES rows, the first of them row `first`, to weights, their states' max and total brought up to date,
// and what their outputs are rescaled by.
template <typename Kind>
static void soften_rows(const Kind &kind, const Turn &turn, float *scores, int64_t first, int64_t count) {
    const Workspace &w = turn.w;
    float *max_seen = w.split.max + first, *rescale = w.rescale + first;
    const Range *ranges = turn.ranges + first;
    for (int64_t r = 0; r < count; ++r) {
        if (turn.problem.soft_cap > 0.0f) cap_scores(kind, scores + r * TILE, turn.problem.soft_cap);
        if (!turn.is_whole) hide(scores + r * TILE, ranges[r]);
    }
    const Vec before = load(max_seen), now = max(kind.scaled(highest_of_rows(scores, count)), before);
    store(max_seen, now);
    store(rescale, exp2(sub(before, now)));
    for (int64_t r = 0; r < count; ++r) {
        if (ranges[r].is_empty()) {
            rescale[r] = 1.0f;
            kind.forget(scores + r * TILE);
        } else {
            soften_row(kind, scores + r * TILE, max_seen[r], rescale[r], w.split.total + (first + r) * LANES);
        }
    }
}

}  // namespace quire::QUIRE_ISA
