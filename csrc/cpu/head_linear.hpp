// Heads that are multiplied each by a weight of its own, for native callers (the step, the bindings).
#pragma once

#include "dispatch.hpp"
#include "weight.hpp"

namespace quire {

// A weight [heads * N, K], in which one head's outputs follow another's, and rows of heads [T, heads * size].
struct HeadWeights {
    LinearWeight weight;
    int64_t num_heads, size;  // size: of a head of x, K or more

    int64_t num_outputs() const { return weight.num_outputs / num_heads; }  // N
    int64_t rest() const { return size - weight.num_inputs; }
    int64_t out_size() const { return num_outputs() + rest(); }
    LinearWeight of(int64_t head) const { return weight.part(head * num_outputs(), num_outputs()); }
};

// Whether the weight holds floats, and each head's outputs begin with a panel.
bool are_whole(const HeadWeights &heads);

// out [T, heads * (N + rest)]: of each head of x [T, heads * size] the product of its first K elements with the head's weight,
// and then what is behind them. A row's bits depend on nothing but the row, the weight and the instruction set. `out` is no
// part of x.
void head_linear(const HeadWeights &heads, const void *x, DType dtype, int64_t num_tokens, void *out);

}  // namespace quire
