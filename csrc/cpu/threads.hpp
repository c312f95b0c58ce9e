// The number of threads that kernels use: one setting for the whole process.
//
// Every parallel region says `num_threads(team_size(work))`, so that small work stays on the calling thread. A team is
// either 1 or the full setting, never between: libgomp rebuilds its pool when the size of teams changes.
#pragma once

#include <atomic>
#include <cstdint>

namespace quire {

// More are refused: far above any machine's cores, and few enough for the system to give their stacks.
constexpr int MAX_THREADS = 1024;

int num_threads();
void set_num_threads(int count);

// `work` is an estimate in bytes touched or operations done; below the threshold a fork costs more than it saves.
constexpr int64_t PARALLEL_THRESHOLD = 1 << 16;
inline int team_size(int64_t work) { return work < PARALLEL_THRESHOLD ? 1 : num_threads(); }

// The calling thread's index in its team.
int thread_index();

// Items handed out to a team: each thread has a run of neighbouring ones and takes them in order, so that it reads memory
// in order as well; a thread with none left takes the last one of another's, so that none waits for a thread that the system
// has put aside. Belongs to the thread that made it, which has one at a time; the team shares it.
class Shares {
   public:
    Shares(int64_t num_items, int team);  // num_items below 2^31
    int64_t take(int thread);             // an item that no thread has had, or -1

   private:
    struct alignas(64) Range {
        std::atomic<uint64_t> ends{0};  // first in the high half, one past the last in the low half
    };
    int64_t take_from(Range &range, bool is_own);
    Range *ranges_;
    int team_;
};

}  // namespace quire
