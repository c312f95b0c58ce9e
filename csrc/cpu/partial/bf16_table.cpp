// The table of an instruction set that differs from AVX512-VNNI by products of bfloat16, in the projections and in attention.
#include "extension.hpp"

namespace quire::QUIRE_ISA {

void gemm_integers(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    avx512vnni::gemm_integers(weight, rows, block);
}

// As the loops of isa/probe.cpp.
static int64_t probe_pairs(int64_t rounds) {
    constexpr int CHAINS = 16;
    Vec sums[CHAINS];
    Bits pair = broadcast_bits(0x3f803f80u);
    asm volatile("" : "+x"(pair));
    QUNROLL
    for (int c = 0; c < CHAINS; ++c) sums[c] = broadcast(0.0f);
    for (int64_t i = 0; i < rounds; ++i) {
        QUNROLL
        for (int c = 0; c < CHAINS; ++c) {
            sums[c] = dot_bf16(sums[c], pair, pair);
            asm volatile("" : "+x"(sums[c]));
        }
    }
    return rounds * CHAINS * LANES * 4;
}

const KernelTable &extended_table() {
    static const KernelTable made = extend(avx512vnni::extended_table(), [](KernelTable &table) {
        table.has_bf16_dots = HAS_BF16_DOTS;
        table.convert_rows = convert_rows;
        table.gemm = gemm;
        table.store_sums = store_sums;
        table.store_gated = store_gated;
        table.max_task_rows = max_rows_by_pairs;
        table.attention_scratch = attention_scratch;
        table.attend = attend_by_pairs;
        table.probe_pairs = probe_pairs;
    });
    return made;
}

}  // namespace quire::QUIRE_ISA
