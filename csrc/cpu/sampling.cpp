// Sampling over batches of rows: argument checks, threads (a row each), the search for cuts, and the bindings. The inner
// loops are in isa/sampling.cpp; the arithmetic is defined, to the bit, by quire/kernels/sampling.py.
#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "dispatch.hpp"
#include "threads.hpp"
#include "timing.hpp"

namespace quire {

template <typename T>
static T *at(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

// Logits [R, V], and the n rows of them that a call is about.
struct Batch {
    const float *logits;
    int64_t num_tokens;
    const int64_t *row;
    const float *peak, *scale;
    int64_t count;

    ScaledRow operator[](int64_t i) const { return {logits + row[i] * num_tokens, num_tokens, peak[i], scale[i]}; }
    int team() const { return team_size(count < 2 ? 0 : count * num_tokens); }
};

static Batch make_batch(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t row, uintptr_t peak,
                        uintptr_t scale, int64_t count) {
    const Batch batch{at<const float>(logits), num_tokens, at<const int64_t>(row), at<const float>(peak),
                      at<const float>(scale), count};
    for (int64_t i = 0; i < count; ++i) {
        if (batch.row[i] < 0 || batch.row[i] >= num_rows) {
            throw std::invalid_argument("row " + std::to_string(batch.row[i]) + " of " + std::to_string(num_rows));
        }
        if (!std::isfinite(batch.peak[i])) throw std::invalid_argument("a row's peak is not finite");
    }
    return batch;
}

// ---- peaks ----

Peak raised(const SamplingTable &table, Peak peak, const float *logits, int64_t first_id, int64_t num_tokens) {
    if (std::isnan(peak.value)) return peak;
    for (int64_t i = 0; (i = table.next_above(logits, i, num_tokens, peak.value)) < num_tokens; ++i) {
        peak = Peak{first_id + i, logits[i]};
        if (std::isnan(peak.value)) break;
    }
    return peak;
}

static void peaks(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t ids, uintptr_t values) {
    const Stopwatch stopwatch(KernelClass::sampling);
    const SamplingTable &table = sampling_kernels();
#pragma omp parallel for schedule(static) num_threads(team_size(num_rows < 2 ? 0 : num_rows *num_tokens))
    for (int64_t i = 0; i < num_rows; ++i) {
        const Peak peak = raised(table, NO_PEAK, at<const float>(logits) + i * num_tokens, 0, num_tokens);
        at<int64_t>(ids)[i] = peak.token_id;
        at<float>(values)[i] = peak.value;
    }
}

// ---- penalties ----

// One row's penalties. `counts` holds a zero for every token, and does so again afterwards.
struct PenalisedRow {
    float *logits;
    int64_t num_tokens;
    const int32_t *first, *output, *last;  // prompt, output, end
    float repetition, frequency, presence;

    bool has_logit(int32_t id) const { return id >= 0 && id < num_tokens; }

    void penalise(int32_t *counts) const {
        for (const int32_t *id = first; id < last; ++id) {
            if (!has_logit(*id) || counts[*id]++ != 0) continue;
            logits[*id] = logits[*id] > 0.0f ? logits[*id] / repetition : logits[*id] * repetition;
        }
        for (const int32_t *id = first; id < last; ++id) {
            if (has_logit(*id)) counts[*id] = 0;
        }
        for (const int32_t *id = output; id < last; ++id) {
            if (has_logit(*id)) ++counts[*id];
        }
        for (const int32_t *id = output; id < last; ++id) {
            if (!has_logit(*id) || counts[*id] == 0) continue;
            logits[*id] = (logits[*id] - frequency * static_cast<float>(counts[*id])) - presence;
            counts[*id] = 0;
        }
    }
};

static void penalise(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t row, int64_t count,
                     uintptr_t token_ids, int64_t num_ids, uintptr_t start, uintptr_t output_start, uintptr_t repetition,
                     uintptr_t frequency, uintptr_t presence) {
    const Stopwatch stopwatch(KernelClass::sampling);
    const int64_t *rows = at<const int64_t>(row), *starts = at<const int64_t>(start);
    const int64_t *outputs = at<const int64_t>(output_start);
    for (int64_t i = 0; i < count; ++i) {
        const bool is_ordered = 0 <= starts[i] && starts[i] <= outputs[i] && outputs[i] <= starts[i + 1];
        if (rows[i] < 0 || rows[i] >= num_rows || !is_ordered || starts[i + 1] > num_ids) {
            throw std::invalid_argument("penalties of row " + std::to_string(rows[i]) + " lie outside what was passed");
        }
    }
    const int32_t *ids = at<const int32_t>(token_ids);
#pragma omp parallel num_threads(team_size(count < 2 ? 0 : num_ids))
    {
        std::vector<int32_t> counts(num_tokens, 0);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) {
            PenalisedRow{at<float>(logits) + rows[i] * num_tokens, num_tokens, ids + starts[i], ids + outputs[i],
                         ids + starts[i + 1], at<const float>(repetition)[i], at<const float>(frequency)[i],
                         at<const float>(presence)[i]}
                .penalise(counts.data());
        }
    }
}

// ---- cuts ----

struct Candidate {
    float value;
    int32_t id;
    bool operator<(const Candidate &other) const {  // best first
        return value > other.value || (value == other.value && id < other.id);
    }
};

// One row's search: tokens are counted and weighed by bucket of distance, and only the buckets in which a limit falls are
// sorted. So the cost does not grow with the number of tokens kept.
class CutSearch {
public:
    CutSearch(const SamplingTable &table, int64_t num_tokens)
        : table_(table), histogram_(new Histogram), ids_(num_tokens) {}

    Cut find(const ScaledRow &row, int64_t top_k, double top_p, float floor) {
        row_ = &row;
        floor_ = floor;
        table_.histogram(row, floor, *histogram_);
        num_kept_ = 0;
        for (const Bucket &bucket : histogram_->buckets) num_kept_ += bucket.count;
        const int64_t limit = std::min(top_k, num_kept_);
        if (limit < 1) return {std::numeric_limits<float>::infinity(), -1};  // the caller's peak was above all logits
        const int64_t length = top_p < 1.0 ? nucleus(limit, top_p) : limit;
        if (length == num_kept_) return {least_kept(), row.num_tokens - 1};
        const Place place = find_count(length);
        sort_bucket(place.bucket);
        const Candidate &last = sorted_[length - place.before - 1];
        return {last.value, last.id};
    }

private:
    struct Place {
        int bucket;
        int64_t before;  // tokens in the buckets before it
    };

    // The bucket that holds the `length`-th best token.
    Place find_count(int64_t length) const {
        int64_t before = 0;
        int bucket = 0;
        while (before + histogram_->buckets[bucket].count < length) before += histogram_->buckets[bucket++].count;
        return {bucket, before};
    }

    void sort_bucket(int bucket) {
        const int64_t count = table_.collect(*row_, floor_, bucket, ids_.data());
        sorted_.resize(count);
        for (int64_t i = 0; i < count; ++i) sorted_[i] = {row_->logits[ids_[i]], ids_[i]};
        std::sort(sorted_.begin(), sorted_.end());
        for (int64_t i = 0; i < count; ++i) ids_[i] = sorted_[i].id;
        weights_.resize(count);
        table_.weigh(*row_, ids_.data(), count, weights_.data());
    }

    int64_t weight_of(int64_t limit) {
        int64_t total = 0;
        if (limit == num_kept_) {
            for (const Bucket &bucket : histogram_->buckets) total += bucket.weight;
            return total;
        }
        const Place place = find_count(limit);
        for (int bucket = 0; bucket < place.bucket; ++bucket) total += histogram_->buckets[bucket].weight;
        sort_bucket(place.bucket);
        for (int64_t i = 0; i < limit - place.before; ++i) total += weights_[i];
        return total;
    }

    // The length of the shortest best-first prefix that weighs enough; `limit` where only rounding keeps it from that.
    int64_t nucleus(int64_t limit, double top_p) {
        const int64_t target = static_cast<int64_t>(std::ceil(top_p * static_cast<double>(weight_of(limit))));
        int64_t weight = 0, length = 0;
        int bucket = 0;
        while (bucket < NUM_BUCKETS && weight + histogram_->buckets[bucket].weight < target) {
            weight += histogram_->buckets[bucket].weight;
            length += histogram_->buckets[bucket++].count;
        }
        if (bucket == NUM_BUCKETS || length >= limit) return limit;
        sort_bucket(bucket);
        for (const int64_t token_weight : weights_) {
            ++length;
            weight += token_weight;
            if (weight >= target) break;
        }
        return std::min(length, limit);
    }

    float least_kept() {
        int bucket = NUM_BUCKETS - 1;
        while (histogram_->buckets[bucket].count == 0) --bucket;
        const int64_t count = table_.collect(*row_, floor_, bucket, ids_.data());
        float least = row_->logits[ids_[0]];
        for (int64_t i = 1; i < count; ++i) least = std::min(least, row_->logits[ids_[i]]);
        return least;
    }

    const SamplingTable &table_;
    std::unique_ptr<Histogram> histogram_;
    std::vector<int32_t> ids_;
    std::vector<Candidate> sorted_;
    std::vector<int64_t> weights_;
    const ScaledRow *row_ = nullptr;
    float floor_ = 0.0f;
    int64_t num_kept_ = 0;
};

static void cuts(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t row, uintptr_t peak, uintptr_t scale,
                 int64_t count, uintptr_t top_k, uintptr_t top_p, uintptr_t floor, uintptr_t values, uintptr_t ids) {
    const Stopwatch stopwatch(KernelClass::sampling);
    const Batch batch = make_batch(logits, num_rows, num_tokens, row, peak, scale, count);
    const SamplingTable &table = sampling_kernels();
    for (int64_t i = 0; i < count; ++i) {
        if (at<const int64_t>(top_k)[i] < 1 || !(at<const float>(floor)[i] <= 0.0f)) {
            throw std::invalid_argument("top_k must be at least 1 and the floor at most 0");
        }
    }
#pragma omp parallel num_threads(batch.team())
    {
        CutSearch search(table, num_tokens);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) {
            const Cut cut = search.find(batch[i], at<const int64_t>(top_k)[i], at<const double>(top_p)[i],
                                        at<const float>(floor)[i]);
            at<float>(values)[i] = cut.value;
            at<int64_t>(ids)[i] = cut.token_id;
        }
    }
}

// ---- draws ----

static void draw(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t row, uintptr_t peak, uintptr_t scale,
                 int64_t count, uintptr_t cut_values, uintptr_t cut_ids, uintptr_t seeds, uintptr_t positions,
                 uintptr_t out) {
    const Stopwatch stopwatch(KernelClass::sampling);
    const Batch batch = make_batch(logits, num_rows, num_tokens, row, peak, scale, count);
    const SamplingTable &table = sampling_kernels();
#pragma omp parallel for schedule(dynamic) num_threads(batch.team())
    for (int64_t i = 0; i < count; ++i) {
        const DrawKey key{at<const uint64_t>(seeds)[i], at<const uint64_t>(positions)[i]};
        const Cut cut = cut_values ? Cut{at<const float>(cut_values)[i], at<const int64_t>(cut_ids)[i]} : Cut{};
        at<int64_t>(out)[i] = table.draw(batch[i], cut_values ? &cut : nullptr, key);
    }
}

// ---- scores ----

constexpr int64_t FEW = 128;  // up to so many best tokens are kept by insertion while scanning; more are sorted

static void few_best(const SamplingTable &table, const ScaledRow &row, int64_t count, int64_t *ids) {
    const float *logits = row.logits;
    int64_t held = 0;
    const auto insert = [&](int64_t id) {
        int64_t place = held < count ? held++ : count - 1;
        for (; place > 0 && logits[ids[place - 1]] < logits[id]; --place) ids[place] = ids[place - 1];
        ids[place] = id;
    };
    for (int64_t i = 0; i < count; ++i) insert(i);
    for (int64_t i = count; count > 0; ++i) {
        i = table.next_above(logits, i, row.num_tokens, logits[ids[count - 1]]);
        if (i == row.num_tokens) return;
        insert(i);
    }
}

static void many_best(const ScaledRow &row, int64_t count, int64_t *ids) {
    std::vector<Candidate> order(row.num_tokens);
    for (int64_t i = 0; i < row.num_tokens; ++i) order[i] = {row.logits[i], static_cast<int32_t>(i)};
    std::partial_sort(order.begin(), order.begin() + count, order.end());
    for (int64_t i = 0; i < count; ++i) ids[i] = order[i].id;
}

static void score(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t row, uintptr_t peak, uintptr_t scale,
                  int64_t count, uintptr_t cut_values, uintptr_t cut_ids, uintptr_t token_ids, int64_t num_top,
                  uintptr_t totals, uintptr_t ranks, uintptr_t top_ids) {
    const Stopwatch stopwatch(KernelClass::sampling);
    const Batch batch = make_batch(logits, num_rows, num_tokens, row, peak, scale, count);
    const SamplingTable &table = sampling_kernels();
    for (int64_t i = 0; i < count; ++i) {
        const int64_t id = at<const int64_t>(token_ids)[i];
        if (id < 0 || id >= num_tokens) throw std::out_of_range("token id " + std::to_string(id));
    }
    if (num_top < 0 || num_top > num_tokens) throw std::invalid_argument("num_top " + std::to_string(num_top));
#pragma omp parallel for schedule(dynamic) num_threads(batch.team())
    for (int64_t i = 0; i < count; ++i) {
        const ScaledRow scaled = batch[i];
        const Cut cut = cut_values ? Cut{at<const float>(cut_values)[i], at<const int64_t>(cut_ids)[i]} : Cut{};
        int64_t *best = at<int64_t>(top_ids) + i * num_top;
        at<int64_t>(totals)[i] = table.total(scaled, cut_values ? &cut : nullptr);
        at<int64_t>(ranks)[i] =
            1 + table.count_above(scaled.logits, num_tokens, scaled.logits[at<const int64_t>(token_ids)[i]]);
        num_top <= FEW ? few_best(table, scaled, num_top, best) : many_best(scaled, num_top, best);
    }
}

static void noise(uint64_t seed, uint64_t position, int64_t num_tokens, uintptr_t out) {
    sampling_kernels().noise(num_tokens, DrawKey{seed, position}, at<float>(out));
}

static void bind_sampling(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.def("sampling_peaks", &peaks, release());
    m.def("sampling_penalise", &penalise, release());
    m.def("sampling_cuts", &cuts, release());
    m.def("sampling_draw", &draw, release());
    m.def("sampling_score", &score, release());
    m.def("sampling_noise", &noise, release());
}
static const Registration registration(bind_sampling);

}  // namespace quire
