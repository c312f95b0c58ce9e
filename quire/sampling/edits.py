"""What a request does to its logits before they are sampled: bans, biases, processors and
penalties, in vLLM's order.

Owns the order: allowed ids, bad words, `min_tokens`, `logit_bias`, processors, penalties
(repetition over prompt and output, frequency and presence over the output), and last what the row
must have: the end of reasoning whose budget is spent, and the grammar, so that nothing before it
can let through what it forbids. Where the two disagree (in the midst of a character, for grammars
know no halves of one) the grammar goes first. Rows that need none of these are never touched; those
that do are edited in a copy, with the bans, biases and penalties of all rows in one pass each.
Arithmetic is elementwise, so a row's result does not depend on batch composition.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.plan import RowSampling
from quire.errors import RequestError
from quire.grammar.rows import RowMatchers
from quire.kernels.sampling import Penalties, SamplingKernels
from quire.sampling.processors import ProcessorTable
from quire.sampling.rows import RowError, SampledRow, TokenIds
from quire.sampling.thinking import ThinkingWatch

MAX_TABLES = 4096
"""Lists that are kept as arrays; more than any batch holds."""
MAX_HELD_BYTES = 64 << 20
"""What those arrays hold together; the latest ones are kept in any case."""
_WORD_ID_BYTES = 200
"""Of a token of a bad word: an edge of the trie, and the tokens behind it."""

Ids = NDArray[np.int64]
_Key = tuple[int, int, int, int]


def is_edited(row: SampledRow) -> bool:
    """Return whether the request touches its logits at this position."""
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
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _is_too_short(row: SampledRow) -> bool:
    return bool(row.sampling.stop_token_ids) and len(row.output_token_ids) < row.sampling.min_tokens


class BadWords:
    """Token sequences whose last token is forbidden where the ones before it have just been
    generated.

    A trie of what must have been generated, backwards: a step follows the output from its end as
    far as some word goes on, so it costs no more for many words than for a few. Nodes are numbered,
    and one dictionary holds all edges.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._edges: dict[tuple[int, int], int] = {}
        banned: dict[int, list[int]] = {}
        for word in words:
            node = 0
            for token_id in reversed(word[:-1]):
                node = self._edges.setdefault((node, token_id), len(self._edges) + 1)
            banned.setdefault(node, []).append(word[-1])
        self._banned = {node: np.array(ids, dtype=np.int64) for node, ids in banned.items()}

    def completing(self, output_token_ids: TokenIds) -> list[Ids]:
        """Return the tokens that would complete a word now."""
        node, found = 0, [self._banned[0]] if 0 in self._banned else []
        for place in range(len(output_token_ids) - 1, -1, -1):
            following = self._edges.get((node, int(output_token_ids[place])))
            if following is None:
                break
            node = following
            if node in self._banned:
                found.append(self._banned[node])
        return found


@dataclass(frozen=True, slots=True)
class _Tables:
    """What rows list, as arrays, made once for all rows that refer to the same lists."""

    sampling: RowSampling
    """Of the row that they were made for: it keeps the lists alive by
    whose identity they are found."""
    forbidden: Tensor | None
    """bool [V]: what `allowed_token_ids` leaves out; where the logits are."""
    stops: Ids
    bias_ids: Ids
    biases: NDArray[np.float32]
    bad_words: BadWords | None
    num_bytes: int
    """About what they hold."""


class RowEditor:
    """Edits rows of logits in place."""

    def __init__(
        self, kernels: SamplingKernels, processors: ProcessorTable, matchers: RowMatchers
    ) -> None:
        self._kernels = kernels
        self._processors = processors
        self._matchers = matchers
        self._tables: OrderedDict[_Key, _Tables] = OrderedDict()
        self._held_bytes = 0
        self._watches: dict[int, tuple[RowSampling, ThinkingWatch]] = {}
        """By row, with the object that tells its present owner from the one before."""

    def edit(self, logits: Tensor, rows: Sequence[SampledRow]) -> dict[int, str]:
        """Edit `logits` (float32 [m, V], one row for each of `rows`) in place; returns the errors
        of rows that failed.

        What a failed row's logits hold afterwards is undefined; other rows do not notice.
        """
        errors: dict[int, str] = {}
        bans, biases = _Pairs(), _Pairs()
        for i, row in enumerate(rows):
            try:
                tables = self._tables_of(row.sampling, logits)
            except RowError as error:
                errors[i] = str(error)
                continue
            if tables.forbidden is not None:
                logits[i].masked_fill_(tables.forbidden, -torch.inf)
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
        self._apply_constraints(logits, rows, errors)
        return errors

    def _apply_constraints(
        self, logits: Tensor, rows: Sequence[SampledRow], errors: dict[int, str]
    ) -> None:
        for i, row in enumerate(rows):
            if (row.sampling.grammar is None and row.sampling.thinking is None) or i in errors:
                continue
            try:
                allowed = None if row.sampling.grammar is None else self._allowed(row)
                forced = self._forced(row, logits.shape[1])
            except (RequestError, RowError) as error:
                errors[i] = str(error)
                continue
            if forced is not None and (allowed is None or allowed[forced]):
                logits[i] = -torch.inf
                logits[i, forced] = 0.0
            elif allowed is not None:
                _forbid(logits[i], allowed)

    def num_possible(self, row: SampledRow, token_ids: Sequence[int]) -> int:
        """How many of some tokens, one after the other, the row's grammar lets pass; 0 where that
        cannot be said."""
        try:
            matcher = self._matchers.of(row.row, row.sampling)
            return matcher.num_valid(np.asarray(row.output_token_ids, np.int64), token_ids)
        except RequestError:  # told where the row is edited
            return 0

    def _allowed(self, row: SampledRow) -> NDArray[np.bool_]:
        return self._matchers.of(row.row, row.sampling).allowed(
            np.asarray(row.output_token_ids, np.int64)
        )

    def _process(self, logits: Tensor, rows: Sequence[SampledRow], errors: dict[int, str]) -> None:
        for i, row in enumerate(rows):
            if i in errors:
                continue
            try:
                for name in row.sampling.processors:
                    logits[i] = self._processors.apply(name, row, logits[i])
            except RowError as error:
                errors[i] = str(error)

    def _forced(self, row: SampledRow, vocab_size: int) -> int | None:
        """Return the token that the budget for reasoning demands now."""
        if row.sampling.thinking is None:
            return None
        found = self._watches.get(row.row)
        if found is None or found[0] is not row.sampling:
            _checked("thinking", row.sampling.thinking.marks.end_token_ids, vocab_size)
            found = self._watches[row.row] = (row.sampling, ThinkingWatch(row.sampling.thinking))
        return found[1].forced(row.output_token_ids)

    def _tables_of(self, sampling: RowSampling, logits: Tensor) -> _Tables:
        """Rows of one request, and of requests that came together, refer to the same lists;
        identity finds the tables without hashing long ones.
        """
        key = _lists_of(sampling)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = _make_tables(sampling, logits.shape[1], logits.device)
            self._held_bytes += found.num_bytes
        self._tables.move_to_end(key)
        while len(self._tables) > MAX_TABLES or (
            self._held_bytes > MAX_HELD_BYTES and len(self._tables) > 1
        ):
            self._forget(next(iter(self._tables)))
        return found

    def _forget(self, key: _Key) -> None:
        self._held_bytes -= self._tables.pop(key).num_bytes


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


def _lists_of(sampling: RowSampling) -> _Key:
    """Return what identifies the lists of a row, while some row holds them."""
    return (
        id(sampling.allowed_token_ids),
        id(sampling.bad_words),
        id(sampling.stop_token_ids),
        id(sampling.logit_bias),
    )


def _make_tables(sampling: RowSampling, vocab_size: int, device: torch.device) -> _Tables:
    allowed = sampling.allowed_token_ids
    forbidden = None
    if allowed is not None:
        forbidden = torch.ones(vocab_size, dtype=torch.bool)
        forbidden[torch.from_numpy(_checked("allowed_token_ids", allowed, vocab_size))] = False
        forbidden = forbidden.to(device)
    _checked("bad_words", chain.from_iterable(sampling.bad_words), vocab_size)
    return _Tables(
        sampling=sampling,
        forbidden=forbidden,
        stops=_checked("stop_token_ids", sampling.stop_token_ids, vocab_size),
        bias_ids=_checked(
            "logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size
        ),
        biases=np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32),
        bad_words=BadWords(sampling.bad_words) if sampling.bad_words else None,
        num_bytes=(0 if forbidden is None else vocab_size)
        + 8 * len(sampling.stop_token_ids)
        + 12 * len(sampling.logit_bias)
        + _WORD_ID_BYTES * sum(map(len, sampling.bad_words)),
    )


def _checked(name: str, token_ids: Iterable[int], vocab_size: int) -> Ids:
    ids = np.array(list(token_ids), dtype=np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise RowError(
            f"{name} holds token id {outside[0]}; the model has token ids 0 to {vocab_size - 1}"
        )
    return ids


def _forbid(logits: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Forbid ids beyond the vocabulary, which have logits in some models, and no text."""
    num_tokens = min(len(allowed), len(logits))
    logits[:num_tokens].masked_fill_(
        torch.from_numpy(~allowed[:num_tokens]).to(logits.device), -torch.inf
    )
    logits[num_tokens:] = -torch.inf


def _banned(row: SampledRow, tables: _Tables) -> Ids:
    """Return tokens that bad words and `min_tokens` forbid at this position."""
    banned = [] if tables.bad_words is None else tables.bad_words.completing(row.output_token_ids)
    if _is_too_short(row):
        banned.append(tables.stops)
    return np.concatenate(banned) if banned else np.empty(0, dtype=np.int64)


def _penalties(rows: Sequence[SampledRow], device: torch.device) -> Penalties | None:
    """Return the penalties of the rows that have any; None where no row has."""
    chosen = [i for i, row in enumerate(rows) if _is_penalised(row.sampling)]
    if not chosen:
        return None
    samplings = [rows[i].sampling for i in chosen]
    parts = [
        np.asarray(ids)
        for i in chosen
        for ids in (rows[i].prompt_token_ids, rows[i].output_token_ids)
    ]
    ends = np.cumsum([0, *(len(part) for part in parts)])
    return Penalties(
        row=torch.tensor(chosen, device=device),
        token_ids=torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="unsafe")).to(
            device
        ),
        start=torch.from_numpy(ends[::2].copy()).to(device),
        output_start=torch.from_numpy(ends[1::2].copy()).to(device),
        repetition=torch.tensor(
            [sampling.repetition_penalty for sampling in samplings], device=device
        ),
        frequency=torch.tensor(
            [sampling.frequency_penalty for sampling in samplings], device=device
        ),
        presence=torch.tensor([sampling.presence_penalty for sampling in samplings], device=device),
    )
