// The number of threads that kernels use: one setting for the whole process.
//
// Every parallel region says `num_threads(team_size(work))`, so that small work stays on the calling thread. A team is
// either 1 or the full setting, never between: libgomp rebuilds its pool when the size of teams changes.
#pragma once

#include <cstdint>

namespace quire {

int num_threads();
void set_num_threads(int count);

// `work` is an estimate in bytes touched or operations done; below the threshold a fork costs more than it saves.
constexpr int64_t PARALLEL_THRESHOLD = 1 << 16;
inline int team_size(int64_t work) { return work < PARALLEL_THRESHOLD ? 1 : num_threads(); }

// The calling thread's place in the team it is in.
int thread_index();

}  // namespace quire
