// The GEMM in float32: blocks of `x @ weight.T` (weights as in weight.hpp), for weights of every format.
//
// Each output element is one chain of fused multiply-adds over the inputs in ascending order, in one lane of one
// accumulator, whatever the shape of the register tile, of the block or of the batch: that is what makes rows
// invariant.
//
// The register tile is `rows` x `panels`: a vector of weights is loaded once for all rows, an element of x once for all
// panels (the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). bfloat16 is
// widened in registers, a shift or a mask for all rows of a tile, which costs less than a detour by way of the caches.
// Integers are made float32 a chunk at a time, in scratch, for all rows of the block.
//
// Where an instruction multiplies pairs of bfloat16 (and rows are bfloat16 as well), two inputs are one step, and nothing
// is widened. Its chain is another one, so its bits are, but it is as fixed as the first.
#include "gemm.hpp"
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

// Panels side by side in a tile of `rows`: as many as the registers hold, and at least two chains' worth for one row,
// whose speed is bound by memory.
constexpr int max_panels(int rows) {
    if (LANES == 16) return rows <= 6 ? 4 : 2;
    if (LANES == 8) return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    if (NUM_REGISTERS == 32) return rows == 1 ? 4 : rows == 2 ? 2 : 1;
    return rows == 1 ? 2 : 1;
}

// One step: an input of each row times a vector of weights of each output.
#if defined(QUIRE_NEON)
template <int ROWS, int VECS, int ROW = 0>
QINLINE void accumulate(Vec (&sums)[ROWS][VECS], const uint32_t *x, const Vec (&w)[VECS], Bits words = Bits{}) {
    if constexpr (ROW % LANES == 0) words = load_words<ROWS - ROW>(x + ROW);
    QUNROLL
    for (int v = 0; v < VECS; ++v) fma_lane<ROW % LANES>(sums[ROW][v], w[v], words);
    if constexpr (ROW + 1 < ROWS) accumulate<ROWS, VECS, ROW + 1>(sums, x, w, words);
}
#else
// In a tile of many rows every other input is broadcast by the multiplications themselves, where the instruction set can: fewer
// instructions, which counts where another hyperthread takes its share of them. With all inputs, loads bound the speed.
template <int ROWS, int VECS>
QINLINE void accumulate(Vec (&sums)[ROWS][VECS], const uint32_t *x, const Vec (&w)[VECS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        if (ROWS > FEW_ROWS && r % 2 == 1) {
            QUNROLL
            for (int v = 0; v < VECS; ++v) fma_into(sums[r][v], x + r, w[v]);
        } else {
            const Vec value = broadcast_float(x + r);
            QUNROLL
            for (int v = 0; v < VECS; ++v) fma_into(sums[r][v], value, w[v]);
        }
    }
}
#endif

// A 32-bit word holds the weights of inputs k (low half) and k + 1 (high half): a shift and a mask make them float32.
QINLINE Vec low_half(Bits pairs) { return as_float(shift_left<16>(pairs)); }
QINLINE Vec high_half(Bits pairs) { return as_float(and_bits(pairs, broadcast_bits(0xffff0000u))); }

// What a step does with its line of each panel. WORDS: words of a row that it takes. PREFETCHES: the lines of
// a later step.
struct Floats {
    static constexpr int WORDS = 1;
    static constexpr bool PREFETCHES = true;

    template <int ROWS, int PANELS>
    QINLINE void step(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, int64_t stride) {
        Vec weights[PANELS * PANEL_VECS];
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) weights[v] = as_float(load_bits(line(w, v, stride)));
        accumulate<ROWS>(sums, x, weights);
    }
};

struct Bf16 {
    static constexpr int WORDS = 2;
    static constexpr bool PREFETCHES = true;

    // Loaded twice: with 14 rows there are no registers to keep the words in.
    template <int ROWS, int PANELS>
    QINLINE void step(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, int64_t stride) {
        Vec weights[PANELS * PANEL_VECS];
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) weights[v] = low_half(load_bits(line(w, v, stride)));
        accumulate<ROWS>(sums, x, weights);
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) weights[v] = high_half(load_bits(line(w, v, stride)));
        accumulate<ROWS>(sums, x + ROWS, weights);
    }
};

// In the second-level cache, and in tiles of many rows: a step takes so long that the processor fetches the next lines by itself.
struct CachedBf16 : Bf16 {
    static constexpr bool PREFETCHES = false;
};

#if defined(QUIRE_BF16_DOTS) && defined(QUIRE_NEON)
// Two inputs in one instruction (BFDOT), or four of two rows for two outputs (BFMMLA), which is two of the former one after the other:
// a row's bits are the same alone and in a pair. (Arm's manual, BFDotAdd: products and sums are rounded to odd, and subnormal
// numbers are zero.) Steps of two lines, as the matrices want four inputs.
struct Bf16Pairs {};

template <int ROWS, int VECS>
struct RowPairs {
    Vec sums[ROWS / 2][VECS][2];  // of two rows and two outputs, the outputs of a row side by side

    QINLINE_MEMBER explicit RowPairs(const Vec (&acc)[ROWS][VECS]) {
        each_pair([&](int p, int v) {
            const float64x2_t first = vreinterpretq_f64_f32(acc[2 * p][v]), second = vreinterpretq_f64_f32(acc[2 * p + 1][v]);
            sums[p][v][0] = vreinterpretq_f32_f64(vzip1q_f64(first, second));
            sums[p][v][1] = vreinterpretq_f32_f64(vzip2q_f64(first, second));
        });
    }
    QINLINE_MEMBER void store(Vec (&acc)[ROWS][VECS]) const {
        each_pair([&](int p, int v) {
            const float64x2_t low = vreinterpretq_f64_f32(sums[p][v][0]), high = vreinterpretq_f64_f32(sums[p][v][1]);
            acc[2 * p][v] = vreinterpretq_f32_f64(vzip1q_f64(low, high));
            acc[2 * p + 1][v] = vreinterpretq_f32_f64(vzip2q_f64(low, high));
        });
    }
    template <typename Apply>
    QINLINE_MEMBER static void each_pair(Apply apply) {
        QUNROLL
        for (int p = 0; p < ROWS / 2; ++p) {
            QUNROLL
            for (int v = 0; v < VECS; ++v) apply(p, v);
        }
    }
    // Adds the products of two lines; of a last one that has no other, with zeros in its place. A last, odd row is in `acc`.
    template <bool IS_WHOLE>
    QINLINE_MEMBER void add(Vec (&acc)[ROWS][VECS], const uint32_t *x, const char *w, int64_t stride) {
        const uint32x2_t none = vdup_n_u32(0);
        Bits inputs[ROWS / 2 + 1];
        QUNROLL
        for (int p = 0; p < ROWS / 2; ++p) {
            const uint32x2_t low = vld1_u32(x + 2 * p), high = IS_WHOLE ? vld1_u32(x + ROWS + 2 * p) : none;
            inputs[p] = vzip1q_u32(vcombine_u32(low, none), vcombine_u32(high, none));
        }
        const Bits odd_low = broadcast_word(x + ROWS - 1), odd_high = IS_WHOLE ? broadcast_word(x + 2 * ROWS - 1) : broadcast_bits(0);
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            const Bits first = load_bits(line(w, v, stride));
            const Bits second = IS_WHOLE ? load_bits(line(w + LINE, v, stride)) : broadcast_bits(0);
            if constexpr (ROWS > 1) {
                const Bits low = vzip1q_u32(first, second), high = vzip2q_u32(first, second);
                QUNROLL
                for (int p = 0; p < ROWS / 2; ++p) {
                    asm("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sums[p][v][0]) : "w"(inputs[p]), "w"(low));
                    asm("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sums[p][v][1]) : "w"(inputs[p]), "w"(high));
                }
            }
            if constexpr (ROWS % 2 == 1) {
                asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(acc[ROWS - 1][v]) : "w"(first), "w"(odd_low));
                asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(acc[ROWS - 1][v]) : "w"(second), "w"(odd_high));
            }
        }
    }
};
#elif defined(QUIRE_BF16_DOTS)
// Two inputs in one instruction.
struct Bf16Pairs {
    static constexpr int WORDS = 1;
    static constexpr bool PREFETCHES = true;

    template <int ROWS, int PANELS>
    QINLINE void step(Vec (&sums)[ROWS][PANELS], const uint32_t *x, const char *w, int64_t stride) {
        Bits weights[PANELS];
        QUNROLL
        for (int p = 0; p < PANELS; ++p) weights[p] = load_bits(w + p * stride);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Bits value = broadcast_word(x + r);
            QUNROLL
            for (int p = 0; p < PANELS; ++p) sums[r][p] = dot_bf16(sums[r][p], value, weights[p]);
        }
    }
};
#endif

// sums += x times so many panels.
template <typename Weights, int ROWS, int PANELS>
struct Loop {
    QINLINE void run(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, const Panels &panels,
                     Ahead &ahead) {
        for (int64_t left = panels.num_steps; left > 0; left -= STEPS_OF_BLOCK) {
            ahead.fetch();
            const int64_t distance = ahead.distance_at(left, (PANELS - 1) * panels.stride);
            const char *end = w + min64(left, STEPS_OF_BLOCK) * LINE;
            for (; w != end; w += LINE, x += Weights::WORDS * ROWS) {
                if constexpr (Weights::PREFETCHES) prefetch_step<PANELS>(w, panels.stride, distance);
                Weights::template step<ROWS, PANELS>(sums, x, w, panels.stride);
            }
        }
    }
};

#if defined(QUIRE_BF16_DOTS) && defined(QUIRE_NEON)
template <int ROWS, int PANELS>
struct Loop<Bf16Pairs, ROWS, PANELS> {
    QINLINE void run(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, const Panels &panels,
                     Ahead &ahead) {
        RowPairs<ROWS, PANELS * PANEL_VECS> pairs(sums);
        for (int64_t left = panels.num_steps; left > 0; left -= STEPS_OF_BLOCK) {
            ahead.fetch();
            const int64_t distance = ahead.distance_at(left, (PANELS - 1) * panels.stride);
            const char *end = w + min64(left, STEPS_OF_BLOCK) * LINE;
            for (; end - w >= 2 * LINE; w += 2 * LINE, x += 2 * ROWS) {
                prefetch_step<PANELS>(w, panels.stride, distance);
                prefetch_step<PANELS>(w + LINE, panels.stride, distance);
                pairs.template add<true>(sums, x, w, panels.stride);
            }
            if (w != end) pairs.template add<false>(sums, x, w, panels.stride);  // the last line of all
        }
        pairs.store(sums);
    }
};
#endif

// sums (+)= x times `PANELS` panels.
template <typename Weights, int ROWS, int PANELS>
QNOINLINE void tile(const Tile &rows, const Panels &panels, int first, bool is_first, Ahead &ahead) {
    constexpr int VECS = PANELS * PANEL_VECS;
    float *sums = rows.sums + first * PANEL;
    Vec acc[ROWS][VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            acc[r][v] = is_first ? broadcast(0.0f) : load(sums + r * GROUP_WIDTH + v * LANES);
        }
    }
    Loop<Weights, ROWS, PANELS>::run(acc, rows.x, panels.data + first * panels.stride, panels, ahead);
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) store(sums + r * GROUP_WIDTH + v * LANES, acc[r][v]);
    }
}

template <typename Weights, int ROWS>
static void tiles(const Tile &rows, const Panels &panels, bool is_first, Ahead ahead) {
    constexpr int MAX = max_panels(ROWS);
    ahead.spread(ceil_div(panels.num_panels, MAX) * panels.num_steps);
    for (int done = 0; done < panels.num_panels; done += MAX) {
        const int now = panels.num_panels - done < MAX ? panels.num_panels - done : MAX;
        with_constant<MAX>(now, [&](auto count) { tile<Weights, ROWS, count>(rows, panels, done, is_first, ahead); });
    }
}

// All tiles of the block, from word `word` of their rows on.
template <typename Weights>
static void multiply_rows(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block, int64_t word,
                          const Panels &panels) {
    const Following following = following_of(weight, block);
    Tiles row_tiles(rows, block);
    for (int64_t t = 0; t < block.num_tiles; ++t) {
        Tile now = row_tiles.next();
        now.x += word * now.height;
        const Ahead ahead = word > 0 ? Ahead{CACHE_AHEAD * LINE, false, nullptr, nullptr, 0} : ahead_of(following, block, t);
        with_constant<TILE_ROWS>(now.height, [&](auto height) { tiles<Weights, height>(now, panels, word == 0, ahead); });
    }
}

// ---- integers and mxfp4 made float32 ----

struct Scaling {
    Vec scale, zero, offset;
};

// scale * (field - zero point), rounded once. With a fused multiply-add that is scale * field - zero, where `zero` is
// scale * zero point and exact, as zero points are powers of two.
QINLINE Vec zero_of(Vec scale, float zero_point) {
    return HAS_FMA ? mul(scale, broadcast(-zero_point)) : broadcast(zero_point);
}
QINLINE Vec scale_field(Vec field, Vec scale, Vec zero) {
    return HAS_FMA ? fma(field, scale, zero) : mul(sub(field, zero), scale);
}

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

// The number that the four bits at `Shift` mean (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives.
template <int Shift>
QINLINE Vec e2m1(Bits words) {
    const Bits codes = shift_right<Shift>(words);
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps(codes, _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                                       -2.0f, -3.0f, -4.0f, -6.0f));  // by the low four bits
#else
    const Bits sign = shift_left<28>(and_bits(codes, broadcast_bits(8)));
#if defined(__AVX2__)
    const Vec magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f), codes);
#else  // a convex function of the three bits
    const Vec m = mul(to_float(and_bits(codes, broadcast_bits(7))), broadcast(0.5f)), twice = add(m, m);
    const Vec steep = max(sub(twice, broadcast(2.0f)), sub(add(twice, twice), broadcast(8.0f)));
    const Vec magnitude = max(m, steep);
#endif
    return as_float(or_bits(as_bits(magnitude), sign));
#endif
}

// Inputs [k, k + n) of one panel of mxfp4, all within one group. Products with powers of two are exact, also below the normal
// numbers, where the least scale lies.
static void expand_mxfp4(const LinearWeight &weight, const char *group, int64_t k, int64_t n, float *out) {
    const char *w = group + weight.header_bytes() + k / 8 * 4 * PANEL;
    for (int v = 0; v < PANEL_VECS; ++v) {
        const Bits exponents = and_bits(load_signed_bytes(group + v * LANES), broadcast_bits(0xff));
        const Vec scale = max(as_float(shift_left<23>(exponents)), broadcast(0x1p-127f));
        for (int64_t i = 0; i < n; i += 8) {
            const Bits words = load_bits(w + i * PANEL / 2 + v * 4 * LANES);
            float *to = out + i * PANEL + v * LANES;
            store(to, mul(e2m1<0>(words), scale));
            store(to + PANEL, mul(e2m1<8>(words), scale));
            store(to + 2 * PANEL, mul(e2m1<16>(words), scale));
            store(to + 3 * PANEL, mul(e2m1<24>(words), scale));
            store(to + 4 * PANEL, mul(e2m1<4>(words), scale));
            store(to + 5 * PANEL, mul(e2m1<12>(words), scale));
            store(to + 6 * PANEL, mul(e2m1<20>(words), scale));
            store(to + 7 * PANEL, mul(e2m1<28>(words), scale));
        }
    }
}

// Inputs [k, k + n) of one panel, as float32 [n][16].
static void expand(const LinearWeight &weight, const char *panel, int64_t k, int64_t n, float *out) {
    const int64_t group_len = weight.padded_group(), end = k + n;
    for (int64_t now; k < end; k += now, out += now * PANEL) {
        const int64_t group = k / group_len, from = k - group * group_len;
        const char *data = panel + group * weight.group_bytes();
        now = min64(group_len - from, end - k);
        const auto expand_some = weight.format == WeightFormat::mxfp4 ? expand_mxfp4
                                : weight.format == WeightFormat::int8
                                ? (weight.has_offsets ? expand_group<8, true> : expand_group<8, false>)
                                : (weight.has_offsets ? expand_group<4, true> : expand_group<4, false>);
        expand_some(weight, data, from, now, out);
    }
}

// ---- blocks ----

// Straight from the packed weight.
template <typename Weights>
static void use_in_place(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    const Panels panels{weight.panel(block.first_panel), weight.panel_bytes(), block.num_panels,
                        weight.panel_bytes() / LINE};
    multiply_rows<Weights>(weight, rows, block, 0, panels);
}

// By way of float32 scratch.
static void use_expanded(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    constexpr int64_t SMALL_CHUNK = 64;  // 16 KiB of float32: what one tile of rows uses once should not leave L1
    const int64_t inputs = weight.padded_inputs(), chunk = block.num_tiles == 1 ? SMALL_CHUNK : CHUNK;
    float *expanded = static_cast<float *>(block.panels);
    for (int64_t k = 0; k < inputs; k += chunk) {
        const int64_t n = min64(chunk, inputs - k);
        for (int p = 0; p < block.num_panels; ++p) {
            expand(weight, weight.panel(block.first_panel + p), k, n, expanded + p * chunk * PANEL);
        }
        const int64_t stride = chunk * PANEL * int64_t{sizeof(float)};
        const Panels panels{reinterpret_cast<const char *>(expanded), stride, block.num_panels, n};
        multiply_rows<Floats>(weight, rows, block, k, panels);
    }
}

void gemm(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    if (weight.has_int8_inputs) {
        gemm_integers(weight, rows, block);
    } else if (rows.is_bf16) {
#if defined(QUIRE_BF16_DOTS)
        use_in_place<Bf16Pairs>(weight, rows, block);
#endif
    } else if (weight.format == WeightFormat::f32) {
        use_in_place<Floats>(weight, rows, block);
    } else if (weight.format == WeightFormat::bf16) {
        const bool has_large_m = LANES == 16 && block.num_tiles > 1;
        has_large_m ? use_in_place<CachedBf16>(weight, rows, block) : use_in_place<Bf16>(weight, rows, block);
    } else {
        use_expanded(weight, rows, block);
    }
}

}  // namespace quire::QUIRE_ISA
