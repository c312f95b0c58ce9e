// Few rows, without tiles. Decoding is bound by reading keys and values, and making tiles of them for a handful of rows takes
// longer than their products. So these rows are multiplied by vectors straight from the cache, by the unit's own rules, which
// give the same bits (Intel's manual, TDPBF16PS): of 32 numbers the first of each pair are one chain of fused multiply-adds
// and the second another; their sum is added to what was there; and numbers below the smallest normal one count as zero.
#include "amx_attention.hpp"

namespace quire::QUIRE_ISA {

// float32 [chunks][32 elements][FEW_ROWS]
void gather_few(const AttentionProblem &problem, const AttentionTask &task, float *query) {
    const int64_t head_size = problem.cache.head_size, num_rows = task.num_rows();
    memset(query, 0, num_chunks(head_size) * PAIRED * FEW_ROWS * sizeof(float));
    RowWalk walk(task);
    for (int64_t r = 0; r < num_rows; ++r, walk.step()) {
        const bf16 *row = query_row<bf16>(problem, walk);
        for (int64_t d = 0; d < head_size; ++d) {
            const uint32_t bits = static_cast<uint32_t>(row[d].bits) << 16;
            memcpy(query + d * FEW_ROWS + r, &bits, sizeof bits);
        }
    }
}

// Groups of LANES keys that are scored side by side: chains of additions enough to cover an addition's latency, which a
// processor does not look far enough ahead to fill with the next group's transposition.
constexpr int num_groups(int num_rows) { return num_rows <= 2 ? 4 : num_rows <= 4 ? 2 : 1; }

// Element J of a word of each group's keys, times its place in the query.
template <KVFormat F, int J, int ROWS_NOW, int GROUPS>
QINLINE void add_element(const float *query, const Vec (&words)[GROUPS], Vec (&sums)[GROUPS][ROWS_NOW]) {
    QUNROLL
    for (int g = 0; g < GROUPS; ++g) {
        const Vec key = element_of<F, J>(as_bits(words[g]));
        QUNROLL
        for (int r = 0; r < ROWS_NOW; ++r) sums[g][r] = fma(broadcast(query[J * FEW_ROWS + r]), key, sums[g][r]);
    }
}

// 32 elements' share of the scores, from word `chunk` of each group's transposed block on.
template <KVFormat F, int ROWS_NOW, int GROUPS>
QINLINE void score_chunk(const float *query, const Vec (&words)[GROUPS][LANES], int chunk, bool is_first, float *scores) {
    constexpr int PER = PER_WORD<F>, WORDS = PAIRED / PER;
    Vec even[GROUPS][ROWS_NOW], odd[GROUPS][ROWS_NOW];
    QUNROLL
    for (int g = 0; g < GROUPS; ++g) {
        QUNROLL
        for (int r = 0; r < ROWS_NOW; ++r) even[g][r] = odd[g][r] = broadcast(0.0f);
    }
    QUNROLL
    for (int i = 0; i < WORDS; ++i, query += PER * FEW_ROWS) {
        Vec word[GROUPS];
        QUNROLL
        for (int g = 0; g < GROUPS; ++g) word[g] = words[g][chunk + i];
        add_element<F, 0>(query, word, even);
        add_element<F, 1>(query, word, odd);
        if constexpr (PER > 2) add_element<F, 2>(query, word, even);
        if constexpr (PER > 2) add_element<F, 3>(query, word, odd);
    }
    QUNROLL
    for (int g = 0; g < GROUPS; ++g) {
        QUNROLL
        for (int r = 0; r < ROWS_NOW; ++r) {
            float *to = scores + r * TILE + g * LANES;
            store(to, add(is_first ? broadcast(0.0f) : load(to), add(even[g][r], odd[g][r])));
        }
    }
}

// A function of its own, as the outputs have: in one, they get fewer registers (3 % of decoding).
template <KVFormat F, int ROWS_NOW>
__attribute__((noinline)) static void score_directly(const Turn &turn) {
    constexpr int GROUPS = num_groups(ROWS_NOW), WORDS = PAIRED / PER_WORD<F>;
    const int64_t num_bytes = turn.problem.cache.head_size * kv_element_bytes(F);
    for (int first = 0; first < TILE; first += GROUPS * LANES) {
        const float *query = turn.w.query;
        for (int64_t at = 0; at < num_bytes; at += 4 * LANES) {
            Vec words[GROUPS][LANES];
            QUNROLL
            for (int g = 0; g < GROUPS; ++g) {
                load_words(turn.tile.rows + first + g * LANES, at, num_bytes, words[g]);
                turn.next.ask(LANES * 4 * LANES);
            }
            for (int chunk = 0; chunk < LANES && at + 4 * chunk < num_bytes; chunk += WORDS, query += PAIRED * FEW_ROWS) {
                score_chunk<F, ROWS_NOW>(query, words, chunk, at == 0 && chunk == 0, turn.w.scores + first);
            }
        }
    }
}

// One position's share of VECS vectors, from element `first` of its row on.
template <KVFormat F, int ROWS_NOW, int VECS, bool IS_WHOLE>
QINLINE void add_position(const char *row, int64_t first, int64_t head_size, const float *weights,
                          Vec (&sums)[ROWS_NOW][VECS]) {
    Vec value[VECS];
    QUNROLL
    for (int v = 0; v < VECS; ++v) {
        const int64_t d = first + v * LANES;
        value[v] = IS_WHOLE ? load_lanes<F>(row, d) : load_elements<F>(row, d, head_size, 1.0f);
    }
    QUNROLL
    for (int r = 0; r < ROWS_NOW; ++r) {
        const Vec weight = broadcast(weights[r * TILE]);
        QUNROLL
        for (int v = 0; v < VECS; ++v) fma_into(sums[r][v], weight, value[v]);
    }
}

// 32 positions' share of VECS vectors of the outputs, from element `first` on.
template <KVFormat F, int ROWS_NOW, int VECS, bool IS_WHOLE>
QINLINE void weigh_positions(const Turn &turn, const char *const *rows, const float *weights, int64_t first) {
    const int64_t head_size = turn.problem.cache.head_size;
    Vec even[ROWS_NOW][VECS], odd[ROWS_NOW][VECS];
    QUNROLL
    for (int r = 0; r < ROWS_NOW; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) even[r][v] = odd[r][v] = broadcast(0.0f);
    }
    for (int i = 0; i < PAIRED; i += 2) {
        add_position<F, ROWS_NOW, VECS, IS_WHOLE>(rows[i], first, head_size, weights + i, even);
        add_position<F, ROWS_NOW, VECS, IS_WHOLE>(rows[i + 1], first, head_size, weights + i + 1, odd);
        turn.next.ask(2 * VECS * LANES * kv_element_bytes(F));
    }
    float *out = turn.w.split.out + first;
    QUNROLL
    for (int r = 0; r < ROWS_NOW; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            float *to = out + r * turn.w.padded + v * LANES;
            store(to, add(load(to), add(even[r][v], odd[r][v])));
        }
    }
}

template <KVFormat F, int ROWS_NOW>
__attribute__((noinline)) static void weigh_directly(const Turn &turn) {
    constexpr int VECS = ROWS_NOW <= 2 ? 4 : ROWS_NOW <= 4 ? 2 : 1;
    const int64_t head_size = turn.problem.cache.head_size;
    for (int k = 0; k < VALUE_STEPS; ++k) {
        const char *const *rows = turn.tile.rows + TILE + k * PAIRED;
        const float *weights = turn.w.scores + k * PAIRED;
        int64_t first = 0;
        for (; first + VECS * LANES <= head_size; first += VECS * LANES) {
            weigh_positions<F, ROWS_NOW, VECS, true>(turn, rows, weights, first);
        }
        for (; first < head_size; first += LANES) weigh_positions<F, ROWS_NOW, 1, false>(turn, rows, weights, first);
    }
}

// Weights as the bfloat16 that tiles hold, in the place of the scores.
template <bool IS_SCALED>
struct FewScores : RawScores<IS_SCALED> {
    using RawScores<IS_SCALED>::RawScores;
    QINLINE_MEMBER void keep(float *row, int v, Vec values) const {
        store(row + v * LANES, round_to_bf16(this->with_scales(v, values)));
    }
    QINLINE_MEMBER void forget(float *row) const { memset(row, 0, TILE * sizeof(float)); }
};

template <KVFormat F, int ROWS_NOW>
static void attend_rows_directly(const Turn &turn, int64_t num_rows) {
    if constexpr (ROWS_NOW > 1) {
        if (num_rows < ROWS_NOW) return attend_rows_directly<F, ROWS_NOW - 1>(turn, num_rows);
    }
    score_directly<F, ROWS_NOW>(turn);
    float value_scales[TILE];
    if constexpr (is_scaled(F)) {
        float key_scales[TILE];
        load_scales<F>(turn, key_scales, value_scales);
        scale_scores(turn.w.scores, num_rows, key_scales);
    }
    const OutPiece all{0, num_rows, 0, turn.w.padded};
    const FewScores<is_scaled(F)> kind(turn.problem, value_scales);
    if (raise_max(kind, turn, turn.w.scores, 0, num_rows)) rescale(turn.w, all);
    soften_rows(kind, turn, turn.w.scores, 0, num_rows, [] {});
    const Unseen unseen(turn, all);
    weigh_directly<F, ROWS_NOW>(turn);
}

void attend_few(const Turn &turn, int64_t num_rows) {
    switch (turn.problem.cache.format) {
        case KVFormat::bf16: return attend_rows_directly<KVFormat::bf16, FEW_ROWS>(turn, num_rows);
        case KVFormat::int8: return attend_rows_directly<KVFormat::int8, FEW_ROWS>(turn, num_rows);
        case KVFormat::fp8: return attend_rows_directly<KVFormat::fp8, FEW_ROWS>(turn, num_rows);
        case KVFormat::f32: __builtin_unreachable();
    }
}

}  // namespace quire::QUIRE_ISA
