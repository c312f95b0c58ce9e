// Owns the choice of instruction set: the best that was compiled in and that this machine has, until set_isa.
#include "dispatch.hpp"

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

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
#ifdef QUIRE_WITH_neon
QUIRE_DECLARE(neon)
#endif

// Those that extend another set's table make it when they are first used, since they do so with instructions of their own: on a
// machine without them, the start of the program would be too early.
#define QUIRE_DECLARE_EXTENSION(name)      \
    namespace name {                       \
    const KernelTable &extended_table();   \
    }
QUIRE_DECLARE_EXTENSION(avxvnni)
QUIRE_DECLARE_EXTENSION(avx512vnni)
QUIRE_DECLARE_EXTENSION(avx512bf16)
QUIRE_DECLARE_EXTENSION(avx512bf16emulated)
QUIRE_DECLARE_EXTENSION(amx)
QUIRE_DECLARE_EXTENSION(amxemulated)
QUIRE_DECLARE_EXTENSION(neondot)
QUIRE_DECLARE_EXTENSION(neoni8mm)
QUIRE_DECLARE_EXTENSION(neonbf16)

// Whether the processor has AMX for bfloat16 and bytes, the system saves its tiles, and this process may use them: Linux
// wants to be called once, for all threads, since a thread's state grows by 8 KiB.
[[maybe_unused]] static bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24, BYTES = 1u << 25, OSXSAVE = 1u << 27;  // leaf 7: EDX, leaf 1: ECX
    constexpr unsigned TILE_STATES = 3u << 17;                                                 // XTILECFG, XTILEDATA
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;                                // ARCH_REQ_XCOMP_PERM
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & OSXSAVE) == 0) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (BF16 | TILES | BYTES)) != 0) return false;
    unsigned states = 0, high = 0;
    asm volatile("xgetbv" : "=a"(states), "=d"(high) : "c"(0));
    return (~states & TILE_STATES) == 0 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

// Products of bytes with 256 bits and without AVX-512: Intel since 2021 (Alder Lake), AMD since Zen 5.
[[maybe_unused]] static bool has_avxvnni() {
#if defined(__x86_64__)
    constexpr unsigned AVX_VNNI = 1u << 4;  // leaf 7, subleaf 1: EAX
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI) != 0;
#else
    return false;
#endif
}

#if defined(__aarch64__)
// Extensions of Arm's instruction set, by their names in the manual; `hwcap`: Linux's bit for it, above 32 those of its second word.
static bool has_extension([[maybe_unused]] const char *name, [[maybe_unused]] int hwcap) {
#if defined(__linux__)
    return (getauxval(hwcap < 32 ? AT_HWCAP : AT_HWCAP2) >> hwcap % 32 & 1) != 0;
#elif defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname((std::string("hw.optional.arm.") + name).c_str(), &value, &size, nullptr, 0) == 0 && value != 0;
#else
    return false;
#endif
}
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
#ifdef QUIRE_WITH_avxvnni
    if (has_avx2 && has_avxvnni()) tables.push_back(&avxvnni::extended_table());
#endif
#ifdef QUIRE_WITH_avx512
    if (has_avx512) tables.push_back(&avx512::table);
#endif
#ifdef QUIRE_WITH_avx512vnni
    const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    if (has_vnni) tables.push_back(&avx512vnni::extended_table());
#ifdef QUIRE_WITH_avx512bf16
    const bool has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16");
    // Intel's processors make half as many products by pairs as in float32 (1.4 and 5.8 instructions a nanosecond on an
    // Emerald Rapids), so that float32 is better where they are to do without AMX.
    if (has_bf16) tables.insert(tables.end() - (__builtin_cpu_is("intel") ? 1 : 0), &avx512bf16::extended_table());
#ifdef QUIRE_WITH_amx
    if (has_bf16 && has_amx()) tables.push_back(&amx::extended_table());
#endif
#endif
#endif
#endif
#if defined(QUIRE_WITH_neon)
    tables.push_back(&neon::table);
#ifdef QUIRE_WITH_neondot
    const bool has_dots = has_extension("FEAT_DotProd", 20);
    if (has_dots) tables.push_back(&neondot::extended_table());
#ifdef QUIRE_WITH_neoni8mm
    const bool has_matrices = has_dots && has_extension("FEAT_I8MM", 32 + 13);
    if (has_matrices) tables.push_back(&neoni8mm::extended_table());
#ifdef QUIRE_WITH_neonbf16
    if (has_matrices && has_extension("FEAT_BF16", 32 + 14)) tables.push_back(&neonbf16::extended_table());
#endif
#endif
#endif
#endif
    return tables;
}

// Sets that this machine lacks and can act out: for tests only, never chosen.
static std::vector<const KernelTable *> find_emulated() {
    std::vector<const KernelTable *> tables;
#if defined(QUIRE_WITH_avx512bf16emulated) && defined(QUIRE_WITH_amxemulated)
    if (__builtin_cpu_supports("avx512vnni")) {
        tables = {&avx512bf16emulated::extended_table(), &amxemulated::extended_table()};
    }
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
