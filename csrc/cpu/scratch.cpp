// Owns the scratch buffers of all threads.
#include "scratch.hpp"

#include <cstdlib>
#include <new>

namespace quire {

namespace {

constexpr size_t ALIGNMENT = 64;

struct Buffer {
    float *data = nullptr;
    size_t capacity = 0;
    ~Buffer() { std::free(data); }
};

}  // namespace

float *scratch(int slot, size_t count) {
    static thread_local Buffer buffers[NUM_SLOTS];
    Buffer &buffer = buffers[slot];
    if (buffer.capacity < count) {
        const size_t num_bytes = (count * sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        std::free(buffer.data);
        buffer.capacity = 0;
        buffer.data = static_cast<float *>(std::aligned_alloc(ALIGNMENT, num_bytes));
        if (buffer.data == nullptr) throw std::bad_alloc();
        buffer.capacity = count;
    }
    return buffer.data;
}

}  // namespace quire
