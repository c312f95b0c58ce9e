"""Muon for the matrices, Adam for the rest, and the learning-rate schedule.

Owns the update rules and their state as plain tensors, so that a checkpoint is one safetensors
file.
Muon: Keller Jordan and others 2024 (github.com/KellerJordan/Muon): momentum whose update is
orthogonalised by five Newton-Schulz steps. torch.optim.Muon does those in bfloat16, which is slow
on processors without bfloat16 units.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

MUON_LR = 0.02
ADAM_LR = 0.006
MUON_MOMENTUM = 0.95
MUON_WEIGHT_DECAY = 0.1
ADAM_BETAS = (0.9, 0.98)
ADAM_EPS = 1e-8
WARMUP_STEPS = 30
DECAY_START = 0.35  # share of the run after which the rate falls in a straight line to zero


def schedule(step: int, progress: float) -> float:
    """Factor on every learning rate: warm-up by steps, flat,
    then a straight line to zero at progress 1."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    decay = min(1.0, (1.0 - progress) / (1.0 - DECAY_START))
    return float(warmup * max(decay, 0.0))


def orthogonalise(stack: Tensor) -> Tensor:
    """Five Newton-Schulz steps on matrices [count, rows, columns]:
    all singular values move near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if is_tall else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result


class StoryOptimizer:
    """Steps a model's parameters in place, but for those that need no gradient; its state is a flat
    dict of tensors named after the parameters."""

    def __init__(self, model: nn.Module) -> None:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._matrices = {n: p for n, p in trained.items() if p.dim() == 2 and "embed" not in n}
        self._others = {n: p for n, p in trained.items() if n not in self._matrices}
        self.state: dict[str, Tensor] = {}
        for name, weight in trained.items():
            self.state[f"{name}.momentum"] = torch.zeros_like(weight)
        for name, weight in self._others.items():
            self.state[f"{name}.square"] = torch.zeros_like(weight)
        self.num_steps = 0

    def load_state(self, state: dict[str, Tensor], num_steps: int) -> None:
        if state.keys() != self.state.keys():
            raise ValueError(
                "the checkpoint's optimiser state belongs to another model; train into an "
                "empty folder"
            )
        self.state, self.num_steps = dict(state), num_steps

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with all learning rates scaled by `rate`; clears the gradients."""
        self.num_steps += 1
        self._step_matrices(MUON_LR * rate)
        for name, weight in self._others.items():
            self._step_adam(name, weight, ADAM_LR * rate)

    def _step_matrices(self, lr: float) -> None:
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, weight in self._matrices.items():
            momentum = self.state[f"{name}.momentum"]
            assert weight.grad is not None, name
            momentum.lerp_(weight.grad, 1 - MUON_MOMENTUM)
            by_shape[tuple(weight.shape)].append(
                (weight, weight.grad.lerp(momentum, MUON_MOMENTUM))
            )
            weight.grad = None
        for shape, group in by_shape.items():
            updates = orthogonalise(torch.stack([update for _, update in group]))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for (matrix, _), update in zip(group, updates, strict=True):
                matrix.mul_(1 - lr * MUON_WEIGHT_DECAY).add_(update, alpha=-lr * scale)

    def _step_adam(self, name: str, weight: Tensor, lr: float) -> None:
        momentum, square = self.state[f"{name}.momentum"], self.state[f"{name}.square"]
        assert weight.grad is not None, name
        momentum.lerp_(weight.grad, 1 - ADAM_BETAS[0])
        square.lerp_(weight.grad.square(), 1 - ADAM_BETAS[1])
        mean = momentum / (1 - ADAM_BETAS[0] ** self.num_steps)
        deviation = (square / (1 - ADAM_BETAS[1] ** self.num_steps)).sqrt_().add_(ADAM_EPS)
        weight.addcdiv_(mean, deviation, value=-lr)
        weight.grad = None
