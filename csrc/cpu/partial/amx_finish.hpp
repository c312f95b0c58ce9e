// Products of tiles become outputs, a few rows at a time, so that it can be done between the products of the tiles that
// follow: the unit of tiles takes 64 cycles for four products, in which the others would be idle.
#pragma once

#include "../isa/gemm.hpp"

namespace quire::QUIRE_ISA {

constexpr int PAIR = 2 * PANEL;  // columns of two panels

// The sums of two tiles of rows and two panels, as tiles leave them.
using TileSums = uint32_t[2 * MATRIX_ROWS][PAIR];

enum class SumKind { floats, integers, signed_integers };  // integers: the products of unsigned weights, or of signed ones

struct Finish;
using FinishRows = void (*)(const Finish &finish, int64_t first, int64_t last);

// Rows of products, and what they become.
struct Finish {
    const TileSums *products;  // of each of `num_groups` groups; float32: one
    // integers
    int64_t num_groups, count;  // count: of all groups of a row
    const char *headers;        // of the first of these groups and the first panel
    int64_t header_stride, header_group_stride;
    bool has_offsets, is_first;  // is_first: no group comes before these
    float per_start;
    const int32_t *starts;    // of the first row and the first of these groups
    const float *row_scales;  // of the first row
    float *sums;              // [rows][GROUP_WIDTH]: of the groups before and then with these
    FinishRows finish;        // with these groups, rows are complete. Null: others follow
    // outputs
    char *out;  // of the first row and column
    int64_t out_stride, to_next;  // to_next: bytes to the output that is stored as many rows later, and is prefetched; 0: none
    uint32_t columns;      // a bit for each that there is
    const float *bias[2];  // of each panel; null: none
};

// What finishes rows [first, last). is_whole: all inputs are one group without offsets; else groups have been added up.
FinishRows finish_of(SumKind kind, const Outputs &outputs, bool is_whole);
// What adds groups to the sums of rows, and finishes rows that are complete.
FinishRows addition_of(SumKind kind);

}  // namespace quire::QUIRE_ISA
