"""The storyteller's network in plain torch: a Llama decoder with Hugging Face's parameter names.

Owns the shape of the model and its forward pass. Knows nothing of text, data or optimisers.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the network, named as in Hugging Face's ``config.json``."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def as_json(self) -> dict[str, int | float]:
        return asdict(self)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_dim = shape.num_attention_heads * shape.head_dim
        key_dim = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_dim, bias=False)
        self.o_proj = nn.Linear(query_dim, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """hidden [batch, len, hidden_size], cos and sin [len, head_dim] -> [batch, len,
        hidden_size]."""
        batch, length, _ = hidden.shape
        query, key, value = (
            proj(hidden).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding with the two halves of a head as pairs (Llama's layout)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    """Embedding, layers and last norm (``model.`` in the checkpoint)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.num_hidden_layers)])
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        out: Tensor = self.norm(hidden)
        return out


class Storyteller(nn.Module):
    """The language model; its output weights are the embedding (tied)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal(0, 0.02); the projections back into the stream start smaller so that
        depth does not add variance."""
        depth_scale = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 * (depth_scale if is_output else 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [batch, len] -> hidden states after the last norm [batch, len, hidden_size]."""
        length = ids.shape[1]
        hidden: Tensor = self.model(ids, self.cos[:length], self.sin[:length])  # type: ignore[index]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden_size] -> [..., vocab_size]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean cross-entropy (nats) over the positions whose target is not -100, weighted if
        weights are given; all arguments [batch, len]."""
        is_target = targets.flatten() != -100
        hidden = self(ids).flatten(0, 1)[is_target]
        losses = F.cross_entropy(
            self.logits(hidden), targets.flatten()[is_target], reduction="none"
        )
        if weights is None:
            return losses.mean()
        kept = weights.flatten()[is_target]
        return (losses * kept).sum() / kept.sum()


def rotary_table(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """cos and sin [max_position_embeddings, head_dim], each half of the head alike."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()
