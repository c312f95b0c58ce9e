// Projections: what native callers (the program, the bindings) may call. Weights are described in weight.hpp; the
// arithmetic is in isa/gemm*.cpp. Every call may use the whole team of threads, so make none inside a parallel region.
#pragma once

#include <cstdint>

#include "dispatch.hpp"
#include "weight.hpp"

namespace quire {

// out [T, N] = x [T, K] @ weight.T + bias: sums in float32, rounded once. T = 0 is fine. A row's bits depend on nothing
// but the row, the weight and the instruction set (with int8 inputs, not even on that).
void linear(const LinearWeight &weight, const void *x, DType x_dtype, int64_t num_rows, void *out, DType out_dtype);

// The same for a gated MLP, whose weight [2 F, K] has the gate's rows before the other ones:
// out [T, F] = activation(gate) * up, computed on the float32 sums and rounded once.
void linear_gated(const LinearWeight &weight, Activation activation, const void *x, DType x_dtype, int64_t num_rows,
                  void *out, DType out_dtype);

}  // namespace quire
