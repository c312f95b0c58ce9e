"""The least that a machine needs for a workload, whatever engine runs it: exact operations and
bytes of an ideal schedule.

The ideal schedule computes every distinct prompt token once, all prompts together in the first
step, and then one token of every unfinished sequence a step; each step reads the weights once. Of
the last layer, tokens before a prompt's last need keys and values alone. Norms, activations and
sampling are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from quire.bench.workload import BenchRequest
from quire.models.declaration import DecoderSpec


class IdealStep(NamedTuple):
    """What one step of the ideal schedule must do."""

    linear_flops: int
    """Matrix products with weights: at the rate of the data type that an engine multiplies in."""
    attention_flops: int
    """Attention over each token's context: at the rate of floating point."""
    num_bytes: float
    """Weights once, KV read once a sequence and written."""


class MachineRates(NamedTuple):
    """What the machine can do at best, per second."""

    linear_flops: float
    attention_flops: float
    num_bytes: float


def ideal_steps(
    spec: DecoderSpec, requests: Sequence[BenchRequest], bytes_per_weight: float
) -> list[IdealStep]:
    """Return the steps of the ideal schedule. KV is counted in the data type of the declaration's
    cache at 2 bytes a number; of experts, each step reads at least those of one token."""
    flops = spec.flops_per_token()
    kv_bytes = sum(layer.bytes_per_token("bfloat16") for layer in spec.kv_layers)
    # called with the same contexts again and again, over all layers each time
    attention_flops = cache(spec.attention_flops)
    weight_bytes = (flops.layers + flops.head) / 2 * bytes_per_weight

    def step(spans: Iterable[tuple[int, int]], num_heads: int) -> IdealStep:
        """`spans`: (first, end) positions computed of each row."""
        listed = list(spans)
        num_tokens = sum(end - first for first, end in listed)
        linear = (
            num_tokens * flops.layers
            - (num_tokens - len(listed)) * flops.outputs
            + num_heads * flops.head
        )
        attention = sum(
            attention_flops(position + 1, is_wanted=position + 1 == end)
            for first, end in listed
            for position in range(first, end)
        )
        moved = weight_bytes + kv_bytes * sum(end + (end - first) for first, end in listed)
        return IdealStep(linear, attention, moved)

    steps = [step(_distinct_spans(requests), len(requests))]
    for number in range(1, max(each.num_output for each in requests)):
        active = [each for each in requests if each.num_output > number]
        ends = [len(each.token_ids) + number for each in active for _ in range(each.num_sequences)]
        steps.append(step([(end - 1, end) for end in ends], len(ends)))
    return steps


def compute_s(steps: Sequence[IdealStep], rates: MachineRates) -> float:
    """Return the time of the operations alone."""
    return sum(_compute_s(each, rates) for each in steps)


def bandwidth_s(steps: Sequence[IdealStep], rates: MachineRates) -> float:
    """Return the time of the bytes alone."""
    return sum(each.num_bytes for each in steps) / rates.num_bytes


def roofline_s(steps: Sequence[IdealStep], rates: MachineRates) -> float:
    """Return the time when each step takes the longer of its operations and its bytes."""
    return sum(max(_compute_s(each, rates), each.num_bytes / rates.num_bytes) for each in steps)


def _compute_s(step: IdealStep, rates: MachineRates) -> float:
    return step.linear_flops / rates.linear_flops + step.attention_flops / rates.attention_flops


def _distinct_spans(requests: Sequence[BenchRequest]) -> list[tuple[int, int]]:
    """Return positions of each prompt that no earlier one in sorted order shares;
    its last token is computed in any case."""
    spans, previous = [], list[int]()
    for token_ids in sorted(each.token_ids for each in requests):
        num_shared = next(
            (i for i, (a, b) in enumerate(zip(token_ids, previous, strict=False)) if a != b), None
        )
        if num_shared is None:
            num_shared = min(len(token_ids), len(previous))
        spans.append((min(num_shared, len(token_ids) - 1), len(token_ids)))
        previous = token_ids
    return spans
