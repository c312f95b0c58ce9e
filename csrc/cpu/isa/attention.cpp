// Paged attention of one task: some query rows of one sequence that share a KV head.
//
// Keys are visited in tiles of TILE absolute positions, whatever the block size: a tile's keys are gathered through the
// block table, transposed and widened to float32 once for all rows of the task, its values likewise. A row's scores are
// chains over the head's elements, its outputs chains over the tile's positions, both ascending; its online softmax
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) rescales once per tile that the row can
// see, and its state is merged into a running state at the end of each split (as in Dao et al., "Flash-Decoding",
// 2023). None of that depends on the other rows, on how the prompt was divided into steps, or on threads.
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

constexpr int TILE_VECS = TILE / LANES;
constexpr float NONE = -__builtin_inff();

// Rows of a register tile: of scores (x TILE_VECS vectors), and of outputs (x OUT_VECS vectors).
constexpr int SCORE_ROWS = LANES == 16 ? 8 : LANES == 8 ? 3 : 1;
constexpr int OUT_ROWS = LANES == 16 ? 6 : 3;
constexpr int OUT_VECS = 4;

static int64_t padded_head(int64_t head_size) { return round_up(head_size, 16); }

// Softmax states of the rows of a task. `total` is kept as LANES partial sums and added up at the very end.
struct States {
    float *max;    // [rows], -infinity where nothing has been seen
    float *total;  // [rows][LANES]
    float *out;    // [rows][padded head]
};

struct Workspace {
    float *query;    // [MAX_ROWS][padded head], float32
    float *keys;     // [padded head + 16][TILE]: bfloat16 keys come 32 elements at a time
    float *values;   // [TILE][padded head]
    float *scores;   // [MAX_ROWS][TILE]: scores, then weights
    float *rescale;  // [MAX_ROWS]
    States split, running;
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

static Workspace lay_out(float *memory, int64_t padded) {
    Workspace w;
    w.query = take(memory, MAX_ROWS * padded);
    w.keys = take(memory, (padded + 16) * TILE);
    w.values = take(memory, TILE * padded);
    w.scores = take(memory, MAX_ROWS * TILE);
    w.rescale = take(memory, MAX_ROWS);
    w.split = take_states(memory, padded);
    w.running = take_states(memory, padded);
    return w;
}

int64_t attention_scratch(int64_t head_size) {
    const int64_t padded = padded_head(head_size);
    return (3 * MAX_ROWS + 2 * TILE) * padded + 16 * TILE + MAX_ROWS * (TILE + 2 * LANES + 3);
}

int64_t state_size(int64_t head_size) { return padded_head(head_size) + LANES + 1; }

static void clear(const States &states, int64_t rows, int64_t padded) {
    for (int64_t r = 0; r < rows; ++r) states.max[r] = NONE;
    memset(states.total, 0, rows * LANES * sizeof(float));
    memset(states.out, 0, rows * padded * sizeof(float));
}

// ---- gathering ----

// Where the keys, and then the values, of TILE positions live; null from the end of the context on.
struct TileRows {
    const char *rows[2 * TILE];
};

static void locate(const AttentionProblem &problem, const AttentionTask &task, int64_t base, TileRows &tile) {
    const int32_t *table = problem.block_tables + task.sequence * problem.table_stride + base / problem.cache.block_size;
    const KVCache &cache = problem.cache;
    const int64_t row_bytes = cache.row_bytes(), head_bytes = cache.block_size * row_bytes;
    int64_t within = base % cache.block_size;
    for (int64_t i = 0; i < TILE; ++table, within = 0) {
        const int64_t left = min64(TILE - i, task.context_len - base - i);
        if (left <= 0) {
            tile.rows[i] = tile.rows[TILE + i] = nullptr;
            ++i;
            continue;
        }
        const int64_t end = i + min64(left, cache.block_size - within);
        int64_t at = (*table * cache.num_kv_heads + task.kv_head) * head_bytes + within * row_bytes;
        for (; i < end; ++i, at += row_bytes) {
            tile.rows[i] = static_cast<const char *>(cache.keys) + at;
            tile.rows[TILE + i] = static_cast<const char *>(cache.values) + at;
        }
    }
}

template <typename T>
QINLINE const T *as(const char *row) {
    return reinterpret_cast<const T *>(row);
}

template <typename T>
QINLINE Vec load_or_zero(const T *row, int64_t from, int64_t size) {
    if (row == nullptr || from >= size) return broadcast(0.0f);
    return load_up_to(row + from, size - from);
}

// The next tile's keys and values, asked for a few rows at a time while this tile is computed: blocks are scattered, so
// the hardware cannot foresee them. Measured: decoding eight sequences of 1024 gains a factor of about 1.5 from it.
struct Prefetcher {
    const TileRows &tile;
    int64_t row_bytes;
    int row;  // the next to ask for; 2 * TILE when done

    void ask(int count) {
        for (; count > 0 && row < 2 * TILE; --count, ++row) {
            for (int64_t at = 0; at < row_bytes; at += 64)
                __builtin_prefetch(tile.rows[row] + at, 0, 2);  // null: harmless
        }
    }
};

// keys[d][position]: float32 blocks are transposed as they are, bfloat16 in pairs that are split after.
static void gather_keys(const TileRows &tile, const float *, int64_t head_size, float *keys, Prefetcher &next) {
    for (int first = 0; first < TILE; first += LANES) {
        for (int64_t d = 0; d < head_size; d += LANES) {
            Vec block[LANES];
            QUNROLL
            for (int i = 0; i < LANES; ++i) block[i] = load_or_zero(as<float>(tile.rows[first + i]), d, head_size);
            transpose(block);
            QUNROLL
            for (int i = 0; i < LANES; ++i) store(keys + (d + i) * TILE + first, block[i]);
            next.ask(4);
        }
    }
}

QINLINE Vec load_pairs(const bf16 *row, int64_t from, int64_t size) {
    if (row == nullptr) return broadcast(0.0f);
    if (from + 2 * LANES <= size) return as_float(load_bits(row + from));
    bf16 pairs[2 * LANES] = {};
    for (int64_t i = 0; from + i < size; ++i) pairs[i] = row[from + i];
    return as_float(load_bits(pairs));
}

static void gather_keys(const TileRows &tile, const bf16 *, int64_t head_size, float *keys, Prefetcher &next) {
    for (int first = 0; first < TILE; first += LANES) {
        for (int64_t d = 0; d < head_size; d += 2 * LANES) {
            Vec block[LANES];
            QUNROLL
            for (int i = 0; i < LANES; ++i) block[i] = load_pairs(as<bf16>(tile.rows[first + i]), d, head_size);
            transpose(block);
            QUNROLL
            for (int i = 0; i < LANES; ++i) {
                float *to = keys + (d + 2 * i) * TILE + first;
                store(to, as_float(shift_left<16>(as_bits(block[i]))));
                store(to + TILE, as_float(and_bits(as_bits(block[i]), broadcast_bits(0xffff0000u))));
            }
            next.ask(4);
        }
    }
}

template <typename T>
static void gather_values(const TileRows &tile, int64_t head_size, int64_t padded, float *values, Prefetcher &next) {
    for (int i = 0; i < TILE; ++i) {
        const T *row = as<T>(tile.rows[TILE + i]);
        for (int64_t d = 0; d < padded; d += LANES) store(values + i * padded + d, load_or_zero(row, d, head_size));
        if (i % 2 == 0) next.ask(1);
    }
}

template <typename T>
static void gather_tile(const TileRows &tile, int64_t head_size, int64_t padded, const Workspace &w, Prefetcher &next) {
    gather_keys(tile, static_cast<const T *>(nullptr), head_size, w.keys, next);
    gather_values<T>(tile, head_size, padded, w.values, next);
}

// Row r of a task is query position r / num_heads, head r % num_heads.
template <typename T>
static void gather_query(const AttentionProblem &problem, const AttentionTask &task, int64_t padded, float *query) {
    for (int64_t r = 0; r < task.num_rows(); ++r) {
        const int64_t row = task.first_row + r / task.num_heads, head = task.first_head + r % task.num_heads;
        const T *from = static_cast<const T *>(problem.query) + row * problem.query_stride + head * problem.cache.head_size;
        for (int64_t d = 0; d < padded; d += LANES) {
            store(query + r * padded + d, load_or_zero(from, d, problem.cache.head_size));
        }
    }
}

// ---- scores ----

template <int ROWS>
static void score_rows(const float *query, const float *keys, int64_t head_size, int64_t padded, float scale,
                       float *scores) {
    Vec sums[ROWS][TILE_VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < TILE_VECS; ++v) sums[r][v] = broadcast(0.0f);
    }
    for (int64_t d = 0; d < head_size; ++d) {
        Vec key[TILE_VECS];
        QUNROLL
        for (int v = 0; v < TILE_VECS; ++v) key[v] = load(keys + d * TILE + v * LANES);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Vec value = broadcast(query[r * padded + d]);
            QUNROLL
            for (int v = 0; v < TILE_VECS; ++v) sums[r][v] = fma(value, key[v], sums[r][v]);
        }
    }
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < TILE_VECS; ++v) store(scores + r * TILE + v * LANES, mul(sums[r][v], broadcast(scale)));
    }
}

// `rows` <= ROWS rows, by the register tile of just that height.
template <int ROWS>
static void score_few(int64_t rows, const float *query, const float *keys, int64_t head_size, int64_t padded,
                      float scale, float *scores) {
    if (rows == ROWS) return score_rows<ROWS>(query, keys, head_size, padded, scale, scores);
    if constexpr (ROWS > 1) score_few<ROWS - 1>(rows, query, keys, head_size, padded, scale, scores);
}

static void score(const AttentionProblem &problem, const Workspace &w, int64_t first, int64_t last, int64_t padded,
                  Prefetcher &next) {
    for (int64_t r = first; r < last; r += SCORE_ROWS) {
        score_few<SCORE_ROWS>(min64(SCORE_ROWS, last - r), w.query + r * padded, w.keys, problem.cache.head_size, padded,
                              problem.scale, w.scores + r * TILE);
        next.ask(4);
    }
}

// Scores of one row to weights, its state's max and total brought up to date; returns what its outputs are rescaled by.
static float soften(float *scores, int from, int to, float soft_cap, float *max_seen, float *total) {
    Vec x[TILE_VECS];
    if (soft_cap > 0.0f) {
        const Vec cap = broadcast(soft_cap);
        QUNROLL
        for (int v = 0; v < TILE_VECS; ++v)
            store(scores + v * LANES, mul(tanh(div(load(scores + v * LANES), cap)), cap));
    }
    for (int i = 0; i < from; ++i) scores[i] = NONE;
    for (int i = to; i < TILE; ++i) scores[i] = NONE;
    Vec highest = broadcast(*max_seen);
    QUNROLL
    for (int v = 0; v < TILE_VECS; ++v) {
        x[v] = load(scores + v * LANES);
        highest = max(x[v], highest);
    }
    const float new_max = reduce_max(highest);
    Vec sum = broadcast(0.0f);
    QUNROLL
    for (int v = 0; v < TILE_VECS; ++v) {
        x[v] = exp(sub(x[v], broadcast(new_max)));
        store(scores + v * LANES, x[v]);
        sum = add(sum, x[v]);
    }
    const Vec rescale = exp(broadcast(*max_seen - new_max));
    store(total, fma(load(total), rescale, sum));
    *max_seen = new_max;
    float lanes[LANES];
    store(lanes, rescale);
    return lanes[0];
}

// ---- outputs ----

// out [ROWS][VECS vectors] = out * rescale + weights [ROWS][from, to) @ values [from, to).
template <int ROWS, int VECS>
static void weigh_tile(const float *weights, const float *values, const float *rescale, int from, int to,
                       int64_t padded, float *out) {
    Vec sums[ROWS][VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) sums[r][v] = mul(load(out + r * padded + v * LANES), broadcast(rescale[r]));
    }
    for (int i = from; i < to; ++i) {
        Vec value[VECS];
        QUNROLL
        for (int v = 0; v < VECS; ++v) value[v] = load(values + i * padded + v * LANES);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Vec weight = broadcast(weights[r * TILE + i]);
            QUNROLL
            for (int v = 0; v < VECS; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
        }
    }
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) store(out + r * padded + v * LANES, sums[r][v]);
    }
}

template <int ROWS>
static void weigh_rows(const Workspace &w, int64_t row, int from, int to, int64_t padded) {
    const float *weights = w.scores + row * TILE, *rescale = w.rescale + row;
    float *out = w.split.out + row * padded;
    int64_t d = 0;
    for (; d + OUT_VECS * LANES <= padded; d += OUT_VECS * LANES) {
        weigh_tile<ROWS, OUT_VECS>(weights, w.values + d, rescale, from, to, padded, out + d);
    }
    for (; d < padded; d += LANES) weigh_tile<ROWS, 1>(weights, w.values + d, rescale, from, to, padded, out + d);
}

template <int ROWS>
static void weigh_few(int64_t rows, const Workspace &w, int64_t row, int from, int to, int64_t padded) {
    if (rows == ROWS) return weigh_rows<ROWS>(w, row, from, to, padded);
    if constexpr (ROWS > 1) weigh_few<ROWS - 1>(rows, w, row, from, to, padded);
}

// ---- one task ----

// What a query position sees of a tile: [from, to), empty where to <= from.
struct Range {
    int from, to;
};

static Range visible(const AttentionProblem &problem, int64_t position, int64_t base) {
    const int64_t first = problem.window > 0 ? max64(0, position - problem.window + 1 - base) : 0;
    return Range{static_cast<int>(min64(first, TILE)), static_cast<int>(min64(position + 1 - base, TILE))};
}

// Rows [first, last) all see `range`.
static void attend_rows(const AttentionProblem &problem, const Workspace &w, int64_t first, int64_t last, Range range,
                        int64_t padded, Prefetcher &next) {
    score(problem, w, first, last, padded, next);
    for (int64_t r = first; r < last; ++r) {
        w.rescale[r] = soften(w.scores + r * TILE, range.from, range.to, problem.soft_cap, w.split.max + r,
                              w.split.total + r * LANES);
        next.ask(4);
    }
    for (int64_t r = first; r < last; r += OUT_ROWS) {
        weigh_few<OUT_ROWS>(min64(OUT_ROWS, last - r), w, r, range.from, range.to, padded);
        next.ask(4);
    }
}

static void attend_tile(const AttentionProblem &problem, const AttentionTask &task, int64_t base, int64_t padded,
                        const Workspace &w, const TileRows &tile, Prefetcher &next) {
    if (problem.cache.format == KVFormat::f32) {
        gather_tile<float>(tile, problem.cache.head_size, padded, w, next);
    } else {
        gather_tile<bf16>(tile, problem.cache.head_size, padded, w, next);
    }
    const int64_t heads = task.num_heads;
    for (int64_t p = 0; p < task.num_positions;) {  // runs of positions that see the same part of the tile
        const Range range = visible(problem, task.first_position + p, base);
        int64_t end = p + 1;
        for (; end < task.num_positions; ++end) {
            const Range next = visible(problem, task.first_position + end, base);
            if (next.from != range.from || next.to != range.to) break;
        }
        if (range.from < range.to) attend_rows(problem, w, p * heads, end * heads, range, padded, next);
        p = end;
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
    const Vec to = exp(broadcast(*max_to - highest)), from = exp(broadcast(*max_from - highest));
    *max_to = highest;
    store(total_to, fma(load(total_from), from, mul(load(total_to), to)));
    for (int64_t d = 0; d < padded; d += LANES) {
        store(out_to + d, fma(load(out_from + d), from, mul(load(out_to + d), to)));
    }
}

static void attend_tiles(const AttentionProblem &problem, const AttentionTask &task, int64_t begin, int64_t end,
                         int64_t padded, const Workspace &w) {
    TileRows tiles[2];
    if (begin < end) locate(problem, task, begin, tiles[0]);
    for (int64_t base = begin, turn = 0; base < end; base += TILE, turn ^= 1) {
        TileRows &following = tiles[turn ^ 1];
        Prefetcher next{following, problem.cache.row_bytes(), 2 * TILE};
        if (base + TILE < end) {
            locate(problem, task, base + TILE, following);
            next.row = 0;
        }
        attend_tile(problem, task, base, padded, w, tiles[turn], next);
    }
}

static void attend_split(const AttentionProblem &problem, const AttentionTask &task, int64_t split, int64_t padded,
                         const Workspace &w) {
    const int64_t last_position = task.first_position + task.num_positions - 1;
    const int64_t first_seen = problem.window > 0 ? max64(0, task.first_position - problem.window + 1) : 0;
    const int64_t begin = max64(split * SPLIT, first_seen / TILE * TILE);
    const int64_t end = min64((split + 1) * SPLIT, last_position + 1);
    clear(w.split, task.num_rows(), padded);
    attend_tiles(problem, task, begin, end, padded, w);
    for (int64_t r = 0; r < task.num_rows(); ++r) {
        merge(w.running.max + r, w.running.total + r * LANES, w.running.out + r * padded, w.split.max + r,
              w.split.total + r * LANES, w.split.out + r * padded, padded);
    }
}

template <typename T>
static void store_rows(const AttentionProblem &problem, const AttentionTask &task, const States &states,
                       int64_t padded) {
    for (int64_t r = 0; r < task.num_rows(); ++r) {
        const int64_t row = task.first_row + r / task.num_heads, head = task.first_head + r % task.num_heads;
        T *to = static_cast<T *>(problem.out) + (row * problem.num_heads + head) * problem.cache.head_size;
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

void attend(const AttentionProblem &problem, const AttentionTask &task, float *scratch) {
    const int64_t padded = padded_head(problem.cache.head_size), rows = task.num_rows();
    Workspace w = lay_out(scratch, padded);
    if (task.partial != nullptr) w.running = partial_states(task.partial, rows);
    if (problem.dtype == DType::f32) {
        gather_query<float>(problem, task, padded, w.query);
    } else {
        gather_query<bf16>(problem, task, padded, w.query);
    }
    clear(w.running, rows, padded);
    for (int64_t split = task.first_split; split < task.last_split; ++split) {
        attend_split(problem, task, split, padded, w);
    }
    if (task.partial == nullptr) finish(problem, task, w.running, padded);
}

// Merge a task's partial states (one per split, ascending) in order, and store its rows.
void finish_rows(const AttentionProblem &problem, const AttentionTask &task, int num_partials, int64_t partial_stride,
                 float *scratch) {
    const int64_t padded = padded_head(problem.cache.head_size), rows = task.num_rows();
    const Workspace w = lay_out(scratch, padded);
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
