// What the arithmetic units and the memory can do: loops that do nothing else, for the roofline of `quire bench kernels`.
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

// Enough independent chains to hide the latency of an instruction (4 to 5 cycles on two ports), and few enough for the
// registers.
constexpr int PROBE_CHAINS = NUM_REGISTERS == 32 ? 16 : 10;

QINLINE void keep(Vec &x) { QUIRE_KEEP(x); }
QINLINE void keep(Bits &x) { QUIRE_KEEP(x); }

int64_t probe_floats(int64_t rounds) {
    Vec sums[PROBE_CHAINS], factor = broadcast(1.0f);
    QUNROLL
    for (int c = 0; c < PROBE_CHAINS; ++c) sums[c] = broadcast(0.0f);
    keep(factor);
    for (int64_t i = 0; i < rounds; ++i) {
        QUNROLL
        for (int c = 0; c < PROBE_CHAINS; ++c) sums[c] = fma(factor, factor, sums[c]);
        QUNROLL
        for (int c = 0; c < PROBE_CHAINS; ++c) keep(sums[c]);
    }
    return rounds * PROBE_CHAINS * LANES * 2;
}

// Products of bytes, `num_products` instructions for each four inputs.
template <typename Multiply>
static int64_t probe_bytes(int64_t rounds, Bits inputs, int num_products, Multiply multiply) {
    Bits sums[PROBE_CHAINS], bytes = broadcast_bits(0x01010101u);
    QUNROLL
    for (int c = 0; c < PROBE_CHAINS; ++c) sums[c] = broadcast_bits(0);
    keep(bytes);
    for (int64_t i = 0; i < rounds; ++i) {
        for (int product = 0; product < num_products; ++product) {
            QUNROLL
            for (int c = 0; c < PROBE_CHAINS; ++c) {
                keep(inputs);  // equal products would be made once
                sums[c] = multiply(sums[c], bytes, inputs);
            }
        }
        QUNROLL
        for (int c = 0; c < PROBE_CHAINS; ++c) keep(sums[c]);
    }
    return rounds * PROBE_CHAINS * LANES * 4 * 2;
}

int64_t probe_integers(int64_t rounds) {
    const Input ones[4] = {1, 1, 1, 1};
    uint32_t words[QUAD_WORDS];
    memcpy(words, ones, sizeof words);
    return probe_bytes(rounds, load_inputs<0>(words, 1), NUM_PARTS,
                       [](Bits sums, Bits w, Bits x) { return multiply_add(sums, w, x); });
}

int64_t probe_half_bytes(int64_t rounds) {
#if NARROW_SUMS
    return probe_bytes(rounds, broadcast_bits(0x01010101u), 1,
                       [](Bits sums, Bits w, Bits x) { return multiply_add_narrow(sums, w, x); });
#else
    return probe_integers(rounds);
#endif
}

// Reads all of [data, data + num_bytes), a multiple of 64, as four streams.
void probe_read(const void *data, int64_t num_bytes) {
    const char *p = static_cast<const char *>(data);
    const int64_t quarter = num_bytes / 4 / 64 * 64;
    Bits sums = broadcast_bits(0);
    for (int64_t i = 0; i < quarter; i += 64) {
        for (int s = 0; s < 4; ++s) {
            QUNROLL
            for (int j = 0; j < 64; j += 4 * LANES) sums = or_bits(sums, load_bits(p + s * quarter + i + j));
        }
    }
    keep(sums);
}

}  // namespace quire::QUIRE_ISA
