// What the tables of instruction sets have in common that extend another's.
#pragma once

#include "../isa/kernels.hpp"

namespace quire::avx2 {
extern const KernelTable table;
}
namespace quire::neon {
extern const KernelTable table;
}
namespace quire::avx512 {
extern const KernelTable table;
}
namespace quire::avx512vnni {
const KernelTable &extended_table();
void gemm_integers(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block);
}
namespace quire::neoni8mm {
const KernelTable &extended_table();
void gemm_integers(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block);
}

namespace quire::QUIRE_ISA {

// amx_probe.cpp
int64_t probe_pair_tiles(int64_t rounds);
int64_t probe_quad_tiles(int64_t rounds);

// amx_attention.cpp
int64_t max_rows_by_tiles(const AttentionProblem &problem);
void attend_by_tiles(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                     float *scratch);

// bf16_attention.cpp
int64_t max_rows_by_pairs(const AttentionProblem &problem);
void attend_by_pairs(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                     float *scratch);

// For static initialisers: another set's table under this set's name, as `change(table)` leaves it.
template <typename Change>
static KernelTable extend(const KernelTable &base, Change change) {
    KernelTable made = base;
    made.name = ISA_NAME;
    change(made);
    return made;
}

}  // namespace quire::QUIRE_ISA
