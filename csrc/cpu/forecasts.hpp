// Forecasts of the experts that layers will need, judged by what they needed then: whether the next one pays.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace quire {

class Forecasts {
 public:
    void add_layer() { scores_.emplace_back(); }

    // Whether a forecast for the layer pays: those before were right often enough, and files are read from a device. Some
    // steps of each hundred have one in any case, so that this is found anew.
    bool is_due(int64_t layer, int64_t step) const;

    // Experts that the next layer will need, by a forecast, and that are not in memory. One before it is forgotten.
    void keep(int64_t layer, const std::vector<int64_t> &experts);
    // How many of them a layer needs indeed, which come in ascending order; none where they were another layer's.
    int64_t settle(int64_t layer, const std::vector<int64_t> &needed);

    // An expert that is not in memory was found in the system's cache, or was not.
    void note_place(bool is_cached);
    bool is_cold() const { return cold_share_ > LEAST_COLD; }

    // How much to have read ahead for a step of so many tokens: what was there in time before, and a little more. A wrong
    // forecast then costs reads of a device that would have been idle, and hardly keeps a right one waiting.
    int64_t bytes_ahead(int64_t num_tokens, int64_t expert_bytes) const;
    // So many of the requested bytes were there when the layer was reached.
    void note_arrival(int64_t num_tokens, int64_t num_asked, int64_t num_arrived);

 private:
    static constexpr double LEAST_COLD = 1.0 / 16.0;

    struct Score {
        double num_made = 3.0, num_right = 3.0;  // experts, older forecasts counting less; at first it is tried
    };
    std::vector<Score> scores_;  // of each layer
    int64_t open_ = -1;          // the layer of the forecast that is not settled, if there is one
    std::vector<int64_t> experts_;
    double cold_share_ = 0.0;                 // of experts that were looked for lately
    std::array<int64_t, 64> bytes_in_time_{};  // by the bits of the number of tokens; 0: unknown
};

}  // namespace quire
