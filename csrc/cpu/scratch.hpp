// Scratch memory that lives as long as its thread, so that a step allocates nothing.
#pragma once

#include <cstddef>

namespace quire {

// `count` floats, 64-byte aligned, contents undefined. One buffer per thread and `slot`, grown as needed: a second call
// with the same slot on the same thread takes the first one's memory.
float *scratch(int slot, size_t count);

enum ScratchSlot : int {
    INPUT_ROWS = 0,
    INPUT_SCALES = 1,
    GEMM_BLOCK = 2,
    ATTENTION = 3,
    PARTIAL_STATES = 4,
    LOGITS = 5,
    LORA_PRODUCTS = 6,
    GATE_PRODUCTS = 7,
    ROUTING = 8,
    EXPERT_ROWS = 9,
    EXPERT_SUMS = 10,
    HEAD_ROWS = 11,
    EXPERT_RESULTS = 12,
    EXPERT_INPUTS = 13,
    EXPERT_ACTIVATIONS = 14,
    NUM_SLOTS = 15
};

}  // namespace quire
