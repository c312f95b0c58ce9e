// The GEMM in integers: int8 inputs times int8 or int4 weights (layout in weight.hpp).
//
// The sum of a group's products is an exact 32-bit integer, so neither the instructions nor the order in which it is
// made can change it; groups are then added in ascending order in float32, a multiplication and an addition each, which
// every instruction set rounds alike. So results are equal bit for bit everywhere.
//
// Weights are stored as unsigned bytes, value + zero point: a group's sum starts at -zero * (sum of the row's inputs).
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

// Panels side by side in a tile of `rows`, as the registers allow.
constexpr int max_panels(int rows) {
    if (LANES == 16) return 4;
    if (LANES == 8) return rows <= 2 ? 2 : 1;
    return 1;
}

// A piece of a group: weights of `num_inputs` inputs from `weights` on, in each of some panels.
struct Piece {
    const uint8_t *weights;
    int64_t stride;  // bytes from a panel's weights to the next one's
    const float *scales;
    int64_t header_stride;  // floats from a panel's scales to the next one's
    int num_panels;
    int64_t num_inputs;
    int64_t group;
    bool is_first, is_last;  // of its group
    bool has_offsets;
    int32_t zero_point;
};

struct RowTile {
    const Input *x;  // at the piece's first input
    int64_t stride;
    const int32_t *group_sums;  // at the piece's group
    int64_t sums_stride;
    float *sums;       // [rows][GROUP_WIDTH]
    int32_t *partial;  // likewise
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
QINLINE void multiply_int8(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const RowTile &rows, const uint8_t *w, int64_t stride,
                           int64_t n) {
    const Input *x = rows.x;
    for (int64_t k = 0; k < n; k += 4, x += 4, w += 4 * PANEL) {
        Quad weights[PANELS * PANEL_VECS];
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
            weights[v] = unpack(load_bits(w + v / PANEL_VECS * stride + v % PANEL_VECS * 4 * LANES));
        }
        accumulate<ROWS>(acc, x, rows.stride, weights);
    }
}

template <int ROWS, int PANELS>
QINLINE void multiply_int4(Bits (&acc)[ROWS][PANELS * PANEL_VECS], const RowTile &rows, const uint8_t *w, int64_t stride,
                           int64_t n) {
    constexpr int VECS = PANELS * PANEL_VECS;
    const Bits mask = broadcast_bits(0x0f0f0f0fu);
    const Input *x = rows.x;
    for (int64_t k = 0; k < n; k += 8, x += 8, w += 4 * PANEL) {
        Bits pairs[VECS];
        Quad weights[VECS];
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            pairs[v] = load_bits(w + v / PANEL_VECS * stride + v % PANEL_VECS * 4 * LANES);
            weights[v] = unpack(and_bits(pairs[v], mask));
        }
        accumulate<ROWS>(acc, x, rows.stride, weights);
        QUNROLL
        for (int v = 0; v < VECS; ++v) weights[v] = unpack(and_bits(shift_right<4>(pairs[v]), mask));
        accumulate<ROWS>(acc, x + 4, rows.stride, weights);
    }
}

// The group is complete: sums = (first group ? 0 : sums) + scale * integers (+ offset * sum of the inputs).
template <int ROWS, int PANELS>
QINLINE void add_group(const Bits (&acc)[ROWS][PANELS * PANEL_VECS], const Piece &piece, const float *scales,
                       const RowTile &rows, float *sums) {
    QUNROLL
    for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
        const float *header = scales + v / PANEL_VECS * piece.header_stride + v % PANEL_VECS * LANES;
        const Vec scale = load(header);
        QUNROLL
        for (int r = 0; r < ROWS; ++r) {
            float *to = sums + r * GROUP_WIDTH + v * LANES;
            const Vec before = piece.group == 0 ? broadcast(0.0f) : load(to);
            Vec total = add(before, mul(scale, to_float(acc[r][v])));
            if (piece.has_offsets) {
                const float input_sum = static_cast<float>(rows.group_sums[r * rows.sums_stride]);
                total = add(total, mul(load(header + PANEL), broadcast(input_sum)));
            }
            store(to, total);
        }
    }
}

template <bool IS_INT4, int ROWS, int PANELS>
static void tile(const Piece &piece, const RowTile &rows, int first) {
    constexpr int VECS = PANELS * PANEL_VECS;
    float *sums = rows.sums + first * PANEL;
    int32_t *partial = rows.partial + first * PANEL;
    Bits acc[ROWS][VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const int32_t start = -piece.zero_point * rows.group_sums[r * rows.sums_stride];
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            acc[r][v] = piece.is_first ? broadcast_bits(static_cast<uint32_t>(start))
                                       : load_bits(partial + r * GROUP_WIDTH + v * LANES);
        }
    }
    const uint8_t *w = piece.weights + first * piece.stride;
    if constexpr (IS_INT4) {
        multiply_int4<ROWS, PANELS>(acc, rows, w, piece.stride, piece.num_inputs);
    } else {
        multiply_int8<ROWS, PANELS>(acc, rows, w, piece.stride, piece.num_inputs);
    }
    if (piece.is_last) {
        return add_group<ROWS, PANELS>(acc, piece, piece.scales + first * piece.header_stride, rows, sums);
    }
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            store(reinterpret_cast<float *>(partial + r * GROUP_WIDTH + v * LANES), as_float(acc[r][v]));
        }
    }
}

template <bool IS_INT4, int ROWS>
static void tiles(const Piece &piece, const RowTile &rows) {
    constexpr int MAX = max_panels(ROWS);
    for (int done = 0; done < piece.num_panels;) {
        const int now = piece.num_panels - done < MAX ? piece.num_panels - done : MAX;
        if (now == 1) tile<IS_INT4, ROWS, 1>(piece, rows, done);
        if constexpr (MAX >= 2)
            if (now == 2) tile<IS_INT4, ROWS, 2>(piece, rows, done);
        if constexpr (MAX >= 3)
            if (now == 3) tile<IS_INT4, ROWS, 3>(piece, rows, done);
        if constexpr (MAX >= 4)
            if (now == 4) tile<IS_INT4, ROWS, 4>(piece, rows, done);
        done += now;
    }
}

template <bool IS_INT4>
static void row_tile(int height, const Piece &piece, const RowTile &rows) {
    switch (height) {
        case 1:
            return tiles<IS_INT4, 1>(piece, rows);
        case 2:
            return tiles<IS_INT4, 2>(piece, rows);
        case 3:
            return tiles<IS_INT4, 3>(piece, rows);
#if defined(__AVX2__)
        case 4:
            return tiles<IS_INT4, 4>(piece, rows);
        case 5:
            return tiles<IS_INT4, 5>(piece, rows);
        case 6:
            return tiles<IS_INT4, 6>(piece, rows);
#endif
    }
}

// All rows of the block against one piece that begins at input k.
template <bool IS_INT4>
static void multiply_rows(const InputRows &rows, const GemmBlock &block, int64_t num_groups, int64_t k,
                          const Piece &piece) {
    const Input *x = static_cast<const Input *>(rows.data) + block.first_row * rows.stride + k;
    const int32_t *group_sums = rows.sums + block.first_row * num_groups + piece.group;
    for (int64_t r = 0; r < block.num_rows; r += TILE_ROWS) {
        const int height = static_cast<int>(min64(TILE_ROWS, block.num_rows - r));
        const RowTile tile{x + r * rows.stride, rows.stride, group_sums + r * num_groups, num_groups,
                           block.sums + r * GROUP_WIDTH, block.partial + r * GROUP_WIDTH};
        row_tile<IS_INT4>(height, piece, tile);
    }
}

void gemm_integers(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    const int64_t inputs = weight.padded_inputs(), group_len = weight.padded_group();
    const int64_t chunk = block.num_rows <= TILE_ROWS ? inputs : 4 * CHUNK;
    const int64_t header = weight.header_bytes();
    const char *panels = weight.panel(block.first_panel);
    for (int64_t k = 0, n; k < inputs; k += n) {
        const int64_t group = k / group_len, from = k - group * group_len;
        n = min64(chunk, group_len - from);
        const char *data = panels + group * weight.group_bytes();
        const Piece piece{reinterpret_cast<const uint8_t *>(data + header + from * PANEL * weight.bits() / 8),
                          weight.panel_bytes(),
                          reinterpret_cast<const float *>(data),
                          weight.panel_bytes() / int64_t{sizeof(float)},
                          block.num_panels,
                          n,
                          group,
                          from == 0,
                          from + n == group_len,
                          weight.has_offsets,
                          static_cast<int32_t>(weight.zero_point())};
        if (weight.format == WeightFormat::int8) {
            multiply_rows<false>(rows, block, weight.num_groups(), k, piece);
        } else {
            multiply_rows<true>(rows, block, weight.num_groups(), k, piece);
        }
    }
    for (int64_t r = 0; r < block.num_rows; ++r) {
        const Vec scale = broadcast(rows.scales[block.first_row + r]);
        float *sums = block.sums + r * GROUP_WIDTH;
        for (int i = 0; i < block.num_panels * PANEL; i += LANES) store(sums + i, mul(load(sums + i), scale));
    }
}

}  // namespace quire::QUIRE_ISA
