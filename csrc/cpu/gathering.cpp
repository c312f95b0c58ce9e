// Barriers and exchanges between ranks; see gathering.hpp.
#include "gathering.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include "bindings.hpp"
#include "checks.hpp"
#include "elementwise.hpp"
#include "timing.hpp"

namespace quire {

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "counters are shared between processes");

namespace {

using Clock = std::chrono::steady_clock;

// Ranks with a core each arrive within microseconds of one another; where they share cores, spinning keeps others off them.
constexpr auto SPIN = std::chrono::microseconds(50);
// How often a sleeper looks whether those it waits for still live.
constexpr double SLICE_S = 0.02;
// Of waiting that counts towards a silence at a time: a process that was stopped itself has not waited.
constexpr double MOST_COUNTED_S = 0.1;

double seconds(Clock::duration elapsed) { return std::chrono::duration<double>(elapsed).count(); }

bool is_reached(const Counter &counter, uint32_t target) {
    return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - target) >= 0;
}

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleep while the counter has a value, for a slice at most.
void sleep_while(Counter &counter, uint32_t value) {
#if defined(__linux__)
    const timespec slice{0, static_cast<long>(SLICE_S * 1e9)};
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&counter.value), FUTEX_WAIT, value, &slice, nullptr, 0);
#else
    if (counter.value.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

}  // namespace

void advance(Counter &counter, uint32_t value) {
    counter.value.store(value, std::memory_order_seq_cst);
    if (counter.num_sleepers.load(std::memory_order_seq_cst) == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&counter.value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

Gathering::Gathering(void *memory, int64_t num_bytes, int rank, int size, double silence_s)
    : state_(static_cast<GroupState *>(memory)), buffer_bytes_(num_bytes / 2 / 64 * 64), rank_(rank), size_(size),
      silence_s_(silence_s) {
    char *const buffers = static_cast<char *>(memory) + sizeof(GroupState);
    buffers_[0] = buffers;
    buffers_[1] = buffers + buffer_bytes_;
}

// ---- waiting ----

bool Gathering::is_lost() const {
    for (int i = 0; i < size_; ++i) {
        if (state_->ranks[i].is_lost.load(std::memory_order_relaxed) != 0) return true;
    }
    return false;
}

void Gathering::lose(int rank) {
    state_->ranks[rank].is_lost.store(1);
    if (const auto links = this->links()) links->shut();
}

std::shared_ptr<Links> Gathering::links() const {
    const std::lock_guard<std::mutex> lock(changing_);
    return links_;
}

void Gathering::connect(const std::vector<std::pair<int, int>> &peers, int64_t num_bytes) {
    auto links = std::make_shared<Links>(state_, num_bytes, silence_s_, peers);
    const std::lock_guard<std::mutex> lock(changing_);
    links_.swap(links);
}

void Gathering::reset() {
    {
        std::shared_ptr<Links> former;  // ends without the lock, once no thread uses it
        const std::lock_guard<std::mutex> lock(changing_);
        former.swap(links_);
    }
    std::memset(static_cast<void *>(state_), 0, sizeof(GroupState));
    num_barriers_ = num_posted_ = 0;
    turn_ = 0;
}

void Gathering::beat() {
    state_->ranks[rank_].num_beats.fetch_add(1, std::memory_order_relaxed);
    if (const auto links = this->links()) links->beat();
}

// Until the counter of a rank has come to `target`; false after `timeout_s`, if that is not negative. The silence of the
// rank counts only where there is no timeout.
bool Gathering::wait(Counter &counter, uint32_t target, int rank, double timeout_s) {
    if (is_reached(counter, target)) return true;
    const auto began = Clock::now();
    while (Clock::now() - began < SPIN) {
        for (int i = 0; i < 64; ++i) {
            if (is_reached(counter, target)) return true;
            pause_core();
        }
    }
    return sleep(counter, target, rank, timeout_s);
}

bool Gathering::sleep(Counter &counter, uint32_t target, int rank, double timeout_s) {
    uint64_t num_beats = state_->ranks[rank].num_beats.load();
    double silent_s = 0.0;
    const auto began = Clock::now();
    for (auto last = began; !is_reached(counter, target);) {
        counter.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t value = counter.value.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(value - target) < 0) sleep_while(counter, value);
        counter.num_sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (is_reached(counter, target)) return true;
        if (is_lost()) throw std::runtime_error("a rank of the group is gone");
        const auto now = Clock::now();
        if (timeout_s >= 0.0) {
            if (seconds(now - began) >= timeout_s) return false;
            continue;
        }
        const double elapsed_s = seconds(now - last);
        silent_s += elapsed_s < MOST_COUNTED_S ? elapsed_s : MOST_COUNTED_S;
        last = now;
        const uint64_t beats = state_->ranks[rank].num_beats.load();
        if (beats != num_beats) {
            num_beats = beats;
            silent_s = 0.0;
        } else if (silent_s > silence_s_) {
            lose(rank);
            throw std::runtime_error("rank " + std::to_string(rank) + " gives no sign of life for " +
                                     std::to_string(static_cast<int>(silent_s)) + " s");
        }
    }
    return true;
}

void Gathering::barrier(const std::vector<Extent> &extents) {
    ++num_barriers_;
    if (const auto links = this->links()) links->send(Links::Kind::arrived, num_barriers_, extents);
    advance(state_->ranks[rank_].arrived, num_barriers_);
    for (int i = 0; i < size_; ++i) {
        if (i != rank_) wait(state_->ranks[i].arrived, num_barriers_, i, -1.0);
    }
}

static std::vector<Extent> one_extent(int64_t first, int64_t num_bytes) {
    if (num_bytes == 0) return {};
    return {{first, 0, 1, num_bytes}};
}

void Gathering::post(int64_t first, int64_t num_bytes) {
    ++num_posted_;
    if (const auto links = this->links()) links->send(Links::Kind::posted, num_posted_, one_extent(first, num_bytes));
    advance(state_->posted, num_posted_);
}

void Gathering::wait_done() {
    for (int i = 1; i < size_; ++i) wait(state_->ranks[i].done, num_posted_, i, -1.0);
}

bool Gathering::wait_posted(double timeout_s) {
    if (!wait(state_->posted, num_posted_ + 1, 0, timeout_s)) return false;
    ++num_posted_;
    return true;
}

void Gathering::finish(int64_t first, int64_t num_bytes) {
    if (const auto links = this->links()) links->send(Links::Kind::done, num_posted_, one_extent(first, num_bytes), 0);
    advance(state_->ranks[rank_].done, num_posted_);
}

// ---- exchanges ----

// As many rows at a time as a buffer holds. `write(first, last, buffer)` puts down this rank's part of them, and
// `extents(first, last, start)` says where it is, in a buffer that starts there.
template <typename Write, typename Extents>
void Gathering::exchange(int64_t num_rows, int64_t row_bytes, Write write, Extents extents, void *out) {
    if (num_rows == 0 || row_bytes == 0) return;
    if (row_bytes > buffer_bytes_) throw std::invalid_argument("gather: a row is larger than the buffer");
    const Stopwatch stopwatch(KernelClass::gather);
    const int64_t at_once = buffer_bytes_ / row_bytes;
    const bool is_linked = links() != nullptr;
    for (int64_t first = 0; first < num_rows; first += at_once) {
        const int64_t last = min64(first + at_once, num_rows);
        char *const buffer = buffers_[turn_];
        turn_ ^= 1;
        write(first, last, buffer);
        const int64_t start = buffer - reinterpret_cast<char *>(state_);
        barrier(is_linked ? extents(first, last, start) : std::vector<Extent>());
        char *const to = static_cast<char *>(out) + first * row_bytes;
        over_rows(last - first, row_bytes / 4, [&](int64_t begin, int64_t end) {
            std::memcpy(to + begin * row_bytes, buffer + begin * row_bytes, (end - begin) * row_bytes);
        });
    }
}

void Gathering::columns(const void *own, int64_t num_rows, const std::vector<Columns> &columns, int64_t row_bytes, void *out) {
    int64_t own_bytes = 0;
    for (const Columns &each : columns) {
        if (each.first < 0 || each.num_bytes < 0 || each.first + each.num_bytes > row_bytes) {
            throw std::invalid_argument("gather: columns outside the rows");
        }
        own_bytes += each.num_bytes;
    }
    const char *const from = static_cast<const char *>(own);
    exchange(num_rows, row_bytes, [&](int64_t first, int64_t last, char *buffer) {
        over_rows(last - first, own_bytes / 4, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                const char *part = from + (first + t) * own_bytes;
                for (const Columns &each : columns) {
                    std::memcpy(buffer + t * row_bytes + each.first, part, each.num_bytes);
                    part += each.num_bytes;
                }
            }
        });
    }, [&](int64_t first, int64_t last, int64_t start) {
        std::vector<Extent> found;
        for (const Columns &each : columns) {
            if (each.num_bytes > 0) found.push_back({start + each.first, row_bytes, last - first, each.num_bytes});
        }
        return found;
    }, out);
}

void Gathering::rows(const void *rows, const std::vector<uint8_t> &is_own, int64_t row_bytes, void *out) {
    const char *const from = static_cast<const char *>(rows);
    exchange(static_cast<int64_t>(is_own.size()), row_bytes, [&](int64_t first, int64_t last, char *buffer) {
        for (int64_t t = first; t < last; ++t) {
            if (is_own[t]) std::memcpy(buffer + (t - first) * row_bytes, from + t * row_bytes, row_bytes);
        }
    }, [&](int64_t first, int64_t last, int64_t start) {
        std::vector<Extent> found;
        for (int64_t t = first; t < last; ++t) {
            if (!is_own[t]) continue;
            if (t > first && is_own[t - 1]) {
                found.back().num_bytes += row_bytes;
            } else {
                found.push_back({start + (t - first) * row_bytes, 0, 1, row_bytes});
            }
        }
        return found;
    }, out);
}

// ---- bindings ----

using namespace nb::literals;
using Range = std::pair<int64_t, int64_t>;

static void init_gathering(Gathering *self, uintptr_t memory, int64_t num_bytes, int rank, int size, double silence_s) {
    const Arguments args("Gathering");
    args.between(1, MAX_RANKS, "the number of ranks", size);
    args.between(0, size - 1, "the rank", rank);
    args.require(memory % 64 == 0, "the memory is not aligned");
    args.count("the bytes of the buffers", num_bytes, 128);
    args.require(silence_s > 0.0, "the silence must be above 0");
    const int64_t whole = num_bytes + static_cast<int64_t>(sizeof(GroupState));
    void *const at = args.memory("the memory", memory, int64_t{1}, {whole}).as<void>();
    new (self) Gathering(at, num_bytes, rank, size, silence_s);
}

// `columns`: first and one past the last, of elements of `size` bytes.
static void gather_columns(Gathering &group, uintptr_t own, int64_t num_rows, const std::vector<Range> &columns, int64_t width,
                           int64_t size, uintptr_t out) {
    const Arguments args("Gathering.columns");
    args.between(1, 8, "the size of an element", size);
    args.count("the width", width);
    std::vector<Columns> found;
    int64_t own_width = 0;
    for (const auto &[first, end] : columns) {
        args.between(0, width, "the first column", first);
        args.between(first, width, "the last column", end);
        found.push_back({first * size, (end - first) * size});
        own_width += end - first;
    }
    const Memory from = args.memory("own", own, int64_t{1}, {num_rows, own_width, size});
    const Memory to = args.memory("out", out, int64_t{1}, {num_rows, width, size});
    args.apart(to, from);
    group.columns(from.as<const void>(), num_rows, found, width * size, to.as<void>());
}

static void gather_rows(Gathering &group, uintptr_t rows, const std::vector<uint8_t> &is_own, int64_t row_bytes) {
    const Arguments args("Gathering.rows");
    void *const at = args.memory("rows", rows, int64_t{1}, {static_cast<int64_t>(is_own.size()), row_bytes}).as<void>();
    group.rows(at, is_own, row_bytes, at);
}

static void connect_ranks(Gathering &group, const std::vector<std::pair<int, int>> &peers, int64_t num_bytes) {
    const Arguments args("Gathering.connect");
    args.between(sizeof(GroupState), MOST_LINKED_BYTES, "the bytes of the memory", num_bytes);
    for (const auto &[rank, fileno] : peers) {
        args.between(0, group.size() - 1, "a rank", rank);
        args.require(rank != group.rank() && fileno >= 0, "a rank that is not another, or no socket");
    }
    group.connect(peers, num_bytes);
}

static void bind_gathering(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.attr("MAX_RANKS") = MAX_RANKS;
    m.attr("GROUP_STATE_BYTES") = sizeof(GroupState);
    nb::class_<Gathering>(m, "Gathering")
        .def("__init__", &init_gathering, "memory"_a, "num_bytes"_a, "rank"_a, "size"_a, "silence_s"_a)
        .def("columns", &gather_columns, "own"_a, "num_rows"_a, "columns"_a, "width"_a, "size"_a, "out"_a, release())
        .def("rows", &gather_rows, "rows"_a, "is_own"_a, "row_bytes"_a, release())
        .def("connect", &connect_ranks, "peers"_a, "num_bytes"_a, release())
        .def("post", &Gathering::post, "first"_a, "num_bytes"_a, release())
        .def("wait_done", &Gathering::wait_done, release())
        .def("wait_posted", &Gathering::wait_posted, "timeout_s"_a, release())
        .def("finish", &Gathering::finish, "first"_a, "num_bytes"_a, release())
        .def("reset", &Gathering::reset, release())
        .def("beat", &Gathering::beat)  // waits for nothing, and a daemon thread must not be waiting for the lock at the end
        .def("lose", &Gathering::lose, "rank"_a)
        .def_prop_ro("is_lost", &Gathering::is_lost);
}
static const Registration registration(bind_gathering);

}  // namespace quire
