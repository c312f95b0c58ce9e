// The table of an instruction set that differs from AVX512-VNNI in the projections only (products of bfloat16).
#include "extension.hpp"

namespace quire::QUIRE_ISA {

const KernelTable &extended_table() {
    static const KernelTable made = extend([](KernelTable &table) {
        table.has_bf16_dots = HAS_BF16_DOTS;
        table.convert_rows = convert_rows;
        table.gemm = gemm;
        table.store_sums = store_sums;
        table.store_gated = store_gated;
    });
    return made;
}

}  // namespace quire::QUIRE_ISA
