// Few rows, without tiles. Decoding is bound by reading keys and values, and making tiles of them for a handful of rows takes
// longer than their products. So these rows are multiplied by vectors straight from the cache, by the unit's own rules, which
// give the same bits (Intel's manual, TDPBF16PS): of 32 numbers the first of each pair are one chain of fused multiply-adds
// and the second another; their sum is added to what was there; and numbers below the smallest normal one count as zero.
#include "amx_attention.hpp"

#include "../isa/kv_rows.hpp"

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

// For as long as this lives.
class FlushesSubnormals {
   public:
    FlushesSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH_RESULTS | ZERO_OPERANDS); }
    FlushesSubnormals(const FlushesSubnormals &) = delete;
    FlushesSubnormals &operator=(const FlushesSubnormals &) = delete;
    ~FlushesSubnormals() { _mm_setcsr(before_); }

   private:
    static constexpr unsigned FLUSH_RESULTS = 0x8000, ZERO_OPERANDS = 0x40;
    const unsigned before_;
};

// A function of its own, that the compiler moves nothing past the change of the control register.
template <int ROWS_NOW>
__attribute__((noinline)) static void score_directly(const Turn &turn) {
    const int64_t num_bytes = turn.problem.cache.head_size * int64_t{sizeof(bf16)};
    for (int first = 0; first < TILE; first += LANES) {
        Vec sums[ROWS_NOW];
        QUNROLL
        for (int r = 0; r < ROWS_NOW; ++r) sums[r] = broadcast(0.0f);
        const float *query = turn.w.query;
        for (int64_t at = 0; at < num_bytes; at += 4 * LANES) {
            Vec words[LANES], even[ROWS_NOW], odd[ROWS_NOW];
            load_words(turn.tile.rows + first, at, num_bytes, words);
            QUNROLL
            for (int r = 0; r < ROWS_NOW; ++r) even[r] = odd[r] = broadcast(0.0f);
            QUNROLL
            for (int i = 0; i < LANES; ++i, query += 2 * FEW_ROWS) {
                const Vec key = element_of<KVFormat::bf16, 0>(as_bits(words[i]));
                const Vec next_key = element_of<KVFormat::bf16, 1>(as_bits(words[i]));
                QUNROLL
                for (int r = 0; r < ROWS_NOW; ++r) {
                    even[r] = fma(broadcast(query[r]), key, even[r]);
                    odd[r] = fma(broadcast(query[FEW_ROWS + r]), next_key, odd[r]);
                }
            }
            QUNROLL
            for (int r = 0; r < ROWS_NOW; ++r) sums[r] = add(sums[r], add(even[r], odd[r]));
            turn.next.ask(LANES * 4 * LANES);
        }
        QUNROLL
        for (int r = 0; r < ROWS_NOW; ++r) store(turn.w.scores + r * TILE + first, sums[r]);
    }
}

// One position's share of VECS vectors, elements from `values` on, of which `left` are the head's.
template <int ROWS_NOW, int VECS, bool IS_WHOLE>
QINLINE void add_position(const char *values, int64_t left, const float *weights, Vec (&sums)[ROWS_NOW][VECS]) {
    Vec value[VECS];
    QUNROLL
    for (int v = 0; v < VECS; ++v) {
        value[v] = IS_WHOLE ? load(reinterpret_cast<const bf16 *>(values) + v * LANES)
                            : load_elements<KVFormat::bf16>(values, v * LANES, left, 1.0f);
    }
    QUNROLL
    for (int r = 0; r < ROWS_NOW; ++r) {
        const Vec weight = broadcast(weights[r * TILE]);
        QUNROLL
        for (int v = 0; v < VECS; ++v) fma_into(sums[r][v], weight, value[v]);
    }
}

// 32 positions' share of VECS vectors of the outputs, from element `first` on.
template <int ROWS_NOW, int VECS, bool IS_WHOLE>
QINLINE void weigh_positions(const Turn &turn, const char *const *rows, const float *weights, int64_t first) {
    const int64_t left = turn.problem.cache.head_size - first, at = first * int64_t{sizeof(bf16)};
    Vec even[ROWS_NOW][VECS], odd[ROWS_NOW][VECS];
    QUNROLL
    for (int r = 0; r < ROWS_NOW; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) even[r][v] = odd[r][v] = broadcast(0.0f);
    }
    for (int i = 0; i < PAIRED; i += 2) {
        add_position<ROWS_NOW, VECS, IS_WHOLE>(rows[i] + at, left, weights + i, even);
        add_position<ROWS_NOW, VECS, IS_WHOLE>(rows[i + 1] + at, left, weights + i + 1, odd);
        turn.next.ask(2 * VECS * LANES * int64_t{sizeof(bf16)});
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

template <int ROWS_NOW>
__attribute__((noinline)) static void weigh_directly(const Turn &turn) {
    constexpr int VECS = ROWS_NOW <= 2 ? 4 : 2;
    const int64_t head_size = turn.problem.cache.head_size;
    for (int k = 0; k < VALUE_STEPS; ++k) {
        const char *const *rows = turn.tile.rows + TILE + k * PAIRED;
        const float *weights = turn.w.scores + k * PAIRED;
        int64_t first = 0;
        for (; first + VECS * LANES <= head_size; first += VECS * LANES) {
            weigh_positions<ROWS_NOW, VECS, true>(turn, rows, weights, first);
        }
        for (; first < head_size; first += LANES) weigh_positions<ROWS_NOW, 1, false>(turn, rows, weights, first);
    }
}

// Weights as the bfloat16 that tiles hold, in the place of the scores.
struct FewScores : RawScores<false> {
    QINLINE_MEMBER void keep(float *row, int v, Vec values) const { store(row + v * LANES, round_to_bf16(values)); }
    QINLINE_MEMBER void forget(float *row) const { memset(row, 0, TILE * sizeof(float)); }
};

template <int ROWS_NOW>
static void attend_rows_directly(const Turn &turn, int64_t num_rows) {
    if constexpr (ROWS_NOW > 1) {
        if (num_rows < ROWS_NOW) return attend_rows_directly<ROWS_NOW - 1>(turn, num_rows);
    }
    {
        const FlushesSubnormals flushing;
        score_directly<ROWS_NOW>(turn);
    }
    const OutPiece all{0, num_rows, 0, turn.w.padded};
    soften_rows(FewScores{RawScores<false>(turn.problem)}, turn, turn.w.scores, 0, num_rows);
    rescale(turn.w, all);
    const Unseen unseen(turn, all);
    const FlushesSubnormals flushing;
    weigh_directly<ROWS_NOW>(turn);
}

void attend_few(const Turn &turn, int64_t num_rows) { attend_rows_directly<FEW_ROWS>(turn, num_rows); }

}  // namespace quire::QUIRE_ISA
