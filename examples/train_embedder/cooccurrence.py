"""Start vectors of tokens from how often tokens occur near one another.

Positive pointwise mutual information and its singular vectors (Levy and Goldberg, 2014): minutes of
training would go into what one decomposition gives.
"""

import torch
from torch import Tensor

WINDOW = 6
SMOOTHING = 0.75
"""Power of the contexts' counts (Levy, Goldberg and Dagan, 2015)."""


def token_vectors(texts: list[list[int]], num_tokens: int, size: int) -> Tensor:
    """Return float32 [num_tokens, size], of the mean norm one."""
    counts = torch.zeros(num_tokens, num_tokens)
    stream = torch.tensor([token for text in texts for token in text])
    owner = torch.tensor([number for number, text in enumerate(texts) for _ in text])
    for distance in range(1, WINDOW + 1):
        left, right = stream[:-distance], stream[distance:]
        inside = owner[:-distance] == owner[distance:]
        pairs = left[inside] * num_tokens + right[inside]
        found = torch.bincount(pairs, minlength=num_tokens * num_tokens)
        counts += found.view(num_tokens, num_tokens).float() / distance
    counts += counts.T.clone()
    totals = counts.sum(1)
    contexts = totals**SMOOTHING
    expected = totals[:, None] * (contexts / contexts.sum())[None]
    information = torch.log(counts.clamp(min=1e-9) / expected.clamp(min=1e-9)).clamp_(min=0)
    left_vectors, values, _ = torch.svd_lowrank(information, q=size, niter=3)
    vectors: Tensor = left_vectors * values.sqrt()
    scale: Tensor = vectors.norm(dim=1).mean()
    return vectors / scale
