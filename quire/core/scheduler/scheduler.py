"""The scheduler: has each step planned by a `StepPlanner`, and takes in what came of it.

One rule, no phases: a sequence has known tokens and computed tokens, and a step computes some of
the gap. New prompts, chunks of long ones, decodes, prefix hits, resumption after preemption and
forks are all that rule.

Owns the life of every request from `add` to its end, and with the KV manager all blocks. It never
sees a tensor, a text or a clock; time is passed in. A step costs time in proportion to what it
schedules, not to how many requests are known.

A step may be planned while the one before it is computed (`schedule_ahead`). It counts on what that
one will have computed, and may compute the token that it will sample, which only the worker knows
by then; a sequence that turns out to have ended has had a step too many, whose outcome is dropped.
Steps are computed in the order in which they were planned, so what a step gives up the next may use
at once. What was published, shared or released rests on outcomes that have been taken in, never on
expected ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from quire.common.failures import log_failure
from quire.common.seeds import derive_seed
from quire.config.limits import SchedulerLimits
from quire.core.kvcache.manager import KVCacheManager
from quire.core.plan import RowWork, StepPlan, StepResult, TokenLogprobs, WorkResult
from quire.core.request import Conclusion, FinishReason, Request, Sequence, SequenceStatus
from quire.core.request_spec import RequestSpec, ResumedSequence
from quire.core.scheduler.admission import Admission
from quire.core.scheduler.look_ahead import LookAhead
from quire.core.scheduler.pace import StepPace
from quire.core.scheduler.prerequisites import Prerequisite
from quire.core.scheduler.resources import KVBlocks, Resource
from quire.core.scheduler.stats import SchedulerStats
from quire.core.scheduler.step_planner import StepPlanner
from quire.core.strategies import strategy_of
from quire.errors import InvalidParameterError

logger = logging.getLogger(__name__)

# Looking a member up in an enum's class costs ten times as much as a global name (0.3 us), and a
# step does it per sequence.
_RUNNING, _PARKED = SequenceStatus.RUNNING, SequenceStatus.PARKED
_FINISHED = SequenceStatus.FINISHED

_FROM_THE_START = (ResumedSequence(0, ()),)


class Progress(NamedTuple):
    """Something happened to a sequence: it gained a token, ended, or both."""

    sequence: Sequence
    token_id: int | None
    logprobs: TokenLogprobs | None


class Scheduler:
    """The control plane of one engine. Implements `SequenceOps` for its
    requests' decoding strategies."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        resources: Iterable[Resource] = (),
        prerequisites: Iterable[Prerequisite] = (),
        digest_key: bytes = b"",
        pace: StepPace | None = None,
        look_ahead: LookAhead | None = None,
    ) -> None:
        """`resources` are scarce things besides rows and blocks;
        of each of `prerequisites` the worker has the other half."""
        self.limits, self.pace = limits, pace
        self.manager = KVCacheManager(
            limits.num_blocks,
            limits.block_size,
            windows=limits.windows,
            num_ahead=limits.num_ahead,
            digest_key=digest_key,
            caching=limits.enable_prefix_caching,
        )
        self.blocks = KVBlocks(self.manager, int(limits.watermark * limits.num_blocks))
        self.admission = Admission(limits, self.blocks, resources, prerequisites)
        self.rows, self.waiting, self.running = (
            self.admission.rows,
            self.admission.waiting,
            self.admission.running,
        )
        self.requests: dict[str, Request] = {}
        self._num_arrivals = 0
        self.planner = StepPlanner(
            limits, self.blocks, self.admission, SchedulerStats(), pace, look_ahead
        )
        self.flights = self.planner.flights
        self._progress: list[Progress] = []
        self._now = 0.0

    # -- requests come and go
    # ----------------------------------------------------------------------------------------

    def add(self, spec: RequestSpec, resumed: tuple[ResumedSequence, ...] = ()) -> Request:
        """Accept a request that went through `fit`, new or begun elsewhere.
        InvalidParameterError for an id that is in use."""
        if spec.request_id in self.requests:
            raise InvalidParameterError(
                f"request id {spec.request_id!r} is already in use", param="request_id"
            )
        assert 0 < len(spec.prompt_token_ids) <= self.limits.max_model_len - spec.max_tokens, (
            "it did not go through `fit`"
        )
        request = Request(spec, strategy_of(spec, is_forked=bool(resumed)), resumed)
        self._num_arrivals += 1
        request.arrival, request.arrival_step = self._num_arrivals, self.planner.step_id
        if request.scoring is not None:
            request.prompt_logprobs.append(None)
        self.requests[spec.request_id] = request
        self.waiting.arrived(request)
        for begun in resumed or _FROM_THE_START:
            assert len(begun.output_token_ids) < max(spec.max_tokens, 1), (
                f"{spec.request_id}#{begun.index} has ended"
            )
            token_ids = [*spec.prompt_token_ids, *begun.output_token_ids]
            self.waiting.push(self._new_sequence(request, begun.index, token_ids))
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request at once, wherever it is; None if it is not known (any more)."""
        return self._end_request(request_id, FinishReason.ABORT)

    def fail(self, request_id: str, message: str) -> Request | None:
        """End a request that met an error; what its last step computed does not enter the cache."""
        request = self.requests.get(request_id)
        if request is not None:
            request.error = message
        return self._end_request(request_id, FinishReason.ERROR)

    def waiting_for(self, name: str | None = None) -> list[Request]:
        """List the requests that wait for the prerequisite of this name, or for any."""
        parked = (
            sequence
            for each in self.admission.prerequisites
            if name in (None, each.name)
            for sequence in each.parked()
        )
        return list(dict.fromkeys(sequence.request for sequence in parked))

    def fail_all(self, requests: Iterable[Request], message: str) -> list[Progress]:
        """`fail` requests between steps; returns the ends of their sequences."""
        self._progress = []
        for request in requests:
            self.fail(request.request_id, message)
        return self._progress

    @property
    def stats(self) -> SchedulerStats:
        """Counts of steps and of what came of them, kept in one place: the planner's."""
        return self.planner.stats

    @stats.setter
    def stats(self, stats: SchedulerStats) -> None:
        self.planner.stats = stats

    @property
    def look_ahead(self) -> LookAhead | None:
        """What lengthens steps, if anything does: the planner's."""
        return self.planner.look_ahead

    @look_ahead.setter
    def look_ahead(self, look_ahead: LookAhead | None) -> None:
        self.planner.look_ahead = look_ahead

    @property
    def weight_version(self) -> str:
        """What the weights are called that steps are computed with."""
        return self.planner.weight_version

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        """Sequences that want to run and do not."""
        return len(self.waiting) + self.admission.num_parked

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that is not in use; returns how many."""
        return self.manager.forget_free()

    def rekey(self, digest_key: bytes, weight_version: str) -> None:
        """Go on with other weights, with nothing in flight and no sequence running: nothing that
        was cached is found again."""
        assert not self.flights and not self.running
        self.blocks.forget_matches()
        self.manager.rekey(digest_key)
        self.planner.weight_version = weight_version
        for request in self.requests.values():
            for sequence in request.sequences:
                if sequence.keys is not None:
                    sequence.keys = self.manager.index.keys(request.namespace)
                sequence.table = self.manager.new_table(request.namespace)

    def preempt_all(self) -> None:
        """Take everyone's rows and blocks away, to be computed again:
        the worker's state is not to be trusted."""
        for sequence in self.running.copy():
            self.planner.preempt(sequence)

    def lose_flights(self) -> None:
        """Preempt everyone and forget the steps in flight, which will never be taken in."""
        self.preempt_all()
        self.flights.clear()
        self.admission.lose_flights()

    def give_up(self, message: str) -> list[Request]:
        """Mark every request as failed and return them all; touch nothing else.
        The scheduler is not to be used again."""
        lost = list(self.requests.values())
        for request in lost:
            request.error = message
            for sequence in request.sequences:
                if sequence.status is not _FINISHED:
                    sequence.status, sequence.finish_reason = _FINISHED, FinishReason.ERROR
        self.requests.clear()
        return lost

    # -- one step
    # ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step, with none in flight."""
        assert not self.flights, "schedule() before the previous step's update()"
        self._now = now
        self.planner.decide(now)
        return self.planner.close()

    def schedule_ahead(self, now: float) -> StepPlan | None:
        """Decide the step after the one in flight; None where everyone has to
        wait for what that one gives."""
        assert len(self.flights) == 1, f"a step is planned ahead with {len(self.flights)} in flight"
        if self.look_ahead is not None and self.look_ahead.needs_tokens:
            return None
        self._now = now
        return self.planner.close() if self.planner.decide(now) else None

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[Progress]:
        """Take in what came of the oldest step in flight; returns what happened,
        in the plan's order."""
        flight = self.flights[0]
        assert plan.step_id == result.step_id == flight.step_id and len(result.results) == len(
            plan.work
        )
        if self.pace is not None and flight.forecast is None:
            self.pace.pass_by(now)
        # a lost step took no time
        elif self.pace is not None and flight.forecast is not None and result.elapsed_s > 0.0:
            predicted_s = flight.forecast.seconds
            measured_s = self.pace.measure(flight.forecast, result.elapsed_s, now)
            self.stats.count_duration(predicted_s, measured_s)
        if self.look_ahead is not None:
            self.look_ahead.taken_in(plan, result, now)
        self._now, self._progress = now, []
        gone, add_progress, num_plain = flight.gone, self._progress.append, 0
        for sequence, work, outcome in zip(
            flight.sequences, plan.work, result.results, strict=True
        ):
            num_computed, token_ids = sequence.num_computed + 1, outcome.token_ids
            if num_computed >= sequence.fast_update_end or not token_ids or outcome.logprobs:
                if sequence not in gone:
                    self._take_in(sequence, work, outcome)
                continue
            token_id, request = token_ids[0], sequence.request
            sequence.num_computed = num_computed
            sequence.token_ids.append(token_id)
            request.metrics.last_token_s = now
            num_plain += 1
            # half the price of a call
            add_progress(tuple.__new__(Progress, (sequence, token_id, None)))
            if token_id in request.stop_token_ids:
                self._end_if_due(sequence, token_id)
        self.flights.popleft()
        self.stats.num_generated_tokens += num_plain
        for sequence, error in self.admission.take_news(result.news, now):
            self.fail(sequence.request.request_id, error)
        return self._progress

    def _take_in(self, sequence: Sequence, work: RowWork, outcome: WorkResult) -> None:
        """Take in the result of one sequence's work; an exception ends its request alone."""
        if outcome.error is not None:
            self.fail(sequence.request.request_id, outcome.error)
            return
        try:
            if outcome.prompt_logprobs:
                sequence.request.prompt_logprobs.extend(outcome.prompt_logprobs)
            if work.num_ahead:
                self._take_in_run(sequence, work, outcome)
            else:
                self._take_in_computed(sequence, work.start + work.num_tokens, outcome)
        except Exception as error:
            log_failure(
                logger, f"request {sequence.name} failed while its step was taken in", error
            )
            self.fail(
                sequence.request.request_id,
                f"the step could not be taken in: {type(error).__name__}",
            )

    def _take_in_run(self, sequence: Sequence, work: RowWork, outcome: WorkResult) -> None:
        """Several tokens, one after the other, as if each were of a step of its own."""
        num_known, num_right = len(sequence.token_ids), len(outcome.token_ids) - 1
        self.stats.count_run(work.num_ahead, num_right)
        sequence.request.metrics.num_accepted_tokens += num_right
        sequence.request.metrics.num_rejected_tokens += work.num_ahead - num_right
        self.manager.retract(sequence.table, work.start + work.num_tokens - outcome.num_rejected)
        for place, token_id in enumerate(outcome.token_ids):
            sequence.num_planned = num_known + place
            one = WorkResult((token_id,), outcome.logprobs[place : place + 1])
            self._take_in_computed(sequence, num_known + place, one)
            if sequence.status is not _RUNNING:
                break

    def _take_in_computed(self, sequence: Sequence, num: int, outcome: WorkResult) -> None:
        """So many of a sequence's tokens are computed by now."""
        num_new, sequence.num_computed = num - sequence.num_computed, num
        if num >= (sequence.table.num_chained + 1) * self.limits.block_size:
            self._publish(sequence)
            self.admission.num_prefill_publications += num_new > 1
        if num < len(sequence.token_ids):
            return
        strategy = sequence.request.strategy
        strategy.absorb(self, sequence, outcome)
        if sequence.status is _RUNNING and strategy.is_plain and sequence.watch is None:
            sequence.fast_update_end = self._fast_update_end(sequence)

    def _fast_update_end(self, sequence: Sequence) -> int:
        """Return computed tokens at the next outcome of which more comes than a token: a full
        block, or the last token."""
        num_prompt, size = len(sequence.request.prompt_token_ids), self.limits.block_size
        return min(
            (sequence.num_computed // size + 1) * size, num_prompt + sequence.request.max_tokens - 1
        )

    # -- what strategies may do (SequenceOps)
    # ------------------------------------------------------------------------

    def append(
        self,
        sequence: Sequence,
        token_id: int,
        logprobs: TokenLogprobs | None,
        *,
        is_on_worker: bool,
    ) -> None:
        """Add a token to a sequence, and end it there if that token or its length says so."""
        sequence.token_ids.append(token_id)
        if logprobs is not None:
            sequence.cumulative_logprob += logprobs.logprob
        if not is_on_worker and sequence.is_resident:
            self.planner.builder.append_token(sequence.row, token_id)
        request = sequence.request
        if request.metrics.first_token_s is None:
            request.metrics.first_token_s = self._now
        request.metrics.last_token_s = self._now
        self.stats.num_generated_tokens += 1
        if not request.comes_at_once:
            self._progress.append(Progress(sequence, token_id, logprobs))
        self._end_if_due(sequence, token_id)
        if sequence.status is _PARKED:
            self.admission.resume(sequence)

    def _end_if_due(self, sequence: Sequence, token_id: int) -> None:
        """End a sequence whose newest token is a stop token, the last one allowed,
        or once more what came before it."""
        request = sequence.request
        num_output = len(sequence.token_ids) - len(request.prompt_token_ids)
        if token_id in request.stop_token_ids and num_output > sequence.sampling.min_tokens:
            self.finish(sequence, FinishReason.STOP, token_id)
        elif num_output >= request.max_tokens:
            self.finish(sequence, FinishReason.LENGTH)
        elif sequence.watch is not None and sequence.watch.is_looping(
            sequence.token_ids, sequence.sampling.min_tokens
        ):
            self.finish(sequence, FinishReason.REPETITION)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """Return a new sequence with the parent's tokens; it shares the parent's blocks if a row is
        free, else it waits."""
        child = self._new_sequence(parent.request, index, parent.token_ids.copy())
        child.cumulative_logprob = parent.cumulative_logprob
        if parent.status is _RUNNING and self.rows.refusal(child) is None:
            self.rows.reserve(child)
            child.table = self.manager.fork(parent.table)
            child.keys = parent.keys.copy() if parent.keys is not None else None
            child.num_computed = child.num_planned = parent.num_computed
            self.admission.enter(child)
        else:
            self.waiting.push(child)
        return child

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence and free what it holds; its request ends with its last sequence."""
        if sequence.status is _FINISHED:
            return
        self.planner.leave(sequence)
        sequence.status = _FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if self.look_ahead is not None:
            self.look_ahead.end(sequence)
        request = sequence.request
        if not request.comes_at_once:
            self._progress.append(Progress(sequence, None, None))
        if request.is_finished:
            request.metrics.finished_s = self._now
            self.requests.pop(request.request_id, None)
            self.waiting.departed(request)
            self.stats.count_finished(request)

    def conclude(self, request: Request, answers: Iterable[Conclusion]) -> None:
        """Put finished sequences in place of a request's own. They hold nothing."""
        request.sequences = []
        for index, answer in enumerate(answers):
            token_ids = [*request.prompt_token_ids, *answer.token_ids]
            sequence = self._new_sequence(request, index, token_ids)
            sequence.status, sequence.finish_reason = _FINISHED, answer.finish_reason
            sequence.cumulative_logprob = answer.cumulative_logprob
            if answer.finish_reason is FinishReason.STOP:
                sequence.stop_reason = answer.token_ids[-1]
            told = (*answer.token_ids, None)
            self._progress += [Progress(sequence, token_id, None) for token_id in told]

    # -- bookkeeping
    # ----------------------------------------------------------------------------------------------

    def _new_sequence(self, request: Request, index: int, token_ids: list[int]) -> Sequence:
        keys = (
            self.manager.index.keys(request.namespace)
            if self.limits.enable_prefix_caching
            else None
        )
        sampling = request.sampling
        if index:
            sampling = sampling._replace(seed=derive_seed(sampling.seed, index))
        sequence = Sequence(
            request, index, token_ids, self.manager.new_table(request.namespace), keys, sampling
        )
        priority = request.priority if self.limits.policy != "fcfs" else 0
        sequence.rank = (priority, request.arrival, index)
        request.sequences.append(sequence)
        return sequence

    def _publish(self, sequence: Sequence) -> None:
        first = sequence.table.num_chained
        blocks, builder = sequence.table.blocks, self.planner.builder
        for place in self.blocks.publish(sequence):
            if sequence.is_resident:
                builder.replace_block(sequence.row, place, blocks[place])
        if sequence.keys is not None:
            self.admission.published(sequence, first)

    def _end_request(self, request_id: str, reason: FinishReason) -> Request | None:
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in request.sequences:
                self.finish(sequence, reason)
            if request.comes_at_once:
                self.conclude(request, [Conclusion((), 0.0, reason)])
        return request
