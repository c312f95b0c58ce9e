// Mixtures of experts: which experts a token goes to, and what they make of it, for native callers (the step, the bindings).
// Every call may use the whole team of threads.
#pragma once

#include "dispatch.hpp"
#include "expert_pool.hpp"
#include "weight.hpp"

namespace quire {

// The experts of a layer: two weights in which one expert's outputs follow another's.
struct ExpertLayer {
    LinearWeight up;    // [E * 2 F, H]: of each expert the gate, then `up`
    LinearWeight down;  // [E * H, F]
    int64_t num_experts;
    Activation activation;
    ExpertPool *pool = nullptr;  // where the weights have no memory: what has some of them in memory
    int64_t number = 0;          // of the layer there

    int64_t hidden() const { return up.num_inputs; }
    int64_t inner() const { return down.num_inputs; }
    LinearWeight up_of(int64_t expert) const { return up.part(expert * 2 * inner(), 2 * inner()); }
    LinearWeight down_of(int64_t expert) const { return down.part(expert * hidden(), hidden()); }
};

// Whether the weights fit together, and each expert's outputs begin with a panel.
bool are_whole(const ExpertLayer &layer);

// std::invalid_argument, in the name of `function`, unless the experts are in memory, or a pool's.
void check_memory(const char *function, const ExpertLayer &layer);

// ids int64 [T, k] and weights float32 [T, k] from logits float32 [T, E].
void choose_experts(const ExpertRouting &routing, const float *logits, int64_t num_tokens, int64_t *ids, float *weights);

// out [T, H] = the sum over j of weights[t, j] * down(activation(gate(x[t])) * up(x[t])) of expert ids[t, j], in the order of
// j, from zero. An id that is no expert's counts nothing. A row's bits depend on nothing but the row, its choices, the
// weights and the instruction set. `out` is no part of x. ExpertFileError where a pool cannot read an expert.
void apply_experts(const ExpertLayer &layer, const ExpertRouting &routing, const int64_t *ids, const float *weights,
                   const void *x, DType dtype, int64_t num_tokens, void *out);

// Both, of what a router weight [E, H] says of x.
void mix_experts(const ExpertLayer &layer, const ExpertRouting &routing, const LinearWeight &router, const void *x, DType dtype,
                 int64_t num_tokens, void *out);

}  // namespace quire
