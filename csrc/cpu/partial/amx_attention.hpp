// What rows on their way through AMX's attention have in common, whether by tiles (amx_attention.cpp) or, where they are few,
// by vectors that give the same bits (amx_attention_few.cpp).
#pragma once

#include "bf16_attention.hpp"

namespace quire::QUIRE_ISA {

constexpr int ROWS = 16;  // of the query, in a tile
constexpr int VALUE_STEPS = TILE / PAIRED;
static_assert(2 * ROWS * PAIRED <= FEW_ROWS * MAX_HEAD_SIZE);  // what Unseen keeps

inline int64_t num_chunks(int64_t head_size) { return ceil_div(head_size, PAIRED); }

// Their query, and a tile of theirs.
void gather_few(const AttentionProblem &problem, const AttentionTask &task, float *query);
void attend_few(const Turn &turn, int64_t num_rows);

}  // namespace quire::QUIRE_ISA
