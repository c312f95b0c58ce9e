// Mixtures of experts: which experts a token goes to, and what they make of it, for native callers (the step, the bindings).
// Every call may use the whole team of threads.
#pragma once

#include <vector>

#include "dispatch.hpp"
#include "expert_pool.hpp"
#include "gathering.hpp"
#include "lora.hpp"
#include "weight.hpp"

namespace quire {

// What one of several ranks has of a layer's experts: some of them, or some outputs of each.
struct HeldExperts {
    Gathering *gathering = nullptr;  // the other ranks; null: there are none
    int64_t first = 0, count = 0;    // experts
    Columns inner{0, 0};             // of each expert's activation, in elements
};

// The experts of a layer: two weights in which one expert's outputs follow another's.
struct ExpertLayer {
    LinearWeight up;    // [E * 2 F, H]: of each expert the gate, then `up`; of what this rank has
    LinearWeight down;  // [E * H, F]
    int64_t num_experts;
    Activation activation;
    ExpertPool *pool = nullptr;  // where the weights have no memory: what has some of them in memory
    int64_t number = 0;          // of the layer there
    HeldExperts held{};

    int64_t hidden() const { return up.num_inputs; }
    int64_t inner() const { return down.num_inputs; }
    int64_t num_held() const { return held.gathering == nullptr ? num_experts : held.count; }
    int64_t own_inner() const { return up.num_outputs / (2 * num_held()); }
    int64_t own_hidden() const { return down.num_outputs / num_held(); }
    bool holds(int64_t expert) const { return expert >= held.first && expert < held.first + num_held(); }
    // Where an expert's outputs begin.
    int64_t first_up(int64_t expert) const { return (expert - held.first) * 2 * own_inner(); }
    int64_t first_down(int64_t expert) const { return (expert - held.first) * own_hidden(); }
    LinearWeight up_of(int64_t expert) const { return up.part(first_up(expert), 2 * own_inner()); }
    LinearWeight down_of(int64_t expert) const { return down.part(first_down(expert), own_hidden()); }
};

// What adapters change of a layer, for the tokens that use one: weights by their numbers, or Operation::NO_ADAPTERS.
struct ExpertAdapters {
    const AdaptedRows *rows;  // null: none
    int64_t router, up, down;
};

// How the mixture that a step computes next chooses its experts.
struct NextMixture {
    static constexpr int64_t NONE = -1;

    int64_t number = NONE;  // of its layer in the pool; NONE: there is none, or it has another pool
    LinearWeight router{};
    ExpertRouting routing{};
};

// Whether the weights fit together, and each expert's outputs begin with a panel.
bool are_whole(const ExpertLayer &layer);

// std::invalid_argument, in the name of `function`, unless the experts are in memory, or a pool's.
void check_memory(const char *function, const ExpertLayer &layer);

// ids int64 [T, k] and weights float32 [T, k] from logits float32 [T, E].
void choose_experts(const ExpertRouting &routing, const float *logits, int64_t num_tokens, int64_t *ids, float *weights);

// Experts that the next layer of the pool will probably need, the likeliest ones first.
struct LikelyExperts {
    int64_t number;
    std::vector<int64_t> experts;
};

// out [T, H] = the sum over j of weights[t, j] * down(activation(gate(x[t])) * up(x[t])) of expert ids[t, j], in the order of
// j, from zero. An id that is no expert's counts nothing. A row's bits depend on nothing but the row, its choices, the
// weights and the instruction set. `out` is no part of x. ExpertFileError where a pool cannot read an expert. Adapters change
// the outputs that this rank has, and on every rank the same weights where ranks have some outputs of all experts. A pool is told of `likely` experts when it has brought those of x.
void apply_experts(const ExpertLayer &layer, const ExpertRouting &routing, const int64_t *ids, const float *weights,
                   const void *x, DType dtype, int64_t num_tokens, void *out, const ExpertAdapters &adapters,
                   const LikelyExperts *likely = nullptr);

// Of several ranks, all make the call, with the same choices. Where each has whole experts, `out` is whole; where each has
// some outputs of all, it has those of the hidden size that this rank's `down` has.
//
// Both, of what a router weight [E, H] says of x. `next`, where its experts are in the same pool, is what will be computed
// then: the pool is told which experts it would choose for x.
void mix_experts(const ExpertLayer &layer, const ExpertRouting &routing, const LinearWeight &router, const void *x, DType dtype,
                 int64_t num_tokens, void *out, const ExpertAdapters &adapters, const NextMixture &next);

}  // namespace quire
