// Queries and keys on their way to attention: RMS norm of each head, then RoPE, in place.
//
// Heads of the usual sizes stay in registers from the load to the store; others go through the kernels of both parts. The
// operations and their order are those of the parts (elementwise.cpp), and so are the bits: what a norm would have stored
// is rounded before it is rotated.
#include "kernels.hpp"
#include "norms.hpp"

namespace quire::QUIRE_ISA {

// What is the same for all heads of a kind: weight + offset, or no norm at all.
template <int SIZE>
struct HeadGain {
    bool is_present;
    float eps;
    alignas(64) float gain[SIZE];

    explicit HeadGain(const NormRows &norm) : is_present(norm.weight != nullptr), eps(norm.eps) {
        if (!is_present) return;
        convert(norm.weight, norm.weight_dtype, gain, DType::f32, SIZE);
        for (int i = 0; i < SIZE; i += LANES) store(gain + i, add(load(gain + i), broadcast(norm.weight_offset)));
    }
};

template <typename T, int SIZE>
QINLINE void load_head(const T *head, Vec (&x)[SIZE / LANES]) {
    QUNROLL
    for (int v = 0; v < SIZE / LANES; ++v) x[v] = load(head + v * LANES);
}

template <typename T, int SIZE>
QINLINE float norm_scale(const T *head, float eps) {
    Vec x[SIZE / LANES], sums[CHAINS];
    load_head<T, SIZE>(head, x);
    QUNROLL
    for (int c = 0; c < CHAINS; ++c) sums[c] = broadcast(0.0f);
    QUNROLL
    for (int v = 0; v < SIZE / LANES; ++v) sums[v % CHAINS] = fma(x[v], x[v], sums[v % CHAINS]);
    return inverse_root(sum_chains(sums), SIZE, eps);
}

template <typename T, int SIZE, bool IS_NORMED>
QINLINE void prepare_head(T *head, const float *gain, float scale, const float *cos, const float *sin) {
    constexpr int HALF = SIZE / 2 / LANES;  // vectors
    Vec x[2 * HALF];
    load_head<T, SIZE>(head, x);
    QUNROLL
    for (int v = 0; IS_NORMED && v < 2 * HALF; ++v) {
        x[v] = rounded_to<T>(mul(mul(x[v], broadcast(scale)), load(gain + v * LANES)));
    }
    QUNROLL
    for (int v = 0; v < HALF; ++v) {
        const Vec a = x[v], b = x[HALF + v], c = load(cos + v * LANES), s = load(sin + v * LANES);
        store(head + v * LANES, sub(mul(a, c), mul(b, s)));
        store(head + (HALF + v) * LANES, fma(b, c, mul(a, s)));
    }
}

// The heads of one kind of one token: first all sums, whose latency would else be waited for head by head.
template <typename T, int SIZE>
static void prepare_some(T *heads, int64_t num_heads, const HeadGain<SIZE> &norm, const float *cos, const float *sin) {
    constexpr int64_t AT_ONCE = 16;
    for (int64_t h = 0; h < num_heads; h += AT_ONCE, heads += AT_ONCE * SIZE) {
        const int64_t count = min64(AT_ONCE, num_heads - h);
        if (!norm.is_present) {
            for (int64_t i = 0; i < count; ++i) prepare_head<T, SIZE, false>(heads + i * SIZE, nullptr, 1.0f, cos, sin);
            continue;
        }
        float scales[AT_ONCE];
        for (int64_t i = 0; i < count; ++i) scales[i] = norm_scale<T, SIZE>(heads + i * SIZE, norm.eps);
        for (int64_t i = 0; i < count; ++i) prepare_head<T, SIZE, true>(heads + i * SIZE, norm.gain, scales[i], cos, sin);
    }
}

template <typename T, int SIZE>
static void prepare_sized(const HeadRows &rows, int64_t first, int64_t last) {
    static_assert(SIZE % (2 * LANES) == 0 && SIZE % (CHAINS * LANES) == 0);
    const HeadGain<SIZE> query_norm(rows.query_norm), key_norm(rows.key_norm);
    const RopeRows &rope = rows.rope;
    for (int64_t t = first; t < last; ++t) {
        const float *cos = rope.cos_sin + rope.positions[t] * SIZE, *sin = cos + SIZE / 2;
        T *heads = static_cast<T *>(rope.x) + t * rope.stride;
        prepare_some(heads, rows.num_query_heads, query_norm, cos, sin);
        prepare_some(heads + rows.num_query_heads * SIZE, rope.num_heads - rows.num_query_heads, key_norm, cos, sin);
    }
}

template <typename T>
static void norm_part(NormRows norm, T *heads, int64_t num_heads) {
    norm.x = norm.out = heads;
    if (norm.weight != nullptr) rms_norm(norm, 0, num_heads);
}

template <typename T>
static void prepare_apart(const HeadRows &rows, int64_t first, int64_t last) {
    const RopeRows &rope = rows.rope;
    for (int64_t t = first; t < last; ++t) {
        T *heads = static_cast<T *>(rope.x) + t * rope.stride;
        norm_part(rows.query_norm, heads, rows.num_query_heads);
        norm_part(rows.key_norm, heads + rows.num_query_heads * rope.head_size, rope.num_heads - rows.num_query_heads);
        if (rope.cos_sin != nullptr) QUIRE_ISA::rope(rope, t, t + 1);
    }
}

template <typename T>
static void prepare_as(const HeadRows &rows, int64_t first, int64_t last) {
    const bool is_whole = rows.rope.cos_sin != nullptr && !rows.rope.is_interleaved && 2 * rows.rope.half == rows.rope.head_size;
    switch (is_whole ? rows.rope.head_size : 0) {
        case 64:
            return prepare_sized<T, 64>(rows, first, last);
        case 128:
            return prepare_sized<T, 128>(rows, first, last);
        case 256:
            return prepare_sized<T, 256>(rows, first, last);
        default:
            return prepare_apart<T>(rows, first, last);
    }
}

void prepare_heads(const HeadRows &rows, int64_t first, int64_t last) {
    rows.rope.dtype == DType::f32 ? prepare_as<float>(rows, first, last) : prepare_as<bf16>(rows, first, last);
}

}  // namespace quire::QUIRE_ISA
