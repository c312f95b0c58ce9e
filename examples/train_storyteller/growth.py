"""Grow the network in depth during the run.

Owns the schedule of depths and the copying of weights into a deeper model. With a fixed time budget
a shallow network sees far more tokens at first, and the deeper one takes over what it learnt. A new
layer copies its lower neighbour but adds nothing at first (its projections into the stream are
zero), so the loss does not jump. Compare "Progressively stacking" (Gong and others 2019) and
Net2Net's function-preserving growth (Chen and others 2015).
"""

from dataclasses import replace

import torch

from .model import ModelShape, Storyteller
from .optimizer import StoryOptimizer

DEPTHS = ((0.0, 2), (0.25, 4), (0.62, 6))  # (share of the run, layers from then on)


def wanted_depth(progress: float) -> int:
    return [depth for start, depth in DEPTHS if progress >= start][-1]


def _layer_map(old_depth: int, new_depth: int) -> dict[int, int]:
    """New layer index of each old one, spread evenly."""
    return {index: index * new_depth // old_depth for index in range(old_depth)}


def _renamed(name: str, layers: dict[int, int]) -> str:
    parts = name.split(".")
    if parts[1] == "layers":
        parts[2] = str(layers[int(parts[2])])
    return ".".join(parts)


@torch.no_grad()
def grow(
    model: Storyteller, optimizer: StoryOptimizer, depth: int
) -> tuple[Storyteller, StoryOptimizer]:
    """The same function as a deeper model, with the optimiser's memory of the old layers."""
    old_depth = model.shape.num_hidden_layers
    layers = _layer_map(old_depth, depth)
    device = model.model.embed_tokens.weight.device
    deeper = Storyteller(replace(model.shape, num_hidden_layers=depth)).to(device)
    weights = dict(deeper.named_parameters())
    for name, weight in model.named_parameters():
        weights[_renamed(name, layers)].copy_(weight)
    source = 0
    for index in range(depth):
        if index in layers.values():
            source = index
            continue
        layer = deeper.model.layers[index]
        layer.load_state_dict(deeper.model.layers[source].state_dict())
        for output in (
            f"model.layers.{index}.self_attn.o_proj.weight",
            f"model.layers.{index}.mlp.down_proj.weight",
        ):
            weights[output].zero_()
    successor = StoryOptimizer(deeper)
    successor.num_steps = optimizer.num_steps
    for name, tensor in optimizer.state.items():
        successor.state[_renamed(name, layers)].copy_(tensor)
    return deeper, successor


def first_shape() -> ModelShape:
    """The shape that a run starts from."""
    return replace(ModelShape(), num_hidden_layers=wanted_depth(0.0))
