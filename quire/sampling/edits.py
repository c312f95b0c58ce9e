"""What a request does to its logits before they are sampled: bans, biases, processors and penalties, in vLLM's order.

Owns the order: allowed ids, bad words, `min_tokens`, `logit_bias`, processors, penalties (repetition over prompt and output,
frequency and presence over the output), and last what the row must have: the end of thoughts whose budget is spent, and the
grammar, so that nothing before it can let through what it forbids. Where the two disagree (in the midst of a character, for
grammars know no halves of one) the grammar goes first. Rows that ask for none of these are never touched; those that do are
edited in a copy, with the bans, biases and penalties of all rows in one pass each. Arithmetic is elementwise, so a row's result
does not depend on its company.
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
from quire.errors import RequestError
from quire.grammar.rows import RowMatchers
from quire.kernels.sampling import Penalties, SamplingKernels
from quire.sampling.processors import ProcessorTable
from quire.sampling.rows import RowError, SampledRow
from quire.sampling.thinking import ThinkingWatch

MAX_TABLES = 4096
"""Requests whose id lists are kept as arrays; more than any batch holds."""
MAX_HELD_IDS = 1 << 22
"""Ids that those arrays hold together (32 MiB); the latest request's are kept in any case."""

Ids = NDArray[np.int64]


def is_edited(row: SampledRow) -> bool:
    """Whether the request touches its logits at this position."""
    sampling = row.sampling
    return bool(
        sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.logit_bias
        or sampling.processors
        or sampling.grammar is not None
        or sampling.thinking is not None
        or _is_too_short(row)
        or _is_penalised(sampling)
    )


def _is_penalised(sampling: RowSampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


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
    thinking: ThinkingWatch | None

    @property
    def num_ids(self) -> int:
        num_steps = 0 if self.sampling.thinking is None else sum(map(len, self.sampling.thinking.marks[::2]))
        return len(self.allowed) + len(self.stops) + len(self.bias_ids) + sum(map(len, self.sampling.bad_words)) + num_steps


class RowEditor:
    """Edits rows of logits in place."""

    def __init__(self, kernels: SamplingKernels, processors: ProcessorTable, matchers: RowMatchers) -> None:
        self._kernels = kernels
        self._processors = processors
        self._matchers = matchers
        self._tables: OrderedDict[int, _Tables] = OrderedDict()
        self._held_ids = 0

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
        penalties = _penalties(rows, logits.device)
        if penalties is not None:
            self._kernels.penalise(logits, penalties)
        self._keep_to_duties(logits, rows, errors)
        return errors

    def _keep_to_duties(self, logits: Tensor, rows: Sequence[SampledRow], errors: dict[int, str]) -> None:
        for i, row in enumerate(rows):
            if (row.sampling.grammar is None and row.sampling.thinking is None) or i in errors:
                continue
            try:
                allowed = None if row.sampling.grammar is None else self._allowed(row)
            except RequestError as error:
                errors[i] = str(error)
                continue
            watch = self._tables_of(row.sampling, logits.shape[1]).thinking
            forced = None if watch is None else watch.forced(row.output_token_ids)
            if forced is not None and (allowed is None or allowed[forced]):
                logits[i] = -torch.inf
                logits[i, forced] = 0.0
            elif allowed is not None:
                _forbid(logits[i], allowed)

    def _allowed(self, row: SampledRow) -> NDArray[np.bool_]:
        return self._matchers.of(row.sampling).allowed(np.asarray(row.output_token_ids, np.int64))

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
            self._forget(key)
            found = self._tables[key] = _make_tables(sampling, vocab_size)
            self._held_ids += found.num_ids
        self._tables.move_to_end(key)
        while len(self._tables) > MAX_TABLES or (self._held_ids > MAX_HELD_IDS and len(self._tables) > 1):
            self._forget(next(iter(self._tables)))
        return found

    def _forget(self, key: int) -> None:
        tables = self._tables.pop(key, None)
        self._held_ids -= 0 if tables is None else tables.num_ids


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
    if sampling.thinking is not None:
        _checked("thinking", sampling.thinking.marks.end_token_ids, vocab_size)
    return _Tables(
        sampling=sampling,
        allowed=_checked("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size),
        stops=_checked("stop_token_ids", sampling.stop_token_ids, vocab_size),
        bias_ids=_checked("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size),
        biases=np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32),
        bad_words=bad_words,
        thinking=None if sampling.thinking is None else ThinkingWatch(sampling.thinking),
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


def _forbid(logits: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Ids beyond the vocabulary have logits in some models, and no text."""
    num_tokens = min(len(allowed), len(logits))
    logits[:num_tokens].masked_fill_(torch.from_numpy(~allowed[:num_tokens]).to(logits.device), -torch.inf)
    logits[num_tokens:] = -torch.inf


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


def _penalties(rows: Sequence[SampledRow], device: torch.device) -> Penalties | None:
    """The penalties of the rows that have any; None where no row has."""
    chosen = [i for i, row in enumerate(rows) if _is_penalised(row.sampling)]
    if not chosen:
        return None
    samplings = [rows[i].sampling for i in chosen]
    parts = [np.asarray(ids) for i in chosen for ids in (rows[i].prompt_token_ids, rows[i].output_token_ids)]
    ends = np.cumsum([0, *(len(part) for part in parts)])
    return Penalties(
        row=torch.tensor(chosen, device=device),
        token_ids=torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="unsafe")).to(device),
        start=torch.from_numpy(ends[::2].copy()).to(device),
        output_start=torch.from_numpy(ends[1::2].copy()).to(device),
        repetition=torch.tensor([sampling.repetition_penalty for sampling in samplings], device=device),
        frequency=torch.tensor([sampling.frequency_penalty for sampling in samplings], device=device),
        presence=torch.tensor([sampling.presence_penalty for sampling in samplings], device=device),
    )
