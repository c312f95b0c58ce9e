"""A model with random weights, and a draft model that agrees with it as often as is wished: to
measure what drafting saves where steps take milliseconds, without a trained pair of models.

    python -m benchmarks.draft_pair build/pair --scale 0.08
    python -m benchmarks.speculation --model build/pair/target --draft-model build/pair/draft

The draft model is the target's first two layers. What the other layers add to the stream is scaled
by `--scale`: the smaller, the more often both choose the same token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

_STORYTELLER = Path(__file__).parent.parent / "quire" / "assets" / "quire-storyteller"
_WIDTH, _INNER, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 1024, 2816, 16, 4, 64
_NUM_DRAFT_LAYERS = 2
_HEAD_SCALE = 3.0
"""Of the logits' spread: with less, any change of the stream changes the token."""


def make_weights(vocab_size: int, num_layers: int, scale: float) -> dict[str, Tensor]:
    """The target's weights; the draft model's are among them."""
    generator = torch.Generator().manual_seed(0)

    def drawn(num_outputs: int, num_inputs: int, factor: float = 1.0) -> Tensor:
        values = torch.randn(num_outputs, num_inputs, generator=generator)
        values *= factor / num_inputs**0.5
        return values.bfloat16()

    ones = torch.ones(_WIDTH, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": drawn(vocab_size, _WIDTH, _WIDTH**0.5),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": drawn(vocab_size, _WIDTH, _HEAD_SCALE),
    }
    for number in range(num_layers):
        factor = 1.0 if number < _NUM_DRAFT_LAYERS else scale
        layer = {
            "self_attn.q_proj": drawn(_NUM_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.k_proj": drawn(_NUM_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.v_proj": drawn(_NUM_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.o_proj": drawn(_WIDTH, _NUM_HEADS * _HEAD_DIM, factor),
            "mlp.gate_proj": drawn(_INNER, _WIDTH),
            "mlp.up_proj": drawn(_INNER, _WIDTH),
            "mlp.down_proj": drawn(_WIDTH, _INNER, factor),
            "input_layernorm": ones.clone(),
            "post_attention_layernorm": ones.clone(),
        }
        weights |= {f"model.layers.{number}.{name}.weight": each for name, each in layer.items()}
    return weights


def write_model(folder: Path, weights: dict[str, Tensor], num_layers: int) -> None:
    """Write the first layers as a model, with the storyteller's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: each
        for name, each in weights.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    save_file(kept, folder / "model.safetensors")
    config = json.loads((_STORYTELLER / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": _WIDTH, "intermediate_size": _INNER, "num_hidden_layers": num_layers,
        "num_attention_heads": _NUM_HEADS, "num_key_value_heads": _NUM_KV_HEADS,
        "head_dim": _HEAD_DIM, "tie_word_embeddings": False, "max_position_embeddings": 1024,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(_STORYTELLER / name, folder / name)


def main(argv: Sequence[str] | None = None) -> int:
    """Write both models."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.draft_pair"
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", type=float, default=0.08, help="(default: 0.08)")
    parser.add_argument("--layers", type=int, default=20, help="(default: 20)")
    args = parser.parse_args(argv)
    weights = make_weights(4096, args.layers, args.scale)
    write_model(args.out / "target", weights, args.layers)
    write_model(args.out / "draft", weights, _NUM_DRAFT_LAYERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
