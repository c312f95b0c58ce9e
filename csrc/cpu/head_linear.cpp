// The division of heads' products into blocks and threads: one parallel region for all heads. The arithmetic is that of
// projections (projection.hpp).
#include "head_linear.hpp"

#include <cstring>

#include "bindings.hpp"
#include "checks.hpp"
#include "projection.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "timing.hpp"

namespace quire {

namespace {

constexpr int64_t FEW_TOKENS = 16;  // so few that preparing them once for each range of panels costs less than a wait

class HeadProducts {
   public:
    HeadProducts(const HeadWeights &heads, const void *x, DType dtype, int64_t num_tokens, void *out)
        : table_(kernels()), heads_(heads), x_(x), dtype_(dtype), num_tokens_(num_tokens), out_(out) {}

    void run() const {
        const int team = team_size(num_tokens_ * heads_.weight.num_outputs * heads_.weight.num_inputs);
        const int64_t blocks = ceil_div(num_tokens_, BLOCK_ROWS), panels = heads_.num_outputs() / PANEL;
        int64_t ranges = 1;
        if (num_tokens_ <= FEW_TOKENS && team > 1) {
            ranges = min64(panels, max64(1, FEW_ITEMS * team / heads_.num_heads));
        }
        const int64_t per_head = blocks * ranges;
        Shares shares(heads_.num_heads * per_head, team);
#pragma omp parallel num_threads(team)
        for (int64_t item; (item = shares.take(thread_index())) >= 0;) {
            const int64_t block = item % per_head / ranges, range = item % ranges;
            const int64_t token = share(num_tokens_, blocks, block), panel = share(panels, ranges, range);
            multiply(item / per_head, token, share(num_tokens_, blocks, block + 1) - token, panel,
                     share(panels, ranges, range + 1) - panel);
        }
    }

   private:
    const void *from(int64_t token, int64_t head) const {
        return offset(x_, (token * heads_.num_heads + head) * heads_.size, dtype_);
    }
    void *to(int64_t token, int64_t head) const {
        return offset(out_, (token * heads_.num_heads + head) * heads_.out_size(), dtype_);
    }
    InputRows convert(const LinearWeight &weight, int64_t head, int64_t token, int64_t count) const;
    void multiply(int64_t head, int64_t token, int64_t count, int64_t panel, int64_t num_panels) const;

    const KernelTable &table_;
    const HeadWeights &heads_;
    const void *x_;
    const DType dtype_;
    const int64_t num_tokens_;
    void *out_;
};

// A head's rows of some tokens, gathered and in the form that is multiplied, in the calling thread's scratch.
InputRows HeadProducts::convert(const LinearWeight &weight, int64_t head, int64_t token, int64_t count) const {
    InputRows rows = form_of(table_, weight, dtype_, count);
    rows.data = from(token, head);
    if (is_in_form(rows, weight, dtype_)) return rows;
    const int64_t row_bytes = weight.num_inputs * size_of(dtype_), spare_words = rows.tile_rows * rows.row_words;
    const int64_t num_words = rows.num_tiles * spare_words;
    float *memory = scratch(HEAD_ROWS, num_words + spare_words + ceil_div(count * row_bytes, int64_t{sizeof(float)}));
    uint32_t *spare = reinterpret_cast<uint32_t *>(memory + num_words);
    char *gathered = reinterpret_cast<char *>(spare + spare_words);
    for (int64_t t = 0; t < count; ++t) std::memcpy(gathered + t * row_bytes, from(token + t, head), row_bytes);
    rows.data = memory;
    table_.convert_rows(weight, gathered, dtype_, 0, rows.num_tiles, rows, spare);
    return rows;
}

void HeadProducts::multiply(int64_t head, int64_t token, int64_t count, int64_t panel, int64_t num_panels) const {
    const LinearWeight weight = heads_.of(head);
    const Destination out{to(token, head), dtype_, heads_.num_heads * heads_.out_size(), false, Activation::silu};
    const Projection projection{table_, weight, convert(weight, head, token, count), out};
    const int64_t most = projection.max_panels();
    for (int64_t p = 0; p < num_panels; p += most) {
        compute(projection, {0, projection.rows.num_tiles, panel + p, min64(most, num_panels - p)});
    }
    if (table_.end_gemms != nullptr) table_.end_gemms();  // before its rows make room for others
    const int64_t rest_bytes = heads_.rest() * size_of(dtype_);
    if (panel > 0 || rest_bytes == 0) return;
    for (int64_t t = token; t < token + count; ++t) {
        std::memcpy(offset(to(t, head), heads_.num_outputs(), dtype_), offset(from(t, head), weight.num_inputs, dtype_), rest_bytes);
    }
}

}  // namespace

bool are_whole(const HeadWeights &heads) {
    return heads.num_heads > 0 && !heads.weight.has_scales() && heads.weight.num_outputs % heads.num_heads == 0 &&
           heads.num_outputs() % PANEL == 0 && heads.rest() >= 0;
}

void head_linear(const HeadWeights &heads, const void *x, DType dtype, int64_t num_tokens, void *out) {
    if (num_tokens == 0) return;
    const Stopwatch stopwatch(KernelClass::linear);
    HeadProducts(heads, x, dtype, num_tokens, out).run();
}

static void run(const LinearWeight &weight, int64_t num_heads, int64_t size, uintptr_t x, int dtype, int64_t num_tokens,
                uintptr_t out) {
    const Arguments args("head_linear");
    check_attached("head_linear", weight);
    args.count("the number of heads", num_heads, 1);
    args.count("the size of a head", size, 1);
    const HeadWeights heads{weight, num_heads, size};
    args.require(are_whole(heads), "the weight is not one of floats for so many heads, or one does not begin with a panel");
    const DType type = args.dtype(dtype);
    const Memory from = args.memory("x", x, type, {num_tokens, num_heads, size});
    const Memory to = args.memory("out", out, type, {num_tokens, num_heads, heads.out_size()});
    args.apart(to, from);
    head_linear(heads, from.as<const void>(), type, num_tokens, to.as<void>());
}

static void bind_head_linear(nb::module_ &m) {
    m.def("head_linear", &run, nb::call_guard<nb::gil_scoped_release>());
}
static const Registration registration(bind_head_linear);

}  // namespace quire
