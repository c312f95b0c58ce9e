"""A decoder behind one native call (csrc/cpu/step.cpp): checks of its weights once, of a step's tensors at each call.

Owns the tensors that the native records point to. Which operations run, and in which order, is the extension's copy of
`quire.nn.layers`; both give the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cpu import _native
from quire.kernels.cpu.attention import check_batch, native_cache
from quire.kernels.cpu.checks import (
    activation_code,
    address,
    float_code,
    indices_address,
    int32_address,
    require,
    vector_address,
)
from quire.kernels.cpu.elementwise import native_lookup
from quire.kernels.cpu.linear import CpuLinear
from quire.kernels.interface import (
    AttentionBatch,
    AttentionWeights,
    BlockWeights,
    DecoderWeights,
    MlpWeights,
    NormWeights,
    PackedLinear,
)


def compile_decoder(decoder: DecoderWeights) -> CompiledDecoder:
    """See `Kernels.compile_decoder`; the native step has every part that the operations have."""
    return CompiledDecoder(decoder)


class CompiledDecoder:
    """Implements `ForwardPass`."""

    def __init__(self, decoder: DecoderWeights) -> None:
        self._weights = decoder  # keeps the memory alive that the native records point to
        self._width, self._dtype = decoder.embedding.shape[1], decoder.embedding.dtype
        self._native = _native.Decoder(_embedding(decoder))
        for block in decoder.blocks:
            _add_block(self._native, block, decoder)
        self._caches: list[weakref.ref[Tensor]] = []

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        num_wanted: Tensor | None = None,
    ) -> Tensor:
        self._attach(kv_caches)
        num_tokens = token_ids.numel()
        num_sequences = check_batch(batch)
        out = torch.empty((num_tokens, self._width), dtype=self._dtype)
        self._native.forward(
            indices_address(token_ids, "token_ids", num_tokens),
            indices_address(positions, "positions", num_tokens),
            indices_address(batch.slots, "slots", num_tokens),
            int32_address(batch.query_start, "query_start"),
            int32_address(batch.context_len, "context_len"),
            num_sequences,
            num_tokens,
            int32_address(batch.block_tables, "block_tables"),
            batch.block_tables.shape[1],
            0 if num_wanted is None else vector_address(num_wanted, "num_wanted", torch.int32, num_sequences),
            out.data_ptr(),
        )
        return out

    def _attach(self, kv_caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Point the native step to these caches, unless they are those of the last call. Does not keep them alive."""
        tensors = [tensor for pair in kv_caches for tensor in pair]
        known = self._caches
        if len(known) == len(tensors) and all(ref() is tensor for ref, tensor in zip(known, tensors, strict=True)):
            return
        self._native.set_caches([native_cache(*pair) for pair in kv_caches])
        self._caches = [weakref.ref(tensor) for tensor in tensors]


def _embedding(decoder: DecoderWeights) -> _native.EmbeddingWeights:
    tokens, positions = decoder.embedding, decoder.position_embedding
    if positions is not None and (positions.dtype != tokens.dtype or positions.shape[1:] != tokens.shape[1:]):
        raise ValueError(f"step: embeddings {tokens.dtype} {list(tokens.shape)} and {positions.dtype} {list(positions.shape)}")
    return _native.EmbeddingWeights(
        tokens=native_lookup(tokens),
        positions=None if positions is None else native_lookup(positions),
        num_positions=decoder.max_model_len if positions is None else min(decoder.max_model_len, positions.shape[0]),
        scale=decoder.embedding_scale,
    )


def _add_block(native: _native.Decoder, block: BlockWeights, decoder: DecoderWeights) -> None:
    width = decoder.embedding.shape[1]
    native.add_block(
        attention=_attention(block.attention, decoder),
        mlp=_mlp(block.mlp, width),
        attention_norm=_norm(block.attention_norm, width),
        post_attention_norm=_norm(block.post_attention_norm, width),
        mlp_norm=_norm(block.mlp_norm, width),
        post_mlp_norm=_norm(block.post_mlp_norm, width),
    )


def _attention(attention: AttentionWeights, decoder: DecoderWeights) -> _native.AttentionWeights:
    width, size = decoder.embedding.shape[1], attention.head_dim
    query_width, key_width = attention.num_heads * size, attention.num_kv_heads * size
    rope, half = attention.rope, 0
    if rope is not None:
        half = rope.shape[-1]
        fits = rope.dtype == torch.float32 and rope.shape == (decoder.max_model_len, 2, half) and 2 * half <= size
        require(fits, f"step: expected RoPE float32 [{decoder.max_model_len}, 2, R / 2] for heads of {size}", rope)
    return _native.AttentionWeights(
        qkv=_linear(attention.qkv, width, query_width + 2 * key_width),
        output=_linear(attention.output, query_width, width),
        query_norm=_norm(attention.query_norm, size, query_width),
        key_norm=_norm(attention.key_norm, size, key_width),
        rope=0 if rope is None else address(rope, "rope"),
        rope_half=half,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=size,
        scale=attention.scale,
        soft_cap=attention.soft_cap or 0.0,
        window=attention.window or 0,
    )


def _mlp(mlp: MlpWeights, width: int) -> _native.MlpWeights:
    raised = mlp.down.num_inputs
    return _native.MlpWeights(
        up=_linear(mlp.up, width, 2 * raised if mlp.is_gated else raised),
        down=_linear(mlp.down, raised, width),
        is_gated=mlp.is_gated,
        activation=activation_code(mlp.activation),
    )


def _linear(weight: PackedLinear, num_inputs: int, num_outputs: int) -> _native.LinearWeight:
    if not isinstance(weight, CpuLinear):
        raise TypeError(f"step: a weight was packed by another back end ({type(weight).__name__})")
    if (weight.num_outputs, weight.num_inputs) != (num_outputs, num_inputs):
        raise ValueError(f"step: a weight is [{weight.num_outputs}, {weight.num_inputs}], not [{num_outputs}, {num_inputs}]")
    return weight.native


def _norm(norm: NormWeights | None, *sizes: int) -> _native.NormWeight | None:
    """`sizes`: what the norm may span."""
    if norm is None:
        return None
    weight, bias = norm.weight, norm.bias
    require(weight.dim() == 1 and weight.shape[0] in sizes, f"step: expected a norm over {sizes}", weight)
    if bias is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype):
        raise ValueError(f"step: a norm of {weight.dtype} {list(weight.shape)} with bias {bias.dtype} {list(bias.shape)}")
    return _native.NormWeight(
        weight=address(weight, "norm"),
        bias=0 if bias is None else address(bias, "norm bias"),
        dtype=float_code(weight, "norm"),
        width=weight.shape[0],
        eps=norm.eps,
        offset=norm.weight_offset,
        is_layer=norm.kind == "layer",
    )
