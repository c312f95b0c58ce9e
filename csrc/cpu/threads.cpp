// Owns the thread count setting, and binds it.
#include "threads.hpp"

#include <atomic>
#include <stdexcept>

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
    if (count < 1) throw std::invalid_argument("the number of threads must be at least 1");
    thread_setting.store(count, std::memory_order_relaxed);
}

static void bind_threads(nb::module_ &m) {
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &set_num_threads, nb::arg("count"));
}
static const Registration registration(bind_threads);

}  // namespace quire
