// The LM head fused with argmax and unfiltered sampling: logits are never materialised, which for 64 rows over 152k tokens
// would be 39 MB to allocate, write and read again.
//
// Outputs are computed slice by slice by the projection itself, so the sums are those that it would have stored.
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "checks.hpp"
#include "elementwise.hpp"
#include "linear.hpp"
#include "sampling.hpp"
#include "scratch.hpp"
#include "timing.hpp"

namespace quire {

constexpr int64_t SLICE_ELEMENTS = 1 << 19;  // 2 MiB of sums: with the slice's weights they stay in the last-level cache
constexpr int64_t MIN_SLICE_PANELS = 64;     // enough for all threads to share

// One token to be drawn from a row. Scores depend on the row's largest logit, which is known at the end: until then they are
// taken to the largest so far, and each token that comes within rounding of the best is kept as a rival.
class RunningDraw {
public:
    RunningDraw(float scale, const DrawKey &key) : scale_(scale), key_(key) {}

    void see(const SamplingTable &table, const float *logits, int64_t first_id, int64_t num_tokens, float max_logit) {
        const ScaledRow row{logits, num_tokens, max_logit, scale_};
        float least = -__builtin_inff();
        for (const Rival &rival : rivals_) least = max_of(least, score(rival, max_logit) - MARGIN);
        Hit hit = table.next_hit(row, first_id, key_, 0, least);
        while (hit.index < num_tokens) {
            rivals_.push_back({first_id + hit.index, logits[hit.index], hit.noise});
            least = max_of(least, hit.score - MARGIN);
            hit = table.next_hit(row, first_id, key_, hit.index + 1, least);
        }
    }

    // The lowest id of the best score.
    int64_t token_id(float max_logit) const {
        Rival best{0, -__builtin_inff(), 0.0f};
        for (const Rival &rival : rivals_) {
            if (score(rival, max_logit) > score(best, max_logit)) best = rival;
        }
        return best.token_id;
    }

private:
    // A score is rounded three times. Who can win is less than 54 from the max logit at any time, as noise is between -4 and 23, so
    // two scores are off by less than 54 * 6 * 2^-24 together.
    static constexpr float MARGIN = 1e-4f;

    struct Rival {
        int64_t token_id;
        float logit, noise;
    };

    static float max_of(float a, float b) { return a > b ? a : b; }
    float score(const Rival &rival, float max_logit) const { return (rival.logit - max_logit) * scale_ + rival.noise; }

    float scale_;
    DrawKey key_;
    std::vector<Rival> rivals_;
};

// Tokens to be drawn from some of the rows.
struct Draws {
    std::vector<RunningDraw> running;
    const int64_t *rows;
};

static void see(const LinearWeight &part, int64_t first_id, const float *sums, int64_t num_rows, MaxLogit *max_logits, Draws &draws) {
    const Stopwatch stopwatch(KernelClass::sampling);
    const SamplingTable &table = sampling_kernels();
    const int64_t width = part.num_outputs;
    over_rows(num_rows, width, [&](int64_t from, int64_t to) {
        for (int64_t r = from; r < to; ++r) max_logits[r] = updated(table, max_logits[r], sums + r * width, first_id, width);
    });
    const int64_t num_draws = static_cast<int64_t>(draws.running.size());
    over_rows(num_draws, width, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i) {
            const int64_t r = draws.rows[i];
            draws.running[i].see(table, sums + r * width, first_id, width, max_logits[r].value);
        }
    });
}

static std::vector<MaxLogit> see_all(const LinearWeight &weight, const void *x, DType dtype, int64_t num_rows, Draws &draws) {
    std::vector<MaxLogit> max_logits(num_rows, NO_MAX_LOGIT);
    const int64_t panels = max64(MIN_SLICE_PANELS, SLICE_ELEMENTS / PANEL / max64(num_rows, 1));
    for (int64_t first = 0; first < weight.num_panels(); first += panels) {
        const LinearWeight part = weight.part(first * PANEL, min64(panels * PANEL, weight.num_outputs - first * PANEL));
        float *sums = scratch(LOGITS, num_rows * part.num_outputs);
        linear(part, x, dtype, num_rows, sums, DType::f32);
        see(part, first * PANEL, sums, num_rows, max_logits.data(), draws);
    }
    return max_logits;
}

// Each row's best output, its id and value, and `num_draws` tokens, each drawn from one of the rows.
static void linear_draws(const LinearWeight &weight, uintptr_t x, int x_dtype, int64_t num_rows, uintptr_t ids,
                         uintptr_t values, int64_t num_draws, uintptr_t rows, uintptr_t scales, uintptr_t seeds,
                         uintptr_t positions, uintptr_t drawn) {
    const Arguments args("linear_draws");
    check_attached("linear_draws", weight);
    const DType dtype = args.dtype(x_dtype);
    const Memory from = args.memory("x", x, dtype, {num_rows, weight.num_inputs});
    int64_t *const best = args.array<int64_t>("ids", ids, {num_rows}), *const to = args.array<int64_t>("drawn", drawn, {num_draws});
    float *const logits = args.array<float>("values", values, {num_rows});
    const float *const factors = args.array<const float>("scales", scales, {num_draws});
    const uint64_t *const seed = args.array<const uint64_t>("seeds", seeds, {num_draws});
    const uint64_t *const position = args.array<const uint64_t>("positions", positions, {num_draws});
    args.require(weight.num_outputs > 0 || num_rows == 0, "the weight has no outputs to choose from");
    Draws draws{{}, args.array<const int64_t>("rows", rows, {num_draws})};
    for (int64_t i = 0; i < num_draws; ++i) {
        if (draws.rows[i] < 0 || draws.rows[i] >= num_rows) {
            throw std::invalid_argument("row " + std::to_string(draws.rows[i]) + " of " + std::to_string(num_rows));
        }
        draws.running.emplace_back(args.magnitude("a scale", factors[i]), DrawKey{seed[i], position[i]});
    }
    const std::vector<MaxLogit> max_logits = see_all(weight, from.as<const void>(), dtype, num_rows, draws);
    for (int64_t r = 0; r < num_rows; ++r) {
        best[r] = max_logits[r].token_id;
        logits[r] = max_logits[r].value;
    }
    for (int64_t i = 0; i < num_draws; ++i) to[i] = draws.running[i].token_id(max_logits[draws.rows[i]].value);
}

static void linear_argmax(const LinearWeight &weight, uintptr_t x, int x_dtype, int64_t num_rows, uintptr_t ids,
                         uintptr_t values) {
    linear_draws(weight, x, x_dtype, num_rows, ids, values, 0, 0, 0, 0, 0, 0);
}

static void bind_head(nb::module_ &m) {
    m.def("linear_peaks", &linear_argmax, nb::call_guard<nb::gil_scoped_release>());
    m.def("linear_draws", &linear_draws, nb::call_guard<nb::gil_scoped_release>());
}
static const Registration registration(bind_head);

}  // namespace quire
