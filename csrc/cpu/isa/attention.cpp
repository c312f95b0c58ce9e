// Paged attention of one task: some query rows of one sequence that share a KV head, or of several sequences that begin with
// the same blocks, whose keys are then read once for all of them.
//
// Keys are visited in tiles of TILE absolute positions, whatever the block size. A row's scores are chains over the head's
// elements, its outputs chains over the tile's positions that it sees, both ascending; its online softmax (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018) rescales once per tile that the row can see, and its
// state is merged into a running state at the end of each split (as in Dao et al., "Flash-Decoding", 2023). None of that
// depends on the other rows, on how the prompt was divided into steps, or on threads.
//
// There are two ways through a tile, with the same operations for a row. Many rows: keys and values are widened to float32
// once for all of them (keys transposed), in pieces that stay in the first-level cache while all rows pass over them. Few
// rows (decoding): registers are filled from the cache's rows directly, so that nothing is written on the way.
#include "kernels.hpp"
#include "kv_rows.hpp"

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

// Rows of the cache that each register tile asks for: memory answers a few at a time.
constexpr int ASKED_AT_ONCE = 4;

constexpr int64_t MAX_WORD_ELEMENTS = 4;
static_assert(MAX_ROWS % SCORE_ROWS == 0 && MAX_ROWS % OUT_ROWS == 0 && TILE % KEYS == 0 && SPLIT % TILE == 0);

static int64_t padded_head(int64_t head_size) { return round_up(head_size, 16); }
// As far as blocks of keys reach.
static int64_t padded_keys(int64_t head_size) { return round_up(head_size, MAX_WORD_ELEMENTS * LANES); }

// Softmax states of the rows of a task. `total` is kept as LANES partial sums and added up at the very end.
struct States {
    float *max;    // [rows], -infinity where nothing has been seen
    float *total;  // [rows][LANES]
    float *out;    // [rows][padded head]
};

struct Workspace {
    int64_t padded;  // head size
    float *query;    // [MAX_ROWS / SCORE_ROWS][padded keys][SCORE_ROWS]
    float *keys;     // [TILE / KEYS][padded keys][KEYS]
    float *values;   // pieces of up to OUT_VECS vectors: [TILE][width] each
    float *scores;   // [MAX_ROWS][TILE]: scores, then weights
    float *rescale;  // [MAX_ROWS]
    States split, running;
    States shared_split, shared_running;  // of all members, while their own keys are attended to
};

static float *take(float *&memory, int64_t count) {
    float *taken = memory;
    memory += round_up(count, 16);
    return taken;
}

static States take_states(float *&memory, int64_t padded) {
    float *max = take(memory, MAX_ROWS);
    float *total = take(memory, MAX_ROWS * LANES);
    return States{max, total, take(memory, MAX_ROWS * padded)};
}

static Workspace lay_out(float *memory, int64_t head_size) {
    Workspace w;
    const int64_t padded = padded_head(head_size);
    w.padded = padded;
    w.query = take(memory, MAX_ROWS * padded_keys(head_size));
    w.keys = take(memory, TILE * padded_keys(head_size));
    w.values = take(memory, TILE * padded);
    w.scores = take(memory, MAX_ROWS * TILE);
    w.rescale = take(memory, MAX_ROWS);
    w.split = take_states(memory, padded);
    w.running = take_states(memory, padded);
    w.shared_split = take_states(memory, padded);
    w.shared_running = take_states(memory, padded);
    return w;
}

int64_t attention_scratch(int64_t head_size) {
    return (MAX_ROWS + TILE) * padded_keys(head_size) + (4 * MAX_ROWS + TILE) * padded_head(head_size) +
           MAX_ROWS * (TILE + 4 * LANES + 5) + 16;
}

int64_t state_size(int64_t head_size) { return padded_head(head_size) + LANES + 1; }

static void clear(const States &states, int64_t rows, int64_t padded) {
    for (int64_t r = 0; r < rows; ++r) states.max[r] = NONE;
    memset(states.total, 0, rows * LANES * sizeof(float));
    memset(states.out, 0, rows * padded * sizeof(float));
}

// ---- where a tile is, and who sees what of it ----

// Stands for the rows from the end of the context on.
alignas(64) static const char zero_row[kv_row_bytes(KVFormat::f32, MAX_HEAD_SIZE)] = {};

// The keys, and then the values, of TILE positions.
struct TileRows {
    const char *rows[2 * TILE];
};

static void locate(const AttentionProblem &problem, const AttentionTask &task, int64_t base, TileRows &tile) {
    const KVCache &cache = problem.cache;
    const int32_t *table = problem.block_tables + task.sequence * problem.table_stride + base / cache.block_size;
    const int64_t row_bytes = cache.row_bytes(), head_bytes = cache.block_size * row_bytes;
    const int64_t num_rows = min64(TILE, task.context_len - base);
    int64_t within = base % cache.block_size;
    for (int64_t i = 0; i < num_rows; ++table, within = 0) {
        const int64_t end = i + min64(num_rows - i, cache.block_size - within);
        int64_t at = (*table * cache.num_kv_heads + task.kv_head) * head_bytes + within * row_bytes;
        for (; i < end; ++i, at += row_bytes) {
            tile.rows[i] = static_cast<const char *>(cache.keys) + at;
            tile.rows[TILE + i] = static_cast<const char *>(cache.values) + at;
        }
    }
    for (int64_t i = num_rows; i < TILE; ++i) tile.rows[i] = tile.rows[TILE + i] = zero_row;
}

// The next tile's keys and values, asked for a few rows at a time while this tile is computed: blocks are scattered, so
// the hardware cannot foresee them. Measured before tiles had 64 keys and a direct way: decoding eight sequences of 1024
// gained a factor of about 1.5 from it. After a task's last tile comes the next task's first.
struct Prefetcher {
    const TileRows &tile;
    int64_t row_bytes;
    int row;  // the next to ask for; 2 * TILE when done

    QINLINE_MEMBER void ask(int count) {
        for (; count > 0 && row < 2 * TILE; --count, ++row) {
            for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(tile.rows[row] + at, 0, 2);
        }
    }
};

// What a row sees of a tile: [from, to); both zero where that is nothing.
struct Range {
    int from, to;
    bool is_empty() const { return from == to; }
    bool is_whole() const { return from == 0 && to == TILE; }
};

static Range visible(const AttentionProblem &problem, int64_t position, int64_t base) {
    const int64_t first = problem.window > 0 ? max64(0, position - problem.window + 1 - base) : 0;
    const int64_t end = min64(position + 1 - base, TILE);
    return first < end ? Range{static_cast<int>(first), static_cast<int>(end)} : Range{0, 0};
}

// What each row of a task sees of a tile; returns whether that is all of it, for all rows.
static bool find_ranges(const AttentionProblem &problem, const AttentionTask &task, int64_t base, Range *ranges) {
    bool is_whole = true;
    for (int64_t p = 0; p < task.num_positions; ++p) {
        const Range seen = visible(problem, task.position(p), base);
        is_whole = is_whole && seen.is_whole();
        for (int64_t head = 0; head < task.num_heads; ++head) *ranges++ = seen;
    }
    return is_whole;
}

// What some rows see between them.
static Range hull(const Range *ranges, int64_t count) {
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

// ---- gathering ----

// What rows are multiplied by, so that their products with keys are scores in powers of two (or, where these are capped,
// what the hyperbolic tangent is taken of).
constexpr float LOG2_E = 1.44269504088896341f;
static float query_factor(const AttentionProblem &problem) {
    return problem.soft_cap > 0.0f ? problem.scale / problem.soft_cap : problem.scale * LOG2_E;
}

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

// The query's rows as register tiles of scores read them: SCORE_ROWS elements of different rows side by side.
template <typename T>
static void gather_query(const AttentionProblem &problem, const AttentionTask &task, float *query) {
    const int64_t head_size = problem.cache.head_size, num_rows = task.num_rows();
    const Vec factor = broadcast(query_factor(problem));
    memset(query, 0, round_up(num_rows, SCORE_ROWS) * padded_keys(head_size) * sizeof(float));
    RowWalk walk(task);
    for (int64_t r = 0; r < num_rows; r += SCORE_ROWS, query += SCORE_ROWS * padded_keys(head_size)) {
        const int64_t count = min64(SCORE_ROWS, num_rows - r);
        const T *rows[SCORE_ROWS];
        for (int64_t i = 0; i < count; ++i, walk.step()) {
            rows[i] = static_cast<const T *>(problem.query) + walk.row() * problem.query_stride + walk.query_head() * head_size;
        }
        for (int64_t d = 0; d < head_size; d += LANES) {
            Vec block[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                block[i] = i < count ? mul(load_up_to(rows[i] + d, head_size - d), factor) : broadcast(0.0f);
            }
            transpose(block);
            for (int64_t i = 0; i < min64(LANES, head_size - d); ++i) {
                store_partial(query + (d + i) * SCORE_ROWS, block[i], SCORE_ROWS);
            }
        }
    }
}

template <KVFormat F>
QINLINE Vec load_scales(const char *const *rows, int64_t head_size) {
    float scales[LANES];
    for (int i = 0; i < LANES; ++i) scales[i] = scale_of<F>(rows[i], head_size);
    return load(scales);
}

template <KVFormat F, int J>
QINLINE Vec key_element(Vec word, Vec scales) {
    const Vec x = element_of<F, J>(as_bits(word));
    return is_scaled(F) ? mul(x, scales) : x;
}

template <KVFormat F>
static void gather_keys(const Turn &turn) {
    constexpr int PER = PER_WORD<F>;
    const int64_t head_size = turn.problem.cache.head_size, num_bytes = head_size * kv_element_bytes(F);
    for (int first = 0; first < TILE; first += LANES) {
        const char *const *rows = turn.tile.rows + first;
        const Vec scales = load_scales<F>(rows, head_size);
        float *to = turn.w.keys + first / KEYS * KEYS * padded_keys(head_size) + first % KEYS;
        for (int64_t at = 0; at < num_bytes; at += 4 * LANES, to += PER * LANES * KEYS) {
            Vec block[LANES];
            load_words(rows, at, num_bytes, block);
            QUNROLL
            for (int i = 0; i < LANES; ++i) {
                store(to + PER * i * KEYS, key_element<F, 0>(block[i], scales));
                if constexpr (PER > 1) store(to + (PER * i + 1) * KEYS, key_element<F, 1>(block[i], scales));
                if constexpr (PER > 2) store(to + (PER * i + 2) * KEYS, key_element<F, 2>(block[i], scales));
                if constexpr (PER > 2) store(to + (PER * i + 3) * KEYS, key_element<F, 3>(block[i], scales));
            }
        }
    }
}

template <KVFormat F>
static void gather_values(const Turn &turn) {
    const int64_t head_size = turn.problem.cache.head_size, padded = turn.w.padded;
    for (int i = 0; i < TILE; ++i) {
        const char *row = turn.tile.rows[TILE + i];
        const float scale = scale_of<F>(row, head_size);
        for (int64_t first = 0; first < padded; first += OUT_VECS * LANES) {
            const int64_t width = min64(OUT_VECS * LANES, padded - first);
            float *to = turn.w.values + first * TILE + i * width;
            for (int64_t d = 0; d < width; d += LANES) {
                store(to + d, load_elements<F>(row, first + d, head_size, scale));
            }
        }
    }
}

// ---- scores ----

template <int ROWS>
static void score_tile(const float *query, const float *keys, int64_t head_size, float *scores) {
    Vec sums[ROWS][KEY_VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < KEY_VECS; ++v) sums[r][v] = broadcast(0.0f);
    }
    for (int64_t d = 0; d < head_size; ++d) {
        Vec key[KEY_VECS];
        QUNROLL
        for (int v = 0; v < KEY_VECS; ++v) key[v] = load(keys + d * KEYS + v * LANES);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Vec value = broadcast(query[d * SCORE_ROWS + r]);
            QUNROLL
            for (int v = 0; v < KEY_VECS; ++v) sums[r][v] = fma(value, key[v], sums[r][v]);
        }
    }
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < KEY_VECS; ++v) store(scores + r * TILE + v * LANES, sums[r][v]);
    }
}

// `rows` <= ROWS rows, by the register tile of just that height.
template <int ROWS>
static void score_few(int64_t rows, const float *query, const float *keys, int64_t head_size, float *scores) {
    if (rows == ROWS) return score_tile<ROWS>(query, keys, head_size, scores);
    if constexpr (ROWS > 1) score_few<ROWS - 1>(rows, query, keys, head_size, scores);
}

// Keys in pieces on the outside, so that a piece stays in the first-level cache.
static void score_all(const Turn &turn, int64_t num_rows) {
    const int64_t head_size = turn.problem.cache.head_size, padded = padded_keys(head_size);
    for (int first = 0; first < TILE; first += KEYS) {
        for (int64_t r = 0; r < num_rows; r += SCORE_ROWS) {
            const int64_t count = min64(SCORE_ROWS, num_rows - r);
            const Range seen = turn.seen_by(r, count);
            if (seen.to <= first || seen.from >= first + KEYS) continue;
            turn.next.ask(ASKED_AT_ONCE);
            score_few<SCORE_ROWS>(count, turn.w.query + r * padded, turn.w.keys + first * padded, head_size,
                                  turn.w.scores + r * TILE + first);
        }
    }
}

template <int ROWS>
QINLINE void add_key(const float *query, Vec key, Vec (&sums)[ROWS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) sums[r] = fma(broadcast(query[r]), key, sums[r]);
}

// Keys straight from the cache. Elements past the head's end are zeros, and add nothing.
template <KVFormat F, int ROWS>
static void score_directly(const Turn &turn) {
    constexpr int PER = PER_WORD<F>;
    const int64_t head_size = turn.problem.cache.head_size, num_bytes = head_size * kv_element_bytes(F);
    const Range seen = turn.seen_by(0, ROWS);
    for (int first = seen.from / LANES * LANES; first < seen.to; first += LANES) {
        const char *const *rows = turn.tile.rows + first;
        const Vec scales = load_scales<F>(rows, head_size);
        Vec sums[ROWS];
        QUNROLL
        for (int r = 0; r < ROWS; ++r) sums[r] = broadcast(0.0f);
        const float *query = turn.w.query;
        for (int64_t at = 0; at < num_bytes; at += 4 * LANES) {
            Vec block[LANES];
            load_words(rows, at, num_bytes, block);
            QUNROLL
            for (int i = 0; i < LANES; ++i, query += PER * SCORE_ROWS) {
                add_key(query, key_element<F, 0>(block[i], scales), sums);
                if constexpr (PER > 1) add_key(query + SCORE_ROWS, key_element<F, 1>(block[i], scales), sums);
                if constexpr (PER > 2) add_key(query + 2 * SCORE_ROWS, key_element<F, 2>(block[i], scales), sums);
                if constexpr (PER > 2) add_key(query + 3 * SCORE_ROWS, key_element<F, 3>(block[i], scales), sums);
            }
            turn.next.ask(4);
        }
        QUNROLL
        for (int r = 0; r < ROWS; ++r) store(turn.w.scores + r * TILE + first, sums[r]);
    }
}

// ---- softmax ----

static void cap_scores(float *scores, float soft_cap) {
    for (int i = 0; i < TILE; i += LANES) store(scores + i, mul(tanh(load(scores + i)), broadcast(soft_cap * LOG2_E)));
}

static void hide(float *scores, Range seen) {
    for (int i = 0; i < seen.from; ++i) scores[i] = NONE;
    for (int i = seen.to; i < TILE; ++i) scores[i] = NONE;
}

QINLINE Vec highest_scores(const float *scores) {
    Vec highest = load(scores);
    QUNROLL
    for (int v = 1; v < TILE_VECS; ++v) highest = max(load(scores + v * LANES), highest);
    return highest;
}

// The highest score of `count` <= LANES rows, one in a lane; many of them by a transposition.
QINLINE Vec highest_of_rows(const float *scores, int64_t count) {
    if (count < LANES) {
        float lanes[LANES] = {};
        for (int64_t r = 0; r < count; ++r) lanes[r] = reduce_max(highest_scores(scores + r * TILE));
        return load(lanes);
    }
    Vec block[LANES];
    QUNROLL
    for (int r = 0; r < LANES; ++r) block[r] = highest_scores(scores + r * TILE);
    transpose(block);
    Vec highest = block[0];
    QUNROLL
    for (int i = 1; i < LANES; ++i) highest = max(block[i], highest);
    return highest;
}

// Scores of one row to weights; their sum joins the row's total.
QINLINE void soften_row(float *scores, float highest, float rescale, float *total) {
    Vec sum = broadcast(0.0f);
    QUNROLL
    for (int v = 0; v < TILE_VECS; ++v) {
        const Vec weights = exp2(sub(load(scores + v * LANES), broadcast(highest)));
        store(scores + v * LANES, weights);
        sum = add(sum, weights);
    }
    store(total, fma(load(total), broadcast(rescale), sum));
}

// Scores of `count` <= LANES rows from `first` on to weights, their states' max and total brought up to date, and what their
// outputs are rescaled by.
static void soften_rows(const Turn &turn, int64_t first, int64_t count) {
    const Workspace &w = turn.w;
    float *scores = w.scores + first * TILE, *max_seen = w.split.max + first, *rescale = w.rescale + first;
    const Range *ranges = turn.ranges + first;
    for (int64_t r = 0; r < count; ++r) {
        if (turn.problem.soft_cap > 0.0f) cap_scores(scores + r * TILE, turn.problem.soft_cap);
        if (!turn.is_whole) hide(scores + r * TILE, ranges[r]);
    }
    const Vec before = load(max_seen), now = max(highest_of_rows(scores, count), before);
    store(max_seen, now);
    store(rescale, exp2(sub(before, now)));
    for (int64_t r = 0; r < count; ++r) {
        if (ranges[r].is_empty()) {
            rescale[r] = 1.0f;
        } else {
            soften_row(scores + r * TILE, max_seen[r], rescale[r], w.split.total + (first + r) * LANES);
        }
    }
}

static void soften_all(const Turn &turn, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; r += LANES) soften_rows(turn, r, min64(LANES, num_rows - r));
}

// ---- outputs ----

// Values of a piece that were gathered before, or straight from the cache: vector v of position i.
struct GatheredValues {
    const float *values;
    int64_t width;
    QINLINE_MEMBER const float *at(int i) const { return values + i * width; }
    QINLINE_MEMBER Vec load_vec(const float *row, int v, float) const { return load(row + v * LANES); }
    QINLINE_MEMBER float scale(const float *) const { return 1.0f; }
};

template <KVFormat F>
struct CachedValues {
    const char *const *rows;
    int64_t first, head_size;
    QINLINE_MEMBER const char *at(int i) const { return rows[i]; }
    QINLINE_MEMBER Vec load_vec(const char *row, int v, float scale) const {
        return load_elements<F>(row, first + v * LANES, head_size, scale);
    }
    QINLINE_MEMBER float scale(const char *row) const { return scale_of<F>(row, head_size); }
};

// Some rows' outputs, and what they are made of: the tile's weights and what each row sees.
struct OutRows {
    const float *weights;  // [rows][TILE]
    const Range *ranges;
    const float *rescale;
    float *out;  // rows `padded` elements apart
    int64_t padded;
};

// Positions that all rows see.
template <int ROWS, int VECS, typename Values>
QINLINE void add_positions(const Values &values, const OutRows &rows, int from, int to, Vec (&sums)[ROWS][VECS]) {
    for (int i = from; i < to; ++i) {
        const auto *row = values.at(i);
        const float scale = values.scale(row);
        Vec value[VECS];
        QUNROLL
        for (int v = 0; v < VECS; ++v) value[v] = values.load_vec(row, v, scale);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Vec weight = broadcast(rows.weights[r * TILE + i]);
            QUNROLL
            for (int v = 0; v < VECS; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
        }
    }
}

// Positions that only some of the rows see.
template <int ROWS, int VECS, typename Values>
QINLINE void add_few(const Values &values, const OutRows &rows, int from, int to, Vec (&sums)[ROWS][VECS]) {
    for (int i = from; i < to; ++i) {
        const auto *row = values.at(i);
        const float scale = values.scale(row);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            if (i < rows.ranges[r].from || i >= rows.ranges[r].to) continue;
            const Vec weight = broadcast(rows.weights[r * TILE + i]);
            QUNROLL
            for (int v = 0; v < VECS; ++v) sums[r][v] = fma(weight, values.load_vec(row, v, scale), sums[r][v]);
        }
    }
}

// out = out * rescale + weights @ values for ROWS rows and a piece of VECS vectors, each row over what it sees.
template <int ROWS, int VECS, typename Values>
static void weigh_tile(const Values &values, const OutRows &rows, Range seen) {
    Vec sums[ROWS][VECS];
    Range common = seen;
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            sums[r][v] = mul(load(rows.out + r * rows.padded + v * LANES), broadcast(rows.rescale[r]));
        }
        common.from = rows.ranges[r].from > common.from ? rows.ranges[r].from : common.from;
        common.to = rows.ranges[r].to < common.to ? rows.ranges[r].to : common.to;
    }
    if (common.from >= common.to) common.from = common.to = seen.to;
    add_few<ROWS, VECS>(values, rows, seen.from, common.from, sums);
    add_positions<ROWS, VECS>(values, rows, common.from, common.to, sums);
    add_few<ROWS, VECS>(values, rows, common.to, seen.to, sums);
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) store(rows.out + r * rows.padded + v * LANES, sums[r][v]);
    }
}

template <int ROWS, int VECS, typename Values>
static void weigh_narrow(int64_t num_vecs, const Values &values, const OutRows &rows, Range seen) {
    if (num_vecs == VECS) return weigh_tile<ROWS, VECS>(values, rows, seen);
    if constexpr (VECS > 1) weigh_narrow<ROWS, VECS - 1>(num_vecs, values, rows, seen);
}

// `num_rows` <= ROWS rows.
template <int ROWS, typename Values>
static void weigh_few(int64_t num_rows, int64_t num_vecs, const Values &values, const OutRows &rows, Range seen) {
    if (num_rows == ROWS) return weigh_narrow<ROWS, OUT_VECS>(num_vecs, values, rows, seen);
    if constexpr (ROWS > 1) weigh_few<ROWS - 1>(num_rows, num_vecs, values, rows, seen);
}

// One piece of the head for all rows.
template <typename Values>
static void weigh_all(const Turn &turn, const Values &values, int64_t first, int64_t width, int64_t num_rows) {
    const Workspace &w = turn.w;
    for (int64_t r = 0; r < num_rows; r += OUT_ROWS) {
        const int64_t count = min64(OUT_ROWS, num_rows - r);
        const Range seen = turn.seen_by(r, count);
        if (seen.is_empty()) continue;
        const OutRows rows{w.scores + r * TILE, turn.ranges + r, w.rescale + r, w.split.out + r * w.padded + first,
                           w.padded};
        turn.next.ask(ASKED_AT_ONCE);
        weigh_few<OUT_ROWS>(count, width / LANES, values, rows, seen);
    }
}

// ---- one task ----

template <KVFormat F>
static void attend_gathered(const Turn &turn, int64_t num_rows) {
    gather_keys<F>(turn);
    score_all(turn, num_rows);
    soften_all(turn, num_rows);
    gather_values<F>(turn);
    for (int64_t first = 0; first < turn.w.padded; first += OUT_VECS * LANES) {
        const int64_t width = min64(OUT_VECS * LANES, turn.w.padded - first);
        weigh_all(turn, GatheredValues{turn.w.values + first * TILE, width}, first, width, num_rows);
    }
    turn.next.ask(2 * TILE);
}

template <KVFormat F, int ROWS>
static void score_rows_directly(const Turn &turn, int64_t num_rows) {
    if (num_rows == ROWS) return score_directly<F, ROWS>(turn);
    if constexpr (ROWS > 1) score_rows_directly<F, ROWS - 1>(turn, num_rows);
}

template <KVFormat F>
static void attend_directly(const Turn &turn, int64_t num_rows) {
    score_rows_directly<F, DIRECT_ROWS>(turn, num_rows);
    soften_all(turn, num_rows);
    const int64_t head_size = turn.problem.cache.head_size;
    for (int64_t first = 0; first < turn.w.padded; first += OUT_VECS * LANES) {
        const int64_t width = min64(OUT_VECS * LANES, turn.w.padded - first);
        weigh_all(turn, CachedValues<F>{turn.tile.rows + TILE, first, head_size}, first, width, num_rows);
        turn.next.ask(TILE);
    }
    turn.next.ask(2 * TILE);
}

template <KVFormat F>
static void attend_format(const Turn &turn, int64_t num_rows) {
    num_rows <= DIRECT_ROWS ? attend_directly<F>(turn, num_rows) : attend_gathered<F>(turn, num_rows);
}

static void attend_tile(const Turn &turn, int64_t num_rows) {
    switch (turn.problem.cache.format) {
        case KVFormat::f32: return attend_format<KVFormat::f32>(turn, num_rows);
        case KVFormat::bf16: return attend_format<KVFormat::bf16>(turn, num_rows);
        case KVFormat::int8: return attend_format<KVFormat::int8>(turn, num_rows);
        case KVFormat::fp8: return attend_format<KVFormat::fp8>(turn, num_rows);
    }
}

// Merge one row's state into another: the only place where two softmax states meet.
static void merge(float *max_to, float *total_to, float *out_to, const float *max_from, const float *total_from,
                  const float *out_from, int64_t padded) {
    if (*max_from == NONE) return;
    if (*max_to == NONE) {
        *max_to = *max_from;
        memcpy(total_to, total_from, LANES * sizeof(float));
        memcpy(out_to, out_from, padded * sizeof(float));
        return;
    }
    const float highest = *max_from > *max_to ? *max_from : *max_to;
    const Vec to = exp2(broadcast(*max_to - highest)), from = exp2(broadcast(*max_from - highest));
    *max_to = highest;
    store(total_to, fma(load(total_from), from, mul(load(total_to), to)));
    for (int64_t d = 0; d < padded; d += LANES) {
        store(out_to + d, fma(load(out_from + d), from, mul(load(out_to + d), to)));
    }
}

// The positions of a task's tiles begin at multiples of TILE, from the first that any of its rows sees.
static int64_t first_tile(const AttentionProblem &problem, const AttentionTask &task) {
    const int64_t first_seen = problem.window > 0 ? max64(0, task.first_position - problem.window + 1) : 0;
    return max64(task.begin, max64(task.first_split * int64_t{SPLIT}, first_seen / TILE * TILE));
}

static int64_t end_of_tiles(const AttentionTask &task) {
    if (task.members != nullptr) return task.shared_end;
    return min64(task.last_split * int64_t{SPLIT}, task.first_position + task.num_positions);
}

// The tiles of a task in order; while one is computed, the next is asked for, the first of `next_task` (null: none) last.
struct TileWalk {
    const AttentionProblem &problem;
    const AttentionTask &task, *next_task;
    int64_t base;  // the position at which the present tile begins
    TileRows tiles[2];
    int turn = 0;

    TileWalk(const AttentionProblem &of, const AttentionTask &now, const AttentionTask *then)
        : problem(of), task(now), next_task(then), base(first_tile(of, now)) {
        if (base < end_of_tiles(task)) locate(problem, task, base, tiles[0]);
    }

    void attend_until(int64_t end, const Workspace &w) {
        for (; base < end; base += TILE, turn ^= 1) {
            Prefetcher next{tiles[turn ^ 1], problem.cache.row_bytes(), locate_next(tiles[turn ^ 1]) ? 0 : 2 * TILE};
            Range ranges[MAX_ROWS];
            const bool is_whole = find_ranges(problem, task, base, ranges);
            attend_tile(Turn{problem, w, tiles[turn], next, ranges, is_whole}, task.num_rows());
        }
    }

   private:
    bool locate_next(TileRows &tile) const {
        if (base + TILE < end_of_tiles(task)) {
            locate(problem, task, base + TILE, tile);
        } else if (next_task != nullptr) {
            locate(problem, *next_task, first_tile(problem, *next_task), tile);
        } else {
            return false;
        }
        return true;
    }
};

// The states of a split's rows join the running ones; nothing where no key has been seen since the last time.
static void end_split(const Workspace &w, int64_t rows) {
    const int64_t padded = w.padded;
    for (int64_t r = 0; r < rows; ++r) {
        merge(w.running.max + r, w.running.total + r * LANES, w.running.out + r * padded, w.split.max + r,
              w.split.total + r * LANES, w.split.out + r * padded, padded);
    }
    clear(w.split, rows, padded);
}

// All tiles of a task; the last split is left open.
static void attend_tiles(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                         const Workspace &w) {
    TileWalk walk(problem, task, next_task);
    for (const int64_t end = end_of_tiles(task); walk.base < end;) {
        const int64_t split_end = (walk.base / SPLIT + 1) * SPLIT;
        walk.attend_until(min64(split_end, end), w);
        if (walk.base == split_end) end_split(w, task.num_rows());
    }
}

template <typename T>
static void store_rows(const AttentionProblem &problem, const AttentionTask &task, const States &states,
                       int64_t padded) {
    RowWalk walk(task);
    for (int64_t r = 0; r < task.num_rows(); ++r, walk.step()) {
        T *to = static_cast<T *>(problem.out) +
                (walk.row() * problem.num_heads + walk.query_head()) * problem.cache.head_size;
        const Vec inverse = broadcast(1.0f / reduce_add(load(states.total + r * LANES)));
        for (int64_t d = 0; d < problem.cache.head_size; d += LANES) {
            store_up_to(to + d, mul(load(states.out + r * padded + d), inverse), problem.cache.head_size - d);
        }
    }
}

static void finish(const AttentionProblem &problem, const AttentionTask &task, const States &states, int64_t padded) {
    if (problem.dtype == DType::f32) {
        store_rows<float>(problem, task, states, padded);
    } else {
        store_rows<bf16>(problem, task, states, padded);
    }
}

// A partial state in memory: [rows] max, [rows][LANES] total, [rows][padded head] out.
static States partial_states(float *memory, int64_t rows) {
    return States{memory, memory + rows, memory + rows * (1 + LANES)};
}

static void gather(const AttentionProblem &problem, const AttentionTask &task, float *query) {
    if (problem.dtype == DType::f32) {
        gather_query<float>(problem, task, query);
    } else {
        gather_query<bf16>(problem, task, query);
    }
}

static void copy_states(const States &from, int64_t first, int64_t count, int64_t padded, const States &to) {
    memcpy(to.max, from.max + first, count * sizeof(float));
    memcpy(to.total, from.total + first * LANES, count * LANES * sizeof(float));
    memcpy(to.out, from.out + first * padded, count * padded * sizeof(float));
}

// Each member goes on alone behind the shared keys, with the states that its rows have then.
static void attend_members(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                           const Workspace &w) {
    AttentionTask rest = task.rest_of(0), after{};
    for (int64_t p = 0; p < task.num_positions; ++p, rest = after) {
        const bool is_last = p + 1 == task.num_positions;
        if (!is_last) after = task.rest_of(p + 1);
        gather(problem, rest, w.query);
        copy_states(w.shared_split, p * task.num_heads, task.num_heads, w.padded, w.split);
        copy_states(w.shared_running, p * task.num_heads, task.num_heads, w.padded, w.running);
        attend_tiles(problem, rest, is_last ? next_task : &after, w);
        end_split(w, task.num_heads);
        finish(problem, rest, w.running, w.padded);
    }
}

static void attend_shared(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                          const Workspace &w) {
    Workspace shared = w;
    shared.split = w.shared_split;
    shared.running = w.shared_running;
    clear(shared.split, task.num_rows(), w.padded);
    clear(shared.running, task.num_rows(), w.padded);
    gather(problem, task, w.query);
    const AttentionTask first = task.rest_of(0);
    attend_tiles(problem, task, &first, shared);
    attend_members(problem, task, next_task, w);
}

void attend(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task, float *scratch) {
    const int64_t rows = task.num_rows();
    Workspace w = lay_out(scratch, problem.cache.head_size);
    if (task.members != nullptr) return attend_shared(problem, task, next_task, w);
    if (task.partial != nullptr) w.running = partial_states(task.partial, rows);
    clear(w.split, rows, w.padded);
    clear(w.running, rows, w.padded);
    gather(problem, task, w.query);
    attend_tiles(problem, task, next_task, w);
    end_split(w, rows);
    if (task.partial == nullptr) finish(problem, task, w.running, w.padded);
}

// Merge a task's partial states (one per split, ascending) in order, and store its rows.
void finish_rows(const AttentionProblem &problem, const AttentionTask &task, int num_partials, int64_t partial_stride,
                 float *scratch) {
    const int64_t padded = padded_head(problem.cache.head_size), rows = task.num_rows();
    const Workspace w = lay_out(scratch, problem.cache.head_size);
    clear(w.running, rows, padded);
    for (int i = 0; i < num_partials; ++i) {
        const States from = partial_states(task.partial + i * partial_stride, rows);
        for (int64_t r = 0; r < rows; ++r) {
            merge(w.running.max + r, w.running.total + r * LANES, w.running.out + r * padded, from.max + r,
                  from.total + r * LANES, from.out + r * padded, padded);
        }
    }
    finish(problem, task, w.running, padded);
}

}  // namespace quire::QUIRE_ISA
