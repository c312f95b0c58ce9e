// The GEMM in integers: int8 inputs times int8 or int4 weights (layout in weight.hpp).
//
// The sum of a group's products is an exact 32-bit integer, so neither the instructions nor the order in which it is
// made can change it; what is done with the sums of groups (groups.hpp) every instruction set rounds alike. So results are
// equal bit for bit everywhere.
//
// Weights are stored as unsigned bytes, value + zero point: a group's sum starts at -zero * (sum of the row's inputs), or at 0
// where bytes are made signed, value by value (HAS_START).
// The registers hold a group's integers; the float32 sums of several groups lie in the first-level cache.
#include "groups.hpp"
#include "kernels.hpp"
#include "outliers.hpp"

namespace quire::QUIRE_ISA {

// Panels side by side in a tile of `rows`, as the registers allow. `num_parts`: multiplications of a line.
constexpr int max_panels(int rows, int num_parts) {
    if (LANES == 16) return (rows <= 6 ? 4 : 2) / num_parts;
    if (LANES == 8) return rows == 1 ? 4 : rows == 2 ? 2 : 1;
    if (NUM_REGISTERS == 32) return rows == 1 ? 4 : rows == 2 ? 2 : 1;
    return 1;
}

struct IntegerTile {
    Tile rows;
    const int32_t *starts;  // of the tile's first row; `count` to a row
};

// Products of a part of the inputs of each row with the same part of weights.
#if defined(NEON_MIXED_DOTS) || defined(NEON_SIGNED_DOTS)
template <int ROWS, int VECS, int PART, int ROW = 0>
QINLINE void multiply_part(Bits (&acc)[ROWS][VECS], const uint32_t *x, const Bits (&w)[VECS], Bits words = Bits{}) {
    if constexpr (ROW % LANES == 0) words = load_words<ROWS - ROW>(x + ROW);
    QUNROLL
    for (int v = 0; v < VECS; ++v) multiply_add_lane<ROW % LANES>(acc[ROW][v], w[v], words);
    if constexpr (ROW + 1 < ROWS) multiply_part<ROWS, VECS, PART, ROW + 1>(acc, x, w, words);
}
#else
template <int ROWS, int VECS, int PART>
QINLINE void multiply_part(Bits (&acc)[ROWS][VECS], const uint32_t *x, const Bits (&w)[VECS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const Bits inputs = load_inputs<PART>(x + r, ROWS);
#if SHORT_PAIRS
        if constexpr (VECS == 2) {
            multiply_add_both(acc[r], w, inputs);
            continue;
        }
#endif
        QUNROLL
        for (int v = 0; v < VECS; ++v) acc[r][v] = multiply_add(acc[r][v], w[v], inputs);
    }
}
#endif

// Products of four inputs of each row with bytes of weights.
template <int ROWS, int VECS, int PART = 0>
QINLINE void accumulate(Bits (&acc)[ROWS][VECS], const uint32_t *x, const Bits (&bytes)[VECS]) {
    Bits w[VECS];
    QUNROLL
    for (int v = 0; v < VECS; ++v) w[v] = part_of<PART>(bytes[v]);
    multiply_part<ROWS, VECS, PART>(acc, x, w);
    if constexpr (PART + 1 < NUM_PARTS) accumulate<ROWS, VECS, PART + 1>(acc, x, bytes);
}

#if defined(NEON_MIXED_DOTS)
// Sums as products of matrices (USMMLA) make them: of eight inputs, for two rows and two outputs, the rows in turns. An
// instruction multiplies twice as much as one that takes a single row. A last, odd row has its sums where they were.
template <int ROWS, int VECS>
struct RowPairs {
    Bits sums[ROWS / 2][VECS][2];

    QINLINE_MEMBER explicit RowPairs(const Bits (&acc)[ROWS][VECS]) {
        QUNROLL
        for (int p = 0; p < ROWS / 2; ++p) {
            QUNROLL
            for (int v = 0; v < VECS; ++v) {
                sums[p][v][0] = vzip1q_u32(acc[2 * p][v], acc[2 * p + 1][v]);
                sums[p][v][1] = vzip2q_u32(acc[2 * p][v], acc[2 * p + 1][v]);
            }
        }
    }
    QINLINE_MEMBER void store(Bits (&acc)[ROWS][VECS]) const {
        QUNROLL
        for (int p = 0; p < ROWS / 2; ++p) {
            QUNROLL
            for (int v = 0; v < VECS; ++v) {
                acc[2 * p][v] = vuzp1q_u32(sums[p][v][0], sums[p][v][1]);
                acc[2 * p + 1][v] = vuzp2q_u32(sums[p][v][0], sums[p][v][1]);
            }
        }
    }
    // Adds products of eight inputs, two words of each row, with bytes of weights for the first four and the second, which
    // `load(first, second, v)` loads as late as possible: registers are few.
    template <typename Load>
    QINLINE_MEMBER void add(Bits (&acc)[ROWS][VECS], const uint32_t *x, Load load) {
        Bits inputs[ROWS / 2];
        QUNROLL
        for (int p = 0; p < ROWS / 2; ++p) {
            const uint32x2_t low = vld1_u32(x + 2 * p), high = vld1_u32(x + ROWS + 2 * p);
            inputs[p] = vzip1q_u32(vcombine_u32(low, low), vcombine_u32(high, high));
        }
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            Bits first, second;
            load(first, second, v);
            const Bits low = vzip1q_u32(first, second), high = vzip2q_u32(first, second);
            QUNROLL
            for (int p = 0; p < ROWS / 2; ++p) {
                asm("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sums[p][v][0]) : "w"(low), "w"(inputs[p]));
                asm("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sums[p][v][1]) : "w"(high), "w"(inputs[p]));
            }
            if constexpr (ROWS % 2 == 1) {
                multiply_add_lane<0>(acc[ROWS - 1][v], first, broadcast_word(x + ROWS - 1));
                multiply_add_lane<0>(acc[ROWS - 1][v], second, broadcast_word(x + 2 * ROWS - 1));
            }
        }
    }
};
#endif

// Lines [w, end) of each panel, step by step.
template <typename Weights>
struct Steps {
    template <int ROWS, int PANELS>
    QINLINE void run(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, const char *end,
                     int64_t stride, int64_t distance) {
#if defined(NEON_MIXED_DOTS)
        if constexpr (ROWS > 1) {
            RowPairs<ROWS, PANELS * PANEL_VECS> pairs(acc);
            for (; end - w >= Weights::LINES_OF_EIGHT * LINE; w += Weights::LINES_OF_EIGHT * LINE, x += 2 * ROWS) {
                QUNROLL
                for (int i = 0; i < Weights::LINES_OF_EIGHT; ++i) prefetch_step<PANELS>(w + i * LINE, stride, distance);
                pairs.add(acc, x, [&](Bits &first, Bits &second, int v) { Weights::load_eight(first, second, w, v, stride); });
            }
            pairs.store(acc);
        }
#endif
        for (; w != end; w += LINE, x += Weights::WORDS * ROWS) {
            prefetch_step<PANELS>(w, stride, distance);
            Weights::template step<ROWS, PANELS>(acc, x, w, stride);
        }
    }
};

// What a step does with its line of each panel: four inputs, or eight. LINES_OF_EIGHT: lines with eight inputs, which
// `load_eight` loads as bytes of the first four and of the second.
struct Bytes : Steps<Bytes> {
    static constexpr int LINES_OF_EIGHT = 2;
    static constexpr int WORDS = QUAD_WORDS, PARTS = NUM_PARTS, MAX_ROWS = INT8_TILE_ROWS;
    static constexpr bool HAS_OUTLIERS = SHORT_PAIRS, HAS_START = !HAS_SIGNED_BYTES;

    template <int ROWS, int PANELS>
    QINLINE void step(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, int64_t stride) {
        Bits weights[PANELS * PANEL_VECS];
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) weights[v] = as_multiplied(load_bits(line(w, v, stride)));
        accumulate<ROWS>(acc, x, weights);
    }
    QINLINE void load_eight(Bits &first, Bits &second, const char *w, int v, int64_t stride) {
        first = load_bits(line(w, v, stride));
        second = load_bits(line(w + LINE, v, stride));
    }
};

#if NARROW_SUMS
struct HalfBytes {
    static constexpr int WORDS = 2, PARTS = 1, MAX_ROWS = TILE_ROWS, WIDENING_STEPS = NARROW_PRODUCTS / 2;
    static constexpr bool HAS_OUTLIERS = false, HAS_START = true;

    template <int ROWS, int PANELS>
    QINLINE void run(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, const char *end,
                     int64_t stride, int64_t distance) {
        constexpr int VECS = PANELS * PANEL_VECS;
        const Bits mask = broadcast_bits(0x0f0f0f0fu);
        while (w != end) {
            const char *stop = w + min64(end - w, WIDENING_STEPS * LINE);
            Bits sums[ROWS][VECS];
            QUNROLL
            for (int r = 0; r < ROWS; ++r) {
                QUNROLL
                for (int v = 0; v < VECS; ++v) sums[r][v] = broadcast_bits(0);
            }
            for (; w != stop; w += LINE, x += WORDS * ROWS) {
                prefetch_step<PANELS>(w, stride, distance);
#if SHORT_PAIRS
                if constexpr (ROWS == 1) {
                    const Bits low = broadcast_word(x), high = broadcast_word(x + 1);
                    QUNROLL
                    for (int v = 0; v < VECS; v += 2) {
                        multiply_add_halves(sums[0][v], sums[0][v + 1], line(w, v, stride), low, high, mask);
                    }
                    continue;
                }
#endif
                Bits weights[VECS];
                QUNROLL
                for (int v = 0; v < VECS; ++v) weights[v] = and_bits(load_bits(line(w, v, stride)), mask);
                accumulate_narrow<ROWS>(sums, x, weights);
                QUNROLL
                for (int v = 0; v < VECS; ++v) weights[v] = and_bits(shift_right<4>(load_bits(line(w, v, stride))), mask);
                accumulate_narrow<ROWS>(sums, x + ROWS, weights);
            }
            QUNROLL
            for (int r = 0; r < ROWS; ++r) {
                QUNROLL
                for (int v = 0; v < VECS; ++v) acc[r][v] = widen(acc[r][v], sums[r][v]);
            }
        }
    }

    // Products of four inputs of each row with half bytes of weights.
    template <int ROWS, int VECS>
    QINLINE void accumulate_narrow(Bits (&sums)[ROWS][VECS], const uint32_t *x, const Bits (&w)[VECS]) {
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Bits inputs = broadcast_word(x + r);
#if SHORT_PAIRS
            if constexpr (VECS == 2) {
                multiply_add_narrow_both(sums[r], w, inputs);
                continue;
            }
#endif
            QUNROLL
            for (int v = 0; v < VECS; ++v) sums[r][v] = multiply_add_narrow(sums[r][v], w[v], inputs);
        }
    }
};
#else
struct HalfBytes : Steps<HalfBytes> {
    static constexpr int LINES_OF_EIGHT = 1;
    static constexpr int WORDS = 2 * QUAD_WORDS, PARTS = NUM_PARTS, MAX_ROWS = TILE_ROWS;
    static constexpr bool HAS_OUTLIERS = false, HAS_START = true;

    template <int ROWS, int PANELS>
    QINLINE void step(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, int64_t stride) {
        const Bits mask = broadcast_bits(0x0f0f0f0fu);
        Bits weights[PANELS * PANEL_VECS];
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) weights[v] = and_bits(load_bits(line(w, v, stride)), mask);
        accumulate<ROWS>(acc, x, weights);
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
            weights[v] = and_bits(shift_right<4>(load_bits(line(w, v, stride))), mask);
        }
        accumulate<ROWS>(acc, x + QUAD_WORDS * ROWS, weights);
    }
    QINLINE void load_eight(Bits &first, Bits &second, const char *w, int v, int64_t stride) {
        const Bits bytes = load_bits(line(w, v, stride)), mask = broadcast_bits(0x0f0f0f0fu);
        first = and_bits(bytes, mask);
        second = and_bits(shift_right<4>(bytes), mask);
    }
};
#endif

// Bytes of weights that were expanded: a part of them.
struct Parts : Steps<Parts> {
    static constexpr int LINES_OF_EIGHT = 2;
    static constexpr int WORDS = QUAD_WORDS / NUM_PARTS, PARTS = NUM_PARTS, MAX_ROWS = TILE_ROWS;
    static constexpr bool HAS_OUTLIERS = false, HAS_START = true;

    template <int ROWS, int PANELS>
    QINLINE void step(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, int64_t stride) {
        Bits weights[PANELS * PANEL_VECS];
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) weights[v] = load_bits(line(w, v, stride));
        multiply_part<ROWS, PANELS * PANEL_VECS, 0>(acc, x, weights);
    }
    QINLINE void load_eight(Bits &first, Bits &second, const char *w, int v, int64_t stride) {
        Bytes::load_eight(first, second, w, v, stride);
    }
};

#if SHORT_PAIRS
// The same for rows with large pairs: two and two products in 32 bits.
struct LargePairs : Steps<LargePairs> {
    static constexpr int WORDS = 1, PARTS = 1, MAX_ROWS = INT8_TILE_ROWS;
    static constexpr bool HAS_OUTLIERS = true, HAS_START = true;  // outliers in its other rows

    template <int ROWS, int PANELS>
    QINLINE void step(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, int64_t stride) {
        multiply_half<0, ROWS, PANELS>(acc, x, w, stride);
        multiply_half<1, ROWS, PANELS>(acc, x, w, stride);
    }

    // Even bytes, or odd ones.
    template <int HALF, int ROWS, int PANELS>
    QINLINE void multiply_half(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const uint32_t *x, const char *w, int64_t stride) {
        constexpr int VECS = PANELS * PANEL_VECS;
        Bits weights[VECS];
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            const Bits bytes = load_bits(line(w, v, stride));
            weights[v] = HALF == 0 ? and_bits(bytes, broadcast_bits(0x00ff00ffu)) : _mm256_srli_epi16(bytes, 8);
        }
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Bits bytes = broadcast_word(x + r);
            const Bits inputs = _mm256_srai_epi16(HALF == 0 ? _mm256_slli_epi16(bytes, 8) : bytes, 8);
            QUNROLL
            for (int v = 0; v < VECS; ++v) acc[r][v] = multiply_add_pairs(acc[r][v], weights[v], inputs);
        }
    }
};

static bool has_large_pairs(const Groups &groups, const Tile &tile) {
    const int64_t words = groups.weights.num_steps * tile.height;
    const uint32_t *list = tile.x + words;
    for (int64_t group = 0; group < groups.count; ++group, list += 2 * words) {
        for (int r = 0; r < tile.height; ++r) {
            if (list[r] == HAS_LARGE_PAIRS) return true;
        }
    }
    return false;
}

// Adds the products of the rows' outliers, whose lists lie word by word for all rows, to sums [ROWS][PANELS * PANEL]. They
// come last, when the weights are in a cache. An entry takes about as long as two quads of a row in a tile.
template <int ROWS, int PANELS>
QNOINLINE void add_listed(float *sums, const uint32_t *lists, const char *w, const Panels &panels) {
    constexpr int VECS = PANELS * PANEL_VECS;
    for (int r = 0; r < ROWS; ++r, sums += VECS * LANES) {
        const uint32_t *next = lists + r;
        if (*next == 0 || *next == HAS_LARGE_PAIRS) continue;
        Bits acc[VECS];
        QUNROLL
        for (int v = 0; v < VECS; ++v) acc[v] = load_bits(sums + v * LANES);
        for (; *next != 0; next += ROWS) {
            const Bits inputs = outliers_of(next);
            const char *quad = w + (*next >> 16) * LINE;
            QUNROLL
            for (int v = 0; v < VECS; ++v) acc[v] = multiply_add(acc[v], load_bits(line(quad, v, panels.stride)), inputs);
        }
        QUNROLL
        for (int v = 0; v < VECS; ++v) store(sums + v * LANES, as_float(acc[v]));
    }
}

template <int ROWS, int VECS>
QINLINE void add_outliers(Bits (&acc)[ROWS][VECS], const uint32_t *lists, const char *w, const Panels &panels) {
    uint32_t any = 0;
    QUNROLL
    for (int r = 0; r < ROWS; ++r) any |= lists[r];
    if (any == 0) return;
    float sums[ROWS * VECS * LANES];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) store(sums + (r * VECS + v) * LANES, as_float(acc[r][v]));
    }
    add_listed<ROWS, VECS / PANEL_VECS>(sums, lists, w, panels);
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) acc[r][v] = load_bits(sums + (r * VECS + v) * LANES);
    }
}
#endif

template <typename Weights, int ROWS, int PANELS>
QNOINLINE void tile(const Groups &groups, const IntegerTile &rows, int first, Ahead &ahead) {
    const Panels &panels = groups.weights;
    const uint32_t *x = rows.rows.x;
    for (int64_t group = 0; group < groups.count; ++group) {
        Bits acc[ROWS][PANELS * PANEL_VECS];
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            const int32_t zero = Weights::HAS_START ? rows.starts[r * groups.count + group] : 0;
            const Bits start = broadcast_bits(static_cast<uint32_t>(zero));
            QUNROLL
            for (int v = 0; v < PANELS * PANEL_VECS; ++v) acc[r][v] = start;
        }
        const char *w = panels.data + first * panels.stride + group * groups.stride;
        for (int64_t left = panels.num_steps; left > 0; left -= STEPS_OF_BLOCK) {
            ahead.fetch();
            const int64_t rest = left + (groups.count - 1 - group) * panels.num_steps;
            const int64_t distance = ahead.distance_at(rest, (PANELS - 1) * panels.stride);
            const int64_t num_steps = min64(left, STEPS_OF_BLOCK);
            Weights::template run<ROWS, PANELS>(acc, x, w, w + num_steps * LINE, panels.stride, distance);
            w += num_steps * LINE;
            x += num_steps * Weights::WORDS * ROWS;
        }
#if SHORT_PAIRS
        if constexpr (Weights::HAS_OUTLIERS) {
            add_outliers(acc, x, w - panels.num_steps * LINE, panels);
            x += panels.num_steps * ROWS;
        }
#endif
        const char *headers = groups.headers + first * groups.header_stride + group * groups.header_group_stride;
        add_group<ROWS, PANELS>(rows.rows.sums + first * PANEL, acc, groups, rows.starts, group, headers);
    }
}

template <typename Weights, int ROWS>
static void tiles(const Groups &groups, const IntegerTile &rows, Ahead ahead) {
    constexpr int MAX = max_panels(ROWS, Weights::PARTS);
    const int num_panels = groups.weights.num_panels;
    const int64_t blocks = groups.count * ceil_div(groups.weights.num_steps, STEPS_OF_BLOCK);
    ahead.spread(ceil_div(num_panels, MAX) * blocks * STEPS_OF_BLOCK);
    for (int done = 0; done < num_panels; done += MAX) {
        const int now = num_panels - done < MAX ? num_panels - done : MAX;
        with_constant<MAX>(now, [&](auto count) { tile<Weights, ROWS, count>(groups, rows, done, ahead); });
    }
}

// Sums of a tile are complete: times the scale of each row.
static void scale_rows(const Tile &tile, const float *scales, int num_panels) {
    for (int r = 0; r < tile.height; ++r) {
        const Vec scale = broadcast(scales[r]);
        float *sums = tile.sums + r * GROUP_WIDTH;
        for (int i = 0; i < num_panels * PANEL; i += LANES) store(sums + i, mul(load(sums + i), scale));
    }
}

template <typename Weights>
static void multiply_rows(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block,
                          const Groups &groups) {
    const Following following = following_of(weight, block);
    Tiles row_tiles(rows, block);
    for (int64_t t = 0; t < block.num_tiles; ++t) {
        const Tile now = row_tiles.next();
        const IntegerTile tile{now, rows.starts + now.row * groups.count};
        const Ahead ahead = ahead_of(following, block, t);
        with_constant<Weights::MAX_ROWS>(now.height, [&](auto height) {
#if SHORT_PAIRS
            if (Weights::HAS_OUTLIERS && has_large_pairs(groups, now)) return tiles<LargePairs, height>(groups, tile, ahead);
#endif
            tiles<Weights, height>(groups, tile, ahead);
        });
        scale_rows(now, rows.scales + now.row, block.num_panels);
    }
}

// From so many tiles on weights are unpacked once for all. In parts (AVX2 on Zen 5), 16 rows of int8, three tiles, take as
// long either way, and 64 rows 6 % less.
constexpr int64_t EXPANDING_TILES = NUM_PARTS > 1 ? 3 : 2;

void gemm_integers(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    const Groups groups = groups_of(weight, block);
    const bool is_int8 = weight.format == WeightFormat::int8, expands = block.num_tiles >= EXPANDING_TILES;
    if (is_int8 && (NUM_PARTS == 1 || !expands)) return multiply_rows<Bytes>(weight, rows, block, groups);
    if (!is_int8 && (NARROW_SUMS || !expands)) return multiply_rows<HalfBytes>(weight, rows, block, groups);
    if constexpr (NUM_PARTS > 1 || !NARROW_SUMS) {
        multiply_rows<Parts>(weight, rows, block,
                             is_int8 ? expanded<WeightFormat::int8>(groups, block) : expanded<WeightFormat::int4>(groups, block));
    }
}

}  // namespace quire::QUIRE_ISA
