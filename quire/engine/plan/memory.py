"""Bytes of temporary tensors that a plan reserves, from a model's declaration and the size of its
steps.

Estimates from above, in float32; the KV cache, weights and adapters are counted elsewhere.
"""

from __future__ import annotations

from quire.config.limits import MAX_SCORED_ROWS
from quire.models.blocks import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    Mixer,
    MlpSpec,
)
from quire.models.declaration import DecoderSpec
from quire.models.tensors import DTYPE_BYTES


def workspace_bytes(spec: DecoderSpec, num_batched_tokens: int, max_num_seqs: int) -> int:
    """Return the peak of temporary tensors, computed in float32 to be on the safe side.

    Within a layer: the stream, its norm, the widest projection and its activation. At the end:
    logits of every sequence, and an edited copy where requests have penalties or bias; or those
    of a prompt that is scored, and of the piece before.
    """
    logits_bytes = (
        2
        * min(max(max_num_seqs, MAX_SCORED_ROWS), num_batched_tokens)
        * spec.vocab_size
        * DTYPE_BYTES["float32"]
    )
    return layer_bytes(spec, num_batched_tokens) + logits_bytes


def gate_bytes(spec: DecoderSpec) -> int:
    """Return the bytes of gates' products in float32 that are kept for adapters
    (csrc/cpu/program.cpp): 8 MiB, or those of 128 tokens."""
    mixers = [mixer for block in spec.blocks for mixer in block.mixers]
    mixers += [mixer.shared for mixer in mixers if isinstance(mixer, ExpertsSpec) and mixer.shared]
    widest = max((m.up.num_outputs for m in mixers if isinstance(m, MlpSpec)), default=0)
    return max(8 << 20, 128 * 2 * widest * DTYPE_BYTES["float32"])


def layer_bytes(spec: DecoderSpec, num_tokens: int) -> int:
    """Return the temporary tensors of one layer: stream, norm, widest projection."""
    return block_bytes(spec.blocks, spec.hidden_size, num_tokens)


def block_bytes(blocks: tuple[BlockSpec, ...], hidden: int, num_tokens: int) -> int:
    """Return what one of some blocks takes, at most, between streams of a width."""
    widest = max((_mixer_width(each) for block in blocks for each in block.mixers), default=0)
    return num_tokens * (3 * hidden + widest) * DTYPE_BYTES["float32"]


def _mixer_width(mixer: Mixer) -> int:
    """Return its first projection, and a copy of it or what is activated; of experts, each chosen
    one's copy of the row and what is activated, twice."""
    if isinstance(mixer, ExpertsSpec):
        shared = 0 if mixer.shared is None else _mixer_width(mixer.shared)
        width = mixer.router.num_inputs + 2 * mixer.inner
        return len(mixer.experts) + mixer.routing.num_chosen * width + shared
    if isinstance(mixer, LatentAttentionSpec):
        kept = mixer.down.num_outputs + mixer.query.num_outputs
        return kept + mixer.num_heads * (2 * mixer.rank + mixer.head_dim)
    first = sum(part.num_outputs for part in mixer.projections[0])
    return first + (first if isinstance(mixer, AttentionSpec) else mixer.down.num_inputs)
