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
// registers holds, which reads the weight once, and memory bounds that on any machine. That bound is reasoned, not measured.
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

static int matrix_depth(const LinearWeight &weight, bool is_bf16, int64_t num_rows) {
    if (is_bf16) return depth_of(weight.padded_group() / 2);
    return weight.has_int8_inputs && num_rows > TILE_ROWS ? depth_of(weight.padded_group() / 4) : 0;
}

// The shapes of the tiles, for as long as this lives; then the unit is as if it had never been used.
class Shapes {
   public:
    explicit Shapes(int depth) : depth_(depth) {}
    Shapes(const Shapes &) = delete;
    Shapes &operator=(const Shapes &) = delete;
    ~Shapes() { release_tiles(); }

    // Two tiles of rows, or one where the second has no height.
    void set(int first, int second) {
        if (first == heights_[0] && second == heights_[1]) return;
        TileConfig config{};
        config.palette = 1;
        for (int i = 0; i < 2; ++i) {
            const int height = heights_[i] = i == 0 ? first : second;
            shape(config, 2 * i, height, LINE);
            shape(config, 2 * i + 1, height, LINE);
            shape(config, X + i, height, depth_ * int{sizeof(uint32_t)});
            shape(config, WEIGHTS + i, depth_, LINE);
        }
        configure_tiles(config);
    }

   private:
    static void shape(TileConfig &config, int tile, int rows, int64_t row_bytes) {
        config.rows[tile] = static_cast<uint8_t>(rows);
        config.row_bytes[tile] = static_cast<uint16_t>(rows > 0 ? row_bytes : 0);
    }
    int depth_, heights_[2] = {};
};

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
QINLINE void multiply_steps(Sides &at, const char *w, int64_t num_steps, Ahead &ahead) {
    const char *x = at.x[0], *second_x = at.x[TALL - 1], *next = ahead.next;
    const int64_t stride = at.stride, x_step = at.x_step[0], second_step = at.x_step[TALL - 1];
    const int64_t x_stride = at.depth * int64_t{sizeof(uint32_t)}, w_step = at.depth * LINE;
    const int64_t num_lines = ahead.num_lines;
    const char *end = ahead.end, *last_fetch = at.reuse.last_fetch;
    for (; num_steps > 0; --num_steps, w += w_step, x += x_step, second_x += second_step) {
        for (int64_t i = 0; i < num_lines && next < end; ++i, next += LINE) __builtin_prefetch(next, 0, 2);
        if (w + (WIDE - 1) * stride + PAIR_AHEAD + w_step <= last_fetch) fetch_lines<WIDE>(w + PAIR_AHEAD, w_step, stride);
        step<Words, TALL, WIDE, KEEPS_X, KEEPS_WEIGHTS>(x, second_x, x_stride, w, stride);
    }
    at.x[0] = x;
    if constexpr (TALL == 2) at.x[1] = second_x;
    ahead.next = next;
}

// Sums of a group of `num_lines` words, in the tiles.
template <typename Words, int TALL, int WIDE>
QINLINE void multiply(Sides &at, const char *w, int64_t num_lines, Ahead &ahead) {
    zero_tile<0>();
    if constexpr (WIDE == 2) zero_tile<1>();
    if constexpr (TALL == 2) zero_tile<2>();
    if constexpr (TALL == 2 && WIDE == 2) zero_tile<3>();
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

struct Floats {
    Panels panels;
    int depth;
    Reuse reuse;

    int num_panels() const { return panels.num_panels; }
    int64_t num_steps() const { return ceil_div(panels.num_steps, depth); }

    template <int TALL, int WIDE>
    void run(const RowPair &rows, int first, Ahead &ahead) const {
        Sides at = rows.sides(depth, panels.stride, reuse);
        multiply<Pairs, TALL, WIDE>(at, panels.data + first * panels.stride, panels.num_steps, ahead);
        store_tiles<TALL, WIDE>(rows.tiles[0].sums + first * PANEL, rows.tiles[TALL - 1].sums + first * PANEL,
                                GROUP_WIDTH * int64_t{sizeof(float)});
    }
    void finish(const Tile &) const {}
};

// ---- integers ----

struct Integers {
    Groups groups;
    const InputRows &rows;
    Reuse reuse;

    int num_panels() const { return groups.weights.num_panels; }
    int64_t num_steps() const { return groups.count * ceil_div(groups.weights.num_steps, rows.depth); }

    template <int TALL, int WIDE>
    void run(const RowPair &pair, int first, Ahead &ahead) const {
        alignas(64) uint32_t sums[TALL][MATRIX_ROWS][WIDE * PANEL];
        Sides at = pair.sides(rows.depth, groups.weights.stride, reuse);
        const char *w = groups.weights.data + first * groups.weights.stride;
        for (int64_t group = 0; group < groups.count; ++group, w += groups.stride) {
            multiply<Quads, TALL, WIDE>(at, w, groups.weights.num_steps, ahead);
            store_tiles<TALL, WIDE>(sums[0], sums[TALL - 1], sizeof sums[0][0]);
            for (int i = 0; i < TALL; ++i) add<WIDE>(pair.tiles[i], sums[i], first, group);
        }
    }
    // A group's sums of products, which begin at `starts`, to the sums of the rows.
    template <int WIDE>
    void add(const Tile &tile, const uint32_t (&sums)[MATRIX_ROWS][WIDE * PANEL], int first, int64_t group) const {
        const char *headers = groups.headers + first * groups.header_stride + group * groups.header_group_stride;
        const int32_t *starts = rows.starts + tile.row * groups.count;
        for (int r = 0; r < tile.height; ++r, starts += groups.count) {
            const Bits start = broadcast_bits(static_cast<uint32_t>(starts[group]));
            Bits totals[1][WIDE];
            for (int p = 0; p < WIDE; ++p) totals[0][p] = add_bits(start, load_bits(sums[r] + p * PANEL));
            add_group<1, WIDE>(tile.sums + r * GROUP_WIDTH + first * PANEL, totals, groups, starts, group, headers);
        }
    }
    void finish(const Tile &tile) const { scale_rows(tile, rows.scales + tile.row, num_panels()); }
};

// ---- blocks ----

// What tiles [first, last) of all rows ask for: their share of the panels behind the block's, so that they are in the
// second-level cache when their turn comes.
static Ahead share_of(const Following &following, const InputRows &rows, int64_t first, int64_t last) {
    const auto line = [&](int64_t tile) { return following.data + following.num_lines * tile / rows.num_tiles * LINE; };
    return {0, false, line(first), line(last), 0};
}

template <int TALL, typename Kind>
static void run_panels(const Kind &kind, const RowPair &rows, Ahead ahead) {
    ahead.spread(ceil_div(kind.num_panels(), 2) * kind.num_steps() * STEPS_OF_BLOCK);
    int first = 0;
    for (; first + 2 <= kind.num_panels(); first += 2) kind.template run<TALL, 2>(rows, first, ahead);
    if (first < kind.num_panels()) kind.template run<TALL, 1>(rows, first, ahead);
}

template <typename Kind>
static void multiply_rows(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block, const Kind &kind) {
    const Following following = following_of(weight, block);
    Tiles tiles(rows, block);
    Shapes shapes(rows.depth);
    for (int64_t t = 0; t < block.num_tiles; t += 2) {
        RowPair pair{{tiles.next(), {}}, 1};
        if (t + 1 < block.num_tiles) pair.tiles[pair.count++] = tiles.next();
        const int64_t first = block.first_tile + t;
        const Ahead ahead = block.num_tiles <= 2 ? Ahead{} : share_of(following, rows, first, first + pair.count);
        shapes.set(pair.tiles[0].height, pair.tiles[1].height);
        pair.count == 2 ? run_panels<2>(kind, pair, ahead) : run_panels<1>(kind, pair, ahead);
        for (int i = 0; i < pair.count; ++i) kind.finish(pair.tiles[i]);
        if (block.taker != nullptr) {
            block.taker->take(pair.tiles[0].sums, t * MATRIX_ROWS, pair.tiles[0].height + pair.tiles[1].height);
            tiles.reuse_sums(block.sums);
        }
    }
}

void gemm(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    if (rows.depth == 0) return avx512vnni::table.gemm(weight, rows, block);
    if (rows.is_bf16) {
        const Panels panels{weight.panel(block.first_panel), weight.panel_bytes(), block.num_panels,
                            weight.panel_bytes() / LINE};
        return multiply_rows(weight, rows, block, Floats{panels, rows.depth, reuse_of(weight, rows, block, panels.stride)});
    }
    const Groups packed = groups_of(weight, block);
    const Groups groups = weight.format == WeightFormat::int8 ? packed : expanded(packed, block);
    multiply_rows(weight, rows, block, Integers{groups, rows, reuse_of(weight, rows, block, groups.weights.stride)});
}

const KernelTable &extended_table() {
    static const KernelTable made = extend([](KernelTable &table) {
        table.has_bf16_dots = true;
        table.matrix_depth = matrix_depth;
        table.gemm = gemm;
    });
    return made;
}

}  // namespace quire::QUIRE_ISA
