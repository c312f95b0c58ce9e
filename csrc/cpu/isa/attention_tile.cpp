// One tile: scores of a task's rows, and their outputs once the softmax has made weights of these.
//
// There are two ways through a tile, with the same operations for a row. Many rows: keys and values are widened to float32
// once for all of them (keys transposed), in pieces that stay in the first-level cache while all rows pass over them. Few
// rows (decoding): registers are filled from the cache's rows directly, so that nothing is written on the way.
#include "attention_softmax.hpp"
#include "kv_rows.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t MAX_WHOLE_KEY = 256, KEY_PIECE = 192;  // elements
static_assert(KEY_PIECE % (MAX_WORD_ELEMENTS * LANES) == 0);

// ---- gathering ----

// The query's rows as register tiles of scores read them: SCORE_ROWS elements of different rows side by side, [rows /
// SCORE_ROWS][padded keys][SCORE_ROWS], multiplied by the factor of their scores.
template <typename T>
static void gather_rows(const AttentionProblem &problem, const AttentionTask &task, float *query) {
    const int64_t head_size = problem.cache.head_size, num_rows = task.num_rows();
    const Vec factor = broadcast(score_factor(problem));
    memset(query, 0, round_up(num_rows, SCORE_ROWS) * padded_keys(head_size) * sizeof(float));
    RowWalk walk(task);
    for (int64_t r = 0; r < num_rows; r += SCORE_ROWS, query += SCORE_ROWS * padded_keys(head_size)) {
        const int64_t count = min64(SCORE_ROWS, num_rows - r);
        const T *rows[SCORE_ROWS];
        for (int64_t i = 0; i < count; ++i, walk.step()) rows[i] = query_row<T>(problem, walk);
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

void gather_query(const AttentionProblem &problem, const AttentionTask &task, float *query) {
    if (problem.dtype == DType::f32) {
        gather_rows<float>(problem, task, query);
    } else {
        gather_rows<bf16>(problem, task, query);
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

// Elements [d, end_d) of keys [begin, begin + KEYS): [elements][KEYS].
template <KVFormat F>
static void gather_keys(const Turn &turn, int begin, int64_t d, int64_t end_d) {
    constexpr int PER = PER_WORD<F>;
    const int64_t head_size = turn.problem.cache.head_size, num_bytes = min64(end_d, head_size) * kv_element_bytes(F);
    for (int first = begin; first < begin + KEYS; first += LANES) {
        const char *const *rows = turn.tile.rows + first;
        const Vec scales = load_scales<F>(rows, head_size);
        float *to = turn.w.keys + first - begin;
        for (int64_t at = d * kv_element_bytes(F); at < num_bytes; at += 4 * LANES, to += PER * LANES * KEYS) {
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

// A piece of up to OUT_VECS vectors: [TILE][width].
template <KVFormat F>
static void gather_values(const Turn &turn, int64_t first, int64_t width) {
    const int64_t head_size = turn.problem.cache.head_size;
    float *to = turn.w.values;
    for (int i = 0; i < TILE; ++i, to += width) {
        const char *row = turn.tile.rows[TILE + i];
        const float scale = scale_of<F>(row, head_size);
        for (int64_t d = 0; d < width; d += LANES) store(to + d, load_elements<F>(row, first + d, head_size, scale));
    }
}

// ---- scores ----

// Products of `count` elements, beginning with the first ones or added to those before.
template <int ROWS, bool IS_FIRST>
static void score_tile(const float *query, const float *keys, int64_t count, float *scores) {
    Vec sums[ROWS][KEY_VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < KEY_VECS; ++v) {
            sums[r][v] = IS_FIRST ? broadcast(0.0f) : load(scores + r * TILE + v * LANES);
        }
    }
    for (int64_t d = 0; d < count; ++d) {
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

// Elements of keys that are gathered at a time: of usual heads all; of latents so few that they, and as much of the queries of
// 16 heads, stay in a first-level cache of 32 KiB.
static int64_t elements_at_once(int64_t head_size) { return head_size <= MAX_WHOLE_KEY ? head_size : KEY_PIECE; }

// Elements [d, end_d) of all keys, in pieces of keys, each gathered right before it is read, so that it stays in the first-level
// cache.
template <KVFormat F, bool IS_FIRST>
static void score_elements(const Turn &turn, int64_t num_rows, int64_t d, int64_t end_d) {
    const int64_t padded = padded_keys(turn.problem.cache.head_size);
    for (int first = 0; first < TILE; first += KEYS) {
        gather_keys<F>(turn, first, d, end_d);
        for (int64_t r = 0; r < num_rows; r += SCORE_ROWS) {
            const int64_t count = min64(SCORE_ROWS, num_rows - r);
            const Range seen = turn.seen_by(r, count);
            if (seen.to <= first || seen.from >= first + KEYS) continue;
            turn.next.prefetch_share();
            with_constant<SCORE_ROWS>(count, [&](auto rows) {
                score_tile<rows, IS_FIRST>(turn.w.query + r * padded + d * SCORE_ROWS, turn.w.keys, end_d - d,
                                           turn.w.scores + r * TILE + first);
            });
        }
    }
}

template <KVFormat F>
static void score_all(const Turn &turn, int64_t num_rows) {
    const int64_t head_size = turn.problem.cache.head_size, step = elements_at_once(head_size);
    score_elements<F, true>(turn, num_rows, 0, min64(step, head_size));
    for (int64_t d = step; d < head_size; d += step) score_elements<F, false>(turn, num_rows, d, min64(d + step, head_size));
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
            turn.next.prefetch(LANES * 4 * LANES);
        }
        QUNROLL
        for (int r = 0; r < ROWS; ++r) store(turn.w.scores + r * TILE + first, sums[r]);
    }
}

// ---- weights ----

// Powers of two above the query's factor.
struct FinishedScores {
    QINLINE_MEMBER Vec cappable(Vec x) const { return x; }
    QINLINE_MEMBER Vec scaled(Vec x) const { return x; }
    QINLINE_MEMBER Vec unscaled(Vec x) const { return x; }
    QINLINE_MEMBER Vec weight(Vec x, float highest) const { return exp2(sub(x, broadcast(highest))); }
    QINLINE_MEMBER void keep(float *row, int v, Vec weights) const { store(row + v * LANES, weights); }
    QINLINE_MEMBER void forget(float *) const {}  // what a row does not see is not looked at
};

// Scores to weights, and each row's maximum, total and rescaling with them.
static void soften_all(const Turn &turn, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; r += LANES) {
        const int64_t count = min64(LANES, num_rows - r);
        raise_max(FinishedScores{}, turn, turn.w.scores + r * TILE, r, count);
        soften_rows(FinishedScores{}, turn, turn.w.scores + r * TILE, r, count, [] {});
    }
}

// ---- outputs ----

// Values of a piece that were gathered before, or straight from the cache: vector v of position i.
struct GatheredValues {
    const float *values;
    int64_t width;
    QINLINE_MEMBER void prefetch_ahead(int) const {}
    QINLINE_MEMBER const float *at(int i) const { return values + i * width; }
    QINLINE_MEMBER Vec load_vec(const float *row, int v, float) const { return load(row + v * LANES); }
    QINLINE_MEMBER float scale(const float *) const { return 1.0f; }
};

template <KVFormat F>
struct CachedValues {
    const char *const *rows;
    int64_t first, head_size;
    Prefetcher &next;
    QINLINE_MEMBER void prefetch_ahead(int num_vecs) const { next.prefetch(num_vecs * LANES * kv_element_bytes(F)); }
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
        values.prefetch_ahead(VECS);
    }
}

// Positions that only some of the rows see.
template <int ROWS, int VECS, typename Values>
QINLINE void add_few(const Values &values, const OutRows &rows, Range part, Vec (&sums)[ROWS][VECS]) {
    for (int i = part.from; i < part.to; ++i) {
        const auto *row = values.at(i);
        const float scale = values.scale(row);
        Vec value[VECS];
        QUNROLL
        for (int v = 0; v < VECS; ++v) value[v] = values.load_vec(row, v, scale);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            if (i < rows.ranges[r].from || i >= rows.ranges[r].to) continue;
            const Vec weight = broadcast(rows.weights[r * TILE + i]);
            QUNROLL
            for (int v = 0; v < VECS; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
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
    // One copy of the code for both ends: these functions are most of what this file compiles to.
    for (Range part{seen.from, common.from};; part = Range{common.to, seen.to}) {
        add_few<ROWS, VECS>(values, rows, part, sums);
        if (part.to == seen.to) break;
        add_positions<ROWS, VECS>(values, rows, common.from, common.to, sums);
    }
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) store(rows.out + r * rows.padded + v * LANES, sums[r][v]);
    }
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
        turn.next.prefetch_share();
        with_constant<OUT_ROWS>(count, [&](auto height) {
            with_constant<OUT_VECS>(width / LANES, [&](auto vecs) { weigh_tile<height, vecs>(values, rows, seen); });
        });
    }
}

// ---- one tile ----

// Register tiles of all rows' scores and outputs.
static int64_t num_register_tiles(int64_t num_rows, int64_t head_size, int64_t padded) {
    const int64_t num_pieces = TILE / KEYS * ceil_div(head_size, elements_at_once(head_size));
    return num_pieces * ceil_div(num_rows, SCORE_ROWS) + ceil_div(padded, OUT_VECS * LANES) * ceil_div(num_rows, OUT_ROWS);
}

template <KVFormat F>
static void attend_gathered(const Turn &turn, int64_t num_rows) {
    turn.next.spread(num_register_tiles(num_rows, turn.problem.cache.head_size, turn.w.padded));
    score_all<F>(turn, num_rows);
    soften_all(turn, num_rows);
    for (int64_t first = 0; first < turn.w.padded; first += OUT_VECS * LANES) {
        const int64_t width = min64(OUT_VECS * LANES, turn.w.padded - first);
        gather_values<F>(turn, first, width);
        weigh_all(turn, GatheredValues{turn.w.values, width}, first, width, num_rows);
    }
    turn.next.prefetch_rest();
}

template <KVFormat F>
static void attend_directly(const Turn &turn, int64_t num_rows) {
    with_constant<DIRECT_ROWS>(num_rows, [&](auto rows) { score_directly<F, rows>(turn); });
    soften_all(turn, num_rows);
    const int64_t head_size = turn.problem.cache.head_size;
    for (int64_t first = 0; first < turn.w.padded; first += OUT_VECS * LANES) {
        const int64_t width = min64(OUT_VECS * LANES, turn.w.padded - first);
        weigh_all(turn, CachedValues<F>{turn.tile.rows + TILE, first, head_size, turn.next}, first, width, num_rows);
    }
    turn.next.prefetch_rest();
}

template <KVFormat F>
static void attend_format(const Turn &turn, int64_t num_rows) {
    num_rows <= DIRECT_ROWS ? attend_directly<F>(turn, num_rows) : attend_gathered<F>(turn, num_rows);
}

int run_length(int64_t) { return 1; }
bool adds_to_outputs(int64_t) { return true; }

void attend_run(const Run &run, int64_t num_rows) {
    switch (run.problem.cache.format) {
        case KVFormat::f32: return attend_format<KVFormat::f32>(run.turn(0), num_rows);
        case KVFormat::bf16: return attend_format<KVFormat::bf16>(run.turn(0), num_rows);
        case KVFormat::int8: return attend_format<KVFormat::int8>(run.turn(0), num_rows);
        case KVFormat::fp8: return attend_format<KVFormat::fp8>(run.turn(0), num_rows);
    }
}

}  // namespace quire::QUIRE_ISA
