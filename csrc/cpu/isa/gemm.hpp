// What the GEMMs in float32 and in integers share: how rows are cut into tiles, and which weights to fetch ahead.
//
// While the tiles of a block multiply one chunk of inputs, they prefetch the chunk that comes next into the second-level
// cache, evenly spread over their steps. So the memory is read while the arithmetic runs, and not between.
#pragma once

#include "kernels.hpp"

namespace quire::QUIRE_ISA {

// Up to so many rows, narrow weights are widened in registers by each tile: the first tile waits for the memory anyway.
// With more rows it is cheaper to widen a chunk once, in scratch, for all of them.
constexpr int64_t IN_PLACE_ROWS = 3 * TILE_ROWS;

// Where tile `index` of `num_tiles` begins: heights differ by one at most, as a tile of few rows is slower by row.
QINLINE int64_t tile_start(int64_t num_rows, int64_t num_tiles, int64_t index) { return num_rows * index / num_tiles; }

// Bytes to prefetch, `step` at a time: `length` from `data` on in each of `num_panels` panels that lie `stride` apart.
struct Ahead {
    const char *data;
    int64_t step, length, stride, num_panels;

    // Share `index` of `count`, to be fetched in `num_steps` steps of at most a cache line. (A share that crosses from
    // one panel to the next goes on in the first one, which is a loss of a few lines.)
    Ahead share(int64_t count, int64_t index, int64_t num_steps) const {
        const int64_t each = num_panels * length / count, from = index * each;
        const int64_t panel = length == 0 ? 0 : from / length;
        return {data + panel * stride + (from - panel * length), min64(64, ceil_div(each, max64(1, num_steps))), 0, 0, 0};
    }
};

// What follows inputs [k, k + n) of the block's panels: the next inputs of the same panels, or the panels after them.
// Behind the last panel there may be no memory, and looking for it costs far more than a prefetch saves.
QINLINE Ahead ahead_of(const LinearWeight &weight, const GemmBlock &block, int64_t k, int64_t n) {
    const int64_t panel = weight.panel_bytes(), inputs = weight.padded_inputs(), count = block.num_panels;
    const char *data = weight.panel(block.first_panel);
    if (k + n < inputs) {
        return {data + (k + n) * panel / inputs, 0, min64(n, inputs - k - n) * panel / inputs, panel, count};
    }
    if (block.first_panel + 2 * count > weight.num_panels()) return {data, 0, 0, 0, 0};
    return {data + count * panel, 0, min64(n, inputs) * panel / inputs, panel, count};
}

}  // namespace quire::QUIRE_ISA
