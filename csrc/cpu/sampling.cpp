// Sampling over batches of rows: argument checks, threads (a row each), the search for thresholds, and the bindings. The inner
// loops are in isa/sampling.cpp; the arithmetic is defined, to the bit, by quire/kernels/sampling.py.
#include "sampling.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "dispatch.hpp"
#include "threads.hpp"
#include "timing.hpp"

namespace quire {

// Logits [R, V], and the n rows of them that a call is about.
struct Batch {
    const float *logits;
    int64_t num_tokens;
    const int64_t *row;
    const float *max_logit, *scale;
    int64_t count;

    ScaledRow operator[](int64_t i) const { return {logits + row[i] * num_tokens, num_tokens, max_logit[i], scale[i]}; }
    int team() const { return team_size(count < 2 ? 0 : count * num_tokens); }
};

// Token ids are 32 bits wide where many are held.
static int64_t checked_width(const Arguments &args, int64_t num_tokens) {
    return args.between(1, (int64_t{1} << 31) - 1, "the number of tokens", num_tokens);
}

static Batch make_batch(const Arguments &args, uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t row,
                        uintptr_t max_logit, uintptr_t scale, int64_t count) {
    checked_width(args, num_tokens);
    const Batch batch{args.array<const float>("logits", logits, {num_rows, num_tokens}),
                      num_tokens,
                      args.array<const int64_t>("row", row, {count}),
                      args.array<const float>("max_logit", max_logit, {count}),
                      args.array<const float>("scale", scale, {count}),
                      count};
    for (int64_t i = 0; i < count; ++i) {
        if (batch.row[i] < 0 || batch.row[i] >= num_rows) {
            throw std::invalid_argument("row " + std::to_string(batch.row[i]) + " of " + std::to_string(num_rows));
        }
        args.finite("a row's max_logit", batch.max_logit[i]);
        args.magnitude("a row's scale", batch.scale[i]);
    }
    return batch;
}

// Of each row the last token that is kept; or of no row.
struct RowThresholds {
    const float *values = nullptr;
    const int64_t *ids = nullptr;

    RowThresholds(const Arguments &args, uintptr_t threshold_values, uintptr_t threshold_ids, int64_t count) {
        if (threshold_values == 0 && threshold_ids == 0) return;
        values = args.array<const float>("threshold_values", threshold_values, {count});
        ids = args.array<const int64_t>("threshold_ids", threshold_ids, {count});
    }
    bool are_absent() const { return values == nullptr; }
    FilterThreshold operator[](int64_t i) const { return are_absent() ? FilterThreshold{} : FilterThreshold{values[i], ids[i]}; }
};

// Distances from a best token are not positive; that the max logit is the largest is checked while its row is read.
static void check_max_logits(const Arguments &args, const std::atomic<bool> &are_right) {
    args.require(are_right, "a row's max_logit is below its largest logit");
}

// ---- argmax ----

MaxLogit updated(const SamplingTable &table, MaxLogit max_logit, const float *logits, int64_t first_id, int64_t num_tokens) {
    if (std::isnan(max_logit.value)) return max_logit;
    for (int64_t i = 0; (i = table.next_above(logits, i, num_tokens, max_logit.value)) < num_tokens; ++i) {
        max_logit = MaxLogit{first_id + i, logits[i]};
        if (std::isnan(max_logit.value)) break;
    }
    return max_logit;
}

static void argmax(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t ids, uintptr_t values) {
    const Arguments args("sampling_peaks");
    checked_width(args, num_tokens);
    const float *from = args.array<const float>("logits", logits, {num_rows, num_tokens});
    int64_t *const best = args.array<int64_t>("ids", ids, {num_rows});
    float *const largest = args.array<float>("values", values, {num_rows});
    const Stopwatch stopwatch(KernelClass::sampling);
    const SamplingTable &table = sampling_kernels();
#pragma omp parallel for schedule(static) num_threads(team_size(num_rows < 2 ? 0 : num_rows *num_tokens))
    for (int64_t i = 0; i < num_rows; ++i) {
        const MaxLogit max_logit = updated(table, NO_MAX_LOGIT, from + i * num_tokens, 0, num_tokens);
        best[i] = max_logit.token_id;
        largest[i] = max_logit.value;
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
    const Arguments args("sampling_penalise");
    checked_width(args, num_tokens);
    args.count("the number of rows", count);
    float *const to = args.array<float>("logits", logits, {num_rows, num_tokens});
    const int64_t *const rows = args.array<const int64_t>("row", row, {count});
    const int64_t *const starts = args.array<const int64_t>("start", start, {count + 1});
    const int64_t *const outputs = args.array<const int64_t>("output_start", output_start, {count});
    const int32_t *const ids = args.array<const int32_t>("token_ids", token_ids, {num_ids});
    const float *const factors = args.array<const float>("repetition", repetition, {count});
    const float *const frequencies = args.array<const float>("frequency", frequency, {count});
    const float *const presences = args.array<const float>("presence", presence, {count});
    std::vector<bool> is_seen(num_rows);
    for (int64_t i = 0; i < count; ++i) {
        const bool is_ordered = 0 <= starts[i] && starts[i] <= outputs[i] && outputs[i] <= starts[i + 1];
        if (rows[i] < 0 || rows[i] >= num_rows || !is_ordered || starts[i + 1] > num_ids) {
            throw std::invalid_argument("penalties of row " + std::to_string(rows[i]) + " lie outside what was passed");
        }
        args.require(!is_seen[rows[i]], "a row is named twice");
        is_seen[rows[i]] = true;
    }
#pragma omp parallel num_threads(team_size(count < 2 ? 0 : num_ids))
    {
        std::vector<int32_t> counts(num_tokens, 0);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) {
            PenalisedRow{to + rows[i] * num_tokens, num_tokens, ids + starts[i], ids + outputs[i], ids + starts[i + 1],
                         factors[i], frequencies[i], presences[i]}
                .penalise(counts.data());
        }
    }
}

// ---- thresholds ----

struct Candidate {
    float value;
    int32_t id;
    bool operator<(const Candidate &other) const {  // best first
        return value > other.value || (value == other.value && id < other.id);
    }
};

// One row's search: tokens are counted and weighed by bucket of distance, and only the buckets in which a limit falls are
// sorted. So the cost does not grow with the number of tokens kept.
class ThresholdSearch {
public:
    ThresholdSearch(const SamplingTable &table, int64_t num_tokens)
        : table_(table), histogram_(new Histogram), ids_(num_tokens) {}

    // `is_max_logit`: false afterwards if some logit is above the row's max logit, and the threshold is meaningless.
    FilterThreshold find(const ScaledRow &row, int64_t top_k, double top_p, float floor, bool *is_max_logit) {
        row_ = &row;
        floor_ = floor;
        if (!(*is_max_logit = table_.histogram(row, floor, *histogram_))) return {};
        num_kept_ = 0;
        for (const Bucket &bucket : histogram_->buckets) num_kept_ += bucket.count;
        const int64_t limit = std::min(top_k, num_kept_);
        if (limit < 1) return {std::numeric_limits<float>::infinity(), -1};  // the caller's max_logit was above all logits
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

static void thresholds(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t row, uintptr_t max_logit, uintptr_t scale,
                 int64_t count, uintptr_t top_k, uintptr_t top_p, uintptr_t floor, uintptr_t values, uintptr_t ids) {
    const Stopwatch stopwatch(KernelClass::sampling);
    const Arguments args("sampling_cuts");
    const Batch batch = make_batch(args, logits, num_rows, num_tokens, row, max_logit, scale, count);
    const SamplingTable &table = sampling_kernels();
    const int64_t *const most = args.array<const int64_t>("top_k", top_k, {count});
    const double *const shares = args.array<const double>("top_p", top_p, {count});
    const float *const floors = args.array<const float>("floor", floor, {count});
    float *const to_values = args.array<float>("values", values, {count});
    int64_t *const to_ids = args.array<int64_t>("ids", ids, {count});
    for (int64_t i = 0; i < count; ++i) {
        args.require(most[i] >= 1 && floors[i] <= 0.0f, "top_k must be at least 1 and the floor at most 0");
        args.require(shares[i] >= 0.0, "top_p must not be negative");
    }
    std::atomic<bool> are_max_logits{true};
#pragma omp parallel num_threads(batch.team())
    {
        ThresholdSearch search(table, num_tokens);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) {
            bool is_max_logit = true;
            const FilterThreshold threshold = search.find(batch[i], most[i], shares[i], floors[i], &is_max_logit);
            if (!is_max_logit) are_max_logits = false;
            to_values[i] = threshold.value;
            to_ids[i] = threshold.token_id;
        }
    }
    check_max_logits(args, are_max_logits);
}

// ---- draws ----

static void draw(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t row, uintptr_t max_logit, uintptr_t scale,
                 int64_t count, uintptr_t threshold_values, uintptr_t threshold_ids, uintptr_t seeds, uintptr_t positions,
                 uintptr_t out) {
    const Stopwatch stopwatch(KernelClass::sampling);
    const Arguments args("sampling_draw");
    const Batch batch = make_batch(args, logits, num_rows, num_tokens, row, max_logit, scale, count);
    const RowThresholds thresholds(args, threshold_values, threshold_ids, count);
    const uint64_t *const seed = args.array<const uint64_t>("seeds", seeds, {count});
    const uint64_t *const position = args.array<const uint64_t>("positions", positions, {count});
    int64_t *const drawn = args.array<int64_t>("out", out, {count});
    const SamplingTable &table = sampling_kernels();
#pragma omp parallel for schedule(dynamic) num_threads(batch.team())
    for (int64_t i = 0; i < count; ++i) {
        const FilterThreshold threshold = thresholds[i];
        drawn[i] = table.draw(batch[i], thresholds.are_absent() ? nullptr : &threshold, DrawKey{seed[i], position[i]});
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

static void score(uintptr_t logits, int64_t num_rows, int64_t num_tokens, uintptr_t row, uintptr_t max_logit, uintptr_t scale,
                  int64_t count, uintptr_t threshold_values, uintptr_t threshold_ids, uintptr_t token_ids, int64_t num_top,
                  uintptr_t totals, uintptr_t ranks, uintptr_t top_ids) {
    const Stopwatch stopwatch(KernelClass::sampling);
    const Arguments args("sampling_score");
    const Batch batch = make_batch(args, logits, num_rows, num_tokens, row, max_logit, scale, count);
    const RowThresholds thresholds(args, threshold_values, threshold_ids, count);
    const SamplingTable &table = sampling_kernels();
    args.between(0, num_tokens, "num_top", num_top);
    const int64_t *const ids = args.array<const int64_t>("token_ids", token_ids, {count});
    int64_t *const sums = args.array<int64_t>("totals", totals, {count}), *const places = args.array<int64_t>("ranks", ranks, {count});
    int64_t *const best_ids = args.array<int64_t>("top_ids", top_ids, {count, num_top});
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= num_tokens) throw std::out_of_range("token id " + std::to_string(ids[i]));
    }
    std::atomic<bool> are_max_logits{true};
#pragma omp parallel for schedule(dynamic) num_threads(batch.team())
    for (int64_t i = 0; i < count; ++i) {
        const ScaledRow scaled = batch[i];
        const FilterThreshold threshold = thresholds[i];
        int64_t *best = best_ids + i * num_top;
        sums[i] = table.total(scaled, thresholds.are_absent() ? nullptr : &threshold);
        if (sums[i] < 0) are_max_logits = false;
        places[i] = 1 + table.count_above(scaled.logits, num_tokens, scaled.logits[ids[i]]);
        num_top <= FEW ? few_best(table, scaled, num_top, best) : many_best(scaled, num_top, best);
    }
    check_max_logits(args, are_max_logits);
}

static void noise(uint64_t seed, uint64_t position, int64_t num_tokens, uintptr_t out) {
    float *const to = Arguments("sampling_noise").array<float>("out", out, {num_tokens});
    sampling_kernels().noise(num_tokens, DrawKey{seed, position}, to);
}

static void bind_sampling(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.def("sampling_peaks", &argmax, release());
    m.def("sampling_penalise", &penalise, release());
    m.def("sampling_cuts", &thresholds, release());
    m.def("sampling_draw", &draw, release());
    m.def("sampling_score", &score, release());
    m.def("sampling_noise", &noise, release());
}
static const Registration registration(bind_sampling);

}  // namespace quire
