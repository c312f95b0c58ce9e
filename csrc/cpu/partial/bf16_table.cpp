// The table of an instruction set that differs from AVX512-VNNI in the projections only (products of bfloat16).
#include "../isa/kernels.hpp"

#define QUIRE_STRING(name) #name
#define QUIRE_NAME(name) QUIRE_STRING(name)

namespace quire::avx512vnni {
extern const KernelTable table;
}

namespace quire::QUIRE_ISA {

static KernelTable make_table() {
    KernelTable made = avx512vnni::table;
    made.name = QUIRE_NAME(QUIRE_ISA);
    made.has_bf16_dots = HAS_BF16_DOTS;
    made.convert_rows = convert_rows;
    made.gemm = gemm;
    made.store_sums = store_sums;
    made.store_gated = store_gated;
    return made;
}

const KernelTable &extended_table() {
    static const KernelTable made = make_table();
    return made;
}

}  // namespace quire::QUIRE_ISA
