// Owns the choice of instruction set: the best that was compiled in and that this machine has, until set_isa.
#include "dispatch.hpp"

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"

namespace quire {

#define QUIRE_DECLARE(name)         \
    namespace name {                \
    extern const KernelTable table; \
    }
#ifdef QUIRE_WITH_portable
QUIRE_DECLARE(portable)
#endif
#ifdef QUIRE_WITH_avx2
QUIRE_DECLARE(avx2)
#endif
#ifdef QUIRE_WITH_avx512
QUIRE_DECLARE(avx512)
#endif
#ifdef QUIRE_WITH_avx512vnni
QUIRE_DECLARE(avx512vnni)
#endif

// From the plainest to the best.
static std::vector<const KernelTable *> find_supported() {
    std::vector<const KernelTable *> tables{&portable::table};
#if defined(__x86_64__)
    __builtin_cpu_init();
    [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    [[maybe_unused]] const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                                             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                             __builtin_cpu_supports("avx512dq");
#ifdef QUIRE_WITH_avx2
    if (has_avx2) tables.push_back(&avx2::table);
#endif
#ifdef QUIRE_WITH_avx512
    if (has_avx512) tables.push_back(&avx512::table);
#endif
#ifdef QUIRE_WITH_avx512vnni
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) tables.push_back(&avx512vnni::table);
#endif
#endif
    return tables;
}

static const std::vector<const KernelTable *> &supported() {
    static const std::vector<const KernelTable *> tables = find_supported();
    return tables;
}

static std::atomic<const KernelTable *> chosen{nullptr};

const KernelTable &kernels() {
    const KernelTable *table = chosen.load(std::memory_order_relaxed);
    return table != nullptr ? *table : *supported().back();
}

static void set_isa(const std::string &name) {
    for (const KernelTable *table : supported()) {
        if (name == table->name) return chosen.store(table, std::memory_order_relaxed);
    }
    throw std::invalid_argument("instruction set " + name + " is not supported here");
}

static std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const KernelTable *table : supported()) names.emplace_back(table->name);
    return names;
}

static void bind_dispatch(nb::module_ &m) {
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("set_isa", &set_isa, nb::arg("name"));
    m.def("supported_isas", &supported_isas);
}
static const Registration registration(bind_dispatch);

}  // namespace quire
