// Declarations of this instruction set's kernels; what they do is said in dispatch.hpp and where they are defined.
#pragma once

#include "../dispatch.hpp"
#include "integers.hpp"
#include "simd.hpp"

#define QUIRE_STRING(name) #name
#define QUIRE_NAME(name) QUIRE_STRING(name)

namespace quire::QUIRE_ISA {

constexpr const char *ISA_NAME = QUIRE_NAME(QUIRE_ISA);

// Rows per tile of the GEMM: with 2 panels of 16 outputs, 14 rows are 28 accumulators of AVX-512's 32 registers; with one
// panel, 6 are 12 of AVX2's 16 or 24 of NEON's 32; 3 rows are 12 of SSE2's 16.
constexpr int TILE_ROWS = LANES == 16 ? 14 : LANES == 8 || NUM_REGISTERS == 32 ? 6 : 3;
// For int8 weights multiplied in short pairs (integers.hpp) a register holds what products are added up with: 5 rows.
constexpr int INT8_TILE_ROWS = SHORT_PAIRS ? 5 : TILE_ROWS;
constexpr int PANEL_VECS = PANEL / LANES;

void convert_rows(const LinearWeight &weight, const void *x, DType dtype, int64_t first, int64_t last,
                  const InputRows &out, uint32_t *spare);
void gemm(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block);
void gemm_integers(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block);
void store_sums(const float *sums, const float *bias, const OutputBlock &out);
void store_gated(const float *gate, const float *up, const float *gate_bias, const float *up_bias,
                 Activation activation, const OutputBlock &out);

void lora_down(const LoraRows &task);
void lora_up(const LoraRows &task);
void choose_experts(const ExpertRouting &routing, const float *logits, int64_t first, int64_t last, int64_t *ids,
                    float *weights, float *spare);
void combine_experts(const ExpertSums &from, int64_t first, int64_t last, void *out, DType dtype, int64_t out_stride);

int64_t max_task_rows(const AttentionProblem &problem);
int64_t attention_scratch(int64_t head_size);
int64_t state_size(int64_t out_size);
void attend(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task, float *scratch);
void finish_rows(const AttentionProblem &problem, const AttentionTask &task, int num_partials, int64_t partial_stride,
                 float *scratch);
void store_kv_rows(const void *rows, DType dtype, int64_t num_rows, int64_t head_size, KVFormat format, void *to,
                   int64_t stride);

void rms_norm(const NormRows &norm, int64_t first, int64_t last);
void layer_norm(const NormRows &norm, int64_t first, int64_t last);
void add(const void *x, const void *y, void *out, DType dtype, int64_t first, int64_t last);
void scale(const void *x, float factor, void *out, DType dtype, int64_t first, int64_t last);
void gate_rows(const void *x, const void *gate, void *out, DType dtype, int64_t width, int64_t first, int64_t last);
bool is_finite(const void *x, DType dtype, int64_t first, int64_t last);
void activate(const void *x, void *out, DType dtype, Activation activation, int64_t first, int64_t last);
void gated(const void *gate_up, void *out, DType dtype, Activation activation, int64_t width, int64_t first,
           int64_t last);
void rope(const RopeRows &rope, int64_t first, int64_t last);
void prepare_heads(const HeadRows &rows, int64_t first, int64_t last);
void convert(const void *from, DType from_dtype, void *to, DType to_dtype, int64_t count);

int64_t probe_floats(int64_t rounds);
int64_t probe_integers(int64_t rounds);
int64_t probe_half_bytes(int64_t rounds);
void probe_read(const void *data, int64_t num_bytes);

}  // namespace quire::QUIRE_ISA
