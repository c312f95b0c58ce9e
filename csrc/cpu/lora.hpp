// Low-rank adapters (LoRA, Hu et al. 2021): corrections of projections for the rows that use an adapter.
//
// A step's rows may use different adapters, of different ranks, or none. Rows of one adapter are multiplied together; rows
// without one are not looked at. The arithmetic is in isa/lora.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "dispatch.hpp"

namespace quire {

// What an adapter adds to some neighbouring outputs of a weight: up [num_outputs, rank] times the products
// [first_rank, first_rank + rank) of `down`.
struct LoraPart {
    int64_t first_output, num_outputs, first_rank, rank;
    const float *bias, *replaced;  // [num_outputs]; bias is added, too, and replaced subtracted; null: none
    const void *up;  // panels of LORA_PANEL outputs, [rank][outputs of the panel] each; the last one is as wide as is left
};

// Of one weight: the products of x with down [num_ranks, num_inputs], and the parts that are made of them.
struct LoraWeight {
    int64_t num_ranks = 0, num_inputs = 0, num_outputs = 0;  // num_ranks 0: the adapter leaves this weight as it is
    const void *down = nullptr;  // in blocks and chunks (dispatch.hpp); of an embedding, [num_inputs][num_ranks]
    const float *scales = nullptr;  // [num_ranks], which the products are multiplied by
    std::vector<LoraPart> parts{};
};

// One adapter in memory; its weights by their numbers in the program.
struct Adapter {
    DType dtype;
    std::vector<LoraWeight> weights{};

    const LoraWeight *of(int64_t weight) const {
        const bool is_there = weight >= 0 && weight < static_cast<int64_t>(weights.size()) && weights[weight].num_ranks > 0;
        return is_there ? &weights[weight] : nullptr;
    }
};

// The rows of a step that use an adapter, adapter by adapter.
class AdaptedRows {
   public:
    AdaptedRows() = default;
    // of_row [num_rows]: an index of `adapters`, or -1. std::invalid_argument for anything else.
    AdaptedRows(const std::vector<const Adapter *> &adapters, const int32_t *of_row, int64_t num_rows);

    bool is_empty() const { return groups_.empty(); }
    // Whether any of the rows [first, last) is corrected at this weight.
    bool concern(int64_t weight, int64_t first, int64_t last) const;
    // The rows [first, last), numbered from 0.
    AdaptedRows between(int64_t first, int64_t last) const;
    // Rows rows[0], rows[1], ..., in this order, which ascends.
    AdaptedRows chosen(const std::vector<int64_t> &rows) const;

    // y [T, y_width] += the corrections of columns [first_column, first_column + y_width) of the weight for x [T, K]: sums
    // in float32, rounded once with y. A row's bits depend on nothing but the row, its adapter and the instruction set.
    void add_to(int64_t weight, const void *x, DType x_dtype, void *y, DType y_dtype, int64_t first_column,
                int64_t y_width) const;
    // The same of an embedding: the products are the rows of `down` that ids [T] name. std::out_of_range for others.
    void add_embedding(int64_t weight, const int64_t *ids, void *y, DType y_dtype, int64_t y_width) const;

   private:
    int64_t num_products(int64_t weight) const;
    struct Group {
        const Adapter *adapter;
        std::vector<int64_t> rows;  // ascending
    };
    std::vector<Group> groups_{};
};

}  // namespace quire
