// AMX: eight tiles of up to 16 rows of 64 bytes, and products of them. One function for each instruction that is used, with
// the numbers of the tiles as template arguments; on machines without the unit, tests act them out (amx_emulated.hpp).
//
// Written as assembly because GCC 12's own functions do not tell the compiler which memory they read, so that it may move
// or drop the stores before them.
#pragma once

#include "../isa/simd.hpp"

namespace quire::QUIRE_ISA {

constexpr int NUM_TILES = 8;

// What `ldtilecfg` reads. A tile that is not used has neither rows nor bytes.
struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[NUM_TILES], no_row_bytes[8];
    uint8_t rows[NUM_TILES], no_rows[8];
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace quire::QUIRE_ISA

#if defined(QUIRE_EMULATE_AMX)
#include "amx_emulated.hpp"
#else

namespace quire::QUIRE_ISA {

// Of the calling thread. Every tile becomes zero.
QINLINE void configure_tiles(const TileConfig &config) { asm volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
QINLINE void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

// Rows `stride` bytes apart.
template <int TILE>
QINLINE void load_tile(const void *data, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(data), "r"(stride), "i"(TILE) : "memory");
}
// The same for data that the first-level cache need not keep.
template <int TILE>
QINLINE void stream_tile(const void *data, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(data), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
QINLINE void store_tile(void *data, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(data), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
QINLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}

// sums += x times weights: x has a row's words side by side, weights have a word of 16 outputs in each row. A word is two
// bfloat16, or four bytes: signed ones of x, unsigned or signed ones of the weights. (AT&T syntax: the last source comes
// first.)
template <int SUMS, int X, int WEIGHTS>
QINLINE void add_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(WEIGHTS));
}
template <int SUMS, int X, int WEIGHTS>
QINLINE void add_quads() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(WEIGHTS));
}
template <int SUMS, int X, int WEIGHTS>
QINLINE void add_signed_quads() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(WEIGHTS));
}

}  // namespace quire::QUIRE_ISA

#endif

namespace quire::QUIRE_ISA {

// All tiles of 16 rows of 64 bytes, for as long as this lives; then the unit is as if it had never been used.
class WholeTiles {
   public:
    WholeTiles() {
        TileConfig config{};
        config.palette = 1;
        for (int i = 0; i < NUM_TILES; ++i) config.rows[i] = 16, config.row_bytes[i] = 64;
        configure_tiles(config);
    }
    WholeTiles(const WholeTiles &) = delete;
    WholeTiles &operator=(const WholeTiles &) = delete;
    ~WholeTiles() { release_tiles(); }
};

}  // namespace quire::QUIRE_ISA
