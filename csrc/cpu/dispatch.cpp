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

#ifdef QUIRE_WITH_avx512bf16
QUIRE_DECLARE(avx512bf16)
#endif
#ifdef QUIRE_WITH_avx512bf16emulated
QUIRE_DECLARE(avx512bf16emulated)
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
    const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    if (has_vnni) tables.push_back(&avx512vnni::table);
#ifdef QUIRE_WITH_avx512bf16
    if (has_vnni && __builtin_cpu_supports("avx512bf16")) tables.push_back(&avx512bf16::table);
#endif
#endif
#endif
    return tables;
}

// Sets that this machine lacks and can act out: for tests only, never chosen.
static std::vector<const KernelTable *> find_emulated() {
#ifdef QUIRE_WITH_avx512bf16emulated
    if (__builtin_cpu_supports("avx512vnni")) return {&avx512bf16emulated::table};
#endif
    return {};
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
    for (const auto &tables : {supported(), find_emulated()}) {
        for (const KernelTable *table : tables) {
            if (name == table->name) return chosen.store(table, std::memory_order_relaxed);
        }
    }
    throw std::invalid_argument("instruction set " + name + " is not supported here");
}

static std::vector<std::string> names_of(const std::vector<const KernelTable *> &tables) {
    std::vector<std::string> names;
    for (const KernelTable *table : tables) names.emplace_back(table->name);
    return names;
}

static void bind_dispatch(nb::module_ &m) {
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("set_isa", &set_isa, nb::arg("name"));
    m.def("supported_isas", [] { return names_of(supported()); });
    m.def("emulated_isas", [] { return names_of(find_emulated()); });
}
static const Registration registration(bind_dispatch);

}  // namespace quire
