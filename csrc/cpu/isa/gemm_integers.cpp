// The GEMM in integers: int8 inputs times int8 or int4 weights (layout in weight.hpp).
//
// The sum of a group's products is an exact 32-bit integer, so neither the instructions nor the order in which it is
// made can change it; groups are then added in ascending order in float32, a multiplication and an addition each, which
// every instruction set rounds alike. So results are equal bit for bit everywhere.
//
// Weights are stored as unsigned bytes, value + zero point: a group's sum starts at -zero * (sum of the row's inputs).
#include "gemm.hpp"
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t INTEGER_CHUNK = 4 * CHUNK;  // inputs, a byte each: as large in the cache as CHUNK float32

// Panels side by side in a tile of `rows`, as the registers allow.
constexpr int max_panels(int rows) {
    if (LANES == 16) return 4;
    if (LANES == 8) return rows <= 2 ? 2 : 1;
    return 1;
}

// Weights of some whole groups, or of a piece of one: `num_inputs` inputs in each of `num_groups`.
struct Span {
    const uint8_t *weights;
    int64_t stride, group_stride;  // bytes from a panel to the next one, from a group to the next one
    const char *headers;           // scales, then offsets
    int64_t header_stride, header_group_stride;
    int num_panels;
    int64_t num_inputs, first_group, num_groups;
    bool starts_group, ends_group, has_offsets;
    int32_t zero_point;
    Ahead ahead;
};

struct RowTile {
    const Input *x;  // at the span's first input
    int64_t stride;
    const int32_t *group_sums;  // at the span's first group
    int64_t sums_stride;
    float *sums;       // [rows][GROUP_WIDTH]
    int32_t *partial;  // likewise: the integer sums of a group that is not complete
};

template <int ROWS, int VECS>
QINLINE void accumulate(Bits (&acc)[ROWS][VECS], const Input *x, int64_t stride, const Quad (&w)[VECS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const InputQuad inputs = load_inputs(x + r * stride);
        QUNROLL
        for (int v = 0; v < VECS; ++v) acc[r][v] = multiply_add(acc[r][v], w[v], inputs);
    }
}

template <int ROWS, int PANELS>
QINLINE void multiply_int8(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const Input *x, int64_t x_stride, const uint8_t *w,
                           const Span &span, const char *ahead) {
    for (int64_t k = 0; k < span.num_inputs; k += 4, x += 4, w += 4 * PANEL, ahead += span.ahead.step) {
        Quad weights[PANELS * PANEL_VECS];
        __builtin_prefetch(ahead);
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
            weights[v] = unpack(load_bits(w + v / PANEL_VECS * span.stride + v % PANEL_VECS * 4 * LANES));
        }
        accumulate<ROWS>(acc, x, x_stride, weights);
    }
}

template <int ROWS, int PANELS>
QINLINE void multiply_int4(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const Input *x, int64_t x_stride, const uint8_t *w,
                           const Span &span, const char *ahead) {
    constexpr int VECS = PANELS * PANEL_VECS;
    const Bits mask = broadcast_bits(0x0f0f0f0fu);
    for (int64_t k = 0; k < span.num_inputs; k += 8, x += 8, w += 4 * PANEL, ahead += 2 * span.ahead.step) {
        Bits pairs[VECS];
        Quad weights[VECS];
        __builtin_prefetch(ahead);
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            pairs[v] = load_bits(w + v / PANEL_VECS * span.stride + v % PANEL_VECS * 4 * LANES);
            weights[v] = unpack(and_bits(pairs[v], mask));
        }
        accumulate<ROWS>(acc, x, x_stride, weights);
        QUNROLL
        for (int v = 0; v < VECS; ++v) weights[v] = unpack(and_bits(shift_right<4>(pairs[v]), mask));
        accumulate<ROWS>(acc, x + 4, x_stride, weights);
    }
}

// A group begins: at -zero * (sum of the row's inputs), or with what an earlier piece of it left in `partial`.
template <int ROWS, int PANELS>
QINLINE void start_group(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const Span &span, const RowTile &rows, int64_t group,
                         int first) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const int32_t start = -span.zero_point * rows.group_sums[r * rows.sums_stride + group];
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) acc[r][v] = broadcast_bits(static_cast<uint32_t>(start));
    }
    if (span.starts_group) return;
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
            acc[r][v] = load_bits(rows.partial + r * GROUP_WIDTH + first * PANEL + v * LANES);
        }
    }
}

// A group is complete: sums += scale * integers, then sums += offset * sum of the inputs.
template <int ROWS, int PANELS>
QINLINE void add_group(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const Bits (&acc)[ROWS][PANELS * PANEL_VECS],
                       const Span &span, const RowTile &rows, int64_t group, const char *headers) {
    Vec scales[PANELS * PANEL_VECS];
    QUNROLL
    for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
        const char *panel = headers + v / PANEL_VECS * span.header_stride;
        scales[v] = load(reinterpret_cast<const float *>(panel) + v % PANEL_VECS * LANES);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) sums[r][v] = add(sums[r][v], mul(scales[v], to_float(acc[r][v])));
    }
    if (!span.has_offsets) return;
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const Vec inputs = broadcast(static_cast<float>(rows.group_sums[r * rows.sums_stride + group]));
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
            const char *panel = headers + v / PANEL_VECS * span.header_stride;
            const float *offsets = reinterpret_cast<const float *>(panel) + PANEL + v % PANEL_VECS * LANES;
            sums[r][v] = add(sums[r][v], mul(load(offsets), inputs));
        }
    }
}

template <bool IS_INT4, int ROWS, int PANELS>
static void tile(const Span &span, const RowTile &rows, int first) {
    constexpr int VECS = PANELS * PANEL_VECS;
    float *to = rows.sums + first * PANEL;
    Vec sums[ROWS][VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            sums[r][v] = span.first_group == 0 ? broadcast(0.0f) : load(to + r * GROUP_WIDTH + v * LANES);
        }
    }
    Bits acc[ROWS][VECS];
    for (int64_t group = 0; group < span.num_groups; ++group) {
        const uint8_t *w = span.weights + first * span.stride + group * span.group_stride;
        const char *ahead = span.ahead.data + group * span.num_inputs / 4 * span.ahead.step;
        const Input *x = rows.x + group * span.num_inputs;
        start_group<ROWS, PANELS>(acc, span, rows, group, first);
        if constexpr (IS_INT4) {
            multiply_int4<ROWS, PANELS>(acc, x, rows.stride, w, span, ahead);
        } else {
            multiply_int8<ROWS, PANELS>(acc, x, rows.stride, w, span, ahead);
        }
        if (!span.ends_group) break;
        const char *headers = span.headers + first * span.header_stride + group * span.header_group_stride;
        add_group<ROWS, PANELS>(sums, acc, span, rows, group, headers);
    }
    int32_t *partial = rows.partial + first * PANEL;
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            const int64_t at = r * GROUP_WIDTH + v * LANES;
            if (span.ends_group) {
                store(to + at, sums[r][v]);
            } else {
                store(reinterpret_cast<float *>(partial + at), as_float(acc[r][v]));
            }
        }
    }
}

template <bool IS_INT4, int ROWS>
static void tiles(const Span &span, const RowTile &rows) {
    constexpr int MAX = max_panels(ROWS);
    for (int done = 0; done < span.num_panels;) {
        const int now = span.num_panels - done < MAX ? span.num_panels - done : MAX;
        if (now == 1) tile<IS_INT4, ROWS, 1>(span, rows, done);
        if constexpr (MAX >= 2)
            if (now == 2) tile<IS_INT4, ROWS, 2>(span, rows, done);
        if constexpr (MAX >= 3)
            if (now == 3) tile<IS_INT4, ROWS, 3>(span, rows, done);
        if constexpr (MAX >= 4)
            if (now == 4) tile<IS_INT4, ROWS, 4>(span, rows, done);
        done += now;
    }
}

template <bool IS_INT4>
static void row_tile(int height, const Span &span, const RowTile &rows) {
    switch (height) {
        case 1:
            return tiles<IS_INT4, 1>(span, rows);
        case 2:
            return tiles<IS_INT4, 2>(span, rows);
        case 3:
            return tiles<IS_INT4, 3>(span, rows);
#if defined(__AVX2__)
        case 4:
            return tiles<IS_INT4, 4>(span, rows);
        case 5:
            return tiles<IS_INT4, 5>(span, rows);
        case 6:
            return tiles<IS_INT4, 6>(span, rows);
#endif
    }
}

// All rows of the block against a span that begins at input k; meanwhile the tiles fetch `next`.
template <bool IS_INT4>
static void multiply_rows(const InputRows &rows, const GemmBlock &block, int64_t all_groups, int64_t k, Span span,
                          const Ahead &next) {
    const Input *x = static_cast<const Input *>(rows.data) + block.first_row * rows.stride + k;
    const int32_t *group_sums = rows.sums + block.first_row * all_groups + span.first_group;
    const int64_t num_tiles = ceil_div(block.num_rows, TILE_ROWS);
    for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t r = tile_start(block.num_rows, num_tiles, t);
        const RowTile tile{x + r * rows.stride,           rows.stride, group_sums + r * all_groups, all_groups,
                           block.sums + r * GROUP_WIDTH, block.partial + r * GROUP_WIDTH};
        span.ahead = next.share(num_tiles, t, span.num_groups * span.num_inputs / 4);
        row_tile<IS_INT4>(static_cast<int>(tile_start(block.num_rows, num_tiles, t + 1) - r), span, tile);
    }
}

// One panel's half bytes of a span as bytes.
static void expand_int4(const Span &span, const uint8_t *w, uint8_t *out) {
    const Bits mask = broadcast_bits(0x0f0f0f0fu);
    for (int64_t group = 0; group < span.num_groups; ++group, w += span.group_stride) {
        const uint8_t *from = w;
        for (int64_t k = 0; k < span.num_inputs; k += 8, from += 4 * PANEL, out += 8 * PANEL) {
            QUNROLL
            for (int v = 0; v < PANEL_VECS; ++v) {
                const Bits both = load_bits(from + v * 4 * LANES);
                float *low = reinterpret_cast<float *>(out + v * 4 * LANES), *high = low + PANEL;
                store(low, as_float(and_bits(both, mask)));
                store(high, as_float(and_bits(shift_right<4>(both), mask)));
            }
        }
    }
}

// The span with its weights as bytes in the block's scratch.
static Span expanded(const Span &span, const GemmBlock &block) {
    uint8_t *to = static_cast<uint8_t *>(block.panels);
    const int64_t stride = span.num_groups * span.num_inputs * PANEL;
    for (int p = 0; p < span.num_panels; ++p) expand_int4(span, span.weights + p * span.stride, to + p * stride);
    Span bytes = span;
    bytes.weights = to;
    bytes.stride = stride;
    bytes.group_stride = span.num_inputs * PANEL;
    return bytes;
}

// `n` inputs from k on: whole groups, or a piece of one.
static Span span_of(const LinearWeight &weight, const GemmBlock &block, int64_t k, int64_t n) {
    const int64_t group_len = weight.padded_group(), group = k / group_len, from = k - group * group_len;
    const int64_t num_groups = max64(1, n / group_len);
    const char *data = weight.panel(block.first_panel) + group * weight.group_bytes();
    return {reinterpret_cast<const uint8_t *>(data) + weight.header_bytes() + from * PANEL * weight.bits() / 8,
            weight.panel_bytes(),
            weight.group_bytes(),
            data,
            weight.panel_bytes(),
            weight.group_bytes(),
            block.num_panels,
            n / num_groups,
            group,
            num_groups,
            from == 0,
            (from + n) % group_len == 0,
            weight.has_offsets,
            static_cast<int32_t>(weight.zero_point()),
            {}};
}

void gemm_integers(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    const int64_t inputs = weight.padded_inputs(), group_len = weight.padded_group(), all_groups = weight.num_groups();
    const bool is_one_tile = block.num_rows <= TILE_ROWS;
    const int64_t most = is_one_tile ? inputs : INTEGER_CHUNK;
    for (int64_t k = 0, n; k < inputs; k += n) {
        const int64_t rest = group_len <= most ? inputs - k : group_len - k % group_len;  // of all, or of the group
        n = min64(group_len <= most ? most / group_len * group_len : most, rest);
        const Span span = span_of(weight, block, k, n);
        const Ahead next = ahead_of(weight, block, k, n);
        if (weight.format == WeightFormat::int8) {
            multiply_rows<false>(rows, block, all_groups, k, span, next);
        } else if (block.num_rows <= IN_PLACE_ROWS) {
            multiply_rows<true>(rows, block, all_groups, k, span, next);
        } else {
            multiply_rows<false>(rows, block, all_groups, k, expanded(span, block), next);
        }
    }
    for (int64_t r = 0; r < block.num_rows; ++r) {
        const Vec scale = broadcast(rows.scales[block.first_row + r]);
        float *sums = block.sums + r * GROUP_WIDTH;
        for (int i = 0; i < block.num_panels * PANEL; i += LANES) store(sums + i, mul(load(sums + i), scale));
    }
}

}  // namespace quire::QUIRE_ISA
