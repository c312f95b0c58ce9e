// Paged attention by vectors of bfloat16 pairs where the query is bfloat16 and the cache has 16 or 8 bits; all else is
// AVX512-VNNI's.
//
// Tasks, tiles of keys, splits and the softmax are those of every instruction set (isa/attention*). A score is one chain over
// the head's pairs of elements; an output is one chain over the tile's pairs of positions, where those that a row does not see
// have weights of 0. There are two ways through a tile, with the same chains. Many rows: keys and values are gathered once for
// all of them, so that a word holds a pair, in pieces that stay in the first-level cache while all rows pass over them. Few rows
// (decoding): words are made in registers, from the cache's rows.
//
// Rows are gathered piece by piece, right before all rows of the query pass over them: heads of 576 elements, gathered whole, are
// written past the first-level cache, which took a quarter of the time of sixteen rows.
#include "bf16_attention.hpp"
#include "extension.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t LINE = 64;
constexpr int WORD_PAIRS = TILE / 2;  // pairs of positions

// Pairs of elements that share a word of the cache.
template <KVFormat F>
constexpr int PER = PER_WORD<F> / 2;
// Pairs of elements of a row, whole lines of them; behind the head's end they are zeros.
template <KVFormat F>
int64_t num_pairs(int64_t head_size) {
    return round_up(head_size, PER<F> * PAIRED) / 2;
}
inline int64_t query_stride(int64_t head_size) { return padded_keys(head_size) / 2; }  // words of a row: enough for all formats

// Two numbers that are exact in bfloat16 as a pair.
QINLINE Bits paired(Vec low, Vec high) { return or_bits(shift_right<16>(as_bits(low)), as_bits(high)); }

// Pair J of each word.
template <KVFormat F, int J>
QINLINE Bits pair_of(Vec words) {
    if constexpr (F == KVFormat::bf16) return as_bits(words);
    return paired(element_of<F, 2 * J>(as_bits(words)), element_of<F, 2 * J + 1>(as_bits(words)));
}

// Elements [d, d + 32) of two neighbouring positions, a pair of each. IS_WHOLE: the head has all of them; else zeros behind it.
template <KVFormat F, bool IS_WHOLE>
QINLINE void load_pairs(const char *even, const char *odd, int64_t d, int64_t head_size, Bits (&pairs)[2]) {
    if constexpr (F == KVFormat::bf16) {
        const int64_t at = d * 2, left = (head_size - d) * 2;
        const Bits x = IS_WHOLE ? load_bits(even + at) : load_bytes(even + at, static_cast<int>(left));
        const Bits y = IS_WHOLE ? load_bits(odd + at) : load_bytes(odd + at, static_cast<int>(left));
        pairs[0] = interleave_low(x, y), pairs[1] = interleave_high(x, y);
    } else {
        QUNROLL
        for (int v = 0; v < 2; ++v, d += LANES) {
            pairs[v] = IS_WHOLE ? paired(load_lanes<F>(even, d), load_lanes<F>(odd, d))
                                : paired(load_elements<F>(even, d, head_size, 1.0f), load_elements<F>(odd, d, head_size, 1.0f));
        }
    }
}

// Weights as bfloat16, stored over the first half of their scores.
template <bool IS_SCALED>
struct PairScores : RawScores<IS_SCALED> {
    using RawScores<IS_SCALED>::RawScores;
    QINLINE_MEMBER void keep(float *row, int v, Vec values) const {
        store_normal(reinterpret_cast<bf16 *>(row) + v * LANES, this->with_scales(v, values));
    }
    QINLINE_MEMBER void forget(float *row) const { memset(row, 0, TILE * sizeof(bf16)); }
};

// ---- gathering ----

// The query's rows as register tiles of scores read them: [rows / SCORE_ROWS][pairs][SCORE_ROWS] words.
void gather_query(const AttentionProblem &problem, const AttentionTask &task, float *query) {
    const int64_t head_size = problem.cache.head_size, num_rows = task.num_rows(), stride = query_stride(head_size);
    memset(query, 0, round_up(num_rows, SCORE_ROWS) * stride * sizeof(float));
    RowWalk walk(task);
    for (int64_t r = 0; r < num_rows; r += SCORE_ROWS, query += SCORE_ROWS * stride) {
        const int64_t count = min64(SCORE_ROWS, num_rows - r);
        const bf16 *rows[SCORE_ROWS];
        for (int64_t i = 0; i < count; ++i, walk.step()) rows[i] = query_row<bf16>(problem, walk);
        for (int64_t d = 0; d < head_size; d += PAIRED) {
            Vec block[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                const int num_bytes = static_cast<int>(min64(PAIRED, head_size - d) * 2);
                block[i] = i < count ? as_float(load_bytes(rows[i] + d, num_bytes)) : broadcast(0.0f);
            }
            transpose(block);
            for (int64_t i = 0; i < LANES; ++i) store_partial(query + (d / 2 + i) * SCORE_ROWS, block[i], SCORE_ROWS);
        }
    }
}

// Keys [begin, begin + KEYS): [pairs][KEYS] words.
template <KVFormat F>
static void gather_keys(const Turn &turn, int begin) {
    const int64_t head_size = turn.problem.cache.head_size, num_bytes = head_size * kv_element_bytes(F);
    for (int first = begin; first < begin + KEYS; first += LANES) {
        float *to = turn.w.keys + first - begin;
        for (int64_t at = 0; at < num_bytes; at += LINE) {
            Vec block[LANES];
            load_words(turn.tile.rows + first, at, num_bytes, block);
            QUNROLL
            for (int i = 0; i < LANES; ++i, to += PER<F> * KEYS) {
                store(to, as_float(pair_of<F, 0>(block[i])));
                if constexpr (PER<F> > 1) store(to + KEYS, as_float(pair_of<F, 1>(block[i])));
            }
        }
    }
}

constexpr int64_t PIECE = OUT_VECS * LANES;  // elements of the outputs

// Elements [first, first + width): [pairs of positions][width] words.
template <KVFormat F, bool IS_WHOLE>
static void gather_piece(const Turn &turn, int64_t first, int64_t width) {
    const int64_t head_size = turn.problem.cache.head_size;
    float *to = turn.w.values;
    for (int i = 0; i < WORD_PAIRS; ++i) {
        const char *even = turn.tile.rows[TILE + 2 * i], *odd = turn.tile.rows[TILE + 2 * i + 1];
        for (int64_t d = first; d < first + width; d += PAIRED, to += PAIRED) {
            Bits pairs[2];
            load_pairs<F, IS_WHOLE>(even, odd, d, head_size, pairs);
            store(to, as_float(pairs[0]));
            store(to + LANES, as_float(pairs[1]));
        }
    }
}

template <KVFormat F>
static void gather_values(const Turn &turn, int64_t first, int64_t width) {
    first + width <= turn.problem.cache.head_size ? gather_piece<F, true>(turn, first, width)
                                                  : gather_piece<F, false>(turn, first, width);
}

// ---- many rows ----

QINLINE const uint32_t *words(const float *from) { return reinterpret_cast<const uint32_t *>(from); }

template <int ROWS>
static void score_tile(const uint32_t *query, const float *keys, int64_t num_pairs, float *scores) {
    Vec sums[ROWS][KEY_VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < KEY_VECS; ++v) sums[r][v] = broadcast(0.0f);
    }
    for (int64_t p = 0; p < num_pairs; ++p, query += SCORE_ROWS, keys += KEYS) {
        Bits key[KEY_VECS];
        QUNROLL
        for (int v = 0; v < KEY_VECS; ++v) key[v] = load_bits(keys + v * LANES);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Bits pair = broadcast_word(query + r);
            QUNROLL
            for (int v = 0; v < KEY_VECS; ++v) sums[r][v] = dot_bf16(sums[r][v], pair, key[v]);
        }
    }
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < KEY_VECS; ++v) store(scores + r * TILE + v * LANES, sums[r][v]);
    }
}

template <KVFormat F>
static void score_all(const Turn &turn, int64_t num_rows) {
    const int64_t pairs = num_pairs<F>(turn.problem.cache.head_size), stride = query_stride(turn.problem.cache.head_size);
    for (int first = 0; first < TILE; first += KEYS) {
        gather_keys<F>(turn, first);
        for (int64_t r = 0; r < num_rows; r += SCORE_ROWS) {
            const int64_t count = min64(SCORE_ROWS, num_rows - r);
            const Range seen = turn.seen_by(r, count);
            if (seen.to <= first || seen.from >= first + KEYS) continue;
            turn.next.prefetch_share();
            with_constant<SCORE_ROWS>(count, [&](auto rows) {
                score_tile<rows>(words(turn.w.query) + r * stride, turn.w.keys, pairs,
                                 turn.w.scores + r * TILE + first);
            });
        }
    }
}

// Some rows' weights, outputs, and what these are multiplied by first.
struct OutRows {
    const uint32_t *weights;  // rows TILE words apart
    const float *rescale;
    float *out;  // rows `padded` elements apart
    int64_t padded;
};

template <int ROWS, int VECS>
QINLINE void load_outputs(const OutRows &rows, Vec (&sums)[ROWS][VECS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            sums[r][v] = mul(load(rows.out + r * rows.padded + v * LANES), broadcast(rows.rescale[r]));
        }
    }
}

template <int ROWS, int VECS>
QINLINE void add_pairs(const uint32_t *weights, const Bits (&values)[VECS], Vec (&sums)[ROWS][VECS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const Bits weight = broadcast_word(weights + r * TILE);
        QUNROLL
        for (int v = 0; v < VECS; ++v) sums[r][v] = dot_bf16(sums[r][v], weight, values[v]);
    }
}

template <int ROWS, int VECS>
QINLINE void store_outputs(const OutRows &rows, const Vec (&sums)[ROWS][VECS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) store(rows.out + r * rows.padded + v * LANES, sums[r][v]);
    }
}

// out = out * rescale + weights @ values for ROWS rows and VECS vectors of a piece.
template <int ROWS, int VECS>
static void weigh_tile(const float *values, int64_t width, const OutRows &rows) {
    Vec sums[ROWS][VECS];
    load_outputs(rows, sums);
    for (int i = 0; i < WORD_PAIRS; ++i, values += width) {
        Bits pairs[VECS];
        QUNROLL
        for (int v = 0; v < VECS; ++v) pairs[v] = load_bits(values + v * LANES);
        add_pairs(rows.weights + i, pairs, sums);
    }
    store_outputs(rows, sums);
}

// One piece of the head for all rows.
static void weigh_all(const Turn &turn, int64_t first, int64_t width, int64_t num_rows) {
    const Workspace &w = turn.w;
    const int64_t num_elements = min64(PIECE, w.padded - first);
    for (int64_t r = 0; r < num_rows; r += OUT_ROWS) {
        const int64_t count = min64(OUT_ROWS, num_rows - r);
        if (turn.seen_by(r, count).is_empty()) continue;
        const OutPiece piece{r, count, first, num_elements};
        const Unseen unseen(turn, piece);
        turn.next.prefetch_share();
        const OutRows rows{words(w.scores + r * TILE), w.rescale + r, piece.at(w), w.padded};
        with_constant<OUT_ROWS>(count, [&](auto height) {
            with_constant<OUT_VECS>(num_elements / LANES, [&](auto vecs) {
                weigh_tile<height, vecs>(w.values, width, rows);
            });
        });
    }
}

// Scores to weights, and each row's maximum, total and rescaling with them.
template <KVFormat F>
static void soften_all(const Turn &turn, const Scales &scales, int64_t num_rows) {
    const PairScores<is_scaled(F)> kind(turn.problem, scales.values);
    if constexpr (is_scaled(F)) scale_scores(turn.w.scores, num_rows, scales.keys);
    for (int64_t r = 0; r < num_rows; r += LANES) {
        const int64_t count = min64(LANES, num_rows - r);
        raise_max(kind, turn, turn.w.scores + r * TILE, r, count);
        soften_rows(kind, turn, turn.w.scores + r * TILE, r, count, [] {});
    }
}

template <KVFormat F>
static void attend_gathered(const Turn &turn, const Scales &scales, int64_t num_rows) {
    const int64_t pieces = ceil_div(turn.w.padded, PIECE);
    turn.next.spread(TILE / KEYS * ceil_div(num_rows, SCORE_ROWS) + pieces * ceil_div(num_rows, OUT_ROWS));
    score_all<F>(turn, num_rows);
    soften_all<F>(turn, scales, num_rows);
    const int64_t padded = padded_values(turn.problem.out_size());
    for (int64_t first = 0; first < turn.w.padded; first += PIECE) {
        const int64_t width = min64(PIECE, padded - first);
        gather_values<F>(turn, first, width);
        weigh_all(turn, first, width, num_rows);
    }
}

// ---- few rows ----

// Bytes of the next tile to prefetch while so many of this one are read. Rows with a scale do not begin with a line, and touch
// more of them.
template <KVFormat F>
constexpr int64_t prefetch_bytes(int64_t num_bytes) {
    return is_scaled(F) ? num_bytes * 3 / 2 : num_bytes;
}

template <int ROWS>
QINLINE void add_key(const uint32_t *query, Bits key, Vec (&sums)[ROWS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) sums[r] = dot_bf16(sums[r], broadcast_word(query + r), key);
}

// GROUPS of LANES keys side by side: chains enough to cover the latency of a product. Half of the next tile's lines are
// prefetched as these are loaded, half while they are multiplied: all at once, a context in memory takes a tenth longer. A
// function of its own, as the outputs have: in one, they would get fewer registers.
template <KVFormat F, int ROWS>
__attribute__((noinline)) static void score_directly(const Turn &turn) {
    constexpr int GROUPS = ROWS <= 2 ? 4 : 1;
    const int64_t num_bytes = turn.problem.cache.head_size * kv_element_bytes(F);
    for (int first = 0; first < TILE; first += GROUPS * LANES) {
        const uint32_t *query = words(turn.w.query);
        Vec sums[GROUPS][ROWS];
        QUNROLL
        for (int g = 0; g < GROUPS; ++g) {
            QUNROLL
            for (int r = 0; r < ROWS; ++r) sums[g][r] = broadcast(0.0f);
        }
        for (int64_t at = 0; at < num_bytes; at += LINE) {
            Vec block[GROUPS][LANES];
            QUNROLL
            for (int g = 0; g < GROUPS; ++g) {
                load_words(turn.tile.rows + first + g * LANES, at, num_bytes, block[g]);
                turn.next.prefetch(prefetch_bytes<F>(LANES * LINE / 2));
            }
            QUNROLL
            for (int i = 0; i < LANES; ++i, query += PER<F> * SCORE_ROWS) {
                turn.next.prefetch(prefetch_bytes<F>(GROUPS * LINE / 2));
                QUNROLL
                for (int g = 0; g < GROUPS; ++g) {
                    add_key(query, pair_of<F, 0>(block[g][i]), sums[g]);
                    if constexpr (PER<F> > 1) add_key(query + SCORE_ROWS, pair_of<F, 1>(block[g][i]), sums[g]);
                }
            }
        }
        QUNROLL
        for (int g = 0; g < GROUPS; ++g) {
            QUNROLL
            for (int r = 0; r < ROWS; ++r) store(turn.w.scores + r * TILE + first + g * LANES, sums[g][r]);
        }
    }
}

// Outputs [first, first + VECS * LANES).
template <KVFormat F, int ROWS, int VECS, bool IS_WHOLE>
QINLINE void weigh_piece(const Turn &turn, int64_t first) {
    const int64_t head_size = turn.problem.cache.head_size;
    const OutRows rows{words(turn.w.scores), turn.w.rescale, turn.w.split.out + first, turn.w.padded};
    Vec sums[ROWS][VECS];
    load_outputs(rows, sums);
    for (int i = 0; i < WORD_PAIRS; ++i) {
        const char *even = turn.tile.rows[TILE + 2 * i], *odd = turn.tile.rows[TILE + 2 * i + 1];
        Bits values[VECS];
        QUNROLL
        for (int v = 0; v < VECS; v += 2) {
            Bits pairs[2];
            load_pairs<F, IS_WHOLE>(even, odd, first + v * LANES, head_size, pairs);
            values[v] = pairs[0];
            if constexpr (VECS > 1) values[v + 1] = pairs[1];
        }
        add_pairs(rows.weights + i, values, sums);
        turn.next.prefetch(prefetch_bytes<F>(2 * VECS * LANES * kv_element_bytes(F)));
    }
    store_outputs(rows, sums);
}

template <KVFormat F, int ROWS>
__attribute__((noinline)) static void weigh_directly(const Turn &turn) {
    constexpr int VECS = ROWS <= 2 ? 8 : 2;
    const int64_t size = turn.problem.out_size();
    int64_t first = 0;
    for (; first + VECS * LANES <= size; first += VECS * LANES) weigh_piece<F, ROWS, VECS, true>(turn, first);
    for (; first + PAIRED <= turn.w.padded; first += PAIRED) weigh_piece<F, ROWS, 2, false>(turn, first);
    if (first < turn.w.padded) weigh_piece<F, ROWS, 1, false>(turn, first);
}

template <KVFormat F, int ROWS>
static void attend_directly(const Turn &turn, const Scales &scales) {
    score_directly<F, ROWS>(turn);
    soften_all<F>(turn, scales, ROWS);
    const Unseen unseen(turn, OutPiece{0, ROWS, 0, turn.w.padded});
    weigh_directly<F, ROWS>(turn);
}

// ---- one tile ----

template <KVFormat F>
static void attend_format(const Turn &turn, int64_t num_rows) {
    Scales scales;
    if constexpr (is_scaled(F)) load_scales(turn, scales.keys, scales.values);
    if (num_rows > FEW_ROWS) return attend_gathered<F>(turn, scales, num_rows);
    with_constant<FEW_ROWS>(num_rows, [&](auto rows) { attend_directly<F, rows>(turn, scales); });
}

int run_length(int64_t) { return 1; }
bool adds_to_outputs(int64_t) { return true; }

void attend_run(const Run &run, int64_t num_rows) {
    switch (run.problem.cache.format) {
        case KVFormat::bf16: attend_format<KVFormat::bf16>(run.turn(0), num_rows); break;
        case KVFormat::int8: attend_format<KVFormat::int8>(run.turn(0), num_rows); break;
        case KVFormat::fp8: attend_format<KVFormat::fp8>(run.turn(0), num_rows); break;
        case KVFormat::f32: __builtin_unreachable();
    }
    run.next.prefetch_rest();
}

// ---- tasks ----

int64_t max_rows_by_pairs(const AttentionProblem &problem) {
    return has_bf16_products(problem) ? MAX_ROWS : avx512::table.max_task_rows(problem);
}

void attend_by_pairs(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                     float *scratch) {
    if (!has_bf16_products(problem)) return avx512::table.attend(problem, task, next_task, scratch);
    attend(problem, task, next_task, scratch);
}

}  // namespace quire::QUIRE_ISA
