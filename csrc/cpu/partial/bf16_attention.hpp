// What attention by products of bfloat16 has in common, by AMX's tiles (amx_attention.cpp) or by vectors (bf16_attention.cpp).
//
// Scores are products of the query as it is with keys as they are (elements of 8 bits are exact in bfloat16; a key's scale is
// multiplied into its scores), and weights are rounded to bfloat16, a value's scale multiplied into them. A row that sees
// part of a tile has weights of 0 for the rest; one that sees nothing of it keeps its outputs, as even a sum with zeros could
// change a sign.
#pragma once

#include "../isa/attention_softmax.hpp"
#include "../isa/kv_rows.hpp"

namespace quire::QUIRE_ISA {

constexpr int FEW_ROWS = 8;  // tasks of so few rows read keys and values straight from the cache (docs/lab/attention-cpu.md)
constexpr int PAIRED = 32;   // numbers of a line

// Whether a problem is for them: a factor that is not above zero has another highest score.
inline bool has_bf16_products(const AttentionProblem &problem) {
    return problem.dtype == DType::bf16 && problem.cache.format != KVFormat::f32 && problem.scale > 0.0f;
}

// 2^x for x up to 127 with a relative error below 3e-6, which is little beside the rounding of a weight to bfloat16 (2e-3).
// Takes results below the smallest normal number as zero where the calling thread does. The polynomial is minimax in
// relative error among those of degree 4 that are 1 at 0.
QINLINE Vec short_exp2(Vec x) {
    const Vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less the integer below it
    Vec p = broadcast(1.3426685e-2f);
    p = fma(p, r, broadcast(5.2242472e-2f));
    p = fma(p, r, broadcast(2.4128021e-1f));
    p = fma(p, r, broadcast(6.9304484e-1f));
    p = fma(p, r, broadcast(1.0f));
    return _mm512_scalef_ps(p, x);
}

// Scores without their factor, [rows][TILE]. Weights become bfloat16 in a buffer of their own, [rows][TILE] as well, multiplied
// by the scales of their values where these have some.
template <bool IS_SCALED>
struct RawScores {
    float factor, cap_factor;
    const float *value_scales, *scores;
    bf16 *weights;

    explicit RawScores(const AttentionProblem &problem, const float *scales = nullptr, const float *from = nullptr,
                       bf16 *to = nullptr)
        : factor(problem.soft_cap > 0.0f ? 1.0f : score_factor(problem)), cap_factor(score_factor(problem)),
          value_scales(scales), scores(from), weights(to) {}
    QINLINE_MEMBER Vec cappable(Vec x) const { return mul(x, broadcast(cap_factor)); }
    QINLINE_MEMBER Vec scaled(Vec x) const { return mul(x, broadcast(factor)); }
    QINLINE_MEMBER Vec unscaled(Vec x) const { return div(x, broadcast(factor)); }
    QINLINE_MEMBER Vec weight(Vec x, float highest) const {
        return short_exp2(fma(x, broadcast(factor), broadcast(-highest)));
    }
    QINLINE_MEMBER Vec with_scales(int v, Vec values) const {
        return IS_SCALED ? mul(values, load(value_scales + v * LANES)) : values;
    }
    QINLINE_MEMBER void keep(float *row, int v, Vec values) const {
        store_normal(weights + (row - scores) + v * LANES, with_scales(v, values));
    }
    QINLINE_MEMBER void forget(float *row) const { memset(weights + (row - scores), 0, TILE * sizeof(bf16)); }
};

// The scales of LANES rows, which lie behind their elements.
QINLINE void gather_scales(const char *const *rows, int64_t head_size, float *scales) {
    for (int i = 0; i < LANES; i += 8) {
        const __m512i at = _mm512_add_epi64(_mm512_loadu_si512(rows + i), _mm512_set1_epi64(head_size));
        _mm256_storeu_ps(scales + i, _mm512_i64gather_ps(at, nullptr, 1));
    }
}

// Scales of 8-bit rows.
struct Scales {
    float keys[TILE], values[TILE];
};

inline void scale_scores(float *scores, int64_t num_rows, const float (&scales)[TILE]) {
    for (float *row = scores; row < scores + num_rows * TILE; row += TILE) {
        QUNROLL
        for (int v = 0; v < TILE_VECS; ++v) store(row + v * LANES, mul(load(row + v * LANES), load(scales + v * LANES)));
    }
}

// Of the keys of a tile and of its values.
inline void load_scales(const Turn &turn, float (&keys)[TILE], float (&values)[TILE]) {
    for (int i = 0; i < TILE; i += LANES) {
        gather_scales(turn.tile.rows + i, turn.problem.cache.head_size, keys + i);
        gather_scales(turn.tile.rows + TILE + i, turn.problem.cache.head_size, values + i);
    }
}

// A piece of the outputs of some rows.
struct OutPiece {
    int64_t first_row, num_rows, first, width;  // of rows, of elements

    float *at(const Workspace &w) const { return w.split.out + first_row * w.padded + first; }
};

// The outputs of rows that see nothing, kept for as long as this lives and put back then.
class Unseen {
   public:
    Unseen(const Turn &turn, const OutPiece &piece) : turn_(turn), piece_(piece) { copy<true>(); }
    Unseen(const Unseen &) = delete;
    Unseen &operator=(const Unseen &) = delete;
    ~Unseen() { copy<false>(); }

   private:
    template <bool IS_KEPT>
    void copy() {
        if (turn_.is_whole) return;
        float *out = piece_.at(turn_.w);
        for (int64_t r = 0; r < piece_.num_rows; ++r, out += turn_.w.padded) {
            if (!turn_.ranges[piece_.first_row + r].is_empty()) continue;
            float *kept = kept_ + r * piece_.width;
            memcpy(IS_KEPT ? kept : out, IS_KEPT ? out : kept, piece_.width * sizeof(float));
        }
    }
    const Turn &turn_;
    const OutPiece piece_;
    float kept_[FEW_ROWS * MAX_HEAD_SIZE];
};

}  // namespace quire::QUIRE_ISA
