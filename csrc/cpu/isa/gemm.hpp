// What the GEMMs in float32 and in integers share: how a block is walked through, and which weights are fetched ahead.
//
// Rows come in tiles, word by word for all rows of a tile (dispatch.hpp, InputRows), so that a tile reads them with one
// pointer. A step of a tile uses one cache line of each of its panels, whatever the format: a float32 input, two bfloat16
// ones, four bytes or eight half bytes for 16 outputs. A tile goes through all inputs at once and its sums stay in
// registers.
//
// One tile alone is bound by the memory: it asks for its own lines some way ahead. Of several tiles, each asks for its next
// lines in the first-level cache, and, evenly spread over all of them, for the panels that come next in the second-level
// cache, so that the memory is read while the arithmetic runs. Measured on one core of a Cascade Lake: one row reads
// 11.0 GB/s so, 10.0 without, where a loop that only reads reaches 10.4; 64 rows of bfloat16 reach 83 % of the
// multiply-adds of a loop in registers (70 % by way of float32 scratch and with rows as they came).
#pragma once

#include "kernels.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t LINE = 64;              // bytes
constexpr int64_t MEMORY_AHEAD = 16;      // lines of each panel, where they come from memory
constexpr int64_t CACHE_AHEAD = 4;        // where they come from the second-level cache
constexpr int64_t INPUT_LINES_AHEAD = 8;  // rows that are too many for the second-level cache come from the third
constexpr int64_t STEPS_OF_BLOCK = 8;     // steps between two looks at what is to be asked for
constexpr int FEW_ROWS = 6;               // so few rows stay in the first-level cache

// What is asked for: lines `distance` bytes ahead, and of panels that follow from [next, end) `num_lines` every
// STEPS_OF_BLOCK steps.
struct Ahead {
    int64_t distance;
    bool has_more;  // panels follow that this call will go through next
    const char *next, *end;
    int64_t num_lines;

    void spread(int64_t num_steps) { num_lines = ceil_div(ceil_div(end - next, LINE), ceil_div(num_steps, STEPS_OF_BLOCK)); }
    QINLINE_MEMBER void fetch() {
        for (int64_t i = 0; i < num_lines && next < end; ++i, next += LINE) __builtin_prefetch(next, 0, 2);
    }
    // The distance with `left` steps to go of panels that take `width` bytes: at their end, to those that follow them.
    QINLINE_MEMBER int64_t distance_at(int64_t left, int64_t width) const {
        return has_more && left * LINE <= distance ? distance + width : distance;
    }
};

// What tile `index` of the block asks for: one tile, its own lines; of several, a share of the panels that follow the
// block's, as many as it has. Behind the last one there may be no memory, and looking for it costs far more than a
// prefetch saves.
QINLINE Ahead ahead_of(const LinearWeight &weight, const GemmBlock &block, int64_t index) {
    const int64_t from = min64(block.first_panel + block.num_panels, weight.num_panels());
    const int64_t num_panels = min64(block.num_panels, weight.num_panels() - from);
    if (block.num_tiles == 1) return {MEMORY_AHEAD * LINE, num_panels == block.num_panels, nullptr, nullptr, 0};
    const int64_t num_lines = num_panels * weight.panel_bytes() / LINE;
    const char *data = weight.panel(from);
    return {CACHE_AHEAD * LINE, false, data + num_lines * index / block.num_tiles * LINE,
            data + num_lines * (index + 1) / block.num_tiles * LINE, 0};
}

// The panels that a call multiplies; `stride` bytes from one to the next.
struct Panels {
    const char *data;
    int64_t stride;
    int num_panels;
    int64_t num_steps;
};

// One tile of `height` rows: `x` are its words.
struct Tile {
    int height;
    const uint32_t *x;
    float *sums;  // [height][GROUP_WIDTH]
    int64_t row;  // of all rows
};

QINLINE Tile tile_of(const InputRows &rows, const GemmBlock &block, int64_t index) {
    const int64_t row = rows.first_row(index), end = rows.first_row(index + 1);
    const int64_t in_block = row - rows.first_row(block.first_tile);
    const uint32_t *words = static_cast<const uint32_t *>(rows.data);
    return {static_cast<int>(end - row), words + row * rows.row_words, block.sums + in_block * GROUP_WIDTH, row};
}

// Where vector `v` of a step's weights lies: panels side by side, a line of each.
QINLINE const char *line(const char *w, int v, int64_t stride) {
    return w + v / PANEL_VECS * stride + v % PANEL_VECS * 4 * LANES;
}

// Asks for what a later step needs: a line of each panel, and `WORDS` words of every row.
template <int ROWS, int PANELS, int WORDS>
QINLINE void prefetch_step(const uint32_t *x, const char *w, int64_t stride, int64_t distance) {
    QUNROLL
    for (int p = 0; p < PANELS; ++p) __builtin_prefetch(w + p * stride + distance);
    if constexpr (ROWS <= FEW_ROWS) return;
    QUNROLL
    for (int i = 0; i < (WORDS * ROWS + 15) / 16; ++i) __builtin_prefetch(x + (INPUT_LINES_AHEAD + i) * 16);
}

}  // namespace quire::QUIRE_ISA
