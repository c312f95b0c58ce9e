// How long kernels ran: one running total per class of kernels, for the whole process.
//
// Only the outermost functions that a step calls are timed, on the calling thread, so that times do not overlap and add
// up to no more than the wall time of the thread that drives the steps. Two readings of the clock cost some 50 ns.
#pragma once

#include <chrono>
#include <cstdint>

namespace quire {

enum class KernelClass : int { linear = 0, attention, elementwise, sampling, gather, COUNT };

void add_kernel_time(KernelClass kind, int64_t nanoseconds);

// Counts from its construction to the end of its scope.
class Stopwatch {
   public:
    explicit Stopwatch(KernelClass kind) : kind_(kind), started_(Clock::now()) {}
    ~Stopwatch() {
        const auto elapsed = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started_);
        add_kernel_time(kind_, elapsed.count());
    }
    Stopwatch(const Stopwatch &) = delete;
    Stopwatch &operator=(const Stopwatch &) = delete;

   private:
    using Clock = std::chrono::steady_clock;
    KernelClass kind_;
    Clock::time_point started_;
};

}  // namespace quire
