// Keeps the score of forecasts; see forecasts.hpp.
#include "forecasts.hpp"

#include <algorithm>

#include "dtypes.hpp"

namespace quire {

namespace {

constexpr int64_t TRIAL_PERIOD = 128, TRIAL_STEPS = 4;
// Of the experts in a forecast, those that must be needed for it to pay.
constexpr double LEAST_RIGHT = 0.3;
constexpr double KEPT = 0.95;  // of a forecast's weight, at the next one
constexpr double KEPT_PLACE = 0.97;
constexpr int64_t LEAST_BYTES = 1 << 20, MOST_BYTES = 256 << 20;

size_t size_class(int64_t num_tokens) {
    size_t bits = 0;
    for (; num_tokens > 1; num_tokens >>= 1) ++bits;
    return bits;
}

}  // namespace

bool Forecasts::is_due(int64_t layer, int64_t step) const {
    if (step % TRIAL_PERIOD < TRIAL_STEPS) return true;
    return is_cold() && scores_[layer].num_right >= LEAST_RIGHT * scores_[layer].num_made;
}

void Forecasts::keep(int64_t layer, const std::vector<int64_t> &experts) {
    open_ = layer;
    experts_ = experts;
}

int64_t Forecasts::settle(int64_t layer, const std::vector<int64_t> &needed) {
    const bool is_open = open_ == layer && !experts_.empty();
    open_ = -1;
    if (!is_open) return 0;
    const int64_t num_right = std::count_if(experts_.begin(), experts_.end(), [&](int64_t expert) {
        return std::binary_search(needed.begin(), needed.end(), expert);
    });
    Score &score = scores_[layer];
    score.num_made = KEPT * score.num_made + static_cast<double>(experts_.size());
    score.num_right = KEPT * score.num_right + static_cast<double>(num_right);
    return num_right;
}

void Forecasts::note_place(bool is_cached) { cold_share_ = KEPT_PLACE * cold_share_ + (is_cached ? 0.0 : 1.0 - KEPT_PLACE); }

int64_t Forecasts::bytes_ahead(int64_t num_tokens, int64_t expert_bytes) const {
    const int64_t known = bytes_in_time_[size_class(num_tokens)];
    return known == 0 ? expert_bytes : known;
}

// Fewer bytes may be requested than could be, so that all of them say nothing against more.
void Forecasts::note_arrival(int64_t num_tokens, int64_t num_asked, int64_t num_arrived) {
    int64_t &known = bytes_in_time_[size_class(num_tokens)];
    const int64_t next = num_arrived + num_arrived / 4 + LEAST_BYTES;
    known = min64(MOST_BYTES, num_arrived == num_asked ? max64(known, 2 * num_arrived) : next);
}

}  // namespace quire
