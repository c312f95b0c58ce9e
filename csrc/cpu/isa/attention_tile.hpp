// A tile of keys and values on its way through a task: what the files of the attention share (attention.cpp: tasks;
// attention_tile.cpp: scores and outputs, or partial/amx_attention.cpp; attention_softmax.hpp: what lies between).
#pragma once

#include "kernels.hpp"

namespace quire::QUIRE_ISA {

constexpr int TILE_VECS = TILE / LANES;
constexpr float NONE = -__builtin_inff(), LOWEST = -__FLT_MAX__;

// Register tiles: scores of SCORE_ROWS rows and KEYS keys, outputs of OUT_ROWS rows and OUT_VECS vectors. With AVX-512 24
// accumulators of 32 registers (so with NEON, where a vector has 4 lanes), else 12 of 16 (SSE2, whose multiply-and-add takes a
// register more, 6).
constexpr int KEY_VECS = 2, KEYS = KEY_VECS * LANES;
constexpr int SCORE_ROWS = NUM_REGISTERS == 32 ? 12 : LANES == 8 ? 6 : 3;
constexpr int OUT_ROWS = NUM_REGISTERS == 32 || LANES == 8 ? 6 : 3;
constexpr int OUT_VECS = NUM_REGISTERS == 32 ? 4 : 2;
// Tasks of up to so many rows take the direct way: accumulators and a transposed block share the registers.
constexpr int DIRECT_ROWS = NUM_REGISTERS == 32 ? 8 : SCORE_ROWS;

// Query rows (positions x heads of one KV head) of a task. Tiles of matrices pass over a tile of keys so quickly that what
// prepares it has to be shared by more: their rows, outputs and scores take a second-level cache of 2 MiB up to a half.
#if defined(__AMX_TILE__) || defined(QUIRE_EMULATE_AMX)
constexpr int MAX_ROWS = 576;
// Tiles of keys that rows may pass over in one go.
constexpr int RUN_TILES = 8, RUN_COPIES = RUN_TILES / 2;  // what is gathered of them is bfloat16
#else
constexpr int MAX_ROWS = HAS_BF16_DOTS ? 384 : 192;
constexpr int RUN_TILES = 1, RUN_COPIES = 1;
#endif

constexpr int64_t MAX_WORD_ELEMENTS = 4;
static_assert(MAX_ROWS % SCORE_ROWS == 0 && MAX_ROWS % OUT_ROWS == 0 && TILE % KEYS == 0 && SPLIT % TILE == 0);

inline int64_t padded_head(int64_t head_size) { return round_up(head_size, 16); }
// Tiles of matrices take values by 32 elements.
inline int64_t padded_values(int64_t head_size) { return round_up(head_size, 32); }
// As far as blocks of keys reach.
inline int64_t padded_keys(int64_t head_size) { return round_up(head_size, MAX_WORD_ELEMENTS * LANES); }

// Softmax states of the rows of a task. `total` is kept as LANES partial sums and added up at the very end.
struct States {
    float *max;     // [rows], -infinity where nothing has been seen
    float *total;   // [rows][LANES]
    float *out;     // [rows][padded head of the outputs]
    bool is_empty;  // nothing has been seen by any row, and what they point to is not set; nor is what belongs to rows that
                    // have seen nothing, but for `max`
};

struct Workspace {
    int64_t padded;  // size of a head of the outputs
    float *query;    // [MAX_ROWS][padded keys] or less, in the layout of the kernel that multiplies them
    float *keys;     // [RUN_COPIES][TILE][padded keys], likewise
    float *values;   // [RUN_COPIES][TILE][padded values], likewise
    float *scores;   // [MAX_ROWS][TILE]: scores, then weights
    float *rescale;  // [MAX_ROWS]
    States split, running;
    States shared_split, shared_running;  // of all members, while their own keys are attended to
};

// The keys, and then the values, of TILE positions.
struct TileRows {
    const char *rows[2 * TILE];
};

// Prefetches the next tiles' keys and values while this tile is computed: blocks are scattered, so the hardware cannot
// foresee them. A core has a dozen line fill buffers, so a burst of prefetches stalls on all but the last dozen: they are
// issued evenly, as much as is read of this tile. After a task's last tile comes the next task's first.
class Prefetcher {
   public:
    // `num_rows` rows of `row_bytes` bytes: tiles of keys and of values in turns, which are the same where there is one cache.
    Prefetcher(const char *const *rows, int64_t num_rows, int64_t row_bytes, bool has_one_cache)
        : first_(rows), row_(rows), end_(rows + num_rows), row_bytes_(row_bytes), has_one_cache_(has_one_cache) {
        find_line();
    }
    // Prefetches `num_bytes` more, line by line.
    QINLINE_MEMBER void prefetch(int64_t num_bytes) {
        for (; num_bytes > 0 && line_ != nullptr; num_bytes -= LINE) {
            __builtin_prefetch(line_, 0, 2);
            line_ += LINE;
            if (line_ >= row_end_) find_row();
        }
    }
    // Divides what is left evenly among `num_steps` calls of prefetch_share.
    void spread(int64_t num_steps) { share_ = ceil_div((end_ - row_) / (1 + has_one_cache_) * row_bytes_, num_steps); }
    QINLINE_MEMBER void prefetch_share() { prefetch(share_); }
    void prefetch_rest() { prefetch((end_ - row_) * round_up(row_bytes_, LINE)); }

   private:
    static constexpr int64_t LINE = 64;

    QINLINE_MEMBER void find_row() {
        ++row_;
        if (has_one_cache_ && (row_ - first_) % TILE == 0) row_ += TILE;
        find_line();
    }
    QINLINE_MEMBER void find_line() {
        line_ = row_ < end_ ? *row_ : nullptr;
        row_end_ = line_ != nullptr ? line_ + row_bytes_ : nullptr;
    }

    const char *const *const first_, *const *row_, *const *end_;
    const int64_t row_bytes_;
    const bool has_one_cache_;
    const char *line_, *row_end_;  // the next line of the present row; null: all has been prefetched
    int64_t share_ = 0;            // bytes
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
    const AttentionTask &task;
    const Workspace &w;
    const TileRows &tile;
    Prefetcher &next;
    const Range *ranges;  // of each row
    bool is_whole;        // all rows see all of it
    int64_t base;         // the position at which it begins

    // What rows [first, first + count) see between them.
    Range seen_by(int64_t first, int64_t count) const { return is_whole ? Range{0, TILE} : hull(ranges + first, count); }
};

// Tiles that a task's rows pass over in one go, in order.
struct Run {
    const AttentionProblem &problem;
    const AttentionTask &task;
    const Workspace &w;
    Prefetcher &next;
    int64_t base;  // the position at which the first of them begins
    int count;
    const TileRows *tiles;
    const Range (*ranges)[MAX_ROWS];
    const bool *is_whole;

    Turn turn(int tile) const { return Turn{problem, task, w, tiles[tile], next, ranges[tile], is_whole[tile], base + tile * TILE}; }
};

// Row r of a task is query position r / num_heads, head r % num_heads; this walks through them without dividing.
struct RowWalk {
    const AttentionTask &task;
    int64_t position = 0, head = 0;  // among the task's positions; within the task

    explicit RowWalk(const AttentionTask &of) : task(of) {}
    int64_t row() const { return task.row(position); }
    int64_t query_head() const { return task.first_head + head; }
    void step() {
        if (++head < task.num_heads) return;
        head = 0;
        ++position;
    }
};

// Prefetches rows of the query or the outputs some steps ahead: those of one position are together, but the next position's
// are pages away, where no processor looks for them.
class RowFetcher {
   public:
    explicit RowFetcher(const AttentionTask &task) : walk_(task), num_left_(task.num_rows()) {}
    // One row more, `size` elements from `address_of(walk)` on; of the first call, as many as are to be ahead.
    template <typename Address>
    QINLINE_MEMBER void step(const Address &address_of, int64_t size) {
        for (int i = is_first_ ? ROWS_AHEAD : 1; i > 0 && num_left_ > 0; --i, --num_left_, walk_.step()) {
            const auto *row = address_of(walk_);
            for (int64_t d = 0; d < size; d += 64 / int64_t{sizeof *row}) __builtin_prefetch(row + d);
        }
        is_first_ = false;
    }

   private:
    static constexpr int ROWS_AHEAD = 4;
    RowWalk walk_;
    int64_t num_left_;
    bool is_first_ = true;
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

// Tiles in a run for so many rows.
int run_length(int64_t num_rows);

// Whether outputs of so many rows have to be zero before a split's first run.
bool adds_to_outputs(int64_t num_rows);

// Scores, weights and the outputs of a run's tiles for the first `num_rows` rows of the workspace: `split` is brought up to
// date.
void attend_run(const Run &run, int64_t num_rows);

}  // namespace quire::QUIRE_ISA
