// Reads, checks and forgets experts; see expert_pool.hpp.
#include "expert_pool.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "checks.hpp"
#include "threads.hpp"

namespace quire {

using namespace nb::literals;

namespace {

// A use counts half as much after so many steps: enough to tell experts apart that are chosen in a twentieth of the steps, and
// a text's favourites are forgotten with it.
constexpr double HALF_LIFE_STEPS = 256.0;
constexpr double MOST_USE = 1e100;  // where uses are scaled down
// A pool is not read anew at once where a layer needs more than it holds: a part of it goes through the layer, in some more
// rounds, and the rest of it stays for the next step.
constexpr int64_t FEWEST_ROUNDS = 4;
// Of one call to the system, so that what was read is still in the second-level cache when it is summed.
constexpr int64_t READ_BYTES = 256 << 10;
// Of which one byte says whether they were read ahead.
constexpr int64_t LOOKED_AT_BYTES = 1 << 20;

}  // namespace

// Lanes of words, of which each step is reversible: a word that differs leaves its lane different. As many as multiplications
// are under way at once.
class Checksum {
   public:
    // All but the last call have whole rounds.
    void add(const void *data, int64_t num_bytes) {
        const char *from = static_cast<const char *>(data);
        uint64_t lanes[LANES];
        std::memcpy(lanes, lanes_, sizeof lanes);
        int64_t i = 0;
        for (; i + ROUND <= num_bytes; i += ROUND) add_round(lanes, from + i);
        if (i < num_bytes) {
            char rest[ROUND] = {};
            std::memcpy(rest, from + i, num_bytes - i);
            add_round(lanes, rest);
        }
        std::memcpy(lanes_, lanes, sizeof lanes);
        length_ += num_bytes;
    }

    uint64_t value() const {
        uint64_t sum = static_cast<uint64_t>(length_);
        for (const uint64_t lane : lanes_) sum = step(sum, lane);
        return sum;
    }

   private:
    static constexpr int LANES = 8;
    static constexpr int64_t ROUND = LANES * sizeof(uint64_t);

    static uint64_t step(uint64_t sum, uint64_t word) {
        const uint64_t product = (sum ^ word) * 0x9E3779B97F4A7C15u;
        return product << 29 | product >> 35;
    }
    static void add_round(uint64_t *lanes, const char *from) {
        uint64_t words[LANES];
        std::memcpy(words, from, sizeof words);
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = step(lanes[lane], words[lane]);
    }

    uint64_t lanes_[LANES] = {1, 2, 3, 4, 5, 6, 7, 8};
    int64_t length_ = 0;
};

uint64_t checksum_of(const void *data, int64_t num_bytes) {
    Checksum sum;
    sum.add(data, num_bytes);
    return sum.value();
}

ExpertPool::ExpertPool(std::string path, int descriptor, void *memory, int64_t slot_bytes, int64_t num_slots)
    : path_(std::move(path)), descriptor_(fcntl(descriptor, F_DUPFD_CLOEXEC, 0)), memory_(static_cast<char *>(memory)),
      slot_bytes_(slot_bytes), num_slots_(num_slots), owner_of_(num_slots, NONE), is_held_(num_slots, 0), ahead_(descriptor_) {
    if (descriptor_ < 0) throw ExpertFileError(path_ + ": " + std::strerror(errno));
}

ExpertPool::~ExpertPool() {
    ahead_.end();
    if (descriptor_ >= 0) close(descriptor_);
}

void ExpertPool::add_layer(StoredLayer layer) {
    first_of_.push_back(static_cast<int64_t>(slot_of_.size()));
    slot_of_.resize(slot_of_.size() + layer.num_experts, NONE);
    uses_.resize(slot_of_.size(), 0.0);
    used_in_.resize(slot_of_.size(), 0);
    layer_of_.resize(slot_of_.size(), num_layers());
    layers_.push_back(std::move(layer));
    forecasts_.add_layer();
}

void ExpertPool::fill() {
    std::vector<Read> reads;
    int64_t most = 0;
    for (const StoredLayer &each : layers_) most = max64(most, each.num_experts);
    for (int64_t expert = 0; expert < most; ++expert) {
        for (int64_t layer = 0; layer < num_layers(); ++layer) {
            if (static_cast<int64_t>(reads.size()) == num_slots_) break;
            if (expert < layers_[layer].num_experts) reads.push_back({static_cast<int64_t>(reads.size()), layer, expert});
        }
    }
    read(reads);
}

void ExpertPool::note_use(int64_t layer, const std::vector<int64_t> &experts) {
    if (layer == 0) {
        use_ *= std::exp2(1.0 / HALF_LIFE_STEPS);
        ++step_;
    }
    settle_forecast(layer, experts);
    int64_t num_hits = 0;
    for (const int64_t expert : experts) {
        uses_[number_of(layer, expert)] += use_;
        used_in_[number_of(layer, expert)] = step_;
        num_hits += slot_of_[number_of(layer, expert)] != NONE;
    }
    if (use_ > MOST_USE) {
        for (double &uses : uses_) uses /= use_;
        use_ = 1.0;
    }
    const std::lock_guard<std::mutex> guard(counting_);
    counts_.num_hits += num_hits;
    counts_.num_misses += static_cast<int64_t>(experts.size()) - num_hits;
}

std::vector<size_t> ExpertPool::bring(int64_t layer, const std::vector<int64_t> &experts, std::vector<ExpertWeights> &weights) {
    std::vector<size_t> places, missing;
    std::fill(is_held_.begin(), is_held_.end(), 0);
    for (size_t i = 0; i < experts.size(); ++i) {
        const int64_t slot = slot_of_[number_of(layer, experts[i])];
        (slot == NONE ? missing : places).push_back(i);
        if (slot != NONE) is_held_[slot] = 1;
    }
    const int64_t room = num_slots_ - static_cast<int64_t>(places.size());
    missing.resize(std::min(missing.size(), static_cast<size_t>(min64(room, max64(1, num_slots_ / FEWEST_ROUNDS)))));
    if (places.empty() && missing.empty()) throw std::logic_error("there is no slot for an expert");
    if (!missing.empty()) {
        std::vector<Read> reads;
        const std::vector<int64_t> slots = free_slots(layer, static_cast<int64_t>(missing.size()));
        for (size_t i = 0; i < missing.size(); ++i) reads.push_back({slots[i], layer, experts[missing[i]]});
        read(reads);
        places.insert(places.end(), missing.begin(), missing.end());
        std::sort(places.begin(), places.end());  // ascending experts, as if all had been there
    }
    weights.clear();
    for (const size_t place : places) weights.push_back(weights_of(layer, experts[place]));
    return places;
}

ExpertWeights ExpertPool::weights_of(int64_t layer, int64_t expert) const {
    const StoredLayer &of = layers_[layer];
    const char *data = at(slot_of_[number_of(layer, expert)]);
    const auto part = [&](const LinearWeight &whole, const char *from) {
        LinearWeight weight = whole;
        weight.num_outputs = whole.num_outputs / of.num_experts;
        weight.bias = whole.bias == nullptr ? nullptr : whole.bias + expert * weight.num_outputs;
        weight.data = from;
        return weight;
    };
    return {part(of.up, data), part(of.down, data + of.up_bytes())};
}

// Slots that the layer does not read: empty ones, then those of the experts of least use, which are forgotten. The step's own
// use does not count: layers that have run would push out those that are still to come, all of them in turn where a step needs
// many experts. Among equals the layer goes that is computed again last.
std::vector<int64_t> ExpertPool::free_slots(int64_t layer, int64_t count) {
    std::vector<int64_t> slots;
    for (int64_t slot = 0; slot < num_slots_; ++slot) {
        if (!is_held_[slot]) slots.push_back(slot);
    }
    const auto worth = [&](int64_t slot) {
        const int64_t owner = owner_of_[slot];
        if (owner == NONE) return std::make_pair(-1.0, int64_t{0});
        const int64_t layers_until = (layer_of_[owner] - layer - 1 + num_layers()) % num_layers();
        return std::make_pair(uses_[owner] - (used_in_[owner] == step_ ? use_ : 0.0), -layers_until);
    };
    std::partial_sort(slots.begin(), slots.begin() + count, slots.end(), [&](int64_t a, int64_t b) { return worth(a) < worth(b); });
    slots.resize(count);
    for (const int64_t slot : slots) {
        if (owner_of_[slot] != NONE) slot_of_[owner_of_[slot]] = NONE;
        owner_of_[slot] = NONE;
    }
    return slots;
}

bool ExpertPool::wants_forecast(int64_t layer) const {
    return reads_ahead_ && num_slots_ < static_cast<int64_t>(slot_of_.size()) && forecasts_.is_due(layer, step_);
}

void ExpertPool::expect(int64_t layer, int64_t num_tokens, const std::vector<int64_t> &experts) {
    std::vector<int64_t> missing;
    asked_.clear();
    looked_for_.clear();
    asked_tokens_ = num_tokens;
    int64_t left = forecasts_.bytes_ahead(num_tokens, slot_bytes_), num_bytes = 0;
    for (const int64_t expert : experts) {
        const int64_t number = number_of(layer, expert);
        if (slot_of_[number] != NONE) continue;
        missing.push_back(expert);
        looked_for_.push_back(number);
        const bool is_here = is_cached(descriptor_, part_of(layer, expert, false).last());
        forecasts_.note_place(is_here);
        for (const bool is_down : {false, true}) {
            FilePart part = part_of(layer, expert, is_down);
            part.num_bytes = min64(part.num_bytes, left);
            if (is_here || part.num_bytes == 0) continue;
            asked_.push_back(part);
            left -= part.num_bytes;
            num_bytes += part.num_bytes;
        }
    }
    ahead_.ask(asked_);
    forecasts_.keep(layer, missing);
    const std::lock_guard<std::mutex> guard(counting_);
    counts_.num_forecast += static_cast<int64_t>(missing.size());
    counts_.bytes_ahead += num_bytes;
}

// What a layer needs is known: whether that was foreseen, and whether what was requested has been read.
void ExpertPool::settle_forecast(int64_t layer, const std::vector<int64_t> &experts) {
    const int64_t num_foreseen = forecasts_.settle(layer, experts);
    if (!asked_.empty()) {
        ahead_.drop();
        int64_t num_asked = 0, num_arrived = 0;
        for (const FilePart &part : asked_) {
            for (int64_t done = 0; done < part.num_bytes; done += LOOKED_AT_BYTES) {
                const FilePart piece{part.start + done, min64(LOOKED_AT_BYTES, part.num_bytes - done)};
                if (num_arrived == num_asked && is_cached(descriptor_, piece.last())) num_arrived += piece.num_bytes;
                num_asked += piece.num_bytes;
            }
        }
        forecasts_.note_arrival(asked_tokens_, num_asked, num_arrived);
        asked_.clear();
    }
    const std::lock_guard<std::mutex> guard(counting_);
    counts_.num_foreseen += num_foreseen;
}

// Whether the system's cache has what is to be read, once for each expert: what was requested would seem to have been there.
void ExpertPool::note_places(const std::vector<Read> &reads) {
    for (const Read &each : reads) {
        if (std::find(looked_for_.begin(), looked_for_.end(), number_of(each.layer, each.expert)) != looked_for_.end()) continue;
        forecasts_.note_place(is_cached(descriptor_, part_of(each.layer, each.expert, false).last()));
    }
    looked_for_.clear();
}

FilePart ExpertPool::part_of(int64_t layer, int64_t expert, bool is_down) const {
    const StoredLayer &of = layers_[layer];
    const int64_t num_bytes = is_down ? of.down_bytes() : of.up_bytes();
    return {(is_down ? of.down_start : of.up_start) + expert * num_bytes, num_bytes};
}

// By the whole team; slots have their experts only if all could be read.
void ExpertPool::read(const std::vector<Read> &reads) {
    const auto began = std::chrono::steady_clock::now();
    const int64_t count = 2 * static_cast<int64_t>(reads.size());
    std::vector<std::string> failures(reads.size() * 2);
    std::atomic<bool> has_failed = false;
    note_places(reads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(team_size(count * slot_bytes_))
    for (int64_t i = 0; i < count; ++i) {
        try {
            read_part(reads[i / 2], i % 2 == 1);
        } catch (const std::exception &error) {
            failures[i] = error.what();
            has_failed = true;
        }
    }
    if (has_failed) {
        throw ExpertFileError(*std::find_if(failures.begin(), failures.end(), [](const std::string &each) { return !each.empty(); }));
    }
    int64_t num_bytes = 0;
    for (const Read &each : reads) {
        owner_of_[each.slot] = number_of(each.layer, each.expert);
        slot_of_[owner_of_[each.slot]] = each.slot;
        is_held_[each.slot] = 1;
        num_bytes += layers_[each.layer].up_bytes() + layers_[each.layer].down_bytes();
    }
    const std::lock_guard<std::mutex> guard(counting_);
    counts_.bytes_read += num_bytes;
    counts_.wait_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void ExpertPool::read_part(const Read &read, bool is_down) const {
    const StoredLayer &of = layers_[read.layer];
    const auto [start, num_bytes] = part_of(read.layer, read.expert, is_down);
    char *to = at(read.slot) + (is_down ? of.up_bytes() : 0);
    const auto name = [&] { return path_ + ": expert " + std::to_string(read.expert) + " of mixture " + std::to_string(read.layer); };
    Checksum sum;
    for (int64_t done = 0; done < num_bytes;) {
        const int64_t piece = min64(READ_BYTES, num_bytes - done);
        for (int64_t i = 0; i < piece;) {
            const ssize_t got = pread(descriptor_, to + done + i, piece - i, start + done + i);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) throw ExpertFileError(name() + " cannot be read: " + std::strerror(errno));
            if (got == 0) throw ExpertFileError(name() + " is cut short");
            i += got;
        }
        sum.add(to + done, piece);
        done += piece;
    }
    if (sum.value() != (is_down ? of.down_sums : of.up_sums)[read.expert]) {
        throw ExpertFileError(name() + " has other bytes than were written");
    }
}

PoolCounts ExpertPool::counts() const {
    const std::lock_guard<std::mutex> guard(counting_);
    return counts_;
}

// ---- bindings ----

static void init_pool(ExpertPool *self, const std::string &path, int descriptor, uintptr_t memory, int64_t slot_bytes,
                      int64_t num_slots) {
    const Arguments args("ExpertPool");
    args.count("the bytes of a slot", slot_bytes, 1);
    args.count("the number of slots", num_slots, 1);
    new (self) ExpertPool(path, descriptor, args.memory("the memory", memory, int64_t{1}, {num_slots, slot_bytes}).as<void>(),
                          slot_bytes, num_slots);
}

static void add_layer(ExpertPool &pool, const LinearWeight &up, const LinearWeight &down, int64_t num_experts, int64_t slot_bytes,
                      int64_t up_start, int64_t down_start, const std::vector<uint64_t> &up_sums,
                      const std::vector<uint64_t> &down_sums) {
    const Arguments args("ExpertPool.add_layer");
    args.count("the number of experts", num_experts, 1);
    const size_t count = static_cast<size_t>(num_experts);
    args.require(up_sums.size() == count && down_sums.size() == count, "a checksum for each expert");
    const auto are_parts = [&](const LinearWeight &weight) { return weight.num_outputs % (num_experts * PANEL) == 0; };
    args.require(are_parts(up) && are_parts(down), "an expert does not begin with a panel");
    StoredLayer layer{up, down, num_experts, args.count("a place", up_start), args.count("a place", down_start), up_sums, down_sums};
    layer.up.data = layer.down.data = nullptr;
    args.require(layer.up_bytes() + layer.down_bytes() <= slot_bytes, "an expert does not fit a slot");
    pool.add_layer(std::move(layer));
}

static std::vector<uint64_t> expert_checksums(uintptr_t data, int64_t num_experts, int64_t expert_bytes) {
    const Arguments args("expert_checksums");
    const char *from = args.memory("the weights", data, int64_t{1}, {num_experts, expert_bytes}).as<const char>();
    std::vector<uint64_t> sums(static_cast<size_t>(num_experts));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team_size(num_experts * expert_bytes))
    for (int64_t expert = 0; expert < num_experts; ++expert) sums[expert] = checksum_of(from + expert * expert_bytes, expert_bytes);
    return sums;
}

static void bind_expert_pool(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    nb::exception<ExpertFileError>(m, "ExpertFileError", PyExc_RuntimeError);
    nb::class_<ExpertPool>(m, "ExpertPool")
        .def("__init__", &init_pool, "path"_a, "descriptor"_a, "memory"_a, "slot_bytes"_a, "num_slots"_a)
        .def("add_layer", &add_layer, "up"_a, "down"_a, "num_experts"_a, "slot_bytes"_a, "up_start"_a, "down_start"_a,
             "up_sums"_a, "down_sums"_a)
        .def("fill", &ExpertPool::fill, release())
        .def("set_reads_ahead", &ExpertPool::set_reads_ahead, "reads_ahead"_a)
        .def("counts", [](const ExpertPool &pool) {
            const PoolCounts counts = pool.counts();
            return nb::make_tuple(counts.num_hits, counts.num_misses, counts.bytes_read, counts.wait_s, counts.num_forecast,
                                  counts.num_foreseen, counts.bytes_ahead);
        });
    m.def("expert_checksums", &expert_checksums, release());
}
static const Registration registration(bind_expert_pool);

}  // namespace quire
