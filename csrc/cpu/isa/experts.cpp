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

void choose_experts(const ExpertRouting &routing, const float *logits, int64_t first, int64_t last, int64_t *ids,
                    float *weights, float *spare) {
    const int64_t num_experts = routing.num_experts, count = routing.num_chosen;
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
        find_largest(row, num_experts, count, row_ids, shares);
        const float most = shares[0];
        exponentials(shares, count, most, shares);
        float sum = total(shares, count);
        if (!routing.is_normalised) {
            exponentials(row, num_experts, most, spare);
            sum = total(spare, num_experts);
        }
        for (int64_t j = 0; j < count; ++j) shares[j] = shares[j] / sum;
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
