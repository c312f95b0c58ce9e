// Loading: reads tensors out of files and brings them into the layout of packed weights, without Python and without torch,
// so that it can go on while the interpreter imports its libraries.
//
// Work is cut into pieces of a few panels. Each caller of `work` takes pieces until none is left: a thread of its own from
// `start`, and in `finish` as many threads as the caller wants. Bytes come by pread into a buffer that stays in the
// second-level cache and are written once, in their final place. A mapped file would save that copy, and would cost a
// page fault for every 64 KiB, count as resident memory, and kill the process if the file is truncated meanwhile.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "checks.hpp"
#include "dispatch.hpp"
#include "threads.hpp"

namespace quire {

namespace {

constexpr int64_t PIECE_BYTES = 256 << 10;  // read at a time: a quarter of a second-level cache

enum class Stored : int { f32 = 0, bf16 = 1, f16 = 2 };

constexpr int64_t size_of(Stored type) { return type == Stored::f32 ? 4 : 2; }

// Rows [first_row, first_row + num_rows) of a target, in a file from byte `start` on.
struct Part {
    int file;
    int64_t start, first_row, num_rows;
    Stored type;
};

// A packed weight [num_outputs, num_inputs] in the making, or a table of rows that stay as they are.
struct Target {
    char *data;
    DType dtype;
    bool is_table;
    int64_t num_outputs, num_inputs;
    std::vector<Part> parts;

    int64_t padded_inputs() const { return dtype == DType::bf16 ? round_up(num_inputs, 2) : num_inputs; }
    int64_t row_words() const { return padded_inputs() * size_of(dtype) / 4; }
    int64_t num_covered() const { return parts.empty() ? 0 : parts.back().first_row + parts.back().num_rows; }
};

struct Piece {
    size_t target;
    int64_t first_panel, num_panels;
};

struct Buffers {
    std::vector<char> read;
    std::vector<uint32_t> rows;  // 16 rows in the target's dtype
};

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounded to nearest, ties to even, as torch does it; a NaN stays one.
uint16_t to_bf16(uint32_t bits) {
    if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// Exact: the exponent is moved by a multiplication, which also makes subnormal numbers normal.
uint32_t from_f16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16, rest = static_cast<uint32_t>(half & 0x7fffU) << 13;
    if (rest >= 0x7c00U << 13) return sign | 0x7f800000U | rest;  // infinity or NaN
    return sign | bits_of(float_of(rest) * float_of(0x77800000U));
}

uint32_t load_float(const char *row, int64_t index, Stored type) {
    if (type == Stored::f32) {
        uint32_t bits;
        std::memcpy(&bits, row + index * 4, sizeof bits);
        return bits;
    }
    uint16_t half;
    std::memcpy(&half, row + index * 2, sizeof half);
    return type == Stored::bf16 ? static_cast<uint32_t>(half) << 16 : from_f16(half);
}

void convert_row(const char *row, Stored type, const Target &target, uint32_t *out) {
    if (size_of(type) == size_of(target.dtype) && type != Stored::f16) {
        out[target.row_words() - 1] = 0;
        std::memcpy(out, row, target.num_inputs * size_of(type));
    } else if (target.dtype == DType::f32) {
        for (int64_t k = 0; k < target.num_inputs; ++k) out[k] = load_float(row, k, type);
    } else {
        uint16_t *halves = reinterpret_cast<uint16_t *>(out);
        for (int64_t k = 0; k < target.num_inputs; ++k) halves[k] = to_bf16(load_float(row, k, type));
        if (target.num_inputs % 2 != 0) halves[target.num_inputs] = 0;
    }
}

// A panel is a transposed matrix of 32-bit words: in bfloat16 such a word is a pair of inputs.
void interleave(const uint32_t *rows, int64_t row_words, uint32_t *panel) {
    for (int64_t word = 0; word < row_words; ++word) {
        for (int64_t row = 0; row < PANEL; ++row) panel[word * PANEL + row] = rows[row * row_words + word];
    }
}

void read_exactly(int file, char *to, int64_t count, int64_t start) {
    while (count > 0) {
        const ssize_t got = pread(file, to, static_cast<size_t>(count), start);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) throw std::runtime_error(std::strerror(errno));
        if (got == 0) throw std::runtime_error("the file is shorter than its header says");
        to += got, count -= got, start += got;
    }
}

class Loading {
  public:
    // `owner` keeps the memory that is written to, and the files that are read, for as long as this lives.
    explicit Loading(nb::object owner) : owner_(std::move(owner)) {}
    Loading(const Loading &) = delete;
    Loading &operator=(const Loading &) = delete;
    ~Loading() { cancel(); }

    static int64_t num_bytes(int dtype, int64_t num_outputs, int64_t num_inputs) {
        const Target target = checked(nullptr, dtype, false, num_outputs, num_inputs);
        return ceil_div(num_outputs, PANEL) * PANEL * target.row_words() * 4;
    }

    void add(uintptr_t data, int dtype, bool is_table, int64_t num_outputs, int64_t num_inputs) {
        if (has_begun_) throw std::invalid_argument("nothing can be added");
        Target target = checked(nullptr, dtype, is_table, num_outputs, num_inputs);
        const int64_t num_rows = is_table ? num_outputs : round_up(num_outputs, PANEL);
        target.data = ARGS.memory("the data", data, int64_t{4}, {num_rows, target.row_words()}).as<char>();
        if (is_table && target.padded_inputs() != num_inputs) throw std::invalid_argument("rows of whole words only");
        const int64_t panel_bytes = target.row_words() * 4 * PANEL;
        const int64_t step = max64(1, PIECE_BYTES / panel_bytes), num_panels = ceil_div(num_outputs, PANEL);
        for (int64_t panel = 0; panel < num_panels; panel += step) {
            pieces_.push_back(Piece{targets_.size(), panel, min64(step, num_panels - panel)});
        }
        targets_.push_back(target);
    }

    // The next rows of the target that was added last.
    void add_part(int file, int64_t start, int64_t num_rows, int type) {
        if (has_begun_ || targets_.empty()) throw std::invalid_argument("there is nothing to add a part to");
        Target &target = targets_.back();
        ARGS.between(0, 2, "the stored type", type);
        ARGS.require(file >= 0, "there is no such file");
        ARGS.count("the first byte", start);
        const int64_t first = target.num_covered();
        if (num_rows < 1 || num_rows > target.num_outputs - first) throw std::invalid_argument("too many rows");
        target.parts.push_back(Part{file, start, first, num_rows, static_cast<Stored>(type)});
    }

    // Begins on a thread of its own. `library` is loaded first where it is not empty: relocating libtorch_cpu takes a
    // quarter of a second that `import torch` then need not spend. That it cannot be loaded is for that import to say.
    void start(const std::string &library) {
        if (has_begun_) throw std::invalid_argument("loading has begun already");
        begin();
        try {
            thread_ = std::thread([this, library] {
                if (!library.empty()) dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
                work();
            });
        } catch (const std::system_error &) {
            // The system gives no thread: `finish` does it all.
        }
    }

    // Returns when everything is in place, having helped with `num_threads` threads; throws what went wrong.
    void finish(int num_threads) {
        ARGS.between(1, MAX_THREADS, "the number of threads", num_threads);
        begin();
        std::vector<std::thread> helpers;
        try {
            for (int i = 1; i < num_threads; ++i) helpers.emplace_back([this] { work(); });
        } catch (const std::system_error &) {
            // The system gives no more threads: those that there are do it.
        }
        work();
        for (std::thread &helper : helpers) helper.join();
        join();
        if (!error_.empty()) throw std::runtime_error(error_);
    }

    // Returns when no thread is at work any more; what has not been begun stays undone.
    void cancel() {
        is_cancelled_ = true;
        join();
    }

  private:
    static constexpr Arguments ARGS{"Loading"};

    static Target checked(char *data, int dtype, bool is_table, int64_t num_outputs, int64_t num_inputs) {
        constexpr int64_t MOST = int64_t{1} << 31;
        ARGS.between(1, MOST, "the number of outputs", num_outputs);
        ARGS.between(1, MOST, "the number of inputs", num_inputs);
        return Target{data, ARGS.dtype(dtype), is_table, num_outputs, num_inputs, {}};
    }

    void begin() {
        for (const Target &target : targets_) {
            ARGS.require(target.num_covered() == target.num_outputs, "a target's parts do not make up all of its rows");
        }
        has_begun_ = true;
    }

    void join() {
        if (thread_.joinable()) thread_.join();
    }

    void work() {
        Buffers buffers;
        try {
            for (size_t next = next_++; next < pieces_.size() && !is_cancelled_; next = next_++) {
                load(pieces_[next], buffers);
            }
        } catch (const std::exception &error) {
            const std::lock_guard<std::mutex> guard(mutex_);
            if (error_.empty()) error_ = error.what();
            is_cancelled_ = true;
        }
    }

    void load(const Piece &piece, Buffers &buffers) {
        const Target &target = targets_[piece.target];
        const int64_t words = target.row_words();
        uint32_t *data = reinterpret_cast<uint32_t *>(target.data);
        buffers.rows.resize(PANEL * words);
        for (int64_t panel = piece.first_panel; panel < piece.first_panel + piece.num_panels; ++panel) {
            const int64_t first = panel * PANEL, last = min64(first + PANEL, target.num_outputs);
            uint32_t *rows = target.is_table ? data + first * words : buffers.rows.data();
            for (const Part &part : target.parts) {
                const int64_t from = max64(first, part.first_row), to = min64(last, part.first_row + part.num_rows);
                if (from < to) {
                    read_rows(target, part, from - part.first_row, to - from, rows + (from - first) * words, buffers);
                }
            }
            if (target.is_table) continue;
            std::fill(buffers.rows.begin() + (last - first) * words, buffers.rows.end(), 0);
            interleave(rows, words, data + panel * words * PANEL);
        }
    }

    static void read_rows(const Target &target, const Part &part, int64_t first, int64_t count, uint32_t *out,
                          Buffers &buffers) {
        const int64_t row_bytes = target.num_inputs * size_of(part.type), start = part.start + first * row_bytes;
        if (part.type == static_cast<Stored>(target.dtype) && target.num_inputs == target.padded_inputs()) {
            return read_exactly(part.file, reinterpret_cast<char *>(out), count * row_bytes, start);
        }
        buffers.read.resize(PANEL * row_bytes);
        read_exactly(part.file, buffers.read.data(), count * row_bytes, start);
        for (int64_t row = 0; row < count; ++row) {
            convert_row(&buffers.read[row * row_bytes], part.type, target, out + row * target.row_words());
        }
    }

    nb::object owner_;
    std::vector<Target> targets_;
    std::vector<Piece> pieces_;
    std::atomic<size_t> next_{0};
    std::atomic<bool> has_begun_{false}, is_cancelled_{false};
    std::mutex mutex_;
    std::string error_;
    std::thread thread_;
};

}  // namespace

static void bind_loading(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Loading>(m, "Loading")
        .def(nb::init<nb::object>())
        .def_static("num_bytes", &Loading::num_bytes)
        .def("add", &Loading::add)
        .def("add_part", &Loading::add_part)
        .def("start", &Loading::start)
        .def("finish", &Loading::finish, release())
        .def("cancel", &Loading::cancel, release());
}
static const Registration registration(bind_loading);

}  // namespace quire
