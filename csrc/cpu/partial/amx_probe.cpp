// What the unit can do: products of whole tiles and nothing else, for the roofline of `quire bench kernels`. Four sums in turns
// cover the latency of a product.
#include "amx_tiles.hpp"
#include "extension.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t PRODUCTS = 4;  // of a round
constexpr int64_t WORDS_OF_PRODUCT = 16 * 16 * 16;

template <typename Multiply>
static void repeat(int64_t rounds, const Multiply &multiply) {
    const WholeTiles configured;
    for (int64_t i = 0; i < rounds; ++i) multiply();
}

int64_t probe_pair_tiles(int64_t rounds) {
    repeat(rounds, [] { add_pairs<0, 4, 6>(), add_pairs<1, 4, 7>(), add_pairs<2, 5, 6>(), add_pairs<3, 5, 7>(); });
    return rounds * PRODUCTS * WORDS_OF_PRODUCT * 2 * 2;
}

int64_t probe_quad_tiles(int64_t rounds) {
    repeat(rounds, [] { add_quads<0, 4, 6>(), add_quads<1, 4, 7>(), add_quads<2, 5, 6>(), add_quads<3, 5, 7>(); });
    return rounds * PRODUCTS * WORDS_OF_PRODUCT * 4 * 2;
}

}  // namespace quire::QUIRE_ISA
