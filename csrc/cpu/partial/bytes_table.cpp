// The table of an instruction set that differs from another's by products of bytes: AVX-VNNI with 256 bits from AVX2,
// AVX512-VNNI from AVX-512, Arm's extensions from NEON.
#include "extension.hpp"

namespace quire::QUIRE_ISA {

const KernelTable &extended_table() {
#if defined(QUIRE_NEON)
    const KernelTable &base = neon::table;
#elif defined(__AVX512F__)
    const KernelTable &base = avx512::table;
#else
    const KernelTable &base = avx2::table;
#endif
    static const KernelTable made = extend(base, [](KernelTable &table) {
        table.int8_tile_rows = INT8_TILE_ROWS;
        table.int8_input_bytes = INT8_INPUT_BYTES;
        table.int4_input_bytes = INT4_INPUT_BYTES;
        table.convert_rows = convert_rows;
        table.gemm = gemm;
        table.probe_integers = probe_integers;
        table.probe_half_bytes = probe_half_bytes;
    });
    return made;
}

}  // namespace quire::QUIRE_ISA
