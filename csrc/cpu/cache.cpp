// Movement of keys and values: into the paged cache, and of whole blocks within it.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.hpp"
#include "bindings.hpp"
#include "checks.hpp"
#include "elementwise.hpp"
#include "timing.hpp"

namespace quire {

constexpr int64_t MAX_BLOCK_SIZE = 1 << 20;

static void check_indices(const char *what, const int64_t *indices, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i) {
        if (indices[i] < 0 || indices[i] >= limit) {
            throw std::invalid_argument(std::string(what) + " " + std::to_string(indices[i]) +
                                        " is outside the cache's " + std::to_string(limit));
        }
    }
}

KVCache make_cache(uintptr_t keys, uintptr_t values, int format, int64_t num_blocks, int64_t num_kv_heads,
                   int64_t block_size, int64_t head_size) {
    const Arguments args("KV cache");
    KVCache cache{nullptr, nullptr, args.kv_format(format), args.count("the number of blocks", num_blocks),
                  args.between(1, MAX_HEADS, "the number of KV heads", num_kv_heads),
                  args.between(1, MAX_BLOCK_SIZE, "the block size", block_size),
                  args.between(1, MAX_HEAD_SIZE, "the head size", head_size)};
    const int64_t row_elements = cache.row_bytes() / kv_element_bytes(cache.format);
    const auto memory = [&](const char *name, uintptr_t address) {
        return args.memory(name, address, kv_element_bytes(cache.format), {num_blocks, num_kv_heads, block_size, row_elements});
    };
    const Memory key_memory = memory("keys", keys), value_memory = memory("values", values);
    cache.keys = key_memory.as<void>();
    cache.values = value_memory.as<void>();
    return cache;
}

void check_slots(const KVRows &rows, const KVCache &cache) {
    check_indices("write_kv: slot", rows.slots, rows.num_tokens, cache.num_slots());
}

// The first head's row of a token's keys, or values; the others' follow at `row_stride(cache)` bytes.
static char *row_of(const KVCache &cache, void *rows, int64_t slot) {
    const int64_t block = slot / cache.block_size, within = slot % cache.block_size;
    return static_cast<char *>(rows) + (block * cache.num_kv_heads * cache.block_size + within) * cache.row_bytes();
}

static int64_t row_stride(const KVCache &cache) { return cache.block_size * cache.row_bytes(); }

static void write_token(const KernelTable &table, const void *row, DType dtype, const KVCache &cache, char *to) {
    table.store_kv_rows(row, dtype, cache.num_kv_heads, cache.head_size, cache.format, to, row_stride(cache));
}

static void fetch(const char *row, int64_t num_rows, int64_t row_bytes, int64_t stride) {
    constexpr int64_t LINE = 64;
    for (int64_t r = 0; r < num_rows; ++r, row += stride) {
        for (int64_t at = 0; at < row_bytes; at += LINE) __builtin_prefetch(row + at, 1);
    }
}

void fetch_tokens(const int64_t *slots, const KVCache &cache, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
        fetch(row_of(cache, cache.keys, slots[t]), cache.num_kv_heads, cache.row_bytes(), row_stride(cache));
        if (!cache.has_values()) continue;
        fetch(row_of(cache, cache.values, slots[t]), cache.num_kv_heads, cache.row_bytes(), row_stride(cache));
    }
}

void write_tokens(const KVRows &rows, const KVCache &cache, int64_t first, int64_t last) {
    const KernelTable &table = kernels();
    for (int64_t t = first; t < last; ++t) {
        const void *key = offset(rows.key, t * rows.key_stride, rows.dtype);
        const void *value = offset(rows.value, t * rows.value_stride, rows.dtype);
        write_token(table, key, rows.dtype, cache, row_of(cache, cache.keys, rows.slots[t]));
        if (!cache.has_values()) continue;
        write_token(table, value, rows.dtype, cache, row_of(cache, cache.values, rows.slots[t]));
    }
}

void write_kv(const KVRows &rows, const KVCache &cache) {
    const Stopwatch stopwatch(KernelClass::elementwise);
    check_slots(rows, cache);
    over_rows(rows.num_tokens, cache.num_kv_heads * cache.head_size,
              [&](int64_t first, int64_t last) { write_tokens(rows, cache, first, last); });
}

static void write(uintptr_t key, uintptr_t value, uintptr_t key_cache, uintptr_t value_cache, uintptr_t slots,
                  int dtype, int format, int64_t num_tokens, int64_t key_stride, int64_t value_stride,
                  int64_t num_kv_heads, int64_t head_size, int64_t num_blocks, int64_t block_size) {
    const KVCache cache = make_cache(key_cache, value_cache, format, num_blocks, num_kv_heads, block_size, head_size);
    const Arguments args("write_kv");
    const DType type = args.dtype(dtype);
    const int64_t width = num_kv_heads * head_size;
    args.count("the number of tokens", num_tokens);
    const Memory keys = args.rows("key", key, type, num_tokens, key_stride, width);
    const Memory values = args.rows("value", value, type, num_tokens, value_stride, width);
    const int64_t *at = args.array<const int64_t>("slots", slots, {num_tokens});
    write_kv(KVRows{keys.as<const void>(), values.as<const void>(), type, num_tokens, key_stride, value_stride, at}, cache);
}

static bool overlap(const int64_t *sources, const int64_t *destinations, int64_t count) {
    std::vector<int64_t> sorted(sources, sources + count);
    std::sort(sorted.begin(), sorted.end());
    return std::any_of(destinations, destinations + count,
                       [&](int64_t id) { return std::binary_search(sorted.begin(), sorted.end(), id); });
}

// Of two copies to one block, which is the last would be chance.
static void check_distinct(const int64_t *destinations, int64_t count) {
    std::vector<int64_t> sorted(destinations, destinations + count);
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) throw std::invalid_argument("copy_blocks: two go to block " + std::to_string(*twice));
}

static void copy_blocks(uintptr_t cache, int64_t num_blocks, int64_t block_bytes, uintptr_t sources,
                        uintptr_t destinations, int64_t count) {
    const Arguments args("copy_blocks");
    const int64_t *from = args.array<const int64_t>("sources", sources, {count});
    const int64_t *to = args.array<const int64_t>("destinations", destinations, {count});
    char *blocks = args.array<char>("the cache", cache, {num_blocks, block_bytes});
    check_indices("copy_blocks: source", from, count, num_blocks);
    check_indices("copy_blocks: destination", to, count, num_blocks);
    check_distinct(to, count);
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
    m.def("write_kv", &write, nb::call_guard<nb::gil_scoped_release>());
    m.def("copy_blocks", &copy_blocks, nb::call_guard<nb::gil_scoped_release>());
}
static const Registration registration(bind_cache);

}  // namespace quire
