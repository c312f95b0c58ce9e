// Projections by AMX: tiles of x times tiles of the packed weight, whose lines (a word of 16 outputs each) lie as the unit
// wants them. bfloat16 times bfloat16 for any number of rows; int8 inputs times int8 or int4 weights for many. All else is
// AVX512-VNNI's, and its table is the base of this one.
//
// Two tiles of rows meet two panels, so that each tile that is loaded is used twice and four sums are under way, which
// cover the latency of a product (Intel's optimization manual, chapter on AMX). Where there is one tile of rows, tiles have
// its height: the unit takes as long as there are rows.
//
// Rows are multiplied `depth` words at a time. Where a group does not consist of whole tiles, its last lines are copied
// and padded with zeros.
//
// bfloat16: one instruction adds up the first numbers of its words and the second ones in two chains, adds the two, and
// adds that to the tile (Intel's manual, TDPBF16PS). VDPBF16PS has one chain through both and rounds at other places, so
// it cannot stand in for few rows: every row goes through tiles, in batches of any size, cut at the same words. Rows do not
// meet in a tile, so that a row's bits depend on nothing but the row, the weight and the instruction set. One row costs
// what loading the weight's tiles costs; the unit is idle most of that time, whatever multiplies.
//
// Integers are exact sums modulo 2^32, as everywhere, so few rows may go through VNNI: as many as one of its tiles of
// registers holds, which reads the weight once, and of int4 in groups of 32 as many as two tiles of matrices hold. Measured
// on an Emerald Rapids (docs/benchmarks/kernels-cpu.md), as all figures here.
#include "../isa/groups.hpp"
#include "amx_tiles.hpp"
#include "extension.hpp"

namespace quire::QUIRE_ISA {

constexpr int MAX_DEPTH = 16;  // lines of a tile
constexpr int X = 4;           // tiles 4 and 5 are rows of x, 6 and 7 weights, and 2 t + p the sums of rows t and panel p
constexpr int WEIGHTS = 6;
constexpr int64_t PAIR_AHEAD = 2048;      // bytes; from 1024 to 8192 all are alike
constexpr int64_t KEPT_BYTES = 40 << 10;  // of 48 KiB

// Words that a tile takes of a group of so many: 16, or fewer where the group then divides evenly.
static int depth_of(int64_t group_words) {
    const int64_t steps = ceil_div(group_words, MAX_DEPTH);
    return static_cast<int>(group_words % steps == 0 ? group_words / steps : MAX_DEPTH);
}

// So many rows are better left to VNNI.
static int64_t few_rows(const LinearWeight &weight) {
    return weight.format == WeightFormat::int4 && weight.group_size <= 32 ? 2 * MATRIX_ROWS : TILE_ROWS;
}

static int matrix_depth(const LinearWeight &weight, bool is_bf16, int64_t num_rows) {
    if (is_bf16) return depth_of(weight.padded_group() / 2);
    return weight.has_int8_inputs && num_rows > few_rows(weight) ? depth_of(weight.padded_group() / 4) : 0;
}

// The shapes of the calling thread's tiles. They are kept from block to block: to set them for each pair of panels, and to give
// the unit back, took 5 to 10 % of the time of 64 rows.
class Shapes {
   public:
    // Two tiles of rows, or one where the second has no height, of blocks of `depth` words.
    static void set(int depth, int first, int second) {
        if (depth == depth_ && first == heights_[0] && second == heights_[1]) return;
        depth_ = depth;
        TileConfig config{};
        config.palette = 1;
        for (int i = 0; i < 2; ++i) {
            const int height = heights_[i] = i == 0 ? first : second;
            shape(config, 2 * i, height, LINE);
            shape(config, 2 * i + 1, height, LINE);
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
        config.row_bytes[tile] = static_cast<uint16_t>(rows > 0 ? row_bytes : 0);
    }
    static thread_local int depth_, heights_[2];  // depth_ 0: none are set
};
thread_local int Shapes::depth_ = 0, Shapes::heights_[2] = {};

// What the first-level cache keeps of a block's sides: what is multiplied again soon, and no more than it holds. The other
// side goes by without leaving a line there.
struct Reuse {
    bool keeps_x, keeps_weights;
    const char *last_fetch;  // one pair of tiles asks for its own lines ahead, up to here
};

static Reuse reuse_of(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block, int64_t panel_bytes) {
    const int64_t row_bytes = rows.row_words * int64_t{sizeof(uint32_t)};
    if (block.num_tiles > 2) return {false, 2 * panel_bytes <= KEPT_BYTES, nullptr};
    return {block.num_tiles * MATRIX_ROWS * row_bytes <= KEPT_BYTES, false, weight.panel(weight.num_panels())};
}

// Of the panels that come next, lines are asked for in the second-level cache with each step of the products, as evenly as
// can be: a burst finds the requests to memory (48 of a core) taken, and what is asked for then is dropped. Some are dropped
// in any case, so every line is asked for twice, the second time when the first one would have brought it (32 to 256 lines
// later are alike). One by one, because four lines at a time without a look at the end are dropped more often. Of many rows
// a step asks for so few lines that once is enough, and 2 % faster.
struct Requests {
    static constexpr int64_t LINES_BETWEEN = 64;
    static constexpr int64_t REPEATED_TILES = 8;  // of rows; with more, lines are asked for once

    const char *next = nullptr, *end = nullptr;
    int64_t per_step = 0;  // lines
    bool repeats = false;

    Requests() = default;
    // Parts [first, last) of `count` of what follows a block of so many tiles.
    Requests(const Following &following, int64_t num_tiles, int64_t first, int64_t last, int64_t count)
        : next(following.data + following.num_lines * first / count * LINE),
          end(following.data + following.num_lines * last / count * LINE),
          repeats(num_tiles <= REPEATED_TILES) {}

    // Over so many steps. A division of 32 bits takes half as long as one of 64.
    void spread(int64_t num_steps) {
        const uint32_t lines = static_cast<uint32_t>((end - next) / LINE), steps = static_cast<uint32_t>(num_steps);
        per_step = (lines + steps - 1) / steps;
    }
    QINLINE_MEMBER void ask() {
        for (int64_t i = 0; i < per_step && next < end; ++i, next += LINE) {
            __builtin_prefetch(next, 0, 2);
            if (repeats) __builtin_prefetch(next - LINES_BETWEEN * LINE, 0, 2);
        }
    }
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
    template <int SUMS, int ROWS, int PANEL_TILE>
    QINLINE void add() {
        add_pairs<SUMS, ROWS, PANEL_TILE>();
    }
};

struct Quads {
    template <int SUMS, int ROWS, int PANEL_TILE>
    QINLINE void add() {
        add_quads<SUMS, ROWS, PANEL_TILE>();
    }
};

struct SignedQuads {
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

template <int WIDE>
QINLINE void fetch_lines(const char *w, int64_t num_bytes, int64_t stride) {
    for (int64_t at = 0; at < num_bytes; at += LINE) {
        __builtin_prefetch(w + at);
        if constexpr (WIDE == 2) __builtin_prefetch(w + stride + at);
    }
}

// Whole tiles. Everything in registers: a store to the stack in each step would stand in the way of the loads of lines
// at the same place of a page.
template <typename Words, int TALL, int WIDE, bool KEEPS_X, bool KEEPS_WEIGHTS>
QINLINE void multiply_steps(Sides &at, const char *w, int64_t num_steps, Requests &requests) {
    const char *x = at.x[0], *second_x = at.x[TALL - 1];
    const int64_t stride = at.stride, x_step = at.x_step[0], second_step = at.x_step[TALL - 1];
    const int64_t x_stride = at.depth * int64_t{sizeof(uint32_t)}, w_step = at.depth * LINE;
    const char *last_fetch = at.reuse.last_fetch;
    Requests ahead = requests;
    for (; num_steps > 0; --num_steps, w += w_step, x += x_step, second_x += second_step) {
        if (w + (WIDE - 1) * stride + PAIR_AHEAD + w_step <= last_fetch) fetch_lines<WIDE>(w + PAIR_AHEAD, w_step, stride);
        step<Words, TALL, WIDE, KEEPS_X, KEEPS_WEIGHTS>(x, second_x, x_stride, w, stride);
        ahead.ask();
    }
    at.x[0] = x;
    if constexpr (TALL == 2) at.x[1] = second_x;
    requests = ahead;
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
QINLINE void multiply(Sides &at, const char *w, int64_t num_lines, Requests &ahead) {
    const int64_t num_steps = num_lines / at.depth;
    if (at.reuse.keeps_weights) {
        multiply_steps<Words, TALL, WIDE, false, true>(at, w, num_steps, ahead);
    } else if (at.reuse.keeps_x) {
        multiply_steps<Words, TALL, WIDE, true, false>(at, w, num_steps, ahead);
    } else {
        multiply_steps<Words, TALL, WIDE, false, false>(at, w, num_steps, ahead);
    }
    const int64_t left = num_lines - num_steps * at.depth;
    if (left > 0) last_step<Words, TALL, WIDE>(at, w + num_steps * at.depth * LINE, left);
}

// The tiles of sums, rows `stride` bytes apart.
template <int TALL, int WIDE>
QINLINE void load_tiles(const void *first, const void *second, int64_t stride) {
    load_tile<0>(first, stride);
    if constexpr (WIDE == 2) load_tile<1>(static_cast<const char *>(first) + LINE, stride);
    if constexpr (TALL == 2) load_tile<2>(second, stride);
    if constexpr (TALL == 2 && WIDE == 2) load_tile<3>(static_cast<const char *>(second) + LINE, stride);
}

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
    Sides sides(int depth, int64_t stride, const Reuse &reuse) const {
        Sides at{{}, {}, depth, stride, reuse};
        for (int i = 0; i < count; ++i) {
            at.x[i] = reinterpret_cast<const char *>(tiles[i].x);
            at.x_step[i] = int64_t{tiles[i].height} * depth * int64_t{sizeof(uint32_t)};
        }
        return at;
    }
};

// ---- bfloat16 ----

// Lines of each of two panels that the first-level cache keeps while all rows pass over them.
constexpr int64_t CHUNK_LINES = 256;
constexpr int64_t CHUNKED_TILES = 6;  // from so many on

// Lines [first, last) of panels.
struct Chunk {
    int64_t first, last;
};

struct Floats {
    Panels panels;
    int depth;
    Reuse reuse;

    int num_panels() const { return panels.num_panels; }
    int64_t num_steps() const { return ceil_div(panels.num_steps, depth); }

    template <int TALL, int WIDE>
    void run(const RowPair &rows, int first, Requests &ahead) const {
        run_chunk<TALL, WIDE>(rows, first, Chunk{0, panels.num_steps}, ahead);
    }
    // What is not the first chunk is added to the sums so far.
    template <int TALL, int WIDE>
    void run_chunk(const RowPair &rows, int first, const Chunk &chunk, Requests &ahead) const {
        Sides at = rows.sides(depth, panels.stride, reuse);
        for (int i = 0; i < TALL; ++i) at.x[i] += chunk.first / depth * at.x_step[i];
        float *sums = rows.tiles[0].sums + first * PANEL, *second = rows.tiles[TALL - 1].sums + first * PANEL;
        constexpr int64_t STRIDE = GROUP_WIDTH * int64_t{sizeof(float)};
        chunk.first == 0 ? zero_tiles<TALL, WIDE>() : load_tiles<TALL, WIDE>(sums, second, STRIDE);
        const char *w = panels.data + first * panels.stride + chunk.first * LINE;
        multiply<Pairs, TALL, WIDE>(at, w, chunk.last - chunk.first, ahead);
        store_tiles<TALL, WIDE>(sums, second, STRIDE);
    }
};

// ---- integers ----

struct Integers {
    Groups groups;
    const InputRows &rows;
    Reuse reuse;

    int num_panels() const { return groups.weights.num_panels; }
    int64_t num_steps() const { return groups.count * ceil_div(groups.weights.num_steps, rows.depth); }

    template <int TALL, int WIDE>
    void run(const RowPair &pair, int first, Requests &ahead) const {
        alignas(64) uint32_t sums[2][TALL][MATRIX_ROWS][WIDE * PANEL];
        Sides at = pair.sides(rows.depth, groups.weights.stride, reuse);
        const char *w = groups.weights.data + first * groups.weights.stride;
        for (int64_t group = 0; group <= groups.count; ++group, w += groups.stride) {
            if (group < groups.count) {
                auto &now = sums[group % 2];
                zero_tiles<TALL, WIDE>();
                multiply<Quads, TALL, WIDE>(at, w, groups.weights.num_steps, ahead);
                store_tiles<TALL, WIDE>(now[0], now[TALL - 1], sizeof now[0][0]);
            }
            if (group == 0) continue;
            for (int i = 0; i < TALL; ++i) add_products<WIDE>(pair.tiles[i], sums[(group - 1) % 2][i], first, group - 1);
        }
    }
    // A group's sums of products, which begin at `starts`, to the sums of the rows: as add_group (groups.hpp), with what rows
    // share kept in registers (of groups of 128, a tenth of the time with int4, with int8 a fifth). With the last group's, rows
    // are complete and are scaled.
    template <int WIDE>
    void add_products(const Tile &tile, const uint32_t (&sums)[MATRIX_ROWS][WIDE * PANEL], int first, int64_t group) const {
        const char *headers = groups.headers + first * groups.header_stride + group * groups.header_group_stride;
        Vec scales[WIDE], offsets[WIDE];
        for (int p = 0; p < WIDE; ++p) {
            const float *header = reinterpret_cast<const float *>(headers + p * groups.header_stride);
            scales[p] = load(header);
            offsets[p] = groups.has_offsets ? load(header + PANEL) : broadcast(0.0f);
        }
        const bool is_first = group == 0, is_last = group + 1 == groups.count, has_offsets = groups.has_offsets;
        const float per_start = groups.per_start, *row_scales = rows.scales + tile.row;
        const int64_t count = groups.count;
        const int32_t *start = rows.starts + tile.row * count + group;
        float *to = tile.sums + first * PANEL;
        for (int r = 0; r < tile.height; ++r, start += count, to += GROUP_WIDTH) {
            const Bits begin = broadcast_bits(static_cast<uint32_t>(*start));
            const Vec inputs = broadcast(static_cast<float>(*start) * per_start), row_scale = broadcast(row_scales[r]);
            QUNROLL
            for (int p = 0; p < WIDE; ++p) {
                const Vec product = mul(scales[p], to_float(add_bits(begin, load_bits(sums[r] + p * PANEL))));
                Vec sum = add(is_first ? broadcast(0.0f) : load(to + p * PANEL), product);
                if (has_offsets) sum = add(sum, mul(offsets[p], inputs));
                store(to + p * PANEL, is_last ? mul(sum, row_scale) : sum);
            }
        }
    }
};

// ---- blocks ----

// The next tiles of a block, of which `left` are left.
static RowPair next_pair(Tiles &tiles, int64_t left) {
    RowPair pair{{tiles.next(), {}}, 1};
    if (left > 1) pair.tiles[pair.count++] = tiles.next();
    return pair;
}

template <int TALL, typename Kind>
static void run_panels(const Kind &kind, const RowPair &rows, Requests &ahead) {
    int first = 0;
    for (; first + 2 <= kind.num_panels(); first += 2) kind.template run<TALL, 2>(rows, first, ahead);
    if (first < kind.num_panels()) kind.template run<TALL, 1>(rows, first, ahead);
}

// The rows' sums are complete. The memory would be idle while the taker computes with them.
static void hand_over(const SumsTaker &taker, const float *sums, int64_t first, int64_t count, Requests &ahead) {
    for (int64_t row = 0; row < count; row += taker.rows_of_step) {
        ahead.ask();
        taker.take(sums + row * GROUP_WIDTH, first + row, min64(taker.rows_of_step, count - row));
    }
}

template <typename Kind>
static void multiply_rows(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block, const Kind &kind) {
    const Following following = following_of(weight, block);
    const int64_t num_steps = ceil_div(kind.num_panels(), 2) * kind.num_steps();
    const int64_t more_steps = block.taker == nullptr ? 0 : 2 * MATRIX_ROWS / block.taker->rows_of_step;
    Tiles tiles(rows, block);
    for (int64_t t = 0; t < block.num_tiles; t += 2) {
        const RowPair pair = next_pair(tiles, block.num_tiles - t);
        const int64_t first = block.first_tile + t;
        Requests ahead;
        if (block.num_tiles > 2) {
            ahead = Requests(following, rows.num_tiles, first, first + pair.count, rows.num_tiles);
            ahead.spread(num_steps + more_steps);
        }
        Shapes::set(rows.depth, pair.tiles[0].height, pair.tiles[1].height);
        pair.count == 2 ? run_panels<2>(kind, pair, ahead) : run_panels<1>(kind, pair, ahead);
        if (block.taker != nullptr) {
            hand_over(*block.taker, pair.tiles[0].sums, t * MATRIX_ROWS, pair.height(), ahead);
            tiles.reuse_sums(block.sums);
        }
    }
}

// Many rows of bfloat16 whose weights the first-level cache does not keep whole: chunk by chunk of two panels, so that half of
// what is loaded comes from there; loads from the second-level cache bound the rate otherwise. Sums are stored and loaded
// again in between, which changes no bit.
class Chunks {
   public:
    Chunks(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block, const Floats &kind)
        : rows_(rows), block_(block), kind_(kind), following_(following_of(weight, block)) {
        const int64_t num_steps = kind.num_steps(), count = ceil_div(num_steps * rows.depth, CHUNK_LINES);
        chunk_lines_ = ceil_div(num_steps, count) * rows.depth;
        num_turns_ = count * ceil_div(kind.num_panels(), 2);
    }

    void run() const {
        int64_t turn = 0;
        for (int first = 0; first < kind_.num_panels(); first += 2) {
            for (int64_t line = 0; line < kind_.panels.num_steps; line += chunk_lines_, ++turn) {
                run_chunk(first, Chunk{line, min64(line + chunk_lines_, kind_.panels.num_steps)}, turn);
            }
        }
    }

   private:
    void run_chunk(int first, const Chunk &chunk, int64_t turn) const {
        Tiles tiles(rows_, block_);
        const bool is_wide = first + 2 <= kind_.num_panels();
        for (int64_t t = 0; t < block_.num_tiles; t += 2) {
            const RowPair pair = next_pair(tiles, block_.num_tiles - t);
            const int64_t place = turn * block_.num_tiles + t;
            Requests ahead(following_, rows_.num_tiles, place, place + pair.count, num_turns_ * block_.num_tiles);
            ahead.spread(ceil_div(chunk.last - chunk.first, rows_.depth));
            Shapes::set(rows_.depth, pair.tiles[0].height, pair.tiles[1].height);
            if (pair.count == 2) {
                is_wide ? kind_.run_chunk<2, 2>(pair, first, chunk, ahead) : kind_.run_chunk<2, 1>(pair, first, chunk, ahead);
            } else {
                is_wide ? kind_.run_chunk<1, 2>(pair, first, chunk, ahead) : kind_.run_chunk<1, 1>(pair, first, chunk, ahead);
            }
            if (turn + 1 == num_turns_ && block_.taker != nullptr) {
                block_.taker->take(pair.tiles[0].sums, t * MATRIX_ROWS, pair.height());
            }
        }
    }

    const InputRows &rows_;
    const GemmBlock &block_;
    const Floats kind_;
    const Following following_;
    int64_t chunk_lines_, num_turns_;
};

// ---- int4 in small groups ----

// A tile of rows and a panel at a time, so that the registers hold the float32 sums of all its groups: adding a group's
// integers to sums in memory takes longer than multiplying them. Half bytes become signed bytes, which saves an addition
// for each of the integers. The weights of so many inputs stay in the first-level cache while all rows pass by.
constexpr int64_t CHUNK_INPUTS = 512;
constexpr int64_t SMALL_GROUP = 64;  // larger ones gain nothing

// A group's products are read when two more are under way: a load straight after the store of a tile waits for it, which
// takes half as long as all else together (groups of 32 inputs, 29 ns each and 20 ns).
constexpr int LAG = 2, RING = 4;

using Products = uint32_t[MATRIX_ROWS][PANEL];

// Half bytes hold value + 8.
static void expand_signed(const Groups &groups, const char *panel, char *out) {
    const __m512i mask = _mm512_set1_epi8(15), zero_point = _mm512_set1_epi8(8);
    for (int64_t group = 0; group < groups.count; ++group, panel += groups.stride) {
        const char *from = panel, *end = from + groups.weights.num_steps * LINE;
        for (; from != end; from += LINE, out += 2 * LINE) {
            const __m512i low = _mm512_loadu_si512(from), high = _mm512_srli_epi32(low, 4);
            _mm512_storeu_si512(out, _mm512_sub_epi8(_mm512_and_si512(low, mask), zero_point));
            _mm512_storeu_si512(out + LINE, _mm512_sub_epi8(_mm512_and_si512(high, mask), zero_point));
        }
    }
}

// One tile of rows and one panel, whose weights are signed bytes.
struct TileAndPanel {
    const Groups &groups;
    const InputRows &rows;
    const Tile &tile;
    const char *weights, *headers;

    int64_t block_bytes() const { return int64_t{tile.height} * rows.depth * int64_t{sizeof(uint32_t)}; }
    const char *block(int64_t group) const {
        const int64_t index = group * ceil_div(groups.weights.num_steps, rows.depth);
        return reinterpret_cast<const char *>(tile.x) + index * block_bytes();
    }
    const int32_t *starts() const { return rows.starts + tile.row * groups.count; }
};

static void multiply_group(const TileAndPanel &at, int64_t group, Products &products) {
    const char *x = at.block(group), *w = at.weights + group * at.groups.stride;
    const int depth = at.rows.depth;
    const int64_t block_bytes = at.block_bytes();
    int64_t left = at.groups.weights.num_steps;
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

// As add_group (groups.hpp), with sums in registers.
QINLINE void add_products(const TileAndPanel &at, int64_t group, const Products &products, Vec (&sums)[MATRIX_ROWS]) {
    const float *header = reinterpret_cast<const float *>(at.headers + group * at.groups.header_group_stride);
    const Vec scale = load(header);
    QUNROLL
    for (int r = 0; r < MATRIX_ROWS; ++r) sums[r] = add(sums[r], mul(scale, to_float(load_bits(products[r]))));
    if (!at.groups.has_offsets) return;
    const Vec offset = load(header + PANEL);
    QUNROLL
    for (int r = 0; r < MATRIX_ROWS; ++r) {
        const int32_t start = at.starts()[(r < at.tile.height ? r : 0) * at.groups.count + group];
        sums[r] = add(sums[r], mul(offset, broadcast(static_cast<float>(start) * at.groups.per_start)));
    }
}

// The tile's sums += groups [first, last), and all is scaled where these are the last ones.
static void add_groups(const TileAndPanel &at, int64_t first, int64_t last, float *to) {
    alignas(64) Products products[RING];
    if (at.tile.height < MATRIX_ROWS) memset(products, 0, sizeof products);
    Vec sums[MATRIX_ROWS];
    QUNROLL
    for (int r = 0; r < MATRIX_ROWS; ++r) {
        sums[r] = first == 0 || r >= at.tile.height ? broadcast(0.0f) : load(to + r * GROUP_WIDTH);
    }
    for (int64_t group = first; group < last + LAG; ++group) {
        if (group < last) multiply_group(at, group, products[group % RING]);
        if (group - LAG >= first) add_products(at, group - LAG, products[(group - LAG) % RING], sums);
    }
    const bool is_complete = last == at.groups.count;
    QUNROLL
    for (int r = 0; r < MATRIX_ROWS; ++r) {
        if (r >= at.tile.height) continue;
        store(to + r * GROUP_WIDTH, is_complete ? mul(sums[r], broadcast(at.rows.scales[at.tile.row + r])) : sums[r]);
    }
}

static void multiply_groups(const InputRows &rows, const GemmBlock &block, const Groups &groups) {
    const int64_t chunk = max64(1, CHUNK_INPUTS / (4 * groups.weights.num_steps));
    for (int64_t first = 0; first < groups.count; first += chunk) {
        const int64_t last = min64(groups.count, first + chunk);
        Tiles tiles(rows, block);
        for (int64_t t = 0; t < block.num_tiles; ++t) {
            const Tile tile = tiles.next();
            Shapes::set(rows.depth, tile.height, 0);
            for (int p = 0; p < groups.weights.num_panels; ++p) {
                const TileAndPanel at{groups, rows, tile, groups.weights.data + p * groups.weights.stride,
                                      groups.headers + p * groups.header_stride};
                add_groups(at, first, last, tile.sums + p * PANEL);
            }
            if (last == groups.count && block.taker != nullptr) block.taker->take(tile.sums, t * MATRIX_ROWS, tile.height);
        }
    }
}

void gemm(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    if (rows.depth == 0) return avx512vnni::table.gemm(weight, rows, block);
    if (rows.is_bf16) {
        const Panels panels{weight.panel(block.first_panel), weight.panel_bytes(), block.num_panels,
                            weight.panel_bytes() / LINE};
        Floats kind{panels, rows.depth, reuse_of(weight, rows, block, panels.stride)};
        if (block.num_tiles < CHUNKED_TILES || kind.reuse.keeps_weights) return multiply_rows(weight, rows, block, kind);
        kind.reuse.keeps_weights = true;
        return Chunks(weight, rows, block, kind).run();
    }
    const Groups groups = groups_of(weight, block);
    const bool is_int4 = weight.format == WeightFormat::int4;
    if (is_int4 && weight.group_size <= SMALL_GROUP) {
        return multiply_groups(rows, block, expanded(groups, block, expand_signed));
    }
    const Groups bytes = is_int4 ? expanded(groups, block, expand_int4) : groups;
    multiply_rows(weight, rows, block, Integers{bytes, rows, reuse_of(weight, rows, block, bytes.weights.stride)});
}

const KernelTable &extended_table() {
    static const KernelTable made = extend([](KernelTable &table) {
        table.has_bf16_dots = true;
        table.matrix_depth = matrix_depth;
        table.gemm = gemm;
        table.end_gemms = Shapes::release;
        table.max_task_rows = max_rows_by_tiles;
        table.attention_scratch = attention_scratch;
        table.attend = attend_by_tiles;
        table.probe_pairs = probe_pair_tiles;
        table.probe_integers = probe_quad_tiles;
    });
    return made;
}

}  // namespace quire::QUIRE_ISA
