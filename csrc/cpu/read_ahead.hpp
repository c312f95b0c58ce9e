// What the system's cache has of a file, and reads into it that go on while the caller computes. Linux; on other systems all
// of a file counts as cached, and nothing is begun.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

struct FilePart {
    int64_t start, num_bytes;

    int64_t last() const { return start + num_bytes - 1; }
};

// Whether reading the byte at `place` would wait for no device; true where the system cannot say, or there is no such byte.
bool is_cached(int descriptor, int64_t place);

// Has the system read parts of a file, by a thread that begins with the first ones: where a device's queue is full, asking it
// for more waits, and the pages that it reads into cost time as well. Failures are left to who reads the parts.
class ReadAhead {
   public:
    explicit ReadAhead(int descriptor) : descriptor_(descriptor) {}  // open as long as this is
    ~ReadAhead() { end(); }
    ReadAhead(const ReadAhead &) = delete;

    // In place of those of the call before that have not been begun.
    void ask(const std::vector<FilePart> &parts);
    void drop() { ask({}); }
    void end();  // from then on nothing is asked, and the descriptor may be closed

   private:
    void run();

    const int descriptor_;
    std::thread thread_;  // from the first part on
    std::mutex guard_;
    std::condition_variable is_asked_;
    std::deque<FilePart> parts_;
    bool ends_ = false;
};

}  // namespace quire
