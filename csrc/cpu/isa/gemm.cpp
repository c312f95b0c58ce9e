// The GEMM in float32: blocks of `x @ weight.T` (weights as in weight.hpp), for weights of every format.
//
// Each output element is one chain of fused multiply-adds over the inputs in ascending order, in one lane of one
// accumulator, whatever the shape of the register tile, of the block or of the batch: that is what makes rows
// invariant. Sums go through memory between chunks of inputs, as float32, which changes nothing.
//
// The register tile is `rows` x `panels`: a vector of weights is loaded once for all rows, an element of x once for all
// panels (the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). What is not
// float32 in memory is made so a chunk at a time, in scratch that stays in the cache, for all rows of the block.
//
// Where an instruction multiplies pairs of bfloat16 (and rows are bfloat16 as well), two inputs are one step, and nothing
// is widened. Its chain is another one, so its bits are, but it is as fixed as the first.
#include "gemm.hpp"
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

// Panels side by side in a tile of `rows`: as many as the registers hold, and at least two chains' worth for one row,
// whose speed is bound by memory.
constexpr int max_panels(int rows) {
    if (LANES == 16) return 4;
    if (LANES == 8) return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    return rows == 1 ? 2 : 1;
}

template <int ROWS, int VECS>
QINLINE void accumulate(Vec (&sums)[ROWS][VECS], const float *x, int64_t x_stride, const Vec (&w)[VECS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const Vec value = broadcast(x[r * x_stride]);
        QUNROLL
        for (int v = 0; v < VECS; ++v) sums[r][v] = fma(value, w[v], sums[r][v]);
    }
}

// A 32-bit word holds the weights of inputs k (low half) and k + 1 (high half): a shift and a mask make them float32.
QINLINE Vec low_half(Bits pairs) { return as_float(shift_left<16>(pairs)); }
QINLINE Vec high_half(Bits pairs) { return as_float(and_bits(pairs, broadcast_bits(0xffff0000u))); }

// Two neighbouring inputs of a row of bfloat16.
struct Pair {
    uint32_t bits;
};

constexpr int64_t inputs_of(const float *) { return 1; }
constexpr int64_t inputs_of(const Pair *) { return 2; }

// The weights of one step: panels `stride` elements apart, `num_inputs` inputs of them; and what is wanted after that.
template <typename W>
struct Panels {
    const W *data;
    int64_t stride;
    int num_panels;
    int64_t num_inputs;
    Ahead ahead;
};

// One input.
template <int ROWS, int PANELS>
QINLINE void step(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const float *x, int64_t x_stride, const float *w,
                  int64_t w_stride) {
    Vec weights[PANELS * PANEL_VECS];
    QUNROLL
    for (int p = 0; p < PANELS; ++p) {
        QUNROLL
        for (int v = 0; v < PANEL_VECS; ++v) weights[p * PANEL_VECS + v] = load(w + p * w_stride + v * LANES);
    }
    accumulate<ROWS>(sums, x, x_stride, weights);
}

// Two inputs.
template <int ROWS, int PANELS>
QINLINE void step(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const float *x, int64_t x_stride, const bf16 *w,
                  int64_t w_stride) {
    constexpr int VECS = PANELS * PANEL_VECS;
    Bits pairs[VECS];
    Vec weights[VECS];
    QUNROLL
    for (int p = 0; p < PANELS; ++p) {
        QUNROLL
        for (int v = 0; v < PANEL_VECS; ++v) pairs[p * PANEL_VECS + v] = load_bits(w + p * w_stride + v * 2 * LANES);
    }
    QUNROLL
    for (int v = 0; v < VECS; ++v) weights[v] = low_half(pairs[v]);
    accumulate<ROWS>(sums, x, x_stride, weights);
    QUNROLL
    for (int v = 0; v < VECS; ++v) weights[v] = high_half(pairs[v]);
    accumulate<ROWS>(sums, x + 1, x_stride, weights);
}

#if defined(QUIRE_BF16_DOTS)
// Two inputs in one instruction.
template <int ROWS, int PANELS>
QINLINE void step(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const Pair *x, int64_t x_stride, const bf16 *w,
                  int64_t w_stride) {
    Bits weights[PANELS];
    QUNROLL
    for (int p = 0; p < PANELS; ++p) weights[p] = load_bits(w + p * w_stride);
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const Bits value = broadcast_bits(x[r * x_stride].bits);
        QUNROLL
        for (int p = 0; p < PANELS; ++p) sums[r][p] = dot_bf16(sums[r][p], value, weights[p]);
    }
}
#endif

template <typename X, typename W, int ROWS, int PANELS>
QINLINE void multiply(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const X *x, int64_t x_stride, const Panels<W> &panels,
                      int first) {
    constexpr int64_t STEP = sizeof(W) == 2 ? 2 : 1, X_STEP = STEP / inputs_of(static_cast<const X *>(nullptr));
    const W *w = panels.data + first * panels.stride;
    const char *ahead = panels.ahead.data;
    for (int64_t k = 0; k < panels.num_inputs; k += STEP, x += X_STEP, w += STEP * PANEL, ahead += panels.ahead.step) {
        __builtin_prefetch(ahead);
        step<ROWS, PANELS>(sums, x, x_stride, w, panels.stride);
    }
}

// sums [ROWS][row stride GROUP_WIDTH] (+)= x [ROWS][n] times `PANELS` panels.
template <typename X, typename W, int ROWS, int PANELS>
static void tile(const X *x, int64_t x_stride, const Panels<W> &w, int first, float *sums, bool is_first) {
    constexpr int VECS = PANELS * PANEL_VECS;
    sums += first * PANEL;
    Vec acc[ROWS][VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            acc[r][v] = is_first ? broadcast(0.0f) : load(sums + r * GROUP_WIDTH + v * LANES);
        }
    }
    multiply<X, W, ROWS, PANELS>(acc, x, x_stride, w, first);
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) store(sums + r * GROUP_WIDTH + v * LANES, acc[r][v]);
    }
}

template <typename X, typename W, int ROWS>
static void tiles(const X *x, int64_t x_stride, const Panels<W> &w, float *sums, bool is_first) {
    constexpr int MAX = max_panels(ROWS);
    for (int done = 0; done < w.num_panels;) {
        const int now = w.num_panels - done < MAX ? w.num_panels - done : MAX;
        if (now == 1) tile<X, W, ROWS, 1>(x, x_stride, w, done, sums, is_first);
        if constexpr (MAX >= 2)
            if (now == 2) tile<X, W, ROWS, 2>(x, x_stride, w, done, sums, is_first);
        if constexpr (MAX >= 3)
            if (now == 3) tile<X, W, ROWS, 3>(x, x_stride, w, done, sums, is_first);
        if constexpr (MAX >= 4)
            if (now == 4) tile<X, W, ROWS, 4>(x, x_stride, w, done, sums, is_first);
        done += now;
    }
}

template <typename X, typename W>
static void row_tile(int rows, const X *x, int64_t x_stride, const Panels<W> &w, float *sums, bool is_first) {
    switch (rows) {
        case 1:
            return tiles<X, W, 1>(x, x_stride, w, sums, is_first);
        case 2:
            return tiles<X, W, 2>(x, x_stride, w, sums, is_first);
        case 3:
            return tiles<X, W, 3>(x, x_stride, w, sums, is_first);
#if defined(__AVX2__)
        case 4:
            return tiles<X, W, 4>(x, x_stride, w, sums, is_first);
        case 5:
            return tiles<X, W, 5>(x, x_stride, w, sums, is_first);
        case 6:
            return tiles<X, W, 6>(x, x_stride, w, sums, is_first);
#endif
    }
}

// All rows of the block, inputs from k on; meanwhile the tiles fetch `next`, in even shares.
template <typename X, typename W>
static void multiply_rows(const InputRows &rows, const GemmBlock &block, int64_t k, Panels<W> w, const Ahead &next) {
    const X *x = static_cast<const X *>(rows.data) + (block.first_row * rows.stride + k) / inputs_of(x);
    const int64_t x_stride = rows.stride / inputs_of(x);
    const int64_t num_tiles = ceil_div(block.num_rows, TILE_ROWS);
    for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t r = tile_start(block.num_rows, num_tiles, t);
        const int height = static_cast<int>(tile_start(block.num_rows, num_tiles, t + 1) - r);
        w.ahead = next.share(num_tiles, t, w.num_inputs);
        row_tile<X, W>(height, x + r * x_stride, x_stride, w, block.sums + r * GROUP_WIDTH, k == 0);
    }
}

// ---- weights made float32 ----

static void expand_bf16(const bf16 *w, int64_t n, float *out) {
    for (int64_t k = 0; k < n; k += 2, w += 2 * PANEL, out += 2 * PANEL) {
        QUNROLL
        for (int v = 0; v < PANEL_VECS; ++v) {
            const Bits pairs = load_bits(w + v * 2 * LANES);
            store(out + v * LANES, low_half(pairs));
            store(out + PANEL + v * LANES, high_half(pairs));
        }
    }
}

struct Scaling {
    Vec scale, zero, offset;
};

// scale * (field - zero point), rounded once. With a fused multiply-add that is scale * field - zero, where `zero` is
// scale * zero point and exact, as zero points are powers of two.
#if defined(__AVX2__) || defined(__AVX512F__)
QINLINE Vec zero_of(Vec scale, float zero_point) { return mul(scale, broadcast(-zero_point)); }
QINLINE Vec scale_field(Vec field, Vec scale, Vec zero) { return fma(field, scale, zero); }
#else
QINLINE Vec zero_of(Vec, float zero_point) { return broadcast(zero_point); }
QINLINE Vec scale_field(Vec field, Vec scale, Vec zero) { return mul(sub(field, zero), scale); }
#endif

// The field of `Width` bits that begins at `Shift`, as scale * (field - zero point) (+ offset).
template <int Shift, int Width, bool HAS_OFFSET>
QINLINE Vec scaled(Bits words, const Scaling &by) {
    const Vec field = to_float(and_bits(shift_right<Shift>(words), broadcast_bits((1u << Width) - 1)));
    const Vec product = scale_field(field, by.scale, by.zero);
    return HAS_OFFSET ? add(product, by.offset) : product;
}

template <int Width, bool HAS_OFFSET>
QINLINE void expand_words(const char *w, const Scaling &by, float *out) {
    const Bits words = load_bits(w);
    store(out, scaled<0, Width, HAS_OFFSET>(words, by));
    store(out + PANEL, scaled<8, Width, HAS_OFFSET>(words, by));
    store(out + 2 * PANEL, scaled<16, Width, HAS_OFFSET>(words, by));
    store(out + 3 * PANEL, scaled<24, Width, HAS_OFFSET>(words, by));
    if constexpr (Width == 4) {
        store(out + 4 * PANEL, scaled<4, Width, HAS_OFFSET>(words, by));
        store(out + 5 * PANEL, scaled<12, Width, HAS_OFFSET>(words, by));
        store(out + 6 * PANEL, scaled<20, Width, HAS_OFFSET>(words, by));
        store(out + 7 * PANEL, scaled<28, Width, HAS_OFFSET>(words, by));
    }
}

// Inputs [k, k + n) of one panel, all within one group that begins at `group`.
template <int Width, bool HAS_OFFSET>
static void expand_group(const LinearWeight &weight, const char *group, int64_t k, int64_t n, float *out) {
    constexpr int64_t UNIT = Width == 8 ? 4 : 8;
    const float *scales = reinterpret_cast<const float *>(group), *offsets = scales + PANEL;
    const char *w = group + weight.header_bytes() + k / UNIT * 4 * PANEL;
    const float zero_point = static_cast<float>(weight.zero_point());
    for (int v = 0; v < PANEL_VECS; ++v) {
        Scaling by{load(scales + v * LANES), {}, {}};
        by.zero = zero_of(by.scale, zero_point);
        if (HAS_OFFSET) by.offset = load(offsets + v * LANES);
        for (int64_t i = 0; i < n; i += UNIT) {
            expand_words<Width, HAS_OFFSET>(w + i / UNIT * 4 * PANEL + v * 4 * LANES, by, out + i * PANEL + v * LANES);
        }
    }
}

static void expand_integers(const LinearWeight &weight, const char *panel, int64_t k, int64_t n, float *out) {
    const int64_t group_len = weight.padded_group(), end = k + n;
    for (int64_t now; k < end; k += now, out += now * PANEL) {
        const int64_t group = k / group_len, from = k - group * group_len;
        const char *data = panel + group * weight.group_bytes();
        now = min64(group_len - from, end - k);
        const auto expand = weight.format == WeightFormat::int8
                                ? (weight.has_offsets ? expand_group<8, true> : expand_group<8, false>)
                                : (weight.has_offsets ? expand_group<4, true> : expand_group<4, false>);
        expand(weight, data, from, now, out);
    }
}

// Inputs [k, k + n) of one panel, as float32 [n][16].
static void expand(const LinearWeight &weight, const char *panel, int64_t k, int64_t n, float *out) {
    if (weight.format == WeightFormat::bf16) {
        expand_bf16(reinterpret_cast<const bf16 *>(panel) + k * PANEL, n, out);
    } else {
        expand_integers(weight, panel, k, n, out);
    }
}

// ---- blocks ----

// `chunk` inputs at a time, straight from the packed weight.
template <typename X, typename W>
static void use_in_place(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block, int64_t chunk) {
    const int64_t inputs = weight.padded_inputs(), stride = inputs * PANEL;
    const W *panels = reinterpret_cast<const W *>(weight.panel(block.first_panel));
    for (int64_t k = 0; k < inputs; k += chunk) {
        const Panels<W> now{panels + k * PANEL, stride, block.num_panels, min64(chunk, inputs - k), {}};
        multiply_rows<X>(rows, block, k, now, ahead_of(weight, block, k, chunk));
    }
}

// The same by way of float32 scratch.
static void use_expanded(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block, int64_t chunk) {
    const int64_t inputs = weight.padded_inputs();
    float *panels = static_cast<float *>(block.panels);
    for (int64_t k = 0; k < inputs; k += chunk) {
        const int64_t n = min64(chunk, inputs - k);
        for (int p = 0; p < block.num_panels; ++p) {
            expand(weight, weight.panel(block.first_panel + p), k, n, panels + p * chunk * PANEL);
        }
        const Panels<float> now{panels, chunk * PANEL, block.num_panels, n, {}};
        multiply_rows<float>(rows, block, k, now, ahead_of(weight, block, k, chunk));
    }
}

void gemm(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    constexpr int64_t SMALL_CHUNK = 64;  // 16 KiB of float32: what one tile of rows uses once should not leave L1
    const bool is_one_tile = block.num_rows <= TILE_ROWS;
    const int64_t chunk = is_one_tile ? weight.padded_inputs() : CHUNK;
    if (weight.has_int8_inputs) {
        gemm_integers(weight, rows, block);
    } else if (rows.is_bf16) {
#if defined(QUIRE_BF16_DOTS)
        use_in_place<Pair, bf16>(weight, rows, block, chunk);
#endif
    } else if (weight.format == WeightFormat::f32) {
        use_in_place<float, float>(weight, rows, block, chunk);
    } else if (weight.format == WeightFormat::bf16 && block.num_rows <= IN_PLACE_ROWS) {
        use_in_place<float, bf16>(weight, rows, block, chunk);
    } else {
        use_expanded(weight, rows, block, is_one_tile ? SMALL_CHUNK : CHUNK);
    }
}

}  // namespace quire::QUIRE_ISA
