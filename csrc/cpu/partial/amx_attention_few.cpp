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

// As much of the next tile is prefetched as is read of this one. Rows with a scale do not begin with a line, and touch more of
// them.
template <KVFormat F>
constexpr int64_t lines_of(int64_t num_bytes) {
    return is_scaled(F) ? num_bytes * 3 / 2 : num_bytes;
}

// ---- scores of bfloat16 ----

// Groups of LANES keys that are scored side by side: chains of additions enough to cover an addition's latency, which a
// processor does not look far enough ahead to fill with the next group's transposition.
constexpr int num_groups(int num_rows) { return num_rows <= 2 ? 4 : num_rows <= 4 ? 2 : 1; }

// Element J of a pair of each group's keys, times the same element of the query.
template <int J, int ROWS_NOW, int GROUPS>
QINLINE void add_half(const float *query, const Vec (&pairs)[GROUPS], Vec (&sums)[GROUPS][ROWS_NOW]) {
    QUNROLL
    for (int g = 0; g < GROUPS; ++g) {
        const Vec key = element_of<KVFormat::bf16, J>(as_bits(pairs[g]));
        QUNROLL
        for (int r = 0; r < ROWS_NOW; ++r) sums[g][r] = fma(broadcast(query[J * FEW_ROWS + r]), key, sums[g][r]);
    }
}

// A function of its own, as the outputs have: in one, they get fewer registers (3 % of decoding).
template <int ROWS_NOW>
__attribute__((noinline)) static void score_pairs(const Turn &turn) {
    constexpr int GROUPS = num_groups(ROWS_NOW);
    const int64_t num_bytes = turn.problem.cache.head_size * kv_element_bytes(KVFormat::bf16);
    for (int first = 0; first < TILE; first += GROUPS * LANES) {
        const float *query = turn.w.query;
        for (int64_t at = 0; at < num_bytes; at += 4 * LANES) {
            Vec pairs[GROUPS][LANES], even[GROUPS][ROWS_NOW], odd[GROUPS][ROWS_NOW];
            QUNROLL
            for (int g = 0; g < GROUPS; ++g) {
                load_words(turn.tile.rows + first + g * LANES, at, num_bytes, pairs[g]);
                turn.next.prefetch(LANES * 4 * LANES);
                QUNROLL
                for (int r = 0; r < ROWS_NOW; ++r) even[g][r] = odd[g][r] = broadcast(0.0f);
            }
            QUNROLL
            for (int i = 0; i < LANES; ++i, query += 2 * FEW_ROWS) {
                Vec pair[GROUPS];
                QUNROLL
                for (int g = 0; g < GROUPS; ++g) pair[g] = pairs[g][i];
                add_half<0>(query, pair, even);
                add_half<1>(query, pair, odd);
            }
            QUNROLL
            for (int g = 0; g < GROUPS; ++g) {
                QUNROLL
                for (int r = 0; r < ROWS_NOW; ++r) {
                    float *to = turn.w.scores + first + r * TILE + g * LANES;
                    store(to, add(at == 0 ? broadcast(0.0f) : load(to), add(even[g][r], odd[g][r])));
                }
            }
        }
    }
}

// ---- scores of bytes ----

constexpr int QUARTER = 16;  // bytes of a line's quarter

// A quarter of a line of every fourth of 16 rows, or its first bytes.
template <bool IS_WHOLE>
QINLINE __m512i load_quarters(const char *const *rows, int64_t at, __mmask16 seen) {
    __m128i quarters[4];
    QUNROLL
    for (int i = 0; i < 4; ++i) {
        const char *from = rows[4 * i] + at;
        quarters[i] = IS_WHOLE ? _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)) : _mm_maskz_loadu_epi8(seen, from);
    }
    const __m512i first = _mm512_inserti32x4(_mm512_castsi128_si512(quarters[0]), quarters[1], 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(first, quarters[2], 2), quarters[3], 3);
}

// Four words of each of LANES keys, from byte `at` of `num_bytes` on. With whole lines of them (load_words), words would wait
// in memory for their turn; so few stay in registers.
template <bool IS_WHOLE>
QINLINE void load_four_words(const char *const *rows, int64_t at, int64_t num_bytes, Bits (&words)[4]) {
    const __mmask16 seen = static_cast<__mmask16>((1u << min64(num_bytes - at, QUARTER)) - 1);
    __m512i lines[4];
    QUNROLL
    for (int i = 0; i < 4; ++i) lines[i] = load_quarters<IS_WHOLE>(rows + i, at, seen);
    const __m512i a = _mm512_unpacklo_epi32(lines[0], lines[1]), b = _mm512_unpackhi_epi32(lines[0], lines[1]);
    const __m512i c = _mm512_unpacklo_epi32(lines[2], lines[3]), d = _mm512_unpackhi_epi32(lines[2], lines[3]);
    words[0] = _mm512_unpacklo_epi64(a, c), words[1] = _mm512_unpackhi_epi64(a, c);
    words[2] = _mm512_unpacklo_epi64(b, d), words[3] = _mm512_unpackhi_epi64(b, d);
}

// A byte that is the highest of its word needs no shifts, of which the processor does one at a time, and counts 2^24 times as
// much. So do its chains, with the same roundings (unless a query is beyond 2^90, or so far below 2^-100 that sums vanish).
constexpr float INT8_UNIT = 0x1p-24f;

// Element J of each word, in its unit.
template <KVFormat F, int J>
QINLINE Vec byte_of(Bits words) {
    if constexpr (F == KVFormat::fp8) return element_of<F, J>(words);
    if constexpr (J == 3) return to_float(and_bits(words, broadcast_bits(0xff000000u)));
    constexpr uint32_t NOTHING = 0x00808080u;
    const Bits highest = broadcast_bits(NOTHING | static_cast<uint32_t>(J) << 24);
    const Bits within = add_bits(highest, _mm512_set4_epi32(0x0c000000, 0x08000000, 0x04000000, 0));
    return to_float(_mm512_shuffle_epi8(words, within));
}

// Byte J of each group's words, times the same element of the query.
template <KVFormat F, int J, int ROWS_NOW, int GROUPS>
QINLINE void add_byte(const float *query, const Bits (&words)[GROUPS][4], int i, Vec (&sums)[GROUPS][ROWS_NOW]) {
    QUNROLL
    for (int g = 0; g < GROUPS; ++g) {
        const Vec key = byte_of<F, J>(words[g][i]);
        QUNROLL
        for (int r = 0; r < ROWS_NOW; ++r) sums[g][r] = fma(broadcast(query[J * FEW_ROWS + r]), key, sums[g][r]);
    }
}

// A quarter of a line of each group's keys.
template <KVFormat F, int ROWS_NOW, int GROUPS>
QINLINE void add_quarter(const Turn &turn, const char *const *rows, int64_t at, Vec (&even)[GROUPS][ROWS_NOW],
                         Vec (&odd)[GROUPS][ROWS_NOW]) {
    const int64_t num_bytes = turn.problem.cache.head_size;
    const float *query = turn.w.query + at * FEW_ROWS;
    Bits words[GROUPS][4];
    QUNROLL
    for (int g = 0; g < GROUPS; ++g) {
        num_bytes - at >= QUARTER ? load_four_words<true>(rows + g * LANES, at, num_bytes, words[g])
                                  : load_four_words<false>(rows + g * LANES, at, num_bytes, words[g]);
        turn.next.prefetch(lines_of<F>(LANES * QUARTER));
    }
    QUNROLL
    for (int i = 0; i < 4; ++i, query += 4 * FEW_ROWS) {
        add_byte<F, 0>(query, words, i, even);
        add_byte<F, 1>(query, words, i, odd);
        add_byte<F, 2>(query, words, i, even);
        add_byte<F, 3>(query, words, i, odd);
    }
}

template <KVFormat F, int ROWS_NOW>
__attribute__((noinline)) static void score_bytes(const Turn &turn, const float *key_scales) {
    constexpr int GROUPS = ROWS_NOW <= 2 ? 2 : 1;
    const int64_t num_bytes = turn.problem.cache.head_size;
    const Vec unit = broadcast(F == KVFormat::int8 ? INT8_UNIT : 1.0f);
    for (int first = 0; first < TILE; first += GROUPS * LANES) {
        const char *const *rows = turn.tile.rows + first;
        Vec total[GROUPS][ROWS_NOW];
        for (int64_t at = 0; at < num_bytes; at += PAIRED) {
            Vec even[GROUPS][ROWS_NOW], odd[GROUPS][ROWS_NOW];
            QUNROLL
            for (int g = 0; g < GROUPS; ++g) {
                QUNROLL
                for (int r = 0; r < ROWS_NOW; ++r) even[g][r] = odd[g][r] = broadcast(0.0f);
            }
            add_quarter<F>(turn, rows, at, even, odd);
            if (at + QUARTER < num_bytes) add_quarter<F>(turn, rows, at + QUARTER, even, odd);
            QUNROLL
            for (int g = 0; g < GROUPS; ++g) {
                QUNROLL
                for (int r = 0; r < ROWS_NOW; ++r) {
                    total[g][r] = add(at == 0 ? broadcast(0.0f) : total[g][r], add(even[g][r], odd[g][r]));
                }
            }
        }
        QUNROLL
        for (int g = 0; g < GROUPS; ++g) {
            const Vec scales = mul(load(key_scales + first + g * LANES), unit);
            QUNROLL
            for (int r = 0; r < ROWS_NOW; ++r) {
                store(turn.w.scores + r * TILE + first + g * LANES, mul(total[g][r], scales));
            }
        }
    }
}

// ---- outputs ----

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
        turn.next.prefetch(lines_of<F>(2 * VECS * LANES * kv_element_bytes(F)));
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
    const int64_t size = turn.problem.out_size();
    for (int k = 0; k < VALUE_STEPS; ++k) {
        const char *const *rows = turn.tile.rows + TILE + k * PAIRED;
        const float *weights = turn.w.scores + k * PAIRED;
        int64_t first = 0;
        for (; first + VECS * LANES <= size; first += VECS * LANES) {
            weigh_positions<F, ROWS_NOW, VECS, true>(turn, rows, weights, first);
        }
        for (; first < size; first += LANES) weigh_positions<F, ROWS_NOW, 1, false>(turn, rows, weights, first);
    }
}

// Weights as the bfloat16 that tiles hold, stored over the scores.
template <bool IS_SCALED>
struct FewScores : RawScores<IS_SCALED> {
    using RawScores<IS_SCALED>::RawScores;
    QINLINE_MEMBER void keep(float *row, int v, Vec values) const {
        store(row + v * LANES, round_to_bf16(this->with_scales(v, values)));
    }
    QINLINE_MEMBER void forget(float *row) const { memset(row, 0, TILE * sizeof(float)); }
};

template <KVFormat F, int ROWS_NOW>
static void attend_rows_directly(const Turn &turn) {
    float key_scales[TILE], value_scales[TILE];
    if constexpr (is_scaled(F)) {
        load_scales(turn, key_scales, value_scales);
        score_bytes<F, ROWS_NOW>(turn, key_scales);
    } else {
        score_pairs<ROWS_NOW>(turn);
    }
    const OutPiece all{0, ROWS_NOW, 0, turn.w.padded};
    const FewScores<is_scaled(F)> kind(turn.problem, value_scales);
    if (raise_max(kind, turn, turn.w.scores, 0, ROWS_NOW)) rescale(turn.w, all);
    soften_rows(kind, turn, turn.w.scores, 0, ROWS_NOW, [] {});
    const Unseen unseen(turn, all);
    weigh_directly<F, ROWS_NOW>(turn);
}

void attend_few(const Turn &turn, int64_t num_rows) {
    with_constant<FEW_ROWS>(num_rows, [&](auto rows) {
        switch (turn.problem.cache.format) {
            case KVFormat::bf16: return attend_rows_directly<KVFormat::bf16, rows>(turn);
            case KVFormat::int8: return attend_rows_directly<KVFormat::int8, rows>(turn);
            case KVFormat::fp8: return attend_rows_directly<KVFormat::fp8, rows>(turn);
            case KVFormat::f32: __builtin_unreachable();
        }
    });
}

}  // namespace quire::QUIRE_ISA
