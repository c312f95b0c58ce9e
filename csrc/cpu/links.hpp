// Ranks that share no memory, because they are on several hosts: each has a copy of its own, and what one writes for the
// others is sent to them over a socket each and written to the same place there, before the counter that says so moves on.
//
// A thread for each socket receives. So what is sent is always taken off, and two ranks that send much to each other at the
// same time cannot wait for one another. All that arrives is a sign of life; a socket that ends says that its rank is gone.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace quire {

struct Counter;
struct GroupState;

// Of memory, so that no product of what an extent says overflows.
constexpr int64_t MOST_LINKED_BYTES = int64_t{1} << 31;

// `count` pieces of `num_bytes`, `stride` apart, the first of which is `first` bytes into the memory.
struct Extent {
    int64_t first, stride, count, num_bytes;
};

class Links {
   public:
    enum class Kind : uint32_t { beat, data, arrived, posted, done };

    // `state` is at the beginning of `num_bytes` of memory. `peers`: ranks, and connected sockets, which are closed at the end.
    Links(GroupState *state, int64_t num_bytes, double silence_s, const std::vector<std::pair<int, int>> &peers);
    ~Links();
    Links(const Links &) = delete;
    Links &operator=(const Links &) = delete;

    // Send parts of the memory and a new value of a counter, to one rank or all (-1). Throws std::runtime_error where a rank
    // is gone or takes nothing for `silence_s`. From one thread at a time.
    void send(Kind kind, uint32_t value, const std::vector<Extent> &extents, int rank = -1);
    // From any thread; waits for nothing.
    void beat();
    // Have both ends of all sockets know that it is over. From any thread.
    void shut();

   private:
    struct Peer {
        int rank, fileno;
        std::mutex sending;
        std::vector<char> rest;  // of a sign of life, before anything else
        std::thread receiver;
    };

    void write(Peer &peer, const char *from, size_t num_bytes);
    ssize_t write_some(Peer &peer, const char *from, size_t num_bytes);
    void receive(Peer &peer);
    void take(Peer &peer);
    Counter *counter_of(Kind kind, int rank);

    GroupState *const state_;
    const int64_t num_bytes_;
    const double silence_s_;
    std::vector<std::unique_ptr<Peer>> peers_;
    std::vector<char> message_;
    std::atomic<bool> is_over_{false};
};

}  // namespace quire
