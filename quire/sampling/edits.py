"""What a request does to its logits before they are sampled: bans, biases, processors and penalties, in vLLM's order.

Owns the order: allowed ids, bad words, `min_tokens`, `logit_bias`, processors, then penalties (repetition over prompt
and output, frequency and presence over the output). Rows that ask for none of these are never touched; those that do
are edited in a copy, with the bans, biases and penalties of all rows in one pass each. Arithmetic is elementwise, so
a row's result does not depend on its company.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.plan import RowSampling
from quire.sampling.processors import ProcessorTable
from quire.sampling.rows import RowError, SampledRow, TokenIds

MAX_TABLES = 4096
"""Requests whose id lists are kept as arrays; more than any batch holds."""

Ids = NDArray[np.int64]


def is_edited(row: SampledRow) -> bool:
    """Whether the request touches its logits at this position."""
    sampling = row.sampling
    return bool(
        sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.logit_bias
        or sampling.processors
        or _is_too_short(row)
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _is_too_short(row: SampledRow) -> bool:
    return bool(row.sampling.stop_token_ids) and len(row.output_token_ids) < row.sampling.min_tokens


@dataclass(frozen=True, slots=True)
class _Tables:
    """A request's id lists as arrays, made once."""

    sampling: RowSampling
    allowed: Ids
    stops: Ids
    bias_ids: Ids
    biases: NDArray[np.float32]
    bad_words: dict[int, list[tuple[Ids, int]]]
    """By the length of the part that must have been generated: that part, and the token then forbidden."""


class RowEditor:
    """Edits rows of logits in place."""

    def __init__(self, processors: ProcessorTable) -> None:
        self._processors = processors
        self._tables: OrderedDict[int, _Tables] = OrderedDict()

    def edit(self, logits: Tensor, rows: Sequence[SampledRow]) -> dict[int, str]:
        """Edit `logits` (float32 [m, V], one row for each of `rows`) in place; returns the errors of rows that failed.

        What a failed row's logits hold afterwards is undefined; other rows do not notice.
        """
        errors: dict[int, str] = {}
        bans, biases = _Pairs(), _Pairs()
        for i, row in enumerate(rows):
            try:
                tables = self._tables_of(row.sampling, logits.shape[1])
            except RowError as error:
                errors[i] = str(error)
                continue
            if row.sampling.allowed_token_ids is not None:
                _keep_only(logits[i], tables.allowed)
            bans.add(i, _banned(row, tables))
            biases.add(i, tables.bias_ids, tables.biases)
        if bans:
            logits[bans.rows(), bans.ids()] = -torch.inf
        if biases:
            logits[biases.rows(), biases.ids()] += biases.values().to(logits.device)
        self._process(logits, rows, errors)
        _penalise_repetition(logits, rows)
        _penalise_counts(logits, rows)
        return errors

    def _process(self, logits: Tensor, rows: Sequence[SampledRow], errors: dict[int, str]) -> None:
        for i, row in enumerate(rows):
            if i in errors:
                continue
            try:
                for name in row.sampling.processors:
                    logits[i] = self._processors.apply(name, row, logits[i])
            except RowError as error:
                errors[i] = str(error)

    def _tables_of(self, sampling: RowSampling, vocab_size: int) -> _Tables:
        """A row keeps one RowSampling object for life, so its identity finds the tables without hashing long lists."""
        key = id(sampling)
        found = self._tables.get(key)
        if found is None or found.sampling is not sampling:
            found = self._tables[key] = _make_tables(sampling, vocab_size)
        self._tables.move_to_end(key)
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        return found


class _Pairs:
    """(row, token id, value) triples of several rows, gathered for one indexed operation."""

    def __init__(self) -> None:
        self._rows: list[Ids] = []
        self._ids: list[Ids] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, row: int, ids: Ids, values: NDArray[np.float32] | None = None) -> None:
        if len(ids):
            self._rows.append(np.full(len(ids), row, dtype=np.int64))
            self._ids.append(ids)
            if values is not None:
                self._values.append(values)

    def __bool__(self) -> bool:
        return bool(self._ids)

    def rows(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self._rows))

    def ids(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self._ids))

    def values(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self._values))


def _make_tables(sampling: RowSampling, vocab_size: int) -> _Tables:
    bad_words: dict[int, list[tuple[Ids, int]]] = {}
    for word in sampling.bad_words:
        *before, last = _checked("bad_words", word, vocab_size).tolist()
        bad_words.setdefault(len(before), []).append((np.array(before, dtype=np.int64), last))
    return _Tables(
        sampling=sampling,
        allowed=_checked("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size),
        stops=_checked("stop_token_ids", sampling.stop_token_ids, vocab_size),
        bias_ids=_checked("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size),
        biases=np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32),
        bad_words=bad_words,
    )


def _checked(name: str, token_ids: Iterable[int], vocab_size: int) -> Ids:
    ids = np.array(list(token_ids), dtype=np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise RowError(f"{name} holds token id {outside[0]}; the model has token ids 0 to {vocab_size - 1}")
    return ids


def _keep_only(logits: Tensor, allowed: Ids) -> None:
    ids = torch.from_numpy(allowed).to(logits.device)
    kept = logits[ids]
    logits.fill_(-torch.inf)
    logits[ids] = kept


def _banned(row: SampledRow, tables: _Tables) -> Ids:
    """Tokens that bad words and `min_tokens` forbid at this position."""
    banned = [_completing(row, tables)] if tables.bad_words else []
    if _is_too_short(row):
        banned.append(tables.stops)
    return np.concatenate(banned) if banned else np.empty(0, dtype=np.int64)


def _completing(row: SampledRow, tables: _Tables) -> Ids:
    """Tokens that would complete a bad word of which the rest has just been generated."""
    longest = max(tables.bad_words)
    output = np.asarray(row.output_token_ids[-longest:] if longest else (), dtype=np.int64)
    return np.array(
        [
            last
            for before_len, words in tables.bad_words.items()
            if before_len <= len(output)
            for before, last in words
            if np.array_equal(before, output[len(output) - before_len :])
        ],
        dtype=np.int64,
    )


def _flat_ids(row: int, token_ids: TokenIds, vocab_size: int) -> Ids:
    """Indices of a row's tokens in the flattened logits, without ids that have no logit (placeholders of media)."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        ids = ids[(ids >= 0) & (ids < vocab_size)]
    return ids + row * vocab_size


def _penalise_repetition(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    """Positive logits of tokens seen are divided, others multiplied (Keskar et al. 2019, arXiv:1909.05858)."""
    indices, penalties = [], []
    for i, row in enumerate(rows):
        if row.sampling.repetition_penalty != 1.0:
            for token_ids in (row.prompt_token_ids, row.output_token_ids):
                indices.append(_flat_ids(i, token_ids, logits.shape[1]))
                penalties.append(np.full(len(indices[-1]), row.sampling.repetition_penalty, dtype=np.float32))
    if not indices:
        return
    index = torch.from_numpy(np.concatenate(indices)).to(logits.device)
    penalty = torch.from_numpy(np.concatenate(penalties)).to(logits.device)
    values = logits.view(-1)[index]
    # A token seen twice is written twice, with the same value: all are computed from the logits as they were.
    logits.view(-1)[index] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_counts(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    """Subtract the frequency penalty times the count, then the presence penalty, of each token in the output."""
    indices, frequency, presence = [], [], []
    for i, row in enumerate(rows):
        sampling = row.sampling
        if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
            index, counts = np.unique(_flat_ids(i, row.output_token_ids, logits.shape[1]), return_counts=True)
            indices.append(index)
            frequency.append(counts.astype(np.float32) * np.float32(sampling.frequency_penalty))
            presence.append(np.full(len(index), sampling.presence_penalty, dtype=np.float32))
    if not indices:
        return
    at = torch.from_numpy(np.concatenate(indices)).to(logits.device)
    values = logits.view(-1)[at] - torch.from_numpy(np.concatenate(frequency)).to(logits.device)
    logits.view(-1)[at] = values - torch.from_numpy(np.concatenate(presence)).to(logits.device)
