// Products of tiles of rows and panels, step by step along the inputs, and what is done in between: lines are prefetched,
// and rows that are complete are finished.
#pragma once

#include "amx_finish.hpp"
#include "amx_tiles.hpp"

namespace quire::QUIRE_ISA {

constexpr int MAX_DEPTH = 16;  // lines of a tile
constexpr int X = 4;           // tiles 4 and 5 are rows of x, 6 and 7 weights, and 2 t + p the sums of rows t and panel p
constexpr int WEIGHTS = 6;

// The shapes of the calling thread's tiles. They are kept from block to block: to set them for each pair of panels, and to give
// the unit back, took 5 to 10 % of the time of 64 rows. To set them for a last tile of fewer rows took 16 % of 42 rows of int4
// in groups of 128, so all tiles of a call have the same height, and the last one may have rows that mean nothing.
class Shapes {
   public:
    // `height` rows of x, of blocks of `depth` words.
    static void set(int depth, int height) {
        if (depth == depth_ && height == height_) return;
        depth_ = depth;
        height_ = height;
        TileConfig config{};
        config.palette = 1;
        for (int sum = 0; sum < X; ++sum) shape(config, sum, height, LINE);
        for (int i = 0; i < 2; ++i) {
            shape(config, X + i, height, depth * int{sizeof(uint32_t)});
            shape(config, WEIGHTS + i, depth, LINE);
        }
        configure_tiles(config);
    }
    // The unit is as if it had never been used.
    static void release() {
        if (depth_ == 0) return;
        depth_ = 0;
        release_tiles();
    }

   private:
    static void shape(TileConfig &config, int tile, int rows, int64_t row_bytes) {
        config.rows[tile] = static_cast<uint8_t>(rows);
        config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
    }
    static inline thread_local int depth_ = 0, height_ = 0;  // 0: none are set
};

// What the first-level cache keeps of a block's sides: what is multiplied again soon, and no more than it holds. The other
// side goes by without leaving a line there.
struct Reuse {
    bool keeps_x, keeps_weights;
};

// The lines of the panels behind a pair.
struct Upcoming {
    const char *data;
    int64_t num_lines;
    int64_t distance;  // bytes to as many of `up`; 0: none
};

// Prefetches the panels that come next to the second-level cache with each step of the GEMM, as evenly as possible: a burst
// finds the requests to memory (48 of a core) taken, and is dropped. Some are dropped in any case, so every line is prefetched
// twice, the second time when the first one would have brought it (32 to 256 lines later are alike). One by one, because four
// lines at a time without a check for the end are dropped more often. With many rows a step prefetches so few lines that once
// is enough, and 2 % faster.
struct PanelPrefetcher {
    static constexpr int64_t LINES_BETWEEN = 64;
    static constexpr int64_t REPEATED_TILES = 8;  // of rows; with more, lines are prefetched once

    const char *next = nullptr, *end = nullptr;
    int64_t second = 0;    // bytes from a line to one that is prefetched as well; 0: none
    int64_t per_step = 0;  // lines
    bool repeats = false;

    PanelPrefetcher() = default;
    // Parts [first, last) of `count` of what follows, of rows of so many tiles.
    PanelPrefetcher(const Upcoming &following, int64_t num_tiles, int64_t first, int64_t last, int64_t count)
        : next(following.data + following.num_lines * first / count * LINE),
          end(following.data + following.num_lines * last / count * LINE),
          second(following.distance), repeats(num_tiles <= REPEATED_TILES) {}

    // Over so many steps. A division of 32 bits takes half as long as one of 64.
    void spread(int64_t num_steps) {
        const uint32_t lines = static_cast<uint32_t>((end - next) / LINE), steps = static_cast<uint32_t>(num_steps);
        per_step = (lines + steps - 1) / steps;
    }
    QINLINE_MEMBER void prefetch() {
        for (int64_t i = 0; i < per_step && next < end; ++i, next += LINE) {
            prefetch(next);
            if (second != 0) prefetch(next + second);
        }
    }

   private:
    QINLINE_MEMBER void prefetch(const char *line) const {
        __builtin_prefetch(line, 0, 2);
        if (repeats) __builtin_prefetch(line - LINES_BETWEEN * LINE, 0, 2);
    }
};

// Rows of products, which wait to become outputs until other tiles are multiplied, a few with each step. One after the other,
// making outputs took a third as long as the products of int8 (1024 inputs); a processor does not look that far ahead.
class Waiting {
   public:
    // The next rows, `count` of them. Written where they are read: a copy by vectors of what was just written in words would
    // have to wait until all stores before it, those of the tiles among them, are in the cache.
    Finish &put(FinishRows run, int64_t count) {
        run_ = run;
        next_ = 0;
        end_ = per_step_ = count;
        return finish_;
    }
    // Spreads the rows over `num_steps` steps; without this call they are finished at once.
    void spread(int64_t num_steps) {
        const uint32_t rows = static_cast<uint32_t>(end_ - next_), steps = static_cast<uint32_t>(num_steps);
        per_step_ = (rows + steps - 1) / steps;
    }
    QINLINE_MEMBER void finish_some() {
        if (next_ == end_) return;
        const int64_t first = next_;
        next_ = min64(end_, first + per_step_);
        run_(finish_, first, next_);
    }
    void finish_all() {
        per_step_ = end_ - next_;
        finish_some();
    }

   private:
    Finish finish_;
    FinishRows run_ = nullptr;
    int64_t next_ = 0, end_ = 0, per_step_ = 0;
};

// What is done between products.
struct Meanwhile {
    PanelPrefetcher ahead;
    Waiting waiting;
};

// Where a product of tiles finds its sides. It moves on along the rows.
struct Sides {
    const char *x[2];   // blocks of one or two tiles of rows
    int64_t x_step[2];  // bytes from a block to the next
    int depth;
    int64_t stride;  // bytes from a panel to the next
    Reuse reuse;
};

struct Pairs {
    static constexpr SumKind KIND = SumKind::floats;
    static constexpr int64_t INPUTS = 2;  // of a line
    static constexpr bool IS_EXPANDED = false;

    template <int SUMS, int ROWS, int PANEL_TILE>
    QINLINE void add() {
        add_pairs<SUMS, ROWS, PANEL_TILE>();
    }
};

struct Quads {
    static constexpr SumKind KIND = SumKind::integers;
    static constexpr int64_t INPUTS = 4;  // of a line
    static constexpr bool IS_EXPANDED = false;

    template <int SUMS, int ROWS, int PANEL_TILE>
    QINLINE void add() {
        add_quads<SUMS, ROWS, PANEL_TILE>();
    }
};

struct SignedQuads {
    static constexpr SumKind KIND = SumKind::signed_integers;
    static constexpr int64_t INPUTS = 4;  // of a line
    static constexpr bool IS_EXPANDED = true;

    template <int SUMS, int ROWS, int PANEL_TILE>
    QINLINE void add() {
        add_signed_quads<SUMS, ROWS, PANEL_TILE>();
    }
};

template <int TILE, bool KEEPS>
QINLINE void load(const char *data, int64_t stride) {
    if constexpr (KEEPS) {
        load_tile<TILE>(data, stride);
    } else {
        stream_tile<TILE>(data, stride);
    }
}

template <typename Words, int TALL, int WIDE, bool KEEPS_X, bool KEEPS_WEIGHTS>
QINLINE void step(const char *x, const char *second_x, int64_t x_stride, const char *w, int64_t stride) {
    load<X, KEEPS_X>(x, x_stride);
    if constexpr (TALL == 2) load<X + 1, KEEPS_X>(second_x, x_stride);
    load<WEIGHTS, KEEPS_WEIGHTS>(w, LINE);
    if constexpr (WIDE == 2) load<WEIGHTS + 1, KEEPS_WEIGHTS>(w + stride, LINE);
    Words::template add<0, X, WEIGHTS>();
    if constexpr (TALL == 2) Words::template add<2, X + 1, WEIGHTS>();
    if constexpr (WIDE == 2) Words::template add<1, X, WEIGHTS + 1>();
    if constexpr (TALL == 2 && WIDE == 2) Words::template add<3, X + 1, WEIGHTS + 1>();
}

// The last lines of a group, fewer than a tile has. (The blocks of x are padded as well.)
template <typename Words, int TALL, int WIDE>
QINLINE void last_step(Sides &at, const char *w, int64_t num_lines) {
    alignas(64) char lines[WIDE][MAX_DEPTH * LINE];
    for (int p = 0; p < WIDE; ++p) {
        memcpy(lines[p], w + p * at.stride, num_lines * LINE);
        memset(lines[p] + num_lines * LINE, 0, (at.depth - num_lines) * LINE);
    }
    step<Words, TALL, WIDE, true, true>(at.x[0], at.x[1], at.depth * int64_t{sizeof(uint32_t)}, lines[0], sizeof lines[0]);
    for (int i = 0; i < TALL; ++i) at.x[i] += at.x_step[i];
}

// Whole tiles. Everything but what waits in registers: a store to the stack in each step would stand in the way of the loads
// of lines at the same offset of a page. (With the prefetcher's state in memory, too: 64 rows of bfloat16 are 5 % slower.)
template <typename Words, int TALL, int WIDE, bool KEEPS_X, bool KEEPS_WEIGHTS>
QINLINE void multiply_steps(Sides &at, const char *w, int64_t num_steps, Meanwhile &meanwhile) {
    const char *x = at.x[0], *second_x = at.x[TALL - 1];
    const int64_t stride = at.stride, x_step = at.x_step[0], second_step = at.x_step[TALL - 1];
    const int64_t x_stride = at.depth * int64_t{sizeof(uint32_t)}, w_step = at.depth * LINE;
    PanelPrefetcher ahead = meanwhile.ahead;
    for (; num_steps > 0; --num_steps, w += w_step, x += x_step, second_x += second_step) {
        step<Words, TALL, WIDE, KEEPS_X, KEEPS_WEIGHTS>(x, second_x, x_stride, w, stride);
        ahead.prefetch();
        meanwhile.waiting.finish_some();
    }
    meanwhile.ahead = ahead;
    at.x[0] = x;
    if constexpr (TALL == 2) at.x[1] = second_x;
}

template <int TALL, int WIDE>
QINLINE void zero_tiles() {
    zero_tile<0>();
    if constexpr (WIDE == 2) zero_tile<1>();
    if constexpr (TALL == 2) zero_tile<2>();
    if constexpr (TALL == 2 && WIDE == 2) zero_tile<3>();
}

// To the sums in the tiles, `num_lines` words' products.
template <typename Words, int TALL, int WIDE>
QINLINE void multiply(Sides &at, const char *w, int64_t num_lines, Meanwhile &meanwhile) {
    const int64_t num_steps = static_cast<uint32_t>(num_lines) / static_cast<uint32_t>(at.depth);
    if (at.reuse.keeps_weights) {
        multiply_steps<Words, TALL, WIDE, false, true>(at, w, num_steps, meanwhile);
    } else if (at.reuse.keeps_x) {
        multiply_steps<Words, TALL, WIDE, true, false>(at, w, num_steps, meanwhile);
    } else {
        multiply_steps<Words, TALL, WIDE, false, false>(at, w, num_steps, meanwhile);
    }
    const int64_t left = num_lines - num_steps * at.depth;
    if (left > 0) last_step<Words, TALL, WIDE>(at, w + num_steps * at.depth * LINE, left);
}

// The tiles of sums, rows `stride` bytes apart.
template <int TALL, int WIDE>
QINLINE void store_tiles(void *first, void *second, int64_t stride) {
    store_tile<0>(first, stride);
    if constexpr (WIDE == 2) store_tile<1>(static_cast<char *>(first) + LINE, stride);
    if constexpr (TALL == 2) store_tile<2>(second, stride);
    if constexpr (TALL == 2 && WIDE == 2) store_tile<3>(static_cast<char *>(second) + LINE, stride);
}

// One or two tiles of rows.
struct RowPair {
    Tile tiles[2];
    int count;

    int64_t height() const { return tiles[0].height + tiles[1].height; }
    Sides sides(int64_t first_block, int depth, int64_t stride, const Reuse &reuse) const {
        Sides at{{}, {}, depth, stride, reuse};
        for (int i = 0; i < count; ++i) {
            at.x_step[i] = int64_t{tiles[i].height} * depth * int64_t{sizeof(uint32_t)};
            at.x[i] = reinterpret_cast<const char *>(tiles[i].x) + first_block * at.x_step[i];
        }
        return at;
    }
};

}  // namespace quire::QUIRE_ISA
