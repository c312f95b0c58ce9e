// Owns the thread count setting, and binds it; hands out work.
#include "threads.hpp"

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "bindings.hpp"

namespace quire {

static std::atomic<int> thread_setting{0};

static int default_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();  // honours OMP_NUM_THREADS and torch.set_num_threads
#else
    return 1;
#endif
}

int num_threads() {
    const int count = thread_setting.load(std::memory_order_relaxed);
    return count > 0 ? count : default_threads();
}

int thread_index() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

void set_num_threads(int count) {
    if (count < 1 || count > MAX_THREADS) {
        throw std::invalid_argument("the number of threads must be at least 1 and at most " + std::to_string(MAX_THREADS));
    }
    thread_setting.store(count, std::memory_order_relaxed);
}

Shares::Shares(int64_t num_items, int team) : team_(team) {
    static thread_local std::unique_ptr<Range[]> ranges;
    static thread_local int capacity = 0;
    if (capacity < team) {
        ranges.reset(new Range[team]);
        capacity = team;
    }
    ranges_ = ranges.get();
    for (int thread = 0; thread < team; ++thread) {
        const uint64_t first = num_items * thread / team, end = num_items * (thread + 1) / team;
        ranges_[thread].ends.store(first << 32 | end, std::memory_order_relaxed);
    }
}

int64_t Shares::take_from(Range &range, bool is_own) {
    uint64_t ends = range.ends.load(std::memory_order_relaxed);
    for (;;) {
        const uint64_t first = ends >> 32, end = ends & 0xffffffffu;
        if (first >= end) return -1;
        const uint64_t left = is_own ? (first + 1) << 32 | end : first << 32 | (end - 1);
        if (range.ends.compare_exchange_weak(ends, left, std::memory_order_relaxed)) return is_own ? first : end - 1;
    }
}

int64_t Shares::take(int thread) {
    for (int other = 0; other < team_; ++other) {
        const int64_t item = take_from(ranges_[(thread + other) % team_], other == 0);
        if (item >= 0) return item;
    }
    return -1;
}

static void bind_threads(nb::module_ &m) {
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &set_num_threads, nb::arg("count"));
    m.attr("MAX_THREADS") = MAX_THREADS;
}
static const Registration registration(bind_threads);

}  // namespace quire
