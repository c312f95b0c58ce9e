"""A draft model beside the target: at the end of each step, when its tokens are known, it drafts
what follows them.

Nothing rests on it: drafts are verified like any, and where drafting fails the answers go on
without. A draft is sampled as the target samples, with the same noise at the same position, so that
both choose the same token where their logits agree (Daliri, Musco and Suresh, "Coupling without
communication and drafter-invariant speculative decoding", 2024). What only the target's own steps
can follow (grammars, reasoning budgets) is left out of drafts.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from quire.common.failures import log_failure
from quire.core.drafts import MODELLED, NUM_DEGREES, Drafted, DraftOrder, strength_of_degree
from quire.core.plan import Record, RowSampling, StepPlan
from quire.errors import EngineError
from quire.kernels.interface import AttentionBatch
from quire.sampling.plain import choose_plain, is_plain
from quire.sampling.rows import SampledRow
from quire.spec.depth import DraftDepth
from quire.spec.model import DraftModel
from quire.spec.places import DraftPlaces, KnownRows, Span

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Line:
    """A row that is being drafted, or caught up with."""

    span: Span
    end: int
    """Up to where its known tokens are computed."""
    most: int
    """Tokens to be drafted at most; none while known ones are left to be computed."""
    sampling: RowSampling
    is_plain: bool
    known: NDArray[np.integer[Any]]
    num_prompt: int
    lag: int
    """`DraftModel.lag`."""
    state: Tensor | None = None
    """[1, H]: what a head reads next, of the newest draft."""
    drafted: list[int] = field(default_factory=list)
    degrees: list[int] = field(default_factory=list)
    chance: float = 1.0
    """That all of these are right."""

    @property
    def next_range(self) -> tuple[int, int]:
        """The positions to be computed next: those that lack, then that of the newest draft."""
        if not self.drafted:
            return self.span.first, self.end
        position = self.span.num_known + len(self.drafted) - 1
        return position, position + 1

    @property
    def next_tokens(self) -> NDArray[np.integer[Any]]:
        """The tokens there."""
        if not self.drafted:
            return self.known[self.span.first + self.lag : self.end + self.lag]
        return np.array([self.newest])

    @property
    def newest(self) -> int:
        """The last token so far."""
        return self.drafted[-1] if self.drafted else int(self.known[self.end - 1 + self.lag])

    @property
    def sampled_row(self) -> SampledRow:
        """How its next token is sampled."""
        position = len(self.known) + len(self.drafted)
        if self.is_plain:
            return SampledRow(self.sampling, position)
        tokens = np.concatenate([self.known, np.array(self.drafted, self.known.dtype)])
        prompt, output = tokens[: self.num_prompt], tokens[self.num_prompt :]
        return SampledRow(self.sampling, position, prompt, output, row=self.span.row)

    @property
    def record(self) -> Drafted:
        """What the control plane is told."""
        strengths = tuple(map(strength_of_degree, self.degrees))
        return Drafted(self.span.row, len(self.known), tuple(self.drafted), strengths)


class ModelDrafts:
    """Implements `Companion`."""

    name = MODELLED

    def __init__(
        self, draft: DraftModel, rows: KnownRows, places: DraftPlaces, depth: DraftDepth
    ) -> None:
        self._draft, self._rows, self._places, self.depth = draft, rows, places, depth
        self._most: dict[int, int] = {}
        """Of the rows with an order."""
        self._last: dict[int, _Line] = {}
        """Of each of these, what was drafted last, to be judged."""
        self._own: dict[int, tuple[RowSampling, RowSampling, bool]] = {}
        """By row: what is given, what of it drafts are sampled with, and whether that is plain."""
        self._ends: dict[int, int] = {}
        """Of rows with an order that may gain tokens in this step, the end of their work."""
        self._num_rows, self._is_decoding, self._began_s = 0, False, 0.0
        self._has_failed = False
        self._num_come: dict[int, int] = {}
        """By row, the tokens that came since its last draft."""
        self._num_read, self._read_s = 0, 0.0
        """Tokens of this step that were caught up with, and what that took."""
        self.num_drafted = 0
        """Tokens, since the start."""

    @property
    def weights(self) -> Sequence[Tensor]:
        """All weights of what drafts, those that it shares with the target among them."""
        return self._draft.weights

    @property
    def caches(self) -> Sequence[Tensor]:
        """Memory whose content is computed anew where it is lost with the target's blocks."""
        return self._draft.memory

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Draft once, before there are rows: what is slow the first time is not a request's."""
        blocks, known = self._places.own_blocks(0), np.zeros(2, np.int64)
        for temperature in (0.0, 1.0):
            sampling = RowSampling(temperature=temperature)
            span = Span(0, 0, 1, blocks, 0)
            line = _Line(span, 1, 1, sampling, True, known, 1, self._draft.lag)
            self._add_tokens(self._forward([line]), [line])

    def begin(self, plan: StepPlan) -> None:
        """See `Companion.begin`."""
        self._places.begin(plan)
        if self._draft.head is not None:
            self._draft.head.kept.copy_blocks(plan.copies)
        for row in (*plan.removed_rows, *(new.row for new in plan.new_rows)):
            self._forget(row)
        for order in plan.orders.get(MODELLED, ()):
            row, most = DraftOrder._make(order)
            if most:
                self._most[row] = most
            else:
                self._forget(row)
        self._ends = {}
        if self._most and not self._has_failed:
            self._ends = {
                work.row: work.start + work.num_tokens
                for work in plan.work
                if work.tasks and work.row in self._most
            }
            self._num_rows = len(plan.work)
            num_ahead = sum(work.num_ahead for work in plan.work)
            self._is_decoding = plan.num_tokens - num_ahead == self._num_rows
            self._began_s = time.perf_counter()

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        """See `Companion.take_news`: nothing is waited for."""
        if not self._ends:
            return ()
        if self._is_decoding:
            self.depth.measured_step(time.perf_counter() - self._began_s)
        began_s = time.perf_counter()
        try:
            self._num_read, self._read_s = 0, 0.0
            records = [line.record for line in self._draft_all()]
            if records:
                seconds = time.perf_counter() - began_s
                records[0] = records[0]._replace(
                    seconds=seconds, read_s=self._read_s, num_read=self._num_read
                )
            return tuple(records)
        except EngineError:  # a rank is lost, whom the executor replaces before the next step
            return ()
        except Exception as error:  # answers need no drafts
            log_failure(logger, "a draft model failed; nothing is drafted any more", error)
            self._has_failed = True
            return ()

    def close(self) -> None:
        """See `Companion.close`: nothing is to be ended."""

    def _forget(self, row: int) -> None:
        self._most.pop(row, None)
        self._last.pop(row, None)
        self._own.pop(row, None)
        self._num_come.pop(row, None)

    def _draft_all(self) -> list[_Line]:
        """Draft for all rows that sampled, a token of each at a time."""
        lines = self._lines()
        if not lines:
            return []
        states = self._forward_first(lines)
        is_drafted = [line.most > 0 for line in lines]
        active = [line for line in lines if line.most]
        if len(active) < len(lines):
            states = states[torch.tensor(is_drafted, device=states.device)]
        num_passes, taken, began_s = 0, 0.0, 0.0
        while active:
            if num_passes:
                states = self._forward(active)
            self._add_tokens(states, active)
            if num_passes:
                self.depth.measured_pass(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            num_passes += 1
            taken += sum(line.chance for line in active)
            active = [line for line in active if len(line.drafted) < line.most]
            chances = [line.chance for line in active]
            places = self.depth.going_on(self._num_rows, num_passes, taken, chances)
            active = [active[place] for place in places]
        for line in lines:
            # a head computes again what was drafted, with the target's states
            computed = () if self._draft.lag else line.drafted[:-1]
            self._places.computed(line.span, line.end, computed)
        self._last |= {line.span.row: line for line in lines if line.drafted}
        self.num_drafted += sum(len(line.drafted) for line in lines)
        return lines

    def _forward_first(self, lines: Sequence[_Line]) -> Tensor:
        """`_forward`, measuring what of it is catching up: all but a token of each row, or those
        that the last step has brought."""
        num_tokens, began_s = sum(line.end - line.span.first for line in lines), time.perf_counter()
        states = self._forward(lines)
        num_new = sum(1 + self._num_come.get(line.span.row, 0) for line in lines)
        self._num_read = max(0, num_tokens - num_new)
        self._read_s = (time.perf_counter() - began_s) * self._num_read / max(1, num_tokens)
        return states

    def _lines(self) -> list[_Line]:
        """The rows that are drafted now, or caught up with, as far as a step has time for it."""
        lines, room, size = [], self._draft.max_read, self._rows.block_size
        for row, end in self._ends.items():
            known = self._rows.tokens(row)
            most = min(self._most[row], self._draft.max_len - len(known) + 1)
            is_behind = end < len(known) - 1  # its prompt goes on
            if most <= 0 or is_behind or room < 2 * size or len(known) <= self._draft.lag:
                continue
            self._judge(row, known)
            span = self._places.span(row)
            stop = min(span.num_known, span.first + room)
            if stop < span.num_known:
                stop, most = stop // size * size, 0
            room -= stop - span.first
            num_prompt = int(self._rows.num_prompt_tokens[row])
            sampling, is_plain = self._sampling(row)
            lag = self._draft.lag
            lines.append(_Line(span, stop, most, sampling, is_plain, known, num_prompt, lag))
        return lines

    def _judge(self, row: int, known: NDArray[np.integer[Any]]) -> None:
        """Learn from what came after the row's last draft."""
        last = self._last.pop(row, None)
        self._num_come[row] = 0
        if last is None:
            return
        came = known[len(last.known) :].tolist()
        self._num_come[row] = len(came)
        for token_id, drafted, degree in zip(came, last.drafted, last.degrees, strict=False):
            self.depth.learn(degree, is_right=token_id == drafted)
            if token_id != drafted:
                break

    def _sampling(self, row: int) -> tuple[RowSampling, bool]:
        """What drafts of a row are sampled with, and whether that edits no logits."""
        given = self._rows.sampling[row]
        known = self._own.get(row)
        if known is None or known[0] is not given:
            own = given._replace(
                grammar=None, thinking=None, processors=(), num_logprobs=None, logprob_token_ids=()
            )
            known = self._own[row] = given, own, is_plain(own)
        return known[1], known[2]

    def _forward(self, lines: Sequence[_Line]) -> Tensor:
        """Compute the next tokens of some rows; returns the states [S, H] of each one's last."""
        ranges = [line.next_range for line in lines]
        ends = [end for _, end in ranges]
        counts = [end - first for first, end in ranges]
        size, longest = self._rows.block_size, max(ends)
        query_start = np.array([0, *itertools.accumulate(counts)], np.int32)
        tables = np.zeros((len(lines), -(-longest // size)), np.int32)
        for table, line, end in zip(tables, lines, ends, strict=True):
            num_places = -(-end // size)
            table[:num_places] = line.span.blocks[:num_places]
        if max(counts) == 1:
            owners, positions = np.arange(len(lines)), np.array(ends) - 1
            tokens = np.array([line.newest for line in lines], np.int64)
        else:
            owners = np.repeat(np.arange(len(lines)), counts)
            positions = np.concatenate([np.arange(*each) for each in ranges])
            tokens = np.concatenate([line.next_tokens for line in lines]).astype(np.int64)
        places, offsets = np.divmod(positions, size)
        slots = tables[owners, places].astype(np.int64) * size + offsets
        arrays = (
            query_start, np.array(ends, np.int32), tables, slots, positions,
            self._draft.tokens.inputs(tokens), query_start[1:] - 1,
        )  # fmt: skip
        starts, lengths, tables_there, slots_there, positions_there, token_ids, last = (
            self._draft.stage(arrays)
        )
        batch = AttentionBatch(
            starts, lengths, tables_there, slots_there, positions_there, max(counts), longest
        )
        wanted = None if max(counts) == 1 else torch.ones(len(lines), dtype=torch.int32)
        read = [self._read(line) for line in lines] if self._draft.lag else []
        states = self._draft.forward(token_ids, positions_there, batch, wanted, read)
        return states if len(states) == len(lines) else states.index_select(0, last)

    def _read(self, line: _Line) -> Tensor:
        """The states that a head reads beside a row's next tokens."""
        if line.state is not None:
            return line.state
        rows, num_groups = self._rows, self._rows.num_groups
        blocks = rows.block_tables[line.span.row, ::num_groups]
        return self._draft.kept(blocks, line.span.first, line.end)

    def _add_tokens(self, states: Tensor, lines: Sequence[_Line]) -> None:
        """Sample the next token of each row."""
        draft = self._draft
        logits, read = draft.outcome(states)
        rows = [line.sampled_row for line in lines]
        if all(line.is_plain for line in lines):
            chosen, _ = choose_plain(draft.sampler.kernels, logits, rows, draft.stage)
        else:
            results = draft.sampler.sample(logits, rows)
            # a row that cannot be sampled has any draft
            found = [result.token_ids[0] if result.token_ids else 0 for result in results]
            chosen = torch.tensor(found, device=logits.device)
        surprises = functional.cross_entropy(logits, chosen, reduction="none").tolist()
        for place, line in enumerate(lines if draft.lag else ()):
            line.state = read[place : place + 1]
        for line, token_id, surprise in zip(lines, chosen.tolist(), surprises, strict=True):
            chance = math.exp(-surprise) if surprise >= 0.0 else 0.0  # not where it is no number
            degree = min(int(chance * NUM_DEGREES), NUM_DEGREES - 1)
            line.drafted.append(token_id)
            line.degrees.append(degree)
            line.chance *= self.depth.chance(degree)
