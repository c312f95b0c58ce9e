// AMX emulated on plain memory, for tests on machines without it: what Intel's manual says that each instruction does
// ("Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2: LDTILECFG, TILELOADD, TILELOADDT1, TDPBF16PS, TDPBSUD, TDPBSSD),
// and what it refuses, where this stops with an illegal instruction as the processor does.
#pragma once

namespace quire::QUIRE_ISA {

struct EmulatedTile {
    int rows, row_bytes;  // 0: not in use
    alignas(64) uint8_t bytes[16][64];
};

struct EmulatedUnit {
    bool is_configured;
    EmulatedTile tiles[NUM_TILES];
};

static thread_local EmulatedUnit unit;

QINLINE void require(bool is_so) {
    if (!is_so) __builtin_trap();
}

template <int TILE>
QINLINE EmulatedTile &tile() {
    static_assert(0 <= TILE && TILE < NUM_TILES);
    require(unit.is_configured && unit.tiles[TILE].rows > 0);
    return unit.tiles[TILE];
}

static void configure_tiles(const TileConfig &config) {
    require(config.palette == 1 && config.start_row == 0);
    for (const uint8_t byte : config.reserved) require(byte == 0);
    for (int i = 0; i < 8; ++i) require(config.no_row_bytes[i] == 0 && config.no_rows[i] == 0);
    memset(&unit, 0, sizeof unit);
    unit.is_configured = true;
    for (int i = 0; i < NUM_TILES; ++i) {
        require(config.rows[i] <= 16 && config.row_bytes[i] <= 64 && (config.rows[i] == 0) == (config.row_bytes[i] == 0));
        unit.tiles[i].rows = config.rows[i];
        unit.tiles[i].row_bytes = config.row_bytes[i];
    }
}
static void release_tiles() { memset(&unit, 0, sizeof unit); }

template <int TILE>
static void load_tile(const void *data, int64_t stride) {
    EmulatedTile &to = tile<TILE>();
    memset(to.bytes, 0, sizeof to.bytes);
    for (int r = 0; r < to.rows; ++r) memcpy(to.bytes[r], static_cast<const uint8_t *>(data) + r * stride, to.row_bytes);
}
template <int TILE>
static void stream_tile(const void *data, int64_t stride) {
    load_tile<TILE>(data, stride);
}
template <int TILE>
static void store_tile(void *data, int64_t stride) {
    const EmulatedTile &from = tile<TILE>();
    for (int r = 0; r < from.rows; ++r) memcpy(static_cast<uint8_t *>(data) + r * stride, from.bytes[r], from.row_bytes);
}
template <int TILE>
static void zero_tile() {
    memset(tile<TILE>().bytes, 0, sizeof(EmulatedTile::bytes));
}

// The shapes that a product needs; tiles must differ.
static void require_product(const EmulatedTile &sums, const EmulatedTile &x, const EmulatedTile &weights) {
    require(&sums != &x && &sums != &weights && &x != &weights);
    require(sums.rows == x.rows && sums.row_bytes == weights.row_bytes && x.row_bytes == 4 * weights.rows);
    require(sums.row_bytes % 4 == 0);
}

// Subnormal numbers count as zero and come out as zero.
QINLINE float without_subnormal(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) < 0x00800000u) bits &= 0x80000000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}
QINLINE float float_of(uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return without_subnormal(x);
}
QINLINE float fused(float x, float w, float sum) { return without_subnormal(__builtin_fmaf(x, w, sum)); }

// Two chains of fused multiply-adds, one for the first and one for the second numbers of all words; their sum is rounded,
// and added to the tile's, which is rounded again.
static void add_row_of_pairs(float *sums, const uint16_t *x, const EmulatedTile &weights) {
    const int num_columns = weights.row_bytes / 4;
    float first[16] = {}, second[16] = {};
    for (int k = 0; k < weights.rows; ++k) {
        uint16_t w[32];
        memcpy(w, weights.bytes[k], sizeof w);
        const float x_first = float_of(x[2 * k]), x_second = float_of(x[2 * k + 1]);
        for (int n = 0; n < num_columns; ++n) {
            first[n] = fused(x_first, float_of(w[2 * n]), first[n]);
            second[n] = fused(x_second, float_of(w[2 * n + 1]), second[n]);
        }
    }
    for (int n = 0; n < num_columns; ++n) {
        const float both = without_subnormal(first[n] + second[n]);
        sums[n] = without_subnormal(without_subnormal(sums[n]) + both);
    }
}

template <int SUMS, int X, int WEIGHTS>
static void add_pairs() {
    EmulatedTile &sums = tile<SUMS>(), &x = tile<X>(), &weights = tile<WEIGHTS>();
    require_product(sums, x, weights);
    for (int r = 0; r < sums.rows; ++r) {
        float row[16];
        uint16_t inputs[32];
        memcpy(row, sums.bytes[r], sizeof row);
        memcpy(inputs, x.bytes[r], sizeof inputs);
        add_row_of_pairs(row, inputs, weights);
        memcpy(sums.bytes[r], row, sizeof row);
    }
}

// Exact, modulo 2^32. Byte: of the weights.
template <typename Byte, int SUMS, int X, int WEIGHTS>
static void add_quads_of() {
    EmulatedTile &sums = tile<SUMS>(), &x = tile<X>(), &weights = tile<WEIGHTS>();
    require_product(sums, x, weights);
    for (int r = 0; r < sums.rows; ++r) {
        uint32_t row[16];
        memcpy(row, sums.bytes[r], sizeof row);
        for (int k = 0; k < weights.rows; ++k) {
            int8_t inputs[4];
            memcpy(inputs, x.bytes[r] + 4 * k, sizeof inputs);
            for (int n = 0; n < sums.row_bytes / 4; ++n) {
                Byte w[4];
                memcpy(w, weights.bytes[k] + 4 * n, sizeof w);
                row[n] += static_cast<uint32_t>(inputs[0] * w[0] + inputs[1] * w[1] + inputs[2] * w[2] + inputs[3] * w[3]);
            }
        }
        memcpy(sums.bytes[r], row, sizeof row);
    }
}
template <int SUMS, int X, int WEIGHTS>
static void add_quads() {
    add_quads_of<uint8_t, SUMS, X, WEIGHTS>();
}
template <int SUMS, int X, int WEIGHTS>
static void add_signed_quads() {
    add_quads_of<int8_t, SUMS, X, WEIGHTS>();
}

}  // namespace quire::QUIRE_ISA
