// The table of an instruction set that differs from another's by products of bfloat16: AVX512-BF16 from AVX512-VNNI, in the
// projections and in attention; Arm's extension from i8mm, in the projections.
#include "extension.hpp"

namespace quire::QUIRE_ISA {

#if defined(QUIRE_NEON)
namespace base = neoni8mm;
#else
namespace base = avx512vnni;
#endif

void gemm_integers(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    base::gemm_integers(weight, rows, block);
}

#if defined(QUIRE_NEON)
constexpr int PROBE_PRODUCTS = 4 * LANES;
QINLINE void multiply_pair(Vec &sum, Bits pair) { asm volatile("bfmmla %0.4s, %1.8h, %1.8h" : "+w"(sum) : "w"(pair)); }
#else
constexpr int PROBE_PRODUCTS = 2 * LANES;
QINLINE void multiply_pair(Vec &sum, Bits pair) {
    sum = dot_bf16(sum, pair, pair);
    asm volatile("" : "+x"(sum));
}
#endif

// As the loops of isa/probe.cpp.
static int64_t probe_pairs(int64_t rounds) {
    constexpr int CHAINS = 16;
    Vec sums[CHAINS];
    const Bits pair = broadcast_bits(0x3f803f80u);
    QUNROLL
    for (int c = 0; c < CHAINS; ++c) sums[c] = broadcast(0.0f);
    for (int64_t i = 0; i < rounds; ++i) {
        QUNROLL
        for (int c = 0; c < CHAINS; ++c) multiply_pair(sums[c], pair);
    }
    return rounds * CHAINS * PROBE_PRODUCTS * 2;
}

const KernelTable &extended_table() {
    static const KernelTable made = extend(base::extended_table(), [](KernelTable &table) {
        table.has_bf16_dots = HAS_BF16_DOTS;
        table.convert_rows = convert_rows;
        table.gemm = gemm;
        table.store_sums = store_sums;
        table.store_gated = store_gated;
#if !defined(QUIRE_NEON)
        table.max_task_rows = max_rows_by_pairs;
        table.attention_scratch = attention_scratch;
        table.attend = attend_by_pairs;
#endif
        table.probe_pairs = probe_pairs;
    });
    return made;
}

}  // namespace quire::QUIRE_ISA
