// Fills the table of the instruction set that this copy is compiled for.
#include "../sampling.hpp"
#include "kernels.hpp"

namespace quire::QUIRE_ISA {

extern const SamplingTable sampling_table;  // sampling.cpp

extern const KernelTable table;
const KernelTable table = {
    ISA_NAME,
    TILE_ROWS,
    INT8_TILE_ROWS,
    INT8_INPUT_BYTES,
    INT4_INPUT_BYTES,
    HAS_BF16_DOTS,
    nullptr,  // matrix_depth
    convert_rows,
    gemm,
    nullptr,  // end_gemms
    store_sums,
    store_gated,
    lora_down,
    lora_up,
    choose_experts,
    combine_experts,
    max_task_rows,
    attention_scratch,
    state_size,
    attend,
    finish_rows,
    store_kv_rows,
    rms_norm,
    layer_norm,
    add,
    scale,
    gate_rows,
    is_finite,
    activate,
    gated,
    rope,
    prepare_heads,
    convert,
    &sampling_table,
    probe_floats,
    probe_floats,  // pairs of bfloat16 are made float32
    probe_integers,
    probe_half_bytes,
    probe_read,
};

}  // namespace quire::QUIRE_ISA
