"""Log-probabilities as they are reported: values, ranks and best alternatives of chosen tokens.

Owns the meaning of the four modes. `raw_*` describes the model's logits as they came; `processed_*`
what was sampled
from: after bans, biases, processors, penalties, temperature and filters, where a token that cannot
be sampled has -inf. A greedy row has no temperature and no filters. `*_logits` reports the (scaled)
logit itself in place of the log-probability.

Ranks count tokens with a strictly larger logit. Alternatives are sorted best first (ties by id).
Tokens of `logprob_token_ids` follow after them, in the order of the request, except those
already among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.plan import RowSampling, TokenLogprobs
from quire.errors import RequestError
from quire.kernels.sampling import WEIGHT_ONE, SamplingKernels, Thresholds
from quire.sampling.tensors import integers, scaled_rows, thresholds_of


@dataclass(frozen=True, slots=True)
class Query:
    """One token of one row, to be reported."""

    row: int
    """Row of the logits that are passed along."""
    max_logit: float
    token_id: int
    num_top: int
    """Alternatives wanted, at most the vocabulary."""
    scale: float = 1.0
    threshold: tuple[float, int] | None = None
    extra_ids: tuple[int, ...] = ()
    is_logits: bool = False


def describe(
    kernels: SamplingKernels, logits: Tensor, queries: Sequence[Query]
) -> list[TokenLogprobs]:
    """Report each query's token, in their order. Logits float32 [R, V]; max logits must be
    finite."""
    groups: dict[int, list[int]] = {}
    for i, query in enumerate(queries):
        groups.setdefault(query.num_top, []).append(i)
    reports: dict[int, TokenLogprobs] = {}
    for members in groups.values():
        reports.update(
            zip(
                members,
                _describe_group(kernels, logits, [queries[i] for i in members]),
                strict=True,
            )
        )
    return [reports[i] for i in range(len(queries))]


def _describe_group(
    kernels: SamplingKernels, logits: Tensor, queries: list[Query]
) -> list[TokenLogprobs]:
    """Queries that want the same number of alternatives."""
    device = logits.device
    scores = kernels.score(
        logits,
        scaled_rows([(query.row, query.max_logit, query.scale) for query in queries], device),
        _thresholds(queries, logits),
        integers([query.token_id for query in queries], device),
        num_top=queries[0].num_top,
    )
    tops = scores.top_ids.tolist()
    ids = [_reported_ids(query, top) for query, top in zip(queries, tops, strict=True)]
    # math.log one by one: a vectorised logarithm may round differently by its place in the tensor.
    offsets = [
        0.0 if query.is_logits else query.max_logit * query.scale + math.log(total / WEIGHT_ONE)
        for query, total in zip(queries, scores.total.tolist(), strict=True)
    ]
    values = _values(logits, queries, ids, offsets)
    ranks = scores.rank.tolist()
    return [
        TokenLogprobs(query.token_id, value[0], rank, tuple(token_ids[1:]), tuple(value[1:]))
        for query, rank, token_ids, value in zip(queries, ranks, ids, values, strict=True)
    ]


def _reported_ids(query: Query, top: list[int]) -> list[int]:
    """Return the token itself, then the alternatives, then the requested ids that are not among
    those."""
    if not query.extra_ids:
        return [query.token_id, *top]
    known = set(top)
    return [query.token_id, *top, *(i for i in dict.fromkeys(query.extra_ids) if i not in known)]


def _values(
    logits: Tensor, queries: list[Query], ids: list[list[int]], offsets: list[float]
) -> list[list[float]]:
    """`logit * scale - offset` in float64 for each id of each query;
    -inf where the query's threshold removes it."""
    lengths = np.array([len(row_ids) for row_ids in ids])
    rows = np.repeat([query.row for query in queries], lengths)
    flat_ids = np.concatenate([np.array(row_ids, dtype=np.int64) for row_ids in ids])
    index = (torch.from_numpy(rows).to(logits.device), torch.from_numpy(flat_ids).to(logits.device))
    raw = logits[index].cpu().numpy().astype(np.float64)
    values = raw * np.repeat([query.scale for query in queries], lengths) - np.repeat(
        offsets, lengths
    )
    if any(query.threshold is not None for query in queries):
        thresholds = [query.threshold or (-math.inf, logits.shape[1]) for query in queries]
        least = np.repeat([value for value, _ in thresholds], lengths)
        last = np.repeat([token_id for _, token_id in thresholds], lengths)
        values[(raw < least) | ((raw == least) & (flat_ids > last))] = -math.inf
    ends = np.cumsum(lengths).tolist()
    flat: list[float] = values.tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _thresholds(queries: list[Query], logits: Tensor) -> Thresholds | None:
    if all(query.threshold is None for query in queries):
        return None
    return thresholds_of(
        [query.threshold or (-math.inf, logits.shape[1]) for query in queries], logits.device
    )


def num_alternatives(wanted: int, vocab_size: int) -> int:
    """-1 is the whole vocabulary, and more than that cannot be had."""
    return vocab_size if wanted < 0 else min(wanted, vocab_size)


def prompt_logprobs(
    kernels: SamplingKernels, logits: Tensor, target_ids: Sequence[int], sampling: RowSampling
) -> tuple[TokenLogprobs, ...]:
    """Report target_ids[p] by logits[p] (float32 [P, V]) as the request asks
    (`num_prompt_logprobs`, -1 for all).

    A prompt is not processed: the raw and the processed modes agree on it. RequestError where a row
    holds NaN or +inf, or nothing but -inf.
    """
    max_logits: list[float] = kernels.argmax(logits)[1].tolist()
    if not all(map(math.isfinite, max_logits)):
        raise RequestError(
            "the model's logits for a prompt token are not finite, so the prompt cannot be scored"
        )
    queries = [
        Query(
            row=row,
            max_logit=max_logit,
            token_id=token_id,
            num_top=num_alternatives(sampling.num_prompt_logprobs or 0, logits.shape[1]),
            extra_ids=sampling.logprob_token_ids,
            is_logits=sampling.logprobs_mode.endswith("logits"),
        )
        for row, (max_logit, token_id) in enumerate(zip(max_logits, target_ids, strict=True))
    ]
    return tuple(describe(kernels, logits, queries))
