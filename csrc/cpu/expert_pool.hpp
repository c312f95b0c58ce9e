// Experts of which only some are in memory: a pool of equal slots, and a file that holds all of them.
//
// A step asks for a layer's experts once its router has chosen them. Those that are missing are read into slots, over the
// experts that were of the least use, and are compared with the checksums that they were written with. The pool decides what
// is in memory and nothing else: the same bytes are multiplied wherever they lie.
//
// Where the file is read from a device, experts that the next layer will probably need are read ahead into the system's cache
// while the layer is computed; they enter a slot when they are needed, checked like any other.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "forecasts.hpp"
#include "read_ahead.hpp"
#include "weight.hpp"

namespace quire {

// The file cannot be read, ends too early, or holds other bytes than were written.
struct ExpertFileError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Of bytes as they are kept in a file. Any change of one 64-bit word changes it.
uint64_t checksum_of(const void *data, int64_t num_bytes);

struct ExpertWeights {
    LinearWeight up, down;
};

// One layer's experts in the file; the weights have no memory of their own, but may have biases.
struct StoredLayer {
    LinearWeight up, down;
    int64_t num_experts;
    int64_t up_start, down_start;                  // bytes of the file
    std::vector<uint64_t> up_sums, down_sums;      // of each expert

    int64_t up_bytes() const { return up.num_bytes() / num_experts; }
    int64_t down_bytes() const { return down.num_bytes() / num_experts; }
};

// What has happened since the pool was made.
struct PoolCounts {
    int64_t num_hits, num_misses;  // experts that a layer needed
    int64_t bytes_read;
    double wait_s;                 // for reads, of steps
    int64_t num_forecast;          // experts that were not in memory and that a layer would need, by a forecast
    int64_t num_foreseen;          // those of them that it needed
    int64_t bytes_ahead;           // of the file, that were to be read before they are needed
};

class ExpertPool {
   public:
    // `memory` takes num_slots * slot_bytes, and outlives the pool; the descriptor is closed with it.
    ExpertPool(std::string path, int descriptor, void *memory, int64_t slot_bytes, int64_t num_slots);
    ~ExpertPool();
    ExpertPool(const ExpertPool &) = delete;

    void add_layer(StoredLayer layer);  // before any expert is needed
    int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
    const StoredLayer &layer(int64_t number) const { return layers_[number]; }

    // Reads experts until the slots are full, the first ones of every layer.
    void fill();

    // A layer needs these experts; to be said once, before they are brought.
    void note_use(int64_t layer, const std::vector<int64_t> &experts);

    // Has as many of these experts in memory as slots allow, those first that are there, and returns their places in
    // `experts`; at least one. Their weights are valid until the next call. ExpertFileError where one cannot be read.
    std::vector<size_t> bring(int64_t layer, const std::vector<int64_t> &experts, std::vector<ExpertWeights> &weights);

    // Whether a forecast of what the layer will need is worth its making: not all experts are in memory, and it pays.
    bool wants_forecast(int64_t layer) const;
    // The layer that is computed next, for so many tokens, will need these experts, the likeliest ones first; by guess. To be
    // said when the layer before it has brought its own.
    void expect(int64_t layer, int64_t num_tokens, const std::vector<int64_t> &experts);
    void set_reads_ahead(bool reads_ahead) { reads_ahead_ = reads_ahead; }  // at first it does

    PoolCounts counts() const;

   private:
    static constexpr int64_t NONE = -1;
    struct Read {
        int64_t slot, layer, expert;
    };

    int64_t number_of(int64_t layer, int64_t expert) const { return first_of_[layer] + expert; }
    char *at(int64_t slot) const { return memory_ + slot * slot_bytes_; }
    ExpertWeights weights_of(int64_t layer, int64_t expert) const;
    std::vector<int64_t> free_slots(int64_t layer, int64_t count);
    void read(const std::vector<Read> &reads);
    void read_part(const Read &read, bool is_down) const;
    FilePart part_of(int64_t layer, int64_t expert, bool is_down) const;
    void settle_forecast(int64_t layer, const std::vector<int64_t> &experts);
    void note_places(const std::vector<Read> &reads);

    const std::string path_;
    const int descriptor_;
    char *const memory_;
    const int64_t slot_bytes_, num_slots_;
    std::vector<StoredLayer> layers_;
    std::vector<int64_t> first_of_;   // of each layer: the number of its first expert
    std::vector<int64_t> slot_of_;    // of each expert of the file: where it is, or NONE
    std::vector<double> uses_;        // of each expert: how often it was needed, older times counting less
    std::vector<int64_t> used_in_;    // of each expert: the last step that needed it
    std::vector<int64_t> layer_of_;   // of each expert
    std::vector<int64_t> owner_of_;   // of each slot: whose it is, or NONE
    std::vector<char> is_held_;       // of each slot: whether the step reads it
    int64_t step_ = 0;
    double use_ = 1.0;                // what a use now counts
    Forecasts forecasts_;
    std::atomic<bool> reads_ahead_ = true;
    std::vector<FilePart> asked_;      // to be read ahead, for the layer that is next
    int64_t asked_tokens_ = 0;         // of that step
    std::vector<int64_t> looked_for_;  // by number: experts of the next layer of which it is known whether they were cached
    mutable std::mutex counting_;
    PoolCounts counts_{};
    ReadAhead ahead_;
};

}  // namespace quire
