"""How experts are chosen, written down once more: number by number, from the papers, without the
engine's code."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.program.operations import Routing

BIAS_SCALE = 0.4
ROUTINGS: dict[str, tuple[Routing, bool]] = {
    "v2_greedy": (Routing(12, 3, False, factor=16.0), False),
    "v2_groups": (Routing(12, 3, False, num_groups=4, num_groups_chosen=2), False),
    "normalised_groups": (Routing(12, 4, True, num_groups=3, num_groups_chosen=2), False),
    "v3": (
        Routing(24, 5, True, "sigmoid", 6, 3, "best_two", 2.5),
        True,
    ),
    "v3_wide": (Routing(256, 8, True, "sigmoid", 8, 4, "best_two", 2.5), True),
    "v3_all_of_the_groups": (Routing(16, 4, True, "sigmoid", 8, 2, "best_two"), True),
    "sigmoids_alone": (Routing(7, 2, False, "sigmoid", factor=0.5), False),
    "biased_without_groups": (Routing(30, 4, True, "sigmoid"), True),
}
"""By a name: a routing, and whether it has a bias."""


def draw_case(name: str, num_tokens: int = 9) -> tuple[Tensor, Routing, Tensor | None]:
    """Logits [T, E] without ties, the routing, and its bias of both signs."""
    routing, has_bias = ROUTINGS[name]
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(num_tokens, routing.num_experts, generator=generator)
    bias = BIAS_SCALE * torch.randn(routing.num_experts, generator=generator)
    return logits, routing, bias if has_bias else None


def choose(row: list[float], routing: Routing, bias: list[float]) -> tuple[list[int], list[float]]:
    """Ids and weights of one token."""
    if routing.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in row]
        values = [score + b for score, b in zip(scores, bias, strict=True)]
    else:
        total = sum(math.exp(x) for x in row)
        values = scores = [math.exp(x) / total for x in row]
    size = routing.num_experts // routing.num_groups

    def worth(group: int) -> float:
        ranked = sorted(values[group * size : (group + 1) * size], reverse=True)
        return sum(ranked[: 2 if routing.group_value == "best_two" else 1])

    groups = sorted(range(routing.num_groups), key=lambda g: (-worth(g), g))
    allowed = set(groups[: routing.num_groups_chosen])
    experts = [i for i in range(routing.num_experts) if i // size in allowed]
    ids = sorted(experts, key=lambda i: (-values[i], i))[: routing.num_chosen]
    weights = [scores[i] for i in ids]
    if routing.is_normalised:
        weights = [weight / (sum(weights) + 1e-20) for weight in weights]
    return ids, [weight * routing.factor for weight in weights]


def chosen_by_hand(
    logits: Tensor, routing: Routing, bias: Tensor | None
) -> tuple[list[list[int]], Tensor]:
    """Ids [T][k] and weights [T, k] of all tokens."""
    added = [0.0] * routing.num_experts if bias is None else bias.double().tolist()
    rows = [choose(row, routing, added) for row in logits.double().tolist()]
    return [ids for ids, _ in rows], torch.tensor([weights for _, weights in rows])
