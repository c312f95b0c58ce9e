// A tile of keys and values on its way through a task: what the files of the attention share (attention.cpp: tasks;
// attention_tile.cpp: scores and outputs, or partial/amx_attention.cpp; attention_softmax.hpp: what lies between).
#pragma once

#include "kernels.hpp"

namespace quire::QUIRE_ISA {

constexpr int TILE_VECS = TILE / LANES;
constexpr float NONE = -__builtin_inff();

// Register tiles: scores of SCORE_ROWS rows and KEYS keys, outputs of OUT_ROWS rows and OUT_VECS vectors. With AVX-512 24
// accumulators of 32 registers, else 12 of 16 (SSE2, whose multiply-and-add takes a register more, 6).
constexpr int KEY_VECS = 2, KEYS = KEY_VECS * LANES;
constexpr int SCORE_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 3;
constexpr int OUT_ROWS = LANES == 16 ? 6 : LANES == 8 ? 6 : 3;
constexpr int OUT_VECS = LANES == 16 ? 4 : 2;
// Tasks of up to so many rows take the direct way: accumulators and a transposed block share the registers.
constexpr int DIRECT_ROWS = LANES == 16 ? 8 : SCORE_ROWS;

// Query rows (positions x heads of one KV head) of a task. Tiles of matrices pass over a tile of keys so quickly that what
// prepares it has to be shared by more: their rows, outputs and scores take a second-level cache of 2 MiB up to a half.
#if defined(__AMX_TILE__) || defined(QUIRE_EMULATE_AMX)
constexpr int MAX_ROWS = 576;
#else
constexpr int MAX_ROWS = 192;
#endif

constexpr int64_t MAX_WORD_ELEMENTS = 4;
static_assert(MAX_ROWS % SCORE_ROWS == 0 && MAX_ROWS % OUT_ROWS == 0 && TILE % KEYS == 0 && SPLIT % TILE == 0);

inline int64_t padded_head(int64_t head_size) { return round_up(head_size, 16); }
// Tiles of matrices take values by 64 elements of 16 bits, of smaller heads, too.
inline int64_t padded_values(int64_t head_size) { return max64(padded_head(head_size), 32); }
// As far as blocks of keys reach.
inline int64_t padded_keys(int64_t head_size) { return round_up(head_size, MAX_WORD_ELEMENTS * LANES); }

// Softmax states of the rows of a task. `total` is kept as LANES partial sums and added up at the very end.
struct States {
    float *max;    // [rows], -infinity where nothing has been seen
    float *total;  // [rows][LANES]
    float *out;    // [rows][padded head]
};

struct Workspace {
    int64_t padded;  // head size
    float *query;    // [MAX_ROWS][padded keys] or less, as whoever multiplies them wants them
    float *keys;     // [TILE][padded keys], likewise
    float *values;   // [TILE][padded values], likewise
    float *scores;   // [MAX_ROWS][TILE]: scores, then weights
    float *rescale;  // [MAX_ROWS]
    States split, running;
    States shared_split, shared_running;  // of all members, while their own keys are attended to
};

// The keys, and then the values, of TILE positions.
struct TileRows {
    const char *rows[2 * TILE];
};

// The next tile's keys and values, asked for while this tile is computed: blocks are scattered, so the hardware cannot
// foresee them. A core waits for a dozen lines at a time, so whoever asks for many at once waits for all but the last of
// them: they are asked for little by little, as much as is read of this tile. After a task's last tile comes the next
// task's first.
struct Prefetcher {
    static constexpr int64_t LINE = 64;

    const TileRows &tile;
    int64_t row_bytes;
    int row;            // the next to ask for; 2 * TILE when done
    int64_t at = 0;     // the byte of it from which on
    int64_t share = 0;  // bytes that each register tile asks for

    // So many bytes more, by lines.
    QINLINE_MEMBER void ask(int64_t num_bytes) {
        for (; num_bytes > 0 && row < 2 * TILE; num_bytes -= LINE) {
            __builtin_prefetch(tile.rows[row] + at, 0, 2);
            at += LINE;
            if (at >= row_bytes) at = 0, ++row;
        }
    }
    void ask_for_rest() { ask(2 * TILE * round_up(row_bytes, LINE)); }
};

// What a row sees of a tile: [from, to); both zero where that is nothing.
struct Range {
    int from, to;
    bool is_empty() const { return from == to; }
    bool is_whole() const { return from == 0 && to == TILE; }
};

// What some rows see between them.
inline Range hull(const Range *ranges, int64_t count) {
    Range all{0, 0};
    for (int64_t r = 0; r < count; ++r) {
        if (ranges[r].is_empty()) continue;
        if (all.is_empty() || ranges[r].from < all.from) all.from = ranges[r].from;
        if (ranges[r].to > all.to) all.to = ranges[r].to;
    }
    return all;
}

// A tile on its way through a task.
struct Turn {
    const AttentionProblem &problem;
    const Workspace &w;
    const TileRows &tile;
    Prefetcher &next;
    const Range *ranges;  // of each row
    bool is_whole;        // all rows see all of it

    // What rows [first, first + count) see between them.
    Range seen_by(int64_t first, int64_t count) const { return is_whole ? Range{0, TILE} : hull(ranges + first, count); }
};

// Row r of a task is query position r / num_heads, head r % num_heads; this walks through them without dividing.
struct RowWalk {
    const AttentionTask &task;
    int64_t place = 0, head = 0;  // among the task's positions; within the task

    explicit RowWalk(const AttentionTask &of) : task(of) {}
    int64_t row() const { return task.row(place); }
    int64_t query_head() const { return task.first_head + head; }
    void step() {
        if (++head < task.num_heads) return;
        head = 0;
        ++place;
    }
};

// The present row of the query.
template <typename T>
inline const T *query_row(const AttentionProblem &problem, const RowWalk &walk) {
    return static_cast<const T *>(problem.query) + walk.row() * problem.query_stride +
           walk.query_head() * problem.cache.head_size;
}

constexpr float LOG2_E = 1.44269504088896341f;

// What scores are multiplied by to become powers of two (or, where they are capped, what the hyperbolic tangent is taken of).
inline float score_factor(const AttentionProblem &problem) {
    return problem.soft_cap > 0.0f ? problem.scale / problem.soft_cap : problem.scale * LOG2_E;
}

// A task's rows of the query to where attend_tile reads them.
void gather_query(const AttentionProblem &problem, const AttentionTask &task, float *query);

// Scores, weights and the outputs of a tile for the first `num_rows` rows of the workspace: `split` is brought up to date.
void attend_tile(const Turn &turn, int64_t num_rows);

}  // namespace quire::QUIRE_ISA
