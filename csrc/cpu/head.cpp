// The best output of a projection for each row, without a place for all outputs: greedy decoding needs no more of the
// logits, and those of 64 rows over 152k tokens are 39 MB to write and to read again.
//
// Outputs are computed slice by slice by the projection itself, so the sums are those that it would have stored.
#include "bindings.hpp"
#include "elementwise.hpp"
#include "linear.hpp"
#include "sampling.hpp"
#include "scratch.hpp"
#include "timing.hpp"

namespace quire {

constexpr int64_t SLICE_ELEMENTS = 1 << 19;  // 2 MiB of sums: with the slice's weights they stay in the last-level cache
constexpr int64_t MIN_SLICE_PANELS = 64;     // enough for all threads to share

// Panels [first, first + count) as a weight of their own.
static LinearWeight slice(const LinearWeight &weight, int64_t first, int64_t count) {
    LinearWeight part = weight;
    part.data = weight.panel(first);
    part.bias = weight.bias == nullptr ? nullptr : weight.bias + first * PANEL;
    part.num_outputs = min64(count * PANEL, weight.num_outputs - first * PANEL);
    return part;
}

static void linear_peaks(const LinearWeight &weight, uintptr_t x, int x_dtype, int64_t num_rows, uintptr_t ids,
                         uintptr_t values) {
    const SamplingTable &table = sampling_kernels();
    const int64_t panels = max64(MIN_SLICE_PANELS, SLICE_ELEMENTS / PANEL / max64(num_rows, 1));
    int64_t *best = reinterpret_cast<int64_t *>(ids);
    float *peaks = reinterpret_cast<float *>(values);
    for (int64_t r = 0; r < num_rows; ++r) best[r] = NO_PEAK.token_id, peaks[r] = NO_PEAK.value;
    for (int64_t first = 0; first < weight.num_panels(); first += panels) {
        const LinearWeight part = slice(weight, first, min64(panels, weight.num_panels() - first));
        float *sums = scratch(LOGITS, num_rows * part.num_outputs);
        linear(part, reinterpret_cast<const void *>(x), static_cast<DType>(x_dtype), num_rows, sums, DType::f32);
        const Stopwatch stopwatch(KernelClass::sampling);
        over_rows(num_rows, part.num_outputs, [&](int64_t from, int64_t to) {
            for (int64_t r = from; r < to; ++r) {
                const float *row = sums + r * part.num_outputs;
                const Peak peak = raised(table, Peak{best[r], peaks[r]}, row, first * PANEL, part.num_outputs);
                best[r] = peak.token_id;
                peaks[r] = peak.value;
            }
        });
    }
}

static void bind_head(nb::module_ &m) { m.def("linear_peaks", &linear_peaks, nb::call_guard<nb::gil_scoped_release>()); }
static const Registration registration(bind_head);

}  // namespace quire
