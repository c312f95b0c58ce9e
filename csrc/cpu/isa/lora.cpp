// The two products of an adapter, for a few rows of it at a time.
//
// `lora_down`: each output is one chain of fused multiply-adds over the inputs, lane by lane, and then the sum of its lanes.
// `lora_up`: each output is one chain over the ranks in ascending order, from its bias on, which is then added to what is there. So the bits of
// a row are the same whatever tile it is in, and ranks are never padded. Weights lie in the order in which they are read.
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

constexpr int MAX_ROWS = LANES == 16 ? 4 : 2;  // with LORA_RANKS ranks, so many accumulators stay in registers
constexpr int UP_VECS = 4;
constexpr int64_t UP_WIDTH = UP_VECS * LANES;
constexpr int64_t AHEAD = 2048;  // the distance of prefetches in bytes

// LORA_CHUNK inputs of ROWS rows and RANKS ranks, or `width` of them.
template <typename X, typename W, int ROWS, int RANKS>
QINLINE void down_chunk(const X *const (&x)[ROWS], int64_t k, const W *w, int64_t width, Vec (&sums)[ROWS][RANKS]) {
    __builtin_prefetch(reinterpret_cast<const char *>(w) + AHEAD);
    if (RANKS * LORA_CHUNK * sizeof(W) > 64) __builtin_prefetch(reinterpret_cast<const char *>(w) + AHEAD + 64);
    QUNROLL
    for (int i = 0; i < LORA_CHUNK; i += LANES) {
        const int64_t left = max64(0, width - i);
        Vec values[ROWS];
        QUNROLL
        for (int r = 0; r < ROWS; ++r) values[r] = load_up_to(x[r] + k + i, left);
        QUNROLL
        for (int j = 0; j < RANKS; ++j) {
            const Vec weight = load_up_to(w + j * width + i, left);
            QUNROLL
            for (int r = 0; r < ROWS; ++r) fma_into(sums[r][j], values[r], weight);
        }
    }
}

template <typename X, typename W, int ROWS, int RANKS>
QINLINE void down_tile(const LoraRows &task, int64_t row, int64_t rank) {
    const X *x[ROWS];
    Vec sums[ROWS][RANKS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        x[r] = static_cast<const X *>(task.x) + task.rows[row + r] * task.num_inputs;
        QUNROLL
        for (int j = 0; j < RANKS; ++j) sums[r][j] = broadcast(0.0f);
    }
    const W *w = static_cast<const W *>(task.down) + rank * task.num_inputs;
    int64_t k = 0;
    for (; k + LORA_CHUNK <= task.num_inputs; k += LORA_CHUNK) {
        down_chunk<X, W, ROWS, RANKS>(x, k, w, LORA_CHUNK, sums);
        w += RANKS * LORA_CHUNK;
    }
    if (k < task.num_inputs) down_chunk<X, W, ROWS, RANKS>(x, k, w, task.num_inputs - k, sums);
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        float *out = task.products + (row + r) * task.num_ranks + rank;
        QUNROLL
        for (int j = 0; j < RANKS; ++j) out[j] = reduce_add(sums[r][j]) * task.scales[rank + j];
    }
}

template <typename X, typename W, int ROWS>
static void down_rows(const LoraRows &task, int64_t row) {
    int64_t rank = task.first_rank;
    for (; rank + LORA_RANKS <= task.last_rank; rank += LORA_RANKS) down_tile<X, W, ROWS, LORA_RANKS>(task, row, rank);
    static_assert(LORA_RANKS == 4);
    switch (task.last_rank - rank) {
        case 3:
            return down_tile<X, W, ROWS, 3>(task, row, rank);
        case 2:
            return down_tile<X, W, ROWS, 2>(task, row, rank);
        case 1:
            return down_tile<X, W, ROWS, 1>(task, row, rank);
        default:
            return;
    }
}

template <typename X, typename W>
static void down(const LoraRows &task) {
    int64_t row = task.first_row;
    for (; row + MAX_ROWS <= task.last_row; row += MAX_ROWS) down_rows<X, W, MAX_ROWS>(task, row);
    for (; row < task.last_row; ++row) down_rows<X, W, 1>(task, row);
}

// What the sums of so many outputs begin with.
QINLINE Vec constants(const LoraRows &task, int64_t output, int64_t count) {
    if (task.bias == nullptr) return broadcast(0.0f);
    const Vec bias = load_up_to(task.bias + output, count);
    return task.replaced == nullptr ? bias : sub(bias, load_up_to(task.replaced + output, count));
}

// Columns [at, at + UP_WIDTH) of a panel `width` wide, or as many as there are.
template <typename Y, typename W, int ROWS, bool IS_WHOLE>
QINLINE void up_tile(const LoraRows &task, const W *panel, int64_t width, int64_t at, int64_t row, int64_t column) {
    Vec sums[ROWS][UP_VECS], firsts[UP_VECS];
    const float *products[ROWS];
    QUNROLL
    for (int v = 0; v < UP_VECS; ++v) {
        firsts[v] = constants(task, column - task.y_column + at + v * LANES, IS_WHOLE ? LANES : max64(0, width - at - v * LANES));
    }
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        products[r] = task.products + (row + r) * task.num_ranks + task.first_rank;
        QUNROLL
        for (int v = 0; v < UP_VECS; ++v) sums[r][v] = firsts[v];
    }
    const int64_t rank = task.last_rank - task.first_rank;
    for (int64_t j = 0; j < rank; ++j) {
        Vec weights[UP_VECS];
        __builtin_prefetch(reinterpret_cast<const char *>(panel + j * width + at) + AHEAD);
        __builtin_prefetch(reinterpret_cast<const char *>(panel + j * width + at) + AHEAD + 64);
        QUNROLL
        for (int v = 0; v < UP_VECS; ++v) {
            const W *from = panel + j * width + at + v * LANES;
            weights[v] = IS_WHOLE ? load(from) : load_up_to(from, max64(0, width - at - v * LANES));
        }
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Vec product = broadcast(products[r][j]);
            QUNROLL
            for (int v = 0; v < UP_VECS; ++v) fma_into(sums[r][v], product, weights[v]);
        }
    }
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        Y *y = static_cast<Y *>(task.y) + task.rows[row + r] * task.y_stride + column + at;
        QUNROLL
        for (int v = 0; v < UP_VECS; ++v) {
            const int64_t left = IS_WHOLE ? LANES : width - at - v * LANES;
            if (left > 0) store_up_to(y + v * LANES, add(load_up_to(y + v * LANES, left), sums[r][v]), left);
        }
    }
}

template <typename Y, typename W, int ROWS>
static void up_rows(const LoraRows &task, const W *panel, int64_t width, int64_t column, int64_t row) {
    int64_t at = 0;
    for (; at + UP_WIDTH <= width; at += UP_WIDTH) up_tile<Y, W, ROWS, true>(task, panel, width, at, row, column);
    if (at < width) up_tile<Y, W, ROWS, false>(task, panel, width, at, row, column);
}

template <typename Y, typename W>
static void up(const LoraRows &task) {
    const int64_t rank = task.last_rank - task.first_rank;
    for (int64_t first = task.first_output; first < task.last_output; first += LORA_PANEL) {
        const int64_t width = min64(LORA_PANEL, task.num_outputs - first), column = task.y_column + first;
        const W *panel = static_cast<const W *>(task.up) + first * rank;
        int64_t row = task.first_row;
        for (; row + MAX_ROWS <= task.last_row; row += MAX_ROWS) up_rows<Y, W, MAX_ROWS>(task, panel, width, column, row);
        for (; row < task.last_row; ++row) up_rows<Y, W, 1>(task, panel, width, column, row);
    }
}

void lora_down(const LoraRows &task) {
    if (task.x_dtype == DType::f32) {
        return task.dtype == DType::f32 ? down<float, float>(task) : down<float, bf16>(task);
    }
    task.dtype == DType::f32 ? down<bf16, float>(task) : down<bf16, bf16>(task);
}

void lora_up(const LoraRows &task) {
    if (task.y_dtype == DType::f32) {
        return task.dtype == DType::f32 ? up<float, float>(task) : up<float, bf16>(task);
    }
    task.dtype == DType::f32 ? up<bf16, float>(task) : up<bf16, bf16>(task);
}

}  // namespace quire::QUIRE_ISA
