// How the ranks of one model exchange activations: processes of one machine that map the same memory.
//
// Each rank computes some of the columns (or rows) of a value and writes them where all can read them; behind one barrier
// each has the whole. Nothing is added up, so what is exchanged are the very bits that one process would have. Two buffers
// take turns: a rank that is a barrier ahead writes to the one that is no longer read.
//
// Every wait is bounded. A rank says that it lives by a count that a thread of its own advances; a wait for a rank whose
// count stands still for `silence_s`, or that is known to have died, throws std::runtime_error, and the group is over:
// its owner starts another.
//
// Ranks of several hosts have a copy of the memory each, and send one another what they write (links.hpp). All else is the
// same: who may write where, and when, is decided by the same counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "dispatch.hpp"
#include "links.hpp"

namespace quire {

constexpr int MAX_RANKS = 64;

// A number that only grows (and wraps around), and those who sleep until it has.
struct alignas(64) Counter {
    std::atomic<uint32_t> value, num_sleepers;
};

// Let it grow, and wake them.
void advance(Counter &counter, uint32_t value);

struct RankState {
    Counter arrived;  // at barriers
    Counter done;     // with what was posted
    alignas(64) std::atomic<uint64_t> num_beats;
    std::atomic<uint32_t> is_lost;
};

// The head of the shared memory; zeros are its first state.
struct GroupState {
    Counter posted;  // what rank 0 wants of the others
    RankState ranks[MAX_RANKS];
};

// Columns of a value, in bytes.
struct Columns {
    int64_t first, num_bytes;
};

class Gathering {
   public:
    // `memory` begins with a GroupState and has room for `num_bytes` more, for both buffers.
    Gathering(void *memory, int64_t num_bytes, int rank, int size, double silence_s);

    int rank() const { return rank_; }
    int size() const { return size_; }

    // Rows of this rank's columns, which lie at `columns` of the whole, to whole rows of `row_bytes`.
    void columns(const void *own, int64_t num_rows, const std::vector<Columns> &columns, int64_t row_bytes, void *out);
    // Rows of which each rank has some: `rows` to `out`, which may be the same.
    void rows(const void *rows, const std::vector<uint8_t> &is_own, int64_t row_bytes, void *out);

    // Of rank 0: tell the others that there is something to be done; wait until all have done it. Ranks that share no memory
    // are sent `num_bytes` of it, from `first` on.
    void post(int64_t first, int64_t num_bytes);
    void wait_done();
    // Of the others: wait for the next thing to be done, for so long; say that it is, and send rank 0 part of the memory.
    bool wait_posted(double timeout_s);
    void finish(int64_t first, int64_t num_bytes);

    // Ranks that share no memory: by these sockets the others are reached. The memory has `num_bytes` in all.
    void connect(const std::vector<std::pair<int, int>> &peers, int64_t num_bytes);
    // Back to the first state, without sockets, once all the others have ended.
    void reset();

    void beat();
    void lose(int rank);     // it is known to have died
    bool is_lost() const;    // whether any is

   private:
    template <typename Write, typename Extents>
    void exchange(int64_t num_rows, int64_t row_bytes, Write write, Extents extents, void *out);
    void barrier(const std::vector<Extent> &extents);
    std::shared_ptr<Links> links() const;
    bool wait(Counter &counter, uint32_t target, int rank, double timeout_s);
    bool sleep(Counter &counter, uint32_t target, int rank, double timeout_s);

    GroupState *state_;
    char *buffers_[2];
    int64_t buffer_bytes_;
    int rank_, size_;
    double silence_s_;
    uint32_t num_barriers_ = 0, num_posted_ = 0;
    int turn_ = 0;
    mutable std::mutex changing_;
    std::shared_ptr<Links> links_;  // null: all share one memory
};

}  // namespace quire
