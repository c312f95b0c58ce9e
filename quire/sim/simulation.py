"""One simulated run: a scenario through the real control plane, checked after every step and
against the oracle.

Owns the loop and the checks. It keeps no time of its own: the step number is the clock.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from quire.core.beam import BeamSearch
from quire.core.drafts import MODELLED
from quire.core.kvcache.audit import audit_kept
from quire.core.plan import StepPlan, TokenLogprobs
from quire.core.request import FinishReason, Request, Sequence
from quire.core.request_spec import RequestSpec, fit
from quire.core.scheduler.audit import audit, audit_plan
from quire.core.scheduler.prompt_cache import CacheStats, PromptCache
from quire.core.scheduler.scheduler import Progress, Scheduler
from quire.core.scheduler.tiers import MAX_LIST_S, MAX_READ_S
from quire.core.speculation.speculator import Speculator
from quire.core.speculation.standing import StandingOrders
from quire.core.step_cost import StepCostModel
from quire.errors import PromptTooLongError
from quire.executor.null import NullExecutor, NullMemory
from quire.sim.drafts import OracleDrafter, OracleModel
from quire.sim.faults import FaultInjector
from quire.sim.oracle import Oracle
from quire.sim.scenario import VOCAB_SIZE, Scenario, can_serve
from quire.sim.tiers import SimulatedTiers

Sabotage = Callable[[Scheduler], None]
"""Breaks a scheduler on purpose, for tests that prove that the checks see it."""


class SimulationError(AssertionError):
    """A run went wrong; the message begins with its seed."""


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    num_steps: int = 0
    num_ahead: int = 0
    """Steps that were planned while the one before them was in flight."""
    num_refused: int = 0
    num_strikes: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
    state_hashes: list[str] = field(default_factory=list)
    """One per step, over the plan and the state; equal in every run of the seed."""


def _colliding_digest(parent: bytes, content: bytes) -> bytes:
    """Four digests for everything: nearly every look-up meets other content under its digest."""
    return bytes([sum(parent + content) % 4]) * 16


class Simulation:
    """A scenario in progress. With `is_overlapped`,
    each step is planned before the outcome of the one before it is known."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        is_overlapped: bool = False,
        draft_chance: float | None = None,
        has_draft_model: bool = False,
        is_audited: bool = True,
        sabotage: Sabotage | None = None,
        tiers: SimulatedTiers | None = None,
    ) -> None:
        self.scenario = scenario
        self.oracle = Oracle(scenario.seed, VOCAB_SIZE, scenario.limits.windows)
        self.cache = PromptCache(CacheStats(), "simulated")
        pace = None if scenario.pace is None else scenario.pace.build()
        self._model: OracleModel | None = None
        look_ahead = None
        if draft_chance is not None and has_draft_model:
            look_ahead = self._modelled(draft_chance, None if pace is None else pace.model)
        elif draft_chance is not None:
            look_ahead = self._speculator(draft_chance)
        self.scheduler = Scheduler(
            scenario.limits,
            pace=pace,
            look_ahead=look_ahead,
            prerequisites=(self.cache, *(() if tiers is None else (tiers.prerequisite(),))),
        )
        if scenario.hash == "colliding":
            self.scheduler.manager.index.digest = _colliding_digest
        limits = scenario.limits
        memory = NullMemory(limits.num_blocks, limits.block_size)
        if tiers is not None:
            tiers.attach(memory, limits.block_size, len(limits.windows))
        self.tiers = tiers
        self.executor = NullExecutor(
            limits.max_num_seqs,
            limits.num_blocks,
            limits.block_size,
            vocab_size=VOCAB_SIZE,
            key=scenario.seed,
            windows=limits.windows,
            memory=memory,
            companions=[each for each in (tiers, self._model) if each is not None],
        )
        if self._model is not None:
            self._model.attach(self.executor.rows)
        self.outcome = Outcome()
        self.requests: list[tuple[RequestSpec, Request]] = []
        self._is_overlapped = is_overlapped
        self._in_flight: deque[StepPlan] = deque()
        self._is_audited = is_audited
        self._arriving = sorted(scenario.arrivals, key=lambda arrival: -arrival.step)
        self._faults = FaultInjector(scenario.faults, Random(scenario.seed ^ 0x5EED))
        self._durations = Random(scenario.seed ^ 0x7173)
        """Of steps, which a scheduler that bounds them by time learns from: any will do."""
        self._streams: dict[Sequence, list[int | None]] = {}
        self._logprobs: dict[Sequence, list[TokenLogprobs]] = {}
        if sabotage is not None:
            sabotage(self.scheduler)

    def _speculator(self, chance: float) -> Speculator:
        random = Random(self.scenario.seed ^ 0xD4AF)
        return Speculator(OracleDrafter(self.oracle, random, chance), random.randint(1, 8))

    def _modelled(self, chance: float, costs: StepCostModel | None) -> Speculator:
        """Drafts come from beside the executor; with `costs` they are taken where they should pay,
        which steps of any duration make a matter of chance."""
        random = Random(self.scenario.seed ^ 0xD4AF)
        self._model = OracleModel(self.oracle, random, chance)
        orders = StandingOrders(MODELLED, random.randint(1, 8))
        return Speculator(orders, 8, costs=costs, modelled=orders)

    def run(self) -> Outcome:
        """Run to the end. Raises `SimulationError` where anything is not as it must be."""
        try:
            while self._arriving or self.scheduler.has_work or self._in_flight:
                self._step()
            self._check_end()
        except Exception as error:
            step = self.outcome.num_steps
            raise SimulationError(
                f"seed={self.scenario.seed} step={step}: {type(error).__name__}: {error}"
            ) from error
        self.outcome.num_strikes = self._faults.num_strikes
        self.outcome.num_finished = dict(self.scheduler.stats.num_finished)
        return self.outcome

    def _step(self) -> None:
        scheduler, outcome, step = self.scheduler, self.outcome, self.outcome.num_steps
        last_arrival = max(arrival.step for arrival in self.scenario.arrivals)
        max_steps = self.scenario.max_steps * (1 + self._is_overlapped)
        if self.tiers is not None:  # a wait for each admission, of so many steps at most
            max_steps *= int(MAX_LIST_S + MAX_READ_S)
        bound = max(self.scenario.faults.last_step, last_arrival) + max_steps
        assert step <= bound, f"not finished after {bound} steps"
        while self._arriving and self._arriving[-1].step <= step:
            self._add(self._arriving.pop().spec)
        self._faults.strike_between_steps(scheduler, step)
        self._plan(float(step))
        plan = self._in_flight.popleft()
        result = replace(self.executor.execute(plan), elapsed_s=self._durations.uniform(0.0, 4.0))
        self._faults.strike_in_flight(scheduler, step)
        result = self._faults.spoil(plan, result, self.executor, step)
        self._record(scheduler.update(plan, result, float(step)))
        if self._is_audited:
            audit(scheduler)
            audit_kept(self.cache.kept, scheduler.manager)
        outcome.state_hashes.append(self._state_hash(plan))
        outcome.num_steps += 1

    def _plan(self, now: float) -> None:
        """Plan the next step, unless it is planned already; and the one after it, where steps
        overlap."""
        scheduler, in_flight = self.scheduler, self._in_flight
        if not in_flight:
            in_flight.append(scheduler.schedule(now))
            self._check_plan(in_flight[0])
            assert in_flight[0].work or not scheduler.has_work or scheduler.waiting_for(), (
                "requests are unfinished, and nothing is scheduled"
            )
        ahead = scheduler.schedule_ahead(now) if self._is_overlapped else None
        if ahead is not None:
            in_flight.append(ahead)
            self.outcome.num_ahead += 1
            self._check_plan(ahead)

    def _check_plan(self, plan: StepPlan) -> None:
        if self._is_audited:
            audit_plan(self.scheduler, plan)

    def _add(self, spec: RequestSpec) -> None:
        try:
            fitting = fit(spec, self.scenario.limits)
        except PromptTooLongError:
            assert not can_serve(self.scenario.limits, spec), (
                f"{spec.request_id} was refused, but it fits"
            )
            self.outcome.num_refused += 1
            return
        assert can_serve(self.scenario.limits, spec), (
            f"{spec.request_id} was accepted, but can never be served"
        )
        self.requests.append((spec, self.scheduler.add(fitting)))

    def _record(self, progress: list[Progress]) -> None:
        for sequence, token_id, logprobs in progress:
            stream = self._streams.setdefault(sequence, [])
            assert None not in stream, f"{sequence.name}: something happened after its end"
            stream.append(token_id)
            if logprobs is not None:
                self._logprobs.setdefault(sequence, []).append(logprobs)

    def _state_hash(self, plan: StepPlan) -> str:
        scheduler = self.scheduler
        state = (
            plan,
            scheduler.manager.pool.free_blocks(),
            [s.name for s in scheduler.waiting.sequences()],
        )
        return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()

    # -- checks at the end
    # -------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        scheduler, limits = self.scheduler, self.scenario.limits
        assert scheduler.manager.pool.num_used == 0, (
            f"{scheduler.manager.pool.num_used} blocks leaked"
        )
        assert (
            scheduler.blocks.num_reserved == 0 and scheduler.rows.num_free == limits.max_num_seqs
        ), "something leaked"
        assert scheduler.num_waiting == 0 and not scheduler.running, "a sequence is still there"
        for spec, request in self.requests:
            assert request.is_finished, f"{request.request_id} never finished"
            self._check_prompt(spec, request)
            if isinstance(request.strategy, BeamSearch):
                self._check_beams(spec, request, request.strategy)
            else:
                self._check_samples(spec, request)

    def _check_prompt(self, spec: RequestSpec, request: Request) -> None:
        if request.scoring is None:
            return
        expected, scored = self.oracle.score_prompt(spec), request.prompt_logprobs
        is_complete = request.metrics.first_token_s is not None or self._ended_well(request)
        assert not is_complete or len(scored) == len(expected), (
            f"{request.request_id}: {len(scored)} tokens scored"
        )
        for place, (record, wanted) in enumerate(zip(scored, expected, strict=False)):
            assert record == wanted, (
                f"{request.request_id}: prompt token {place} scored {record}, must be {wanted}"
            )

    def _check_samples(self, spec: RequestSpec, request: Request) -> None:
        has_ended_well = self._ended_well(request)
        assert not has_ended_well or len(request.sequences) == spec.num_sequences, (
            f"{request.request_id}: sequences"
        )
        for sequence in request.sequences:
            expected = self.oracle.sample(spec, sequence.index, request.max_tokens)
            got = sequence.output_token_ids
            is_whole = sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            wanted = expected.token_ids if is_whole else expected.token_ids[: len(got)]
            assert got == wanted, f"{sequence.name}: {got}, must be {wanted}"
            records = self._logprobs.get(sequence, [])
            assert records == expected.logprobs[: len(got)], (
                f"{sequence.name}: log-probabilities differ"
            )
            stream = self._streams.get(sequence, [])
            assert [token for token in stream if token is not None] == got, (
                f"{sequence.name}: streamed {stream}"
            )
            if is_whole:
                assert stream[-1] is None, f"{sequence.name}: no end was reported"
                assert sequence.finish_reason is expected.finish_reason, (
                    f"{sequence.name}: {sequence.finish_reason}"
                )
                assert sequence.cumulative_logprob == expected.cumulative_logprob, (
                    f"{sequence.name}: sum differs"
                )

    def _check_beams(self, spec: RequestSpec, request: Request, strategy: BeamSearch) -> None:
        if not self._ended_well(request):
            return
        expected = self.oracle.search(spec)
        got = [(list(hypothesis.token_ids), hypothesis.score) for hypothesis in strategy.hypotheses]
        assert got == [tuple(answer) for answer in expected], (
            f"{request.request_id}: {got}, must be {expected}"
        )
        streams = [self._streams.get(sequence, []) for sequence in request.sequences]
        assert streams == [[*tokens, None] for tokens, _ in got], f"streamed {streams}"

    @staticmethod
    def _ended_well(request: Request) -> bool:
        reasons = {sequence.finish_reason for sequence in request.sequences}
        return reasons <= {FinishReason.STOP, FinishReason.LENGTH}
