// The machine's limits as the kernels meet them: operations and bytes per second on the team of threads in use.
#include <chrono>

#include "bindings.hpp"
#include "checks.hpp"
#include "dispatch.hpp"
#include "threads.hpp"

namespace quire {

template <typename Work>
static double seconds(const Work &work) {
    const auto started = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

// Operations per second of all threads together, each doing `rounds` of the loop.
static double rate(int64_t (*loop)(int64_t), int64_t rounds) {
    const int team = num_threads();
    Arguments("probe").count("the number of rounds", rounds, 1);
    int64_t total = 0;
    const double elapsed = seconds([&] {
#pragma omp parallel for schedule(static) num_threads(team) reduction(+ : total)
        for (int part = 0; part < team; ++part) total += loop(rounds);
    });
    return static_cast<double>(total) / elapsed;
}

static double read_rate(uintptr_t data, int64_t num_bytes) {
    const KernelTable &table = kernels();
    const int team = num_threads();
    const char *from = Arguments("probe_read").array<const char>("the memory", data, {num_bytes});
    const int64_t share = num_bytes / team / 64 * 64;
    const double elapsed = seconds([&] {
#pragma omp parallel for schedule(static) num_threads(team)
        for (int part = 0; part < team; ++part) {
            table.probe_read(from + part * share, share);
        }
    });
    return static_cast<double>(share * team) / elapsed;
}

static void bind_probe(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.def("probe_floats", [](int64_t rounds) { return rate(kernels().probe_floats, rounds); }, release());
    m.def("probe_pairs", [](int64_t rounds) { return rate(kernels().probe_pairs, rounds); }, release());
    m.def("probe_integers", [](int64_t rounds) { return rate(kernels().probe_integers, rounds); }, release());
    m.def("probe_half_bytes", [](int64_t rounds) { return rate(kernels().probe_half_bytes, rounds); }, release());
    m.def("probe_read", &read_rate, release());
}
static const Registration registration(bind_probe);

}  // namespace quire
