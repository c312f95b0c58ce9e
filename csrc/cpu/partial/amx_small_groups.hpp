// int4 in small groups: a tile of rows and a panel at a time, so that the registers hold the float32 sums of all its groups.
// Adding a group's integers to sums in memory takes longer than multiplying them.
#pragma once

#include "amx_products.hpp"

namespace quire::QUIRE_ISA {

// A group's products are read when two more are under way: a load straight after the store of a tile waits for it, which
// takes half as long as all else together (groups of 32 inputs, 29 ns each and 20 ns).
constexpr int LAG = 2, RING = 4;

using Products = uint32_t[MATRIX_ROWS][PANEL];

// One tile of rows and one panel, whose weights are signed bytes, from one group on.
struct TileAndPanel {
    const LinearWeight &weight;
    int height, depth;
    const char *x, *weights, *headers;
    int64_t num_lines, x_step, header_step;  // of a group; bytes from a group to the next one
};

static void multiply_group(const TileAndPanel &at, int64_t group, Products &products) {
    const int depth = at.depth;
    const int64_t block_bytes = int64_t{at.height} * depth * int64_t{sizeof(uint32_t)};
    const char *x = at.x + group * at.x_step, *w = at.weights + group * at.num_lines * LINE;
    int64_t left = at.num_lines;
    zero_tile<0>();
    for (; left >= depth; left -= depth, w += depth * LINE, x += block_bytes) {
        step<SignedQuads, 1, 1, true, true>(x, x, depth * int64_t{sizeof(uint32_t)}, w, 0);
    }
    if (left > 0) {
        Sides sides{{x, nullptr}, {block_bytes, 0}, depth, 0, {}};
        last_step<SignedQuads, 1, 1>(sides, w, left);
    }
    store_tile<0>(products, LINE);
}

// As add_group (groups.hpp), with sums in registers. `starts`: of the tile's first row and this group.
QINLINE void add_products(const TileAndPanel &at, int64_t group, const int32_t *starts, const Products &products,
                          Vec (&sums)[MATRIX_ROWS]) {
    const float *header = reinterpret_cast<const float *>(at.headers + group * at.header_step);
    const Vec scale = load(header);
    QUNROLL
    for (int r = 0; r < MATRIX_ROWS; ++r) sums[r] = add(sums[r], mul(scale, to_float(load_bits(products[r]))));
    if (!at.weight.has_offsets) return;
    const Vec offset = load(header + PANEL);
    const float per_start = -1.0f / static_cast<float>(at.weight.zero_point());
    QUNROLL
    for (int r = 0; r < MATRIX_ROWS; ++r) {
        const int32_t start = starts[(r < at.height ? r : 0) * at.weight.num_groups()];
        sums[r] = add(sums[r], mul(offset, broadcast(static_cast<float>(start) * per_start)));
    }
}

// The tile's sums += `num_groups` groups.
static void add_small_groups(const TileAndPanel &at, int64_t num_groups, bool is_first, const int32_t *starts, float *to) {
    alignas(LINE) Products products[RING];
    if (at.height < MATRIX_ROWS) memset(products, 0, sizeof products);
    Vec sums[MATRIX_ROWS];
    QUNROLL
    for (int r = 0; r < MATRIX_ROWS; ++r) {
        sums[r] = is_first || r >= at.height ? broadcast(0.0f) : load(to + r * GROUP_WIDTH);
    }
    for (int64_t group = 0; group < num_groups + LAG; ++group) {
        if (group < num_groups) multiply_group(at, group, products[group % RING]);
        const int64_t done = group - LAG;
        if (done >= 0) add_products(at, done, starts + done, products[done % RING], sums);
    }
    QUNROLL
    for (int r = 0; r < MATRIX_ROWS; ++r) {
        if (r < at.height) store(to + r * GROUP_WIDTH, sums[r]);
    }
}

}  // namespace quire::QUIRE_ISA
