// By preadv2 and posix_fadvise; see read_ahead.hpp.
#include "read_ahead.hpp"

#include <fcntl.h>
#include <sys/uio.h>

#include <cerrno>
#include <system_error>

#include "dtypes.hpp"

namespace quire {

// One call reads no more than the device's `read_ahead_kb`, which is 128 unless set.
static constexpr int64_t PIECE_BYTES = 128 << 10;

#if defined(__linux__) && defined(RWF_NOWAIT)

bool is_cached(int descriptor, int64_t place) {
    char byte;
    const iovec to{&byte, 1};
    return preadv2(descriptor, &to, 1, place, RWF_NOWAIT) >= 0 || errno != EAGAIN;
}

static void begin_reading(int descriptor, const FilePart &piece) {
    posix_fadvise(descriptor, piece.start, piece.num_bytes, POSIX_FADV_WILLNEED);
}

#else

bool is_cached(int, int64_t) { return true; }
static void begin_reading(int, const FilePart &) {}

#endif

void ReadAhead::end() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard<std::mutex> guard(guard_);
        ends_ = true;
    }
    is_asked_.notify_one();
    thread_.join();
}

void ReadAhead::ask(const std::vector<FilePart> &parts) {
    {
        const std::lock_guard<std::mutex> guard(guard_);
        parts_.assign(parts.begin(), parts.end());
    }
    if (parts.empty()) return;
    try {
        if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    } catch (const std::system_error &) {
        return;  // the system gives no thread: nothing is read ahead
    }
    is_asked_.notify_one();
}

void ReadAhead::run() {
    std::unique_lock<std::mutex> guard(guard_);
    while (true) {
        is_asked_.wait(guard, [this] { return ends_ || !parts_.empty(); });
        if (ends_) return;
        FilePart &first = parts_.front();
        const FilePart piece{first.start, min64(PIECE_BYTES, first.num_bytes)};
        first.start += piece.num_bytes;
        first.num_bytes -= piece.num_bytes;
        if (first.num_bytes == 0) parts_.pop_front();
        guard.unlock();
        begin_reading(descriptor_, piece);
        guard.lock();
    }
}

}  // namespace quire
