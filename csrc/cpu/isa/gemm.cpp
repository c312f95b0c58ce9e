// The GEMM: blocks of `x @ weight.T`, on packed rows and packed weights (layouts in dispatch.hpp).
//
// Each output element is one chain of fused multiply-adds over the inputs in ascending order, in one lane of one
// accumulator, whatever the shape of the register tile, of the block or of the batch: that is what makes rows
// invariant. Sums go through memory between blocks of inputs, as float32, which changes nothing.
//
// The register tile is `rows` x `panels`: a vector of weights is loaded once for all rows, an element of x once for all
// panels (the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

constexpr int PANEL_VECS = PANEL / LANES;

// Panels side by side in a tile of `rows`: as many as the registers hold, and at least two chains' worth for one row,
// whose speed is bound by memory.
constexpr int max_panels(int rows) {
    if (LANES == 16) return 4;
    if (LANES == 8) return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    return rows == 1 ? 2 : 1;
}

template <int ROWS, int VECS>
QINLINE void accumulate(Vec (&sums)[ROWS][VECS], const float *x, const Vec (&w)[VECS]) {
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const Vec value = broadcast(x[r]);
        QUNROLL
        for (int v = 0; v < VECS; ++v) sums[r][v] = fma(value, w[v], sums[r][v]);
    }
}

template <int ROWS, int PANELS>
QINLINE void multiply(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const float *x, const float *w, int64_t stride,
                      int64_t n) {
    for (int64_t k = 0; k < n; ++k, x += ROWS, w += PANEL) {
        Vec weights[PANELS * PANEL_VECS];
        QUNROLL
        for (int p = 0; p < PANELS; ++p) {
            QUNROLL
            for (int v = 0; v < PANEL_VECS; ++v) weights[p * PANEL_VECS + v] = load(w + p * stride + v * LANES);
        }
        accumulate<ROWS>(sums, x, weights);
    }
}

// A 32-bit word holds the weights of inputs k (low half) and k + 1 (high half): a shift and a mask make them float32.
template <int ROWS, int PANELS>
QINLINE void multiply(Vec (&sums)[ROWS][PANELS * PANEL_VECS], const float *x, const bf16 *w, int64_t stride,
                      int64_t n) {
    for (int64_t k = 0; k < n; k += 2, x += 2 * ROWS, w += 2 * PANEL) {
        Bits pairs[PANELS * PANEL_VECS];
        Vec weights[PANELS * PANEL_VECS];
        QUNROLL
        for (int p = 0; p < PANELS; ++p) {
            QUNROLL
            for (int v = 0; v < PANEL_VECS; ++v) {
                pairs[p * PANEL_VECS + v] = load_bits(w + p * stride + v * 2 * LANES);
            }
        }
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) weights[v] = as_float(shift_left<16>(pairs[v]));
        accumulate<ROWS>(sums, x, weights);
        QUNROLL
        for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
            weights[v] = as_float(and_bits(pairs[v], broadcast_bits(0xffff0000u)));
        }
        accumulate<ROWS>(sums, x + ROWS, weights);
    }
}

// sums [ROWS][row stride GROUP_PANELS * PANEL] (+)= x [n][ROWS] times `PANELS` panels that lie `stride` elements apart.
template <typename W, int ROWS, int PANELS>
static void tile(const float *x, const W *w, int64_t stride, int64_t n, float *sums, bool is_first) {
    constexpr int VECS = PANELS * PANEL_VECS;
    Vec acc[ROWS][VECS];
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            acc[r][v] = is_first ? broadcast(0.0f) : load(sums + r * GROUP_PANELS * PANEL + v * LANES);
        }
    }
    multiply<ROWS, PANELS>(acc, x, w, stride, n);
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) store(sums + r * GROUP_PANELS * PANEL + v * LANES, acc[r][v]);
    }
}

template <typename W, int ROWS>
static void panels(const float *x, const W *w, int64_t stride, int num_panels, int64_t n, float *sums, bool is_first) {
    constexpr int MAX = max_panels(ROWS);
    for (int done = 0; done < num_panels;) {
        const int now = num_panels - done < MAX ? num_panels - done : MAX;
        const W *from = w + done * stride;
        float *to = sums + done * PANEL;
        if (now == 1) tile<W, ROWS, 1>(x, from, stride, n, to, is_first);
        if constexpr (MAX >= 2)
            if (now == 2) tile<W, ROWS, 2>(x, from, stride, n, to, is_first);
        if constexpr (MAX >= 3)
            if (now == 3) tile<W, ROWS, 3>(x, from, stride, n, to, is_first);
        if constexpr (MAX >= 4)
            if (now == 4) tile<W, ROWS, 4>(x, from, stride, n, to, is_first);
        done += now;
    }
}

template <typename W>
static void tile_rows(int rows, const float *x, const W *w, int64_t stride, int num_panels, int64_t n, float *sums,
                      bool is_first) {
    switch (rows) {
        case 1:
            return panels<W, 1>(x, w, stride, num_panels, n, sums, is_first);
        case 2:
            return panels<W, 2>(x, w, stride, num_panels, n, sums, is_first);
        case 3:
            return panels<W, 3>(x, w, stride, num_panels, n, sums, is_first);
#if defined(__AVX2__)
        case 4:
            return panels<W, 4>(x, w, stride, num_panels, n, sums, is_first);
        case 5:
            return panels<W, 5>(x, w, stride, num_panels, n, sums, is_first);
        case 6:
            return panels<W, 6>(x, w, stride, num_panels, n, sums, is_first);
#endif
    }
}

template <typename W>
static void sum_block(const PackedWeight &weight, const PackedRows &rows, const GemmBlock &block) {
    const int64_t inputs = weight.padded_inputs(), stride = weight.panel_elements();
    const W *panel = static_cast<const W *>(weight.data) + block.first_panel * stride;
    for (int64_t k = 0; k < inputs; k += block.k_block) {
        const int64_t n = min64(block.k_block, inputs - k);
        for (int64_t r = 0; r < block.num_rows; r += TILE_ROWS) {
            const int64_t row = block.first_row + r;
            const int width = static_cast<int>(min64(TILE_ROWS, rows.num_rows - row));
            const float *x = rows.data + row * inputs + k * width;
            tile_rows<W>(width, x, panel + k * PANEL, stride, block.num_panels, n,
                         block.sums + r * GROUP_PANELS * PANEL, k == 0);
        }
    }
}

template <typename T>
static void store_block(const PackedWeight &weight, const GemmBlock &block, T *out) {
    const int64_t first = block.first_panel * PANEL;
    const int64_t width = min64(int64_t{block.num_panels} * PANEL, weight.num_outputs - first);
    for (int64_t r = 0; r < block.num_rows; ++r) {
        const float *sums = block.sums + r * GROUP_PANELS * PANEL;
        T *to = out + (block.first_row + r) * weight.num_outputs + first;
        for (int64_t i = 0; i < width; i += LANES) {
            Vec sum = load(sums + i);
            if (weight.bias != nullptr) sum = add(sum, load_up_to(weight.bias + first + i, width - i));
            store_up_to(to + i, sum, width - i);
        }
    }
}

void gemm(const PackedWeight &weight, const PackedRows &rows, const GemmBlock &block, void *out, DType out_dtype) {
    if (weight.dtype == DType::f32) {
        sum_block<float>(weight, rows, block);
    } else {
        sum_block<bf16>(weight, rows, block);
    }
    if (out_dtype == DType::f32) {
        store_block(weight, block, static_cast<float *>(out));
    } else {
        store_block(weight, block, static_cast<bf16 *>(out));
    }
}

template <typename T>
static void pack_tile(const T *x, int64_t num_inputs, int64_t num_rows, int64_t padded_inputs, float *out) {
    for (int64_t r = 0; r < num_rows; ++r) {
        const T *row = x + r * num_inputs;
        for (int64_t k = 0; k < num_inputs; k += LANES) {
            float lanes[LANES];
            store(lanes, load_up_to(row + k, num_inputs - k));
            const int64_t n = min64(LANES, num_inputs - k);
            for (int64_t i = 0; i < n; ++i) out[(k + i) * num_rows + r] = lanes[i];
        }
        for (int64_t k = num_inputs; k < padded_inputs; ++k) out[k * num_rows + r] = 0.0f;
    }
}

// One tile of rows (num_rows <= TILE_ROWS), as float32.
void pack_rows(const void *x, DType dtype, int64_t num_inputs, int64_t num_rows, int64_t padded_inputs, float *out) {
    if (dtype == DType::f32) {
        pack_tile(static_cast<const float *>(x), num_inputs, num_rows, padded_inputs, out);
    } else {
        pack_tile(static_cast<const bf16 *>(x), num_inputs, num_rows, padded_inputs, out);
    }
}

}  // namespace quire::QUIRE_ISA
