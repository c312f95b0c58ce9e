// The decoder step as Python sees it: records of weights that a `Decoder` is made of (quire/kernels/cpu/step.py makes and
// checks them). Addresses stay valid because the Python side keeps the tensors.
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "checks.hpp"
#include "step.hpp"

namespace quire {

using namespace nb::literals;

static void init_norm(NormWeight *self, uintptr_t weight, uintptr_t bias, int dtype, int64_t width, float eps,
                      float offset, bool is_layer) {
    const Arguments args("NormWeight");
    const DType type = args.dtype(dtype);
    args.count("the width", width, 1);
    const Memory gain = args.memory("the weight", weight, type, {width});
    const Memory added = args.memory("the bias", bias, type, {bias == 0 ? 0 : width});
    new (self) NormWeight{gain.as<const void>(), added.as<const void>(), type, width, args.magnitude("eps", eps),
                          args.finite("the offset", offset), is_layer};
}

static NormWeight or_absent(const NormWeight *norm) { return norm == nullptr ? NormWeight{} : *norm; }

// Of all heads together, or of each by itself.
static void check_head_norm(const Arguments &args, const NormWeight *norm, int64_t head_size, int64_t num_heads) {
    const bool fits = norm == nullptr || norm->width == head_size || norm->width == head_size * num_heads;
    args.require(fits, "a norm of queries or keys spans neither a head nor all of them");
}

static void init_attention(AttentionWeights *self, const LinearWeight &qkv, const LinearWeight &output,
                           const NormWeight *query_norm, const NormWeight *key_norm, uintptr_t rope, int64_t rope_half,
                           int64_t num_heads, int64_t num_kv_heads, int64_t head_size, float scale, float soft_cap,
                           int64_t window) {
    const Arguments args("AttentionWeights");
    check_attached("AttentionWeights", qkv);
    check_attached("AttentionWeights", output);
    args.between(1, MAX_HEAD_SIZE, "the head size", head_size);
    args.between(1, MAX_HEADS, "the number of heads", num_heads);
    args.between(1, num_heads, "the number of KV heads", num_kv_heads);
    args.require(num_heads % num_kv_heads == 0, "heads must be a multiple of KV heads");
    args.require(qkv.num_outputs == (num_heads + 2 * num_kv_heads) * head_size, "qkv does not fit the heads");
    args.require(output.num_inputs == num_heads * head_size, "the output does not fit the heads");
    args.require(output.num_outputs == qkv.num_inputs, "the output is not as wide as what qkv reads");
    args.between(0, head_size / 2, "rope_half", rope_half);
    check_head_norm(args, query_norm, head_size, num_heads);
    check_head_norm(args, key_norm, head_size, num_kv_heads);
    const float *angles = args.array<const float>("rope", rope, {rope == 0 ? 0 : 1, 2, rope_half});
    new (self) AttentionWeights{qkv, output, or_absent(query_norm), or_absent(key_norm), angles, rope_half, num_heads,
                                num_kv_heads, head_size, args.finite("the scale", scale),
                                args.magnitude("the soft cap", soft_cap), args.count("the window", window)};
}

static void init_mlp(MlpWeights *self, const LinearWeight &up, const LinearWeight &down, bool is_gated,
                     int activation) {
    const Arguments args("MlpWeights");
    check_attached("MlpWeights", up);
    check_attached("MlpWeights", down);
    args.require(up.num_outputs == down.num_inputs * (is_gated ? 2 : 1), "`up` and `down` do not fit together");
    args.require(down.num_outputs == up.num_inputs, "`down` is not as wide as what `up` reads");
    new (self) MlpWeights{up, down, is_gated, args.activation(activation)};
}

static void init_embedding(EmbeddingWeights *self, const Lookup &tokens, const Lookup *positions, int64_t num_positions,
                           float scale) {
    const Arguments args("EmbeddingWeights");
    args.count("the number of positions", num_positions, 1);
    if (positions != nullptr) {
        args.require(positions->width == tokens.width && positions->dtype == tokens.dtype, "both tables must be alike");
        args.between(1, positions->num_rows, "the number of positions", num_positions);
    }
    new (self) EmbeddingWeights{tokens, positions == nullptr ? Lookup{} : *positions, num_positions,
                                args.finite("the scale", scale)};
}

static void add_block(Decoder &decoder, const AttentionWeights &attention, const MlpWeights &mlp,
                      const NormWeight *attention_norm, const NormWeight *post_attention_norm,
                      const NormWeight *mlp_norm, const NormWeight *post_mlp_norm) {
    const Arguments args("Decoder.add_block");
    args.require(attention.qkv.num_inputs == decoder.width() && mlp.up.num_inputs == decoder.width(),
                 "the block is not as wide as the embedding");
    for (const NormWeight *norm : {attention_norm, post_attention_norm, mlp_norm, post_mlp_norm}) {
        args.require(norm == nullptr || norm->width == decoder.width(), "a norm is not as wide as the embedding");
    }
    decoder.add_block(BlockWeights{or_absent(attention_norm), or_absent(post_attention_norm), or_absent(mlp_norm),
                                   or_absent(post_mlp_norm), attention, mlp});
}

static void init_cache(KVCache *self, uintptr_t keys, uintptr_t values, int format, int64_t num_blocks,
                       int64_t num_kv_heads, int64_t block_size, int64_t head_size) {
    new (self) KVCache(make_cache(keys, values, format, num_blocks, num_kv_heads, block_size, head_size));
}

static void forward(Decoder &decoder, uintptr_t token_ids, uintptr_t positions, uintptr_t slots, uintptr_t query_start,
                    uintptr_t context_len, int64_t num_sequences, int64_t num_tokens, uintptr_t block_tables,
                    int64_t table_stride, uintptr_t num_wanted, uintptr_t out) {
    constexpr int64_t MOST = (int64_t{1} << 31) - 1;  // both are counted in 32 bits
    const Arguments args("Decoder.forward");
    args.between(0, MOST, "the number of tokens", num_tokens);
    args.between(0, MOST, "the number of sequences", num_sequences);
    const Sequences sequences{args.array<const int32_t>("query_start", query_start, {num_sequences + 1}),
                              args.array<const int32_t>("context_len", context_len, {num_sequences}), num_sequences,
                              num_tokens};
    const StepInputs step{args.array<const int64_t>("token_ids", token_ids, {num_tokens}),
                          args.array<const int64_t>("positions", positions, {num_tokens}),
                          args.array<const int64_t>("slots", slots, {num_tokens}),
                          sequences,
                          args.array<const int32_t>("block_tables", block_tables, {num_sequences, table_stride}),
                          table_stride,
                          args.array<const int32_t>("num_wanted", num_wanted, {num_wanted == 0 ? 0 : num_sequences})};
    decoder.forward(step, args.memory("out", out, decoder.dtype(), {num_tokens, decoder.width()}).as<void>());
}

static void bind_step(nb::module_ &m) {
    nb::class_<NormWeight>(m, "NormWeight")
        .def("__init__", &init_norm, "weight"_a, "bias"_a, "dtype"_a, "width"_a, "eps"_a, "offset"_a, "is_layer"_a);
    nb::class_<AttentionWeights>(m, "AttentionWeights")
        .def("__init__", &init_attention, "qkv"_a, "output"_a, "query_norm"_a.none(), "key_norm"_a.none(), "rope"_a,
             "rope_half"_a, "num_heads"_a, "num_kv_heads"_a, "head_size"_a, "scale"_a, "soft_cap"_a, "window"_a);
    nb::class_<MlpWeights>(m, "MlpWeights")
        .def("__init__", &init_mlp, "up"_a, "down"_a, "is_gated"_a, "activation"_a);
    nb::class_<EmbeddingWeights>(m, "EmbeddingWeights")
        .def("__init__", &init_embedding, "tokens"_a, "positions"_a.none(), "num_positions"_a, "scale"_a);
    nb::class_<KVCache>(m, "KVCache")
        .def("__init__", &init_cache, "keys"_a, "values"_a, "format"_a, "num_blocks"_a, "num_kv_heads"_a,
             "block_size"_a, "head_size"_a);
    nb::class_<Decoder>(m, "Decoder")
        .def(nb::init<const EmbeddingWeights &>(), "embedding"_a)
        .def("add_block", &add_block, "attention"_a, "mlp"_a, "attention_norm"_a.none(),
             "post_attention_norm"_a.none(), "mlp_norm"_a.none(), "post_mlp_norm"_a.none())
        .def("set_caches", &Decoder::set_caches, "caches"_a)
        .def("forward", &forward, nb::call_guard<nb::gil_scoped_release>());
}
static const Registration registration(bind_step);

}  // namespace quire
