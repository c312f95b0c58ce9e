// What the bindings of norms, activations and lookups share with programs (program.cpp): the division of rows among
// threads, and the checks of indices. The arithmetic is in isa/elementwise.cpp.
#pragma once

#include "dispatch.hpp"
#include "threads.hpp"

namespace quire {

// Run `work(first, last)` over `count` rows of `row_cost` elements, divided evenly among threads.
template <typename Work>
void over_rows(int64_t count, int64_t row_cost, Work work) {
    const int team = team_size(count * row_cost);
    if (team == 1) return work(int64_t{0}, count);
#pragma omp parallel for schedule(static) num_threads(team)
    for (int part = 0; part < team; ++part) work(count * part / team, count * (part + 1) / team);
}

// out [T, width] = x * sigmoid(gate [T, 1]), rounded once; `out` may be x.
void gate_rows(const void *x, const void *gate, void *out, DType dtype, int64_t num_rows, int64_t width);

// std::invalid_argument for a position that a table of RoPE or of embeddings does not have.
void check_positions(const int64_t *positions, int64_t count, int64_t num_positions);

// A table [num_rows, width], row by row or as a packed float weight (weight.hpp).
struct Lookup {
    const void *table;
    DType dtype;
    int64_t num_rows, width;
    int64_t panel_bytes;  // 0: row by row
};

// Gather rows; std::out_of_range for an id outside the table.
void embedding(const Lookup &lookup, const int64_t *ids, int64_t count, void *out);

}  // namespace quire
