// The decoder step as Python sees it: records of weights that a `Decoder` is made of (quire/kernels/cpu/step.py makes and
// checks them). Addresses stay valid because the Python side keeps the tensors.
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "step.hpp"

namespace quire {

using namespace nb::literals;

static void init_norm(NormWeight *self, uintptr_t weight, uintptr_t bias, int dtype, int64_t width, float eps,
                      float offset, bool is_layer) {
    new (self) NormWeight{reinterpret_cast<const void *>(weight),
                          reinterpret_cast<const void *>(bias),
                          static_cast<DType>(dtype),
                          width,
                          eps,
                          offset,
                          is_layer};
}

static NormWeight or_absent(const NormWeight *norm) { return norm == nullptr ? NormWeight{} : *norm; }

static void init_attention(AttentionWeights *self, const LinearWeight &qkv, const LinearWeight &output,
                           const NormWeight *query_norm, const NormWeight *key_norm, uintptr_t rope, int64_t rope_half,
                           int64_t num_heads, int64_t num_kv_heads, int64_t head_size, float scale, float soft_cap,
                           int64_t window) {
    new (self) AttentionWeights{qkv,
                                output,
                                or_absent(query_norm),
                                or_absent(key_norm),
                                reinterpret_cast<const float *>(rope),
                                rope_half,
                                num_heads,
                                num_kv_heads,
                                head_size,
                                scale,
                                soft_cap,
                                window};
}

static void init_mlp(MlpWeights *self, const LinearWeight &up, const LinearWeight &down, bool is_gated,
                     int activation) {
    new (self) MlpWeights{up, down, is_gated, static_cast<Activation>(activation)};
}

static void init_embedding(EmbeddingWeights *self, const Lookup &tokens, const Lookup *positions, int64_t num_positions,
                           float scale) {
    new (self) EmbeddingWeights{tokens, positions == nullptr ? Lookup{} : *positions, num_positions, scale};
}

static void add_block(Decoder &decoder, const AttentionWeights &attention, const MlpWeights &mlp,
                      const NormWeight *attention_norm, const NormWeight *post_attention_norm,
                      const NormWeight *mlp_norm, const NormWeight *post_mlp_norm) {
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
    const StepInputs step{reinterpret_cast<const int64_t *>(token_ids),
                          reinterpret_cast<const int64_t *>(positions),
                          reinterpret_cast<const int64_t *>(slots),
                          Sequences{reinterpret_cast<const int32_t *>(query_start),
                                    reinterpret_cast<const int32_t *>(context_len), num_sequences, num_tokens},
                          reinterpret_cast<const int32_t *>(block_tables),
                          table_stride,
                          reinterpret_cast<const int32_t *>(num_wanted)};
    decoder.forward(step, reinterpret_cast<void *>(out));
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
