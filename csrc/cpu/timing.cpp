// Owns the running totals of kernel time, and binds them.
#include "timing.hpp"

#include <atomic>

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"

namespace quire {

static constexpr int NUM_CLASSES = static_cast<int>(KernelClass::COUNT);
static const char *const CLASS_NAMES[NUM_CLASSES] = {"linear", "attention", "elementwise", "sampling", "gather"};
static std::atomic<int64_t> totals[NUM_CLASSES];

void add_kernel_time(KernelClass kind, int64_t nanoseconds) {
    totals[static_cast<int>(kind)].fetch_add(nanoseconds, std::memory_order_relaxed);
}

static std::map<std::string, double> kernel_times() {
    std::map<std::string, double> seconds;
    for (int i = 0; i < NUM_CLASSES; ++i) seconds[CLASS_NAMES[i]] = 1e-9 * static_cast<double>(totals[i].load());
    return seconds;
}

static void bind_timing(nb::module_ &m) { m.def("kernel_times", &kernel_times); }
static const Registration registration(bind_timing);

}  // namespace quire
