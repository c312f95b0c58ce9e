// Movement of keys and values: into the paged cache, and of whole blocks within it.
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <algorithm>

#include "bindings.hpp"
#include "dispatch.hpp"
#include "threads.hpp"

namespace quire {

static void check_indices(const char *what, const int64_t *indices, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i) {
        if (indices[i] < 0 || indices[i] >= limit) {
            throw std::invalid_argument(std::string(what) + " " + std::to_string(indices[i]) +
                                        " is outside the cache's " + std::to_string(limit));
        }
    }
}

// Rows of keys or values, [T, KV heads, D] with rows `stride` elements apart, and the cache they go to.
struct CacheWrite {
    const void *rows;
    void *cache;  // [B, KV heads, block size, D]
    int64_t stride;
};

struct CacheShape {
    DType dtype, cache_dtype;
    int64_t num_kv_heads, head_size, block_size;
};

static void write_rows(const KernelTable &table, const CacheWrite &write, const CacheShape &shape, const int64_t *slots,
                       int64_t token) {
    const int64_t block = slots[token] / shape.block_size, within = slots[token] % shape.block_size;
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        const int64_t slot = (block * shape.num_kv_heads + head) * shape.block_size + within;
        table.convert(offset(write.rows, token * write.stride + head * shape.head_size, shape.dtype), shape.dtype,
                      offset(write.cache, slot * shape.head_size, shape.cache_dtype), shape.cache_dtype,
                      shape.head_size);
    }
}

static void write_kv(uintptr_t key, uintptr_t value, uintptr_t key_cache, uintptr_t value_cache, uintptr_t slots,
                     int dtype, int cache_dtype, int64_t num_tokens, int64_t key_stride, int64_t value_stride,
                     int64_t num_kv_heads, int64_t head_size, int64_t num_blocks, int64_t block_size) {
    const CacheShape shape{static_cast<DType>(dtype), static_cast<DType>(cache_dtype), num_kv_heads, head_size,
                           block_size};
    const CacheWrite keys{reinterpret_cast<const void *>(key), reinterpret_cast<void *>(key_cache), key_stride};
    const CacheWrite values{reinterpret_cast<const void *>(value), reinterpret_cast<void *>(value_cache), value_stride};
    const int64_t *slot_ids = reinterpret_cast<const int64_t *>(slots);
    check_indices("write_kv: slot", slot_ids, num_tokens, num_blocks * block_size);
    const KernelTable &table = kernels();
#pragma omp parallel for schedule(static) num_threads(team_size(num_tokens * num_kv_heads * head_size))
    for (int64_t token = 0; token < num_tokens; ++token) {
        write_rows(table, keys, shape, slot_ids, token);
        write_rows(table, values, shape, slot_ids, token);
    }
}

static bool overlap(const int64_t *sources, const int64_t *destinations, int64_t count) {
    std::vector<int64_t> sorted(sources, sources + count);
    std::sort(sorted.begin(), sorted.end());
    return std::any_of(destinations, destinations + count,
                       [&](int64_t id) { return std::binary_search(sorted.begin(), sorted.end(), id); });
}

static void copy_blocks(uintptr_t cache, int64_t num_blocks, int64_t block_bytes, uintptr_t sources,
                        uintptr_t destinations, int64_t count) {
    const int64_t *from = reinterpret_cast<const int64_t *>(sources),
                  *to = reinterpret_cast<const int64_t *>(destinations);
    check_indices("copy_blocks: source", from, count, num_blocks);
    check_indices("copy_blocks: destination", to, count, num_blocks);
    char *blocks = reinterpret_cast<char *>(cache);
    if (!overlap(from, to, count)) {
        for (int64_t i = 0; i < count; ++i) {
            std::memcpy(blocks + to[i] * block_bytes, blocks + from[i] * block_bytes, block_bytes);
        }
        return;
    }
    std::vector<char> held(count * block_bytes);  // all reads before any write
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(held.data() + i * block_bytes, blocks + from[i] * block_bytes, block_bytes);
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(blocks + to[i] * block_bytes, held.data() + i * block_bytes, block_bytes);
}

static void bind_cache(nb::module_ &m) {
    m.def("write_kv", &write_kv, nb::call_guard<nb::gil_scoped_release>());
    m.def("copy_blocks", &copy_blocks, nb::call_guard<nb::gil_scoped_release>());
}
static const Registration registration(bind_cache);

}  // namespace quire
