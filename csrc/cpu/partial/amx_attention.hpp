// What rows on their way through AMX's attention have in common, whether by tiles (amx_attention.cpp) or, where they are few,
// by vectors that give the same bits (amx_attention_few.cpp).
#pragma once

#include "bf16_attention.hpp"

namespace quire::QUIRE_ISA {

constexpr int ROWS = 16;  // of the query, in a tile
constexpr int VALUE_STEPS = TILE / PAIRED;
static_assert(2 * ROWS * PAIRED <= FEW_ROWS * MAX_HEAD_SIZE);  // what Unseen keeps

inline int64_t num_chunks(int64_t head_size) { return ceil_div(head_size, PAIRED); }

inline void rescale(const Workspace &w, const OutPiece &piece) {
    float *out = piece.at(w);
    for (int64_t r = 0; r < piece.num_rows; ++r, out += w.padded) {
        const float factor = w.rescale[piece.first_row + r];
        if (factor == 1.0f) continue;
        for (int64_t d = 0; d < piece.width; d += LANES) store(out + d, mul(load(out + d), broadcast(factor)));
    }
}

// The query of few rows, and a tile of theirs.
void gather_few(const AttentionProblem &problem, const AttentionTask &task, float *query);
void attend_few(const Turn &turn, int64_t num_rows);

}  // namespace quire::QUIRE_ISA
