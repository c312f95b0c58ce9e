// Norms, activations, rotary embedding and conversion, on rows [first, last). A row's sums run over its own elements in
// an order fixed by its length alone; everything else is elementwise, and a partial vector does what a whole one does.
#include "activation.hpp"
#include "kernels.hpp"
#include "norms.hpp"

namespace quire::QUIRE_ISA {

// ---- norms ----

// `work(i, left)` for each vector of a row; `left` is a constant for all that are whole, which costs no question then.
template <typename Work>
QINLINE void over_vectors(int64_t width, Work work) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) work(i, int64_t{LANES});
    if (i < width) work(i, width - i);
}

template <typename Term>
QINLINE float sum_row(int64_t width, Term term) {
    Vec sums[CHAINS];
    QUNROLL
    for (int c = 0; c < CHAINS; ++c) sums[c] = broadcast(0.0f);
    int64_t i = 0;
    for (; i + CHAINS * LANES <= width; i += CHAINS * LANES) {
        QUNROLL
        for (int c = 0; c < CHAINS; ++c) sums[c] = term(sums[c], i + c * LANES, int64_t{LANES});
    }
    for (; i < width; i += LANES) sums[0] = term(sums[0], i, width - i);
    return sum_chains(sums);
}

template <typename T>
QINLINE Vec store_rounded_up_to(T *p, Vec x, int64_t n) {
    if (n >= LANES) return store_rounded(p, x);
    store_partial(p, x, static_cast<int>(n));
    return load_partial(p, static_cast<int>(n));
}

template <typename T, typename W>
QINLINE void scale_row(const T *x, const W *weight, T *out, const NormRows &norm, float squares) {
    const Vec scale = broadcast(inverse_root(squares, norm.width, norm.eps)), offset = broadcast(norm.weight_offset);
    over_vectors(norm.width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
        const Vec gain = add(load_up_to(weight + i, left), offset);
        store_up_to(out + i, mul(mul(load_up_to(x + i, left), scale), gain), left);
    });
}

template <typename T, typename W>
static void rms_norm_row(const T *x, const W *weight, T *out, const NormRows &norm) {
    const float squares = sum_row(norm.width, [&](Vec sum, int64_t i, int64_t left) __attribute__((always_inline)) {
        const Vec value = load_up_to(x + i, left);
        return fma(value, value, sum);
    });
    scale_row(x, weight, out, norm, squares);
}

// The same of x + residual, which is stored first and so rounded.
template <typename T, typename W>
static void add_rms_norm_row(const T *x, const T *residual, T *total, const W *weight, T *out, const NormRows &norm) {
    const float squares = sum_row(norm.width, [&](Vec sum, int64_t i, int64_t left) __attribute__((always_inline)) {
        const Vec value = add(load_up_to(x + i, left), load_up_to(residual + i, left));
        const Vec held = store_rounded_up_to(total + i, value, left);
        return fma(held, held, sum);
    });
    scale_row(total, weight, out, norm, squares);
}

template <typename T>
static void add_row(const T *x, const T *residual, T *sum, int64_t width) {
    over_vectors(width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
        store_up_to(sum + i, add(load_up_to(x + i, left), load_up_to(residual + i, left)), left);
    });
}

template <typename T, typename W>
static void layer_norm_row(const T *x, const W *weight, const W *bias, T *out, const NormRows &norm) {
    const int64_t width = norm.width;
    const float total = sum_row(width, [&](Vec sum, int64_t i, int64_t left) __attribute__((always_inline)) {
        return add(sum, load_up_to(x + i, left));
    });
    const Vec mean = broadcast(total / static_cast<float>(width));
    const float squares = sum_row(width, [&](Vec sum, int64_t i, int64_t left) __attribute__((always_inline)) {
        Vec value = sub(load_up_to(x + i, left), mean);
        if (left < LANES) {  // lanes beyond the row hold 0 - mean
            float lanes[LANES];
            store(lanes, value);
            value = load_partial(lanes, static_cast<int>(left));
        }
        return fma(value, value, sum);
    });
    const Vec scale = broadcast(inverse_root(squares, width, norm.eps));
    over_vectors(width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
        Vec value = mul(mul(sub(load_up_to(x + i, left), mean), scale), load_up_to(weight + i, left));
        if (bias != nullptr) value = add(value, load_up_to(bias + i, left));
        store_up_to(out + i, value, left);
    });
}

template <typename T, typename W>
static void rms_norm_rows(const NormRows &norm, int64_t first, int64_t last) {
    const W *weight = static_cast<const W *>(norm.weight);
    for (int64_t r = first; r < last; ++r) {
        const int64_t at = r * norm.width;
        const T *x = static_cast<const T *>(norm.x) + at;
        T *out = static_cast<T *>(norm.out) + at;
        if (norm.residual == nullptr) {
            rms_norm_row(x, weight, out, norm);
        } else {
            add_rms_norm_row(x, static_cast<const T *>(norm.residual) + at, static_cast<T *>(norm.sum) + at, weight, out,
                             norm);
        }
    }
}

// The row that is normed: x, or x + residual, which is stored first and so rounded.
template <typename T>
static const T *norm_input(const NormRows &norm, int64_t at) {
    const T *x = static_cast<const T *>(norm.x) + at;
    if (norm.residual == nullptr) return x;
    T *sum = static_cast<T *>(norm.sum) + at;
    add_row(x, static_cast<const T *>(norm.residual) + at, sum, norm.width);
    return sum;
}

template <typename T, typename W>
static void layer_norm_rows(const NormRows &norm, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        const int64_t at = r * norm.width;
        layer_norm_row(norm_input<T>(norm, at), static_cast<const W *>(norm.weight),
                       static_cast<const W *>(norm.bias), static_cast<T *>(norm.out) + at, norm);
    }
}

void rms_norm(const NormRows &norm, int64_t first, int64_t last) {
    if (norm.dtype == DType::f32) {
        if (norm.weight_dtype == DType::f32) return rms_norm_rows<float, float>(norm, first, last);
        return rms_norm_rows<float, bf16>(norm, first, last);
    }
    if (norm.weight_dtype == DType::f32) return rms_norm_rows<bf16, float>(norm, first, last);
    return rms_norm_rows<bf16, bf16>(norm, first, last);
}

void layer_norm(const NormRows &norm, int64_t first, int64_t last) {
    if (norm.dtype == DType::f32) {
        if (norm.weight_dtype == DType::f32) return layer_norm_rows<float, float>(norm, first, last);
        return layer_norm_rows<float, bf16>(norm, first, last);
    }
    if (norm.weight_dtype == DType::f32) return layer_norm_rows<bf16, float>(norm, first, last);
    return layer_norm_rows<bf16, bf16>(norm, first, last);
}

// ---- sums and products ----

template <typename T>
static void scale_span(const T *x, float factor, T *out, int64_t count) {
    const Vec by = broadcast(factor);
    for (int64_t i = 0; i < count; i += LANES) store_up_to(out + i, mul(load_up_to(x + i, count - i), by), count - i);
}

void add(const void *x, const void *y, void *out, DType dtype, int64_t first, int64_t last) {
    const int64_t count = last - first;
    x = offset(x, first, dtype), y = offset(y, first, dtype), out = offset(out, first, dtype);
    if (dtype == DType::f32) {
        add_row(static_cast<const float *>(x), static_cast<const float *>(y), static_cast<float *>(out), count);
    } else {
        add_row(static_cast<const bf16 *>(x), static_cast<const bf16 *>(y), static_cast<bf16 *>(out), count);
    }
}

// x - x is zero where x is finite, and not a number elsewhere.
template <typename T>
static bool is_finite_span(const T *x, int64_t count) {
    Vec sum = broadcast(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        const Vec value = load_up_to(x + i, count - i);
        sum = add(sum, sub(value, value));
    }
    return reduce_add(sum) == 0.0f;
}

bool is_finite(const void *x, DType dtype, int64_t first, int64_t last) {
    x = offset(x, first, dtype);
    if (dtype == DType::f32) return is_finite_span(static_cast<const float *>(x), last - first);
    return is_finite_span(static_cast<const bf16 *>(x), last - first);
}

void scale(const void *x, float factor, void *out, DType dtype, int64_t first, int64_t last) {
    const int64_t count = last - first;
    x = offset(x, first, dtype), out = offset(out, first, dtype);
    if (dtype == DType::f32) {
        scale_span(static_cast<const float *>(x), factor, static_cast<float *>(out), count);
    } else {
        scale_span(static_cast<const bf16 *>(x), factor, static_cast<bf16 *>(out), count);
    }
}

template <typename T>
static void gate_rows_as(const T *x, const T *gate, T *out, int64_t width, int64_t first, int64_t last) {
    const Vec one = broadcast(1.0f);
    for (int64_t t = first; t < last; ++t) {
        float value[LANES];
        store(value, load_up_to(gate + t, 1));
        const Vec by = div(one, add(one, exp(negate(broadcast(value[0])))));
        const T *from = x + t * width;
        T *to = out + t * width;
        for (int64_t i = 0; i < width; i += LANES) store_up_to(to + i, mul(load_up_to(from + i, width - i), by), width - i);
    }
}

void gate_rows(const void *x, const void *gate, void *out, DType dtype, int64_t width, int64_t first, int64_t last) {
    if (dtype == DType::f32) {
        gate_rows_as(static_cast<const float *>(x), static_cast<const float *>(gate), static_cast<float *>(out), width, first,
                     last);
    } else {
        gate_rows_as(static_cast<const bf16 *>(x), static_cast<const bf16 *>(gate), static_cast<bf16 *>(out), width, first,
                     last);
    }
}

// ---- activations ----

template <typename T, Activation A>
static void activate_span(const T *x, T *out, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += LANES) {
        store_up_to(out + i, apply<A>(load_up_to(x + i, last - i)), last - i);
    }
}

template <typename T, Activation A>
static void gated_rows(const T *gate_up, T *out, int64_t width, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        const T *gate = gate_up + 2 * r * width, *up = gate + width;
        T *to = out + r * width;
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t left = width - i;
            store_up_to(to + i, gated_product<A>(load_up_to(gate + i, left), load_up_to(up + i, left)), left);
        }
    }
}

template <typename T>
static void activate_as(const T *x, T *out, Activation activation, int64_t first, int64_t last) {
    switch (activation) {
        case Activation::silu:
            return activate_span<T, Activation::silu>(x, out, first, last);
        case Activation::gelu:
            return activate_span<T, Activation::gelu>(x, out, first, last);
        case Activation::gelu_tanh:
            return activate_span<T, Activation::gelu_tanh>(x, out, first, last);
        case Activation::gelu_sigmoid:
            return activate_span<T, Activation::gelu_sigmoid>(x, out, first, last);
        case Activation::clamped_swish:
            __builtin_unreachable();  // refused by the callers
    }
}

template <typename T>
static void gated_as(const T *gate_up, T *out, Activation activation, int64_t width, int64_t first, int64_t last) {
    switch (activation) {
        case Activation::silu:
            return gated_rows<T, Activation::silu>(gate_up, out, width, first, last);
        case Activation::gelu:
            return gated_rows<T, Activation::gelu>(gate_up, out, width, first, last);
        case Activation::gelu_tanh:
            return gated_rows<T, Activation::gelu_tanh>(gate_up, out, width, first, last);
        case Activation::gelu_sigmoid:
            return gated_rows<T, Activation::gelu_sigmoid>(gate_up, out, width, first, last);
        case Activation::clamped_swish:
            return gated_rows<T, Activation::clamped_swish>(gate_up, out, width, first, last);
    }
}

void activate(const void *x, void *out, DType dtype, Activation activation, int64_t first, int64_t last) {
    if (dtype == DType::f32) {
        activate_as(static_cast<const float *>(x), static_cast<float *>(out), activation, first, last);
    } else {
        activate_as(static_cast<const bf16 *>(x), static_cast<bf16 *>(out), activation, first, last);
    }
}

void gated(const void *gate_up, void *out, DType dtype, Activation activation, int64_t width, int64_t first,
           int64_t last) {
    if (dtype == DType::f32) {
        gated_as(static_cast<const float *>(gate_up), static_cast<float *>(out), activation, width, first, last);
    } else {
        gated_as(static_cast<const bf16 *>(gate_up), static_cast<bf16 *>(out), activation, width, first, last);
    }
}

// ---- rotary embedding ----

template <typename T>
QINLINE void rotate(T *first, T *second, const float *cos, const float *sin, int64_t left) {
    const Vec a = load_up_to(first, left), b = load_up_to(second, left);
    const Vec c = load_up_to(cos, left), s = load_up_to(sin, left);
    store_up_to(first, sub(mul(a, c), mul(b, s)), left);
    store_up_to(second, fma(b, c, mul(a, s)), left);
}

template <typename T>
static void rotate_halves(T *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) rotate(x + i, x + half + i, cos + i, sin + i, half - i);
}

template <typename T>
static void rotate_neighbours(T *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t n = min64(LANES, half - i);
        T even[LANES] = {}, odd[LANES] = {};
        for (int64_t j = 0; j < n; ++j) even[j] = x[2 * (i + j)], odd[j] = x[2 * (i + j) + 1];
        rotate(even, odd, cos + i, sin + i, n);
        for (int64_t j = 0; j < n; ++j) x[2 * (i + j)] = even[j], x[2 * (i + j) + 1] = odd[j];
    }
}

template <typename T>
static void rope_rows(const RopeRows &rope, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        const float *cos = rope.cos_sin + rope.positions[r] * 2 * rope.half, *sin = cos + rope.half;
        T *row = static_cast<T *>(rope.x) + r * rope.stride;
        for (int64_t head = 0; head < rope.num_heads; ++head, row += rope.head_size) {
            if (rope.is_interleaved) {
                rotate_neighbours(row, cos, sin, rope.half);
            } else {
                rotate_halves(row, cos, sin, rope.half);
            }
        }
    }
}

void rope(const RopeRows &rope, int64_t first, int64_t last) {
    rope.dtype == DType::f32 ? rope_rows<float>(rope, first, last) : rope_rows<bf16>(rope, first, last);
}

// ---- conversion ----

template <typename From, typename To>
static void convert_span(const void *from, void *to, int64_t count) {
    const From *x = static_cast<const From *>(from);
    To *out = static_cast<To *>(to);
    for (int64_t i = 0; i < count; i += LANES) store_up_to(out + i, load_up_to(x + i, count - i), count - i);
}

void convert(const void *from, DType from_dtype, void *to, DType to_dtype, int64_t count) {
    if (from_dtype == to_dtype) {
        memcpy(to, from, count * size_of(to_dtype));
    } else if (from_dtype == DType::f32) {
        convert_span<float, bf16>(from, to, count);
    } else {
        convert_span<bf16, float>(from, to, count);
    }
}

}  // namespace quire::QUIRE_ISA
