// What a mixture of experts needs beside projections: the choice of experts, and the sum of what they give.
#include <cmath>
#include <limits>

#include "kernels.hpp"

namespace quire::QUIRE_ISA {

// exp(x - most), of `count` elements.
static void exponentials(const float *x, int64_t count, float most, float *out) {
    for (int64_t i = 0; i < count; i += LANES) {
        store_up_to(out + i, exp(sub(load_up_to(x + i, count - i), broadcast(most))), count - i);
    }
}

// In ascending order, so that the number of lanes does not matter.
static float total(const float *x, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += x[i];
    return sum;
}

// The largest `count` of a row, larger first, the lowest id first among equals: a sorted list that most elements do not enter.
static void find_largest(const float *row, int64_t num_experts, int64_t count, int64_t *ids, float *values) {
    int64_t found = 0;
    for (int64_t i = 0; i < num_experts; ++i) {
        if (found == count && !(row[i] > values[count - 1])) continue;
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && row[i] > values[at - 1]; --at) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = row[i];
        ids[at] = i;
    }
}

static void sigmoids(const float *x, int64_t count, float *out) {
    const Vec one = broadcast(1.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        store_up_to(out + i, div(one, add(one, exp(negate(load_up_to(x + i, count - i))))), count - i);
    }
}

// What a group counts as: its largest value, or the sum of its largest two.
static float group_value(const float *values, int64_t size, bool sums_best_two) {
    float best = -__builtin_inff(), second = best;
    for (int64_t i = 0; i < size; ++i) {
        if (values[i] > best) {
            second = best;
            best = values[i];
        } else if (values[i] > second) {
            second = values[i];
        }
    }
    return sums_best_two ? best + second : best;
}

// Copies the values to `out`, those of groups that are not among the best as minus infinity. `spare`: 4 floats a group, and 4.
static void keep_best_groups(const ExpertRouting &routing, const float *values, float *out, float *spare) {
    const int64_t size = routing.num_experts / routing.num_groups, count = routing.num_groups_chosen;
    float *const totals = spare, *const best = spare + routing.num_groups;
    int64_t *const chosen = reinterpret_cast<int64_t *>(round_up(reinterpret_cast<uintptr_t>(best + count), alignof(int64_t)));
    for (int64_t g = 0; g < routing.num_groups; ++g) totals[g] = group_value(values + g * size, size, routing.sums_best_two);
    find_largest(totals, routing.num_groups, count, chosen, best);
    for (int64_t i = 0; i < routing.num_experts; ++i) out[i] = -__builtin_inff();
    for (int64_t c = 0; c < count; ++c) memcpy(out + chosen[c] * size, values + chosen[c] * size, size * sizeof(float));
}

// The chosen sigmoids, over their sum (and a number that keeps it from being zero) if they are normalised.
static void weigh_sigmoids(const ExpertRouting &routing, const float *scores, const int64_t *ids, float *weights) {
    const int64_t count = routing.num_chosen;
    for (int64_t j = 0; j < count; ++j) weights[j] = scores[ids[j]];
    if (!routing.is_normalised) return;
    const float sum = total(weights, count) + 1e-20f;
    for (int64_t j = 0; j < count; ++j) weights[j] = weights[j] / sum;
}

// Shares of the softmax; `weights` are the chosen logits, larger first, and `spare` takes E floats.
static void weigh_softmax(const ExpertRouting &routing, const float *row, float *weights, float *spare) {
    const int64_t count = routing.num_chosen;
    float most = weights[0];
    if (!routing.is_normalised) {
        for (int64_t i = 0; i < routing.num_experts; ++i) most = row[i] > most ? row[i] : most;
    }
    exponentials(weights, count, most, weights);
    float sum = total(weights, count);
    if (!routing.is_normalised) {
        exponentials(row, routing.num_experts, most, spare);
        sum = total(spare, routing.num_experts);
    }
    for (int64_t j = 0; j < count; ++j) weights[j] = weights[j] / sum;
}

void choose_experts(const ExpertRouting &routing, const float *logits, int64_t first, int64_t last, int64_t *ids,
                    float *weights, float *spare) {
    const int64_t num_experts = routing.num_experts, count = routing.num_chosen;
    float *const kept = spare, *const scores = spare + num_experts, *const rest = scores + num_experts;
    for (int64_t t = first; t < last; ++t) {
        const float *row = logits + t * num_experts;
        int64_t *row_ids = ids + t * count;
        float *shares = weights + t * count;
        bool are_finite = true;
        for (int64_t i = 0; i < num_experts; ++i) are_finite = are_finite && std::isfinite(row[i]);
        if (!are_finite) {
            for (int64_t j = 0; j < count; ++j) {
                row_ids[j] = 0;
                shares[j] = std::numeric_limits<float>::quiet_NaN();
            }
            continue;
        }
        const float *values = row;
        if (routing.is_sigmoid) {
            sigmoids(row, num_experts, scores);
            for (int64_t i = 0; i < num_experts; ++i) kept[i] = routing.bias == nullptr ? scores[i] : scores[i] + routing.bias[i];
            values = kept;
        }
        if (routing.num_groups > 1) {
            float *const masked = routing.is_sigmoid ? scores : kept;
            keep_best_groups(routing, values, masked, rest);
            values = masked;
        }
        find_largest(values, num_experts, count, row_ids, shares);
        if (routing.is_sigmoid) {
            sigmoids(row, num_experts, scores);
            weigh_sigmoids(routing, scores, row_ids, shares);
        } else {
            weigh_softmax(routing, row, shares, kept);
        }
        for (int64_t j = 0; j < count; ++j) shares[j] = shares[j] * routing.factor;
    }
}

template <typename T>
static void combine_as(const ExpertSums &from, int64_t first, int64_t last, T *out, int64_t out_stride) {
    for (int64_t t = first; t < last; ++t, out += out_stride) {
        const int32_t *places = from.places + t * from.num_chosen;
        const float *weights = from.weights + t * from.num_chosen;
        for (int64_t i = 0; i < from.width; i += LANES) {
            Vec sum = broadcast(0.0f);
            for (int64_t j = 0; j < from.num_chosen; ++j) {
                if (places[j] < 0) continue;
                sum = add(sum, mul(broadcast(weights[j]), load_up_to(from.data + places[j] * from.width + i, from.width - i)));
            }
            store_up_to(out + i, sum, from.width - i);
        }
    }
}

void combine_experts(const ExpertSums &from, int64_t first, int64_t last, void *out, DType dtype, int64_t out_stride) {
    dtype == DType::f32 ? combine_as(from, first, last, static_cast<float *>(out), out_stride)
                        : combine_as(from, first, last, static_cast<bf16 *>(out), out_stride);
}

}  // namespace quire::QUIRE_ISA
