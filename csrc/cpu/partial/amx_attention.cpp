// Paged attention by AMX where the query is bfloat16 and the cache has 16 or 8 bits; all else is AVX512-VNNI's.
//
// Tasks, tiles of keys, splits and the softmax are everyone's (isa/attention*). Here a tile's scores are products of tiles
// of 16 rows of the query with 16 keys, and its outputs products of 16 rows of weights, rounded to bfloat16, with 16
// elements of the values. The unit wants its right side by pairs: two elements of 16 keys side by side, which are the words
// of their rows transposed, or an element of two neighbouring positions, which are their rows interleaved. Elements of 8
// bits are exact in bfloat16; the scale of a key is multiplied into its scores, that of a value into its weights.
//
// A score is the same chain for any company, an output one over all positions of the tile, where those that a row does not
// see have the weight 0. Rows that see nothing of a tile keep their outputs: even the sum with zeros could change a sign.
#include "amx_attention.hpp"
#include "amx_tiles.hpp"
#include "extension.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t LINE = 64;  // bytes: a row of a tile
constexpr int64_t TILE_BYTES = 16 * LINE;
constexpr int KEY_TILES = TILE / 16;
constexpr int SIDE = 4, OTHER_SIDES = 5;  // tiles 5 to 7 take one side in turn, while 4 keeps the other

// The first `count` bytes of a line, or all that it has; zeros behind them.
QINLINE Bits load_line(const char *from, int64_t count) {
    return count >= LINE ? load_bits(from) : load_bytes(from, static_cast<int>(count));
}
static void store_line(char *to, Bits line) { store(reinterpret_cast<float *>(to), as_float(line)); }

// ---- gathering ----

// [rows / 16][chunks of 32 elements][16 rows][32]
static void gather_tiles(const AttentionProblem &problem, const AttentionTask &task, char *query) {
    const int64_t head_size = problem.cache.head_size, chunks = num_chunks(head_size), num_rows = task.num_rows();
    RowWalk walk(task);
    for (int64_t r = 0; r < round_up(num_rows, ROWS); ++r) {
        char *to = query + r / ROWS * chunks * TILE_BYTES + r % ROWS * LINE;
        const bf16 *row = r < num_rows ? query_row<bf16>(problem, walk) : nullptr;
        for (int64_t d = 0; d < head_size; d += PAIRED, to += TILE_BYTES) {
            store_line(to, r < num_rows ? load_bytes(row + d, static_cast<int>(min64(PAIRED, head_size - d) * 2))
                                        : broadcast_bits(0));
        }
        if (r < num_rows) walk.step();
    }
}

void gather_query(const AttentionProblem &problem, const AttentionTask &task, float *query) {
    if (task.num_rows() <= FEW_ROWS) return gather_few(problem, task, query);
    gather_tiles(problem, task, reinterpret_cast<char *>(query));
}

// [chunks][TILE / 16][16 pairs of elements][16 keys]
static void gather_keys(const Turn &turn, const char *const *rows) {
    const int64_t num_bytes = turn.problem.cache.head_size * int64_t{sizeof(bf16)};
    for (int n = 0; n < KEY_TILES; ++n) {
        char *to = reinterpret_cast<char *>(turn.w.keys) + n * TILE_BYTES;
        for (int64_t at = 0; at < num_bytes; at += LINE, to += KEY_TILES * TILE_BYTES) {
            Vec block[LANES];
            load_words(rows + n * 16, at, num_bytes, block);
            QUNROLL
            for (int i = 0; i < LANES; ++i) store_line(to + i * LINE, as_bits(block[i]));
            turn.next.ask(turn.next.share);
        }
    }
}

constexpr int64_t PIECE_BYTES = NUM_SUMS * TILE_BYTES;  // of the values of 32 positions

// 32 positions of the values, the first of them `rows[0]`, elements [first, first + width), up to PIECE of them: [NUM_SUMS]
// [16 pairs of positions][16 elements]. What is stored has to stay in the first-level cache beside the rows that go by, so it
// is little.
static void gather_values(const Turn &turn, const char *const *rows, int64_t first, int64_t width, char *to) {
    const int64_t num_bytes = min64(width, turn.problem.cache.head_size - first) * int64_t{sizeof(bf16)};
    for (int pair = 0; pair < 16; ++pair, to += LINE) {
        const char *even = rows[2 * pair] + first * 2, *odd = rows[2 * pair + 1] + first * 2;
        for (int64_t at = 0; at < num_bytes; at += LINE) {
            const Bits x = load_line(even + at, num_bytes - at), y = load_line(odd + at, num_bytes - at);
            store_line(to + at / LINE * 2 * TILE_BYTES, interleave_low(x, y));
            store_line(to + (at / LINE * 2 + 1) * TILE_BYTES, interleave_high(x, y));
        }
        turn.next.ask(turn.next.share);
    }
}

// Rows of a tile as bfloat16, whole lines of them.
struct WholeRows {
    alignas(64) bf16 data[TILE * MAX_HEAD_SIZE];
    const char *rows[TILE];

    template <KVFormat F>
    void fill(const char *const *from, int64_t head_size) {
        const int64_t width = num_chunks(head_size) * PAIRED;
        for (int i = 0; i < TILE; ++i) {
            bf16 *to = data + i * width;
            for (int64_t d = 0; d < width; d += LANES) store(to + d, load_elements<F>(from[i], d, head_size, 1.0f));
            rows[i] = reinterpret_cast<const char *>(to);
        }
    }
};

// Scales of 8-bit rows.
struct Scales {
    float keys[TILE], values[TILE];
};

// ---- products ----

template <int SUM>
QINLINE void add_product(const char *right) {
    constexpr int RIGHT = OTHER_SIDES + SUM % 3;
    load_tile<RIGHT>(right + SUM * TILE_BYTES, LINE);
    add_pairs<SUM, SIDE, RIGHT>();
}

// To the first `count` sums, 32 numbers' products: a tile of rows, `stride` bytes apart, with `count` tiles of the right side.
QINLINE void add_products(const void *rows, int64_t stride, const char *right, int64_t count) {
    load_tile<SIDE>(rows, stride);
    add_product<0>(right);
    if (count > 1) add_product<1>(right);
    if (count > 2) add_product<2>(right);
    if (count > 3) add_product<3>(right);
}

// So many sums side by side, rows `stride` bytes apart.
static void load_sums(const float *sums, int64_t stride, int64_t count) {
    load_tile<0>(sums, stride);
    if (count > 1) load_tile<1>(sums + 16, stride);
    if (count > 2) load_tile<2>(sums + 32, stride);
    if (count > 3) load_tile<3>(sums + 48, stride);
}

static void store_sums(float *sums, int64_t stride, int64_t count) {
    store_tile<0>(sums, stride);
    if (count > 1) store_tile<1>(sums + 16, stride);
    if (count > 2) store_tile<2>(sums + 32, stride);
    if (count > 3) store_tile<3>(sums + 48, stride);
}

static void score(const Turn &turn, int64_t first, float *scores) {
    static_assert(KEY_TILES == NUM_SUMS);
    const int64_t chunks = num_chunks(turn.problem.cache.head_size);
    const char *query = reinterpret_cast<const char *>(turn.w.query) + first / ROWS * chunks * TILE_BYTES;
    const char *keys = reinterpret_cast<const char *>(turn.w.keys);
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int64_t c = 0; c < chunks; ++c, query += TILE_BYTES, keys += KEY_TILES * TILE_BYTES) {
        add_products(query, LINE, keys, KEY_TILES);
    }
    store_sums(scores, TILE * int64_t{sizeof(float)}, KEY_TILES);
}

// ---- one tile ----

// The rows of a task, 16 at a time: first all rows' weights, then their outputs by pieces, so that the keys, and then a
// piece of the values, stay in the first-level cache while all rows pass over them. The next 16's scores and rescaled
// outputs are stored before these 16 go on: a tile is not loaded right after it was stored, which costs more than its
// product does, and vectors compute while the unit multiplies.
template <bool IS_SCALED>
class RowTiles {
   public:
    RowTiles(const Turn &turn, int64_t num_rows, const Scales &scales)
        : turn_(turn), num_rows_(num_rows), count_(ceil_div(num_rows, ROWS)), scales_(scales) {}

    void attend(const char *const *values) const {
        count_ == 1 ? attend_one(values) : attend_all(values);
    }

   private:
    // One tile of rows has no others to pass the time with: what is stored for the unit is loaded behind something else.
    void attend_one(const char *const *values) const {
        gather_step(values, 0);
        score(turn_, 0, scores_of(0));
        gather_step(values, 1);
        soften(0);
        rescale(turn_.w, piece(0, 0, turn_.w.padded));
        for (int64_t first = 0; first < turn_.w.padded; first += PIECE) weigh(0, first, width_at(first), gathered_at(first));
    }
    void gather_step(const char *const *values, int k) const {
        static_assert(VALUE_STEPS == 2);
        for (int64_t first = 0; first < turn_.w.padded; first += PIECE) {
            gather_values(turn_, values + k * PAIRED, first, width_at(first), gathered_at(first) + k * PIECE_BYTES);
        }
    }
    void attend_all(const char *const *values) const {
        score_all();
        for (int64_t first = 0; first < turn_.w.padded; first += PIECE) weigh_all(values, first, width_at(first));
    }
    void score_all() const {
        if (is_seen(0)) score(turn_, 0, scores_of(0));
        for (int64_t i = 0; i < count_; ++i) {
            if (i + 1 < count_ && is_seen(i + 1)) score(turn_, (i + 1) * ROWS, scores_of(i + 1));
            turn_.next.ask(turn_.next.share);
            if (is_seen(i)) soften(i);
        }
    }
    // Elements [first, first + width) of the outputs.
    void weigh_all(const char *const *values, int64_t first, int64_t width) const {
        char *gathered = gathered_at(0);
        for (int k = 0; k < VALUE_STEPS; ++k) {
            gather_values(turn_, values + k * PAIRED, first, width, gathered + k * PIECE_BYTES);
        }
        if (is_seen(0)) rescale(turn_.w, piece(0, first, width));
        for (int64_t i = 0; i < count_; ++i) {
            if (i + 1 < count_ && is_seen(i + 1)) rescale(turn_.w, piece(i + 1, first, width));
            turn_.next.ask(turn_.next.share);
            if (is_seen(i)) weigh(i, first, width, gathered);
        }
    }
    void weigh(int64_t i, int64_t first, int64_t width, const char *gathered) const {
        const OutPiece out = piece(i, first, width);
        const Unseen unseen(turn_, out);
        load_sums(out.at(turn_.w), out_stride(), width / 16);
        for (int k = 0; k < VALUE_STEPS; ++k) {
            const bf16 *weights = weights_of(i) + k * PAIRED;
            add_products(weights, TILE * int64_t{sizeof(bf16)}, gathered + k * PIECE_BYTES, width / 16);
        }
        store_sums(out.at(turn_.w), out_stride(), width / 16);
    }
    void soften(int64_t i) const {
        float *scores = scores_of(i);
        if (IS_SCALED) scale_scores(scores, height(i), scales_.keys);
        const RawScores<IS_SCALED> kind(turn_.problem, scales_.values, scores, weights_of(i));
        soften_rows(kind, turn_, scores, i * ROWS, height(i));
    }
    int64_t out_stride() const { return turn_.w.padded * int64_t{sizeof(float)}; }
    int64_t height(int64_t i) const { return min64(ROWS, num_rows_ - i * ROWS); }
    bool is_seen(int64_t i) const { return !turn_.seen_by(i * ROWS, height(i)).is_empty(); }
    int64_t width_at(int64_t first) const { return min64(PIECE, turn_.w.padded - first); }
    // The values of a piece, where each has a place of its own.
    char *gathered_at(int64_t first) const {
        return reinterpret_cast<char *>(turn_.w.values) + first / PIECE * VALUE_STEPS * PIECE_BYTES;
    }
    OutPiece piece(int64_t i, int64_t first, int64_t width) const { return {i * ROWS, height(i), first, width}; }
    float *scores_of(int64_t i) const { return turn_.w.scores + i % 2 * ROWS * TILE; }
    // Behind the scores of 32 rows.
    bf16 *weights_of(int64_t i) const {
        static_assert(2 * ROWS * sizeof(float) + MAX_ROWS * sizeof(bf16) <= MAX_ROWS * sizeof(float));
        return reinterpret_cast<bf16 *>(turn_.w.scores + 2 * ROWS * TILE) + i * ROWS * TILE;
    }

    const Turn &turn_;
    const int64_t num_rows_, count_;
    const Scales &scales_;
};

// The next tile is asked for evenly, by everything that is gathered of this one and by all steps of all rows: of many lines at
// once the processor forgets some.
static int64_t share_of_next(const Turn &turn, int64_t num_rows) {
    const int64_t pieces = ceil_div(turn.w.padded, PIECE);
    const int64_t num_gathered = KEY_TILES * num_chunks(turn.problem.cache.head_size) + pieces * VALUE_STEPS * PAIRED / 2;
    return ceil_div(2 * TILE * turn.next.row_bytes, num_gathered + ceil_div(num_rows, ROWS) * (1 + pieces));
}

template <bool IS_SCALED>
static void attend_many(const Turn &turn, int64_t num_rows, const char *const *values, const Scales &scales) {
    RowTiles<IS_SCALED>(turn, num_rows, scales).attend(values);
}

template <KVFormat F>
static void attend_bytes(const Turn &turn, int64_t num_rows) {
    const int64_t head_size = turn.problem.cache.head_size;
    WholeRows keys, values;
    keys.fill<F>(turn.tile.rows, head_size);
    values.fill<F>(turn.tile.rows + TILE, head_size);
    gather_keys(turn, keys.rows);
    Scales scales;
    load_scales<F>(turn, scales.keys, scales.values);
    attend_many<true>(turn, num_rows, values.rows, scales);
}

static void attend_bf16(const Turn &turn, int64_t num_rows) {
    gather_keys(turn, turn.tile.rows);
    attend_many<false>(turn, num_rows, turn.tile.rows + TILE, Scales{});
}

static void attend_by_format(const Turn &turn, int64_t num_rows) {
    turn.next.share = share_of_next(turn, num_rows);
    switch (turn.problem.cache.format) {
        case KVFormat::bf16: return attend_bf16(turn, num_rows);
        case KVFormat::int8: return attend_bytes<KVFormat::int8>(turn, num_rows);
        case KVFormat::fp8: return attend_bytes<KVFormat::fp8>(turn, num_rows);
        case KVFormat::f32: __builtin_unreachable();
    }
}

void attend_tile(const Turn &turn, int64_t num_rows) {
    num_rows <= FEW_ROWS ? attend_few(turn, num_rows) : attend_by_format(turn, num_rows);
    turn.next.ask_for_rest();
}

// ---- tasks ----

// A factor that is not above zero has another highest score.
static bool is_for_tiles(const AttentionProblem &problem) {
    return problem.dtype == DType::bf16 && problem.cache.format != KVFormat::f32 && problem.scale > 0.0f;
}

int64_t max_rows_by_tiles(const AttentionProblem &problem) {
    return is_for_tiles(problem) ? MAX_ROWS : avx512vnni::table.max_task_rows(problem);
}

void attend_by_tiles(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                     float *scratch) {
    if (!is_for_tiles(problem)) return avx512vnni::table.attend(problem, task, next_task, scratch);
    const WholeTiles configured;
    attend(problem, task, next_task, scratch);
}

}  // namespace quire::QUIRE_ISA
