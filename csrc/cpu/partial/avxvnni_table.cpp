// The table of an instruction set that differs from AVX2 by products of bytes: AVX-VNNI, with 256 bits.
#include "extension.hpp"

namespace quire::QUIRE_ISA {

const KernelTable &extended_table() {
    static const KernelTable made = extend(avx2::table, [](KernelTable &table) {
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
