// The online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): scores of a tile to weights.
//
// A kind of scores says what is still to be done to them and how weights are stored over the scores:
//     cappable(x)         what the hyperbolic tangent is taken of, where scores are capped
//     scaled(x)           scores in powers of two, and
//     unscaled(x)         back
//     weight(x, high)     two to the power of how far these are above `high`
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

// The bias of row r of the task, by how far each key is from its query.
template <typename Kind>
static void add_bias(const Kind &kind, const Turn &turn, int64_t r, float *scores) {
    const AttentionProblem &problem = turn.problem;
    const int64_t reach = problem.bias_reach, position = turn.task.position(r / turn.task.num_heads);
    const int64_t head = turn.task.first_head + r % turn.task.num_heads;
    const float *row = problem.bias + head * (2 * reach + 1) + reach + turn.base - position;
    const int64_t count = min64(TILE, turn.task.context_len - turn.base);
    for (int64_t i = 0; i < count; i += LANES) {
        const Vec bias = kind.unscaled(mul(load_up_to(row + i, count - i), broadcast(LOG2_E)));
        store(scores + i, add(load(scores + i), bias));
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

// How far scores may be above a row's max, in powers of two, until it is raised to them: weights then reach 2^SLACK, which no
// format minds, and a row's outputs are rescaled in its first tile or two instead of whenever a score is the highest so far
// (as in FlashAttention-4). Whether a max is raised depends on its row alone.
constexpr float SLACK = 8.0f;

// Whether any of `count` <= LANES rows has a score above its limit.
static bool has_higher(const float *scores, const float *limits, int64_t count) {
    Vec is_higher = broadcast(0.0f);
    for (int64_t r = 0; r < count; ++r) {
        is_higher = where_less(broadcast(limits[r]), highest_scores(scores + r * TILE), broadcast(1.0f), is_higher);
    }
    return reduce_max(is_higher) > 0.0f;
}

// Brings the max of `count` <= LANES rows, the first of them row `first`, up to date with their scores, and finds what their
// totals and outputs are rescaled by; returns whether that is not 1 for all. It seldom is, and then no load waits for a max.
template <typename Kind>
static bool raise_max(const Kind &kind, const Turn &turn, float *scores, int64_t first, int64_t count) {
    for (int64_t r = 0; r < count; ++r) {
        if (turn.problem.soft_cap > 0.0f) cap_scores(kind, scores + r * TILE, turn.problem.soft_cap);
        if (turn.problem.bias != nullptr) add_bias(kind, turn, first + r, scores + r * TILE);
        if (!turn.is_whole) hide(scores + r * TILE, turn.ranges[first + r]);
    }
    float *max_seen = turn.w.split.max + first, *rescale = turn.w.rescale + first, limits[LANES];
    const Vec before = load(max_seen), limit = kind.unscaled(add(before, broadcast(SLACK))), one = broadcast(1.0f);
    store(limits, limit);
    store(rescale, one);
    if (!has_higher(scores, limits, count)) return false;
    const Vec highest = highest_of_rows(scores, count);
    const Vec now = where_less(limit, highest, kind.scaled(highest), before);
    store(max_seen, now);
    store(rescale, where_less(before, now, where_less(before, broadcast(LOWEST), one, exp2(sub(before, now))), one));
    bool is_rescaled = false;
    for (int64_t r = 0; r < count; ++r) is_rescaled |= rescale[r] != 1.0f;
    return is_rescaled;
}

// Scores of rows [first, first + count), whose max is up to date, to weights; their sums join the rows' totals. Before each row,
// `between()`.
template <typename Kind, typename Between>
QINLINE void soften_rows(const Kind &kind, const Turn &turn, float *scores, int64_t first, int64_t count, Between between) {
    const Range *ranges = turn.ranges + first;
    const float *max_seen = turn.w.split.max + first, *rescale = turn.w.rescale + first;
    float *total = turn.w.split.total + first * LANES;
    for (int64_t r = 0; r < count; ++r, scores += TILE, total += LANES) {
        between();
        if (ranges[r].is_empty()) {
            kind.forget(scores);
            continue;
        }
        Vec sum = broadcast(0.0f);
        QUNROLL
        for (int v = 0; v < TILE_VECS; ++v) {
            const Vec weights = kind.weight(load(scores + v * LANES), max_seen[r]);
            kind.keep(scores, v, weights);
            sum = add(sum, weights);
        }
        store(total, fma(load(total), broadcast(rescale[r]), sum));
    }
}

}  // namespace quire::QUIRE_ISA
