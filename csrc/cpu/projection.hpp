// One projection of rows that are ready to be multiplied, block by block: what `linear.cpp` divides among threads for one
// weight, and `experts.cpp` for many.
#pragma once

#include "dispatch.hpp"

namespace quire {

constexpr int64_t BLOCK_ROWS = 128;  // so many whole tiles (of 3, 6, 14 or 16 rows) as fit
// Panels of a block of several tiles: as wide as the widest tile of many rows.
constexpr int64_t TILE_PANELS = 2;
constexpr int64_t FEW_ITEMS = 16;  // so few for a thread are made a multiple of the threads: one more would be noticed

// Where a projection's outputs go: rows `stride` elements apart, of which `data` is the column `first_column` of the first.
struct Destination {
    void *data;
    DType dtype;
    int64_t stride;
    bool is_gated;
    Activation activation;
    bool is_streamed = false;
    int64_t first_column = 0;
};

struct Projection {
    const KernelTable &table;
    const LinearWeight &weight;
    InputRows rows;
    Destination out;

    int64_t num_columns() const { return out.is_gated ? weight.num_outputs / 2 : weight.num_outputs; }
    int64_t num_panels() const { return ceil_div(num_columns(), PANEL); }  // of `out`
    bool has_matrices() const { return rows.depth > 0; }
    // Tiles of matrices meet the gate and `up` in one go, where both begin with a panel.
    bool is_fused() const { return has_matrices() && (!out.is_gated || num_columns() % PANEL == 0); }
    // A block of gated columns whose `up` rows do not begin with a panel needs one panel more of them.
    int64_t max_panels() const {
        const int64_t most = is_fused() && out.is_gated ? GROUP_PANELS / 2 : GROUP_PANELS;
        if (!has_matrices() && rows.num_tiles > 1) return TILE_PANELS;
        return out.is_gated && num_columns() % PANEL != 0 ? GROUP_PANELS - 1 : most;
    }
};

// Tiles x panels of `out`.
struct Block {
    int64_t first_tile, num_tiles, first_panel, num_panels;
};

// The block's outputs, on the calling thread.
void compute(const Projection &task, const Block &block);

// The form in which so many rows are multiplied; they are not there yet.
InputRows form_of(const KernelTable &table, const LinearWeight &weight, DType dtype, int64_t num_rows);

// Whether x [num_rows, num_inputs] is in that form as it lies.
bool is_in_form(const InputRows &form, const LinearWeight &weight, DType dtype);

// Even shares of whole items: item `index` of `parts` begins here.
inline int64_t share(int64_t count, int64_t parts, int64_t index) { return count * index / parts; }

}  // namespace quire
