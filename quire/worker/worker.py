"""The worker: carries out a plan on a model. Rows, inputs, forward pass; what comes of the hidden
states is the outlets' part.

Owns its rows and its KV memory. It knows plans, rows and tensors; requests, texts and scheduling
are none of its business. A step is *launched*, and its outcome read later. As a rule the outcome is
there when `launch` returns. On a device that computes beside the host (`read_late`) the next step
may be launched before the tokens of this one have been read, if an outlet can leave all of them on
the device; a step with any other task waits for its own results.

What goes wrong for one row alone (numbers that are not finite, a failing processor, even a kernel
that raises on it) becomes that row's error; the others' results are what they would have been
without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.common.failures import log_failure
from quire.core.plan import NOT_FINITE, RowWork, StepPlan, StepResult, WorkResult
from quire.errors import EngineError, QuireError
from quire.nn.context import StepContext
from quire.nn.decoder import DecoderModel
from quire.worker.batch import StepInputs, gather, move
from quire.worker.companions import Companion, Companions
from quire.worker.memory import KVMemory
from quire.worker.outlets.interface import HiddenStates, Outlet, Unread, batches
from quire.worker.residence import Fixed, Residence
from quire.worker.rows import RowTable
from quire.worker.staging import Staging

if TYPE_CHECKING:
    from quire.worker.graphs import GraphBackend, GraphSettings, StepGraphs
    from quire.worker.last_tokens import LastTokens, Readback

logger = logging.getLogger(__name__)

Outcome = Callable[[], list[WorkResult]]
"""The results of some work, in its order; waits for the device where it has to."""

_NOTHING, _FAILED = WorkResult(), WorkResult(error=NOT_FINITE)
_LOST = "the step before this one failed on this sequence"


class Worker:
    """One model, its KV memory, and the rows of the sequences that run on it."""

    def __init__(
        self,
        model: DecoderModel,
        memory: KVMemory,
        rows: RowTable,
        outlets: Iterable[Outlet],
        companions: Iterable[Companion] = (),
        residence: Residence | None = None,
    ) -> None:
        self.residence = residence or Fixed("nothing says how this worker's memory returns")
        self.model = model
        self.memory = memory
        self.rows = rows
        self.outlets = tuple(outlets)
        self.companions = Companions(companions)
        self._stage = Staging(model.kernels.device)
        self.graphs: StepGraphs | None = None
        self.last_tokens: LastTokens | None = None
        self._has_failed = False
        """Whether a row is known to have failed in the last step:
        it did not sample the token that the next one counts on."""

    def read_late(self, read: Readback) -> None:
        """Keep sampled tokens on the device and read them with `read`.
        Before the first step and the first graph."""
        from quire.worker.last_tokens import LastTokens

        self.last_tokens = LastTokens(len(self.rows.sampling), self.model.kernels.device, read)

    def use_graphs(self, backend: GraphBackend, settings: GraphSettings) -> None:
        """Record small steps and replay them; the last block of the memory must be in no pool."""
        from quire.worker.graphs import ScratchBlock, StepGraphs

        scratch = ScratchBlock(
            self.memory.num_blocks - 1, self.rows.block_size, self.rows.num_groups
        )
        self.graphs = StepGraphs(
            lambda inputs: self.model.forward(*self._arguments(inputs)),
            self._stage,
            backend,
            settings,
            scratch,
        )

    @torch.inference_mode()
    def idle(self) -> bool:
        """Make use of a moment in which nothing is to be computed;
        whether there may be more to do."""
        return self.graphs is not None and self.graphs.record_next()

    def _arguments(self, inputs: StepInputs) -> tuple[Tensor, Tensor, StepContext]:
        """Return what the model is called with."""
        batch = inputs.batch
        if batch.others:
            batch = replace(batch, group_of=self.memory.layout.group_of)
        context = StepContext(batch, self.memory.caches, inputs.num_wanted, inputs.rows)
        token_ids = (
            inputs.token_ids
            if self.last_tokens is None
            else self.last_tokens.fill_in(inputs.token_ids)
        )
        return token_ids, inputs.batch.positions, context

    def execute(self, plan: StepPlan) -> StepResult:
        """`launch`, and wait."""
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Apply a plan's changes, begin to compute its work; see `quire.executor.interface`.

        Everything is computed together; if that raises, each row alone, so that only the culprit is
        blamed. Computing a row twice is harmless: the same numbers go to the same slots.
        """
        started = time.perf_counter()
        self.companions.begin(plan)
        self.rows.apply(plan)
        self.memory.copy_blocks(plan.copies, self.model.kernels, self._stage)
        work = self._known(plan.work) if self._has_failed else plan.work
        self._has_failed = len(work) < len(plan.work)
        try:
            outcome = self._launch(work) if work else list
        except EngineError:  # no row's failure
            raise
        except Exception as error:
            log_failure(
                logger, f"a step of {len(work)} rows failed; computing each row alone", error
            )
            outcome = self._launch_apart(work)
        launched = time.perf_counter()
        news = self.companions.take_news(plan)
        aside_s = time.perf_counter() - launched  # what companions do is none of the step's cost

        def result() -> StepResult:
            results = tuple(outcome())
            if len(work) < len(plan.work):
                results = _with_lost(plan.work, work, results)
            assert len(results) == len(plan.work)
            elapsed_s = time.perf_counter() - started - aside_s
            return StepResult(plan.step_id, results, elapsed_s, news)

        return result

    def _known(self, work: Sequence[RowWork]) -> Sequence[RowWork]:
        """Return what can be computed: not beyond the tokens that a row has."""
        num_tokens = self.rows.num_tokens
        return [
            item
            for item in work
            if item.start + item.num_tokens - item.num_ahead <= num_tokens[item.row]
        ]

    def _launch_apart(self, work: Sequence[RowWork]) -> Outcome:
        """Compute each row alone; one that raises fails."""
        outcomes = []
        for item in work:
            try:
                outcomes.append(self._launch([item]))
            except EngineError:
                raise
            except Exception as error:
                self._has_failed = True
                failed = WorkResult(error=f"the model failed on this sequence: {_cause(error)}")
                outcomes.append(partial(list, (failed,)))
        return lambda: [result for outcome in outcomes for result in outcome()]

    def _launch(self, work: Sequence[RowWork]) -> Outcome:
        """Compute, and give each row the token that it sampled, once nothing can raise any more."""
        is_whole = self.memory.layout.windows[0] is None
        shared_unit = self.model.kernels.shared_prefix_unit if is_whole else None
        arrays = gather(self.rows, work, shared_unit=shared_unit)
        # from a graph where one was recorded
        states = None
        if self.graphs is not None and self.model.is_recordable(arrays.rows):
            states = self.graphs.forward(arrays)
        if states is None:
            inputs = move(arrays, self.rows.block_size, self._stage)
            states = self.model.forward(*self._arguments(inputs))
        hidden = HiddenStates(work, states, arrays.query_start.tolist())
        outcome = (
            None if self.last_tokens is None else self._launch_unread(hidden, self.last_tokens)
        )
        if outcome is not None:
            return outcome
        results = self._results(hidden)
        for item, result in zip(work, results, strict=True):
            if result.token_ids:
                self.rows.append_result(item, result)
            self._has_failed |= result.error is not None
        return lambda: results

    def _results(self, hidden: HiddenStates) -> list[WorkResult]:
        """Have every task done, but those of rows whose numbers are not finite."""
        kernels, places = self.model.kernels, range(len(hidden.work))
        is_sound = [True] * len(places)
        if not kernels.is_finite(hidden.states):
            is_sound = _sound_rows(kernels.finite_rows(hidden.states).cpu(), hidden)
        results = [_NOTHING if each else _FAILED for each in is_sound]
        for outlet, batch in batches(self.outlets, hidden, compress(places, is_sound)):
            for place, result in zip(batch.places, outlet.launch(batch), strict=True):
                results[place] = (
                    result if results[place] is _NOTHING else results[place].join(result)
                )
        return results

    def _launch_unread(self, hidden: HiddenStates, tokens: LastTokens) -> Outcome | None:
        """Have every task done and read nothing back; None where that cannot be.

        A row whose numbers are not finite is heard of when the results are read; until then its
        tokens are any.
        """
        shares = batches(self.outlets, hidden, range(len(hidden.work)))
        if len(shares) > 1:
            return None
        places, unread = [], Unread((), lambda tensors: [])
        for outlet, batch in shares:
            launched = outlet.launch_unread(batch)
            if launched is None:
                return None
            places, unread = batch.places, launched
        arrival = tokens.read([self.model.kernels.finite_rows(hidden.states), *unread.tensors])
        if places:
            (rows,) = self._stage(
                (np.array([hidden.work[place].row for place in places], np.int64),)
            )
            tokens.put(rows, unread.tensors[0])
            for place in places:
                self.rows.append_unread(hidden.work[place].row)

        def results() -> list[WorkResult]:
            is_finite, *chosen = arrival()
            is_sound = _sound_rows(is_finite, hidden)
            found = [_NOTHING if each else _FAILED for each in is_sound]
            for place, result in zip(places, unread.results(chosen), strict=True):
                found[place] = result if is_sound[place] else found[place]
            return found

        return results


def _with_lost(
    work: Sequence[RowWork], known: Sequence[RowWork], results: Sequence[WorkResult]
) -> tuple[WorkResult, ...]:
    """Return the results of all work, where only what is `known` was computed."""
    found = {item.row: result for item, result in zip(known, results, strict=True)}
    return tuple(found.get(item.row, WorkResult(error=_LOST)) for item in work)


def _cause(error: Exception) -> str:
    """Say what a client may know: all of what is meant for people, else only the kind."""
    return str(error) if isinstance(error, QuireError) else type(error).__name__


def _sound_rows(is_finite: Tensor, hidden: HiddenStates) -> list[bool]:
    """Return for each work whether the hidden states of all tokens that its row knows are finite.
    Those of further ones are judged with what is sampled there."""
    is_good = is_finite.numpy().copy()
    for item, end in zip(hidden.work, hidden.query_start[1:], strict=True):
        is_good[end - item.num_ahead : end] = True
    is_sound: list[bool] = np.logical_and.reduceat(is_good, hidden.query_start[:-1]).tolist()
    return is_sound
