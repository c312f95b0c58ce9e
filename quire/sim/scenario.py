"""Scenarios: what a seed stands for. Limits, requests with their arrival steps, and which faults
strike how often.

Pools are tiny on purpose: with 4 to 16 blocks, preemption, eviction, copy-on-write and refusal
happen in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, NamedTuple

from quire.common.numbers import ceil_div
from quire.config.limits import POLICIES, SchedulerLimits
from quire.core.plan import RowSampling
from quire.core.request_spec import BeamSettings, Keep, RequestSpec
from quire.core.scheduler.pace import StepPace
from quire.core.step_cost import NUM_COSTS, StepCostModel, UnitCosts

VOCAB_SIZE = 12
STOP_TOKEN = 11
Hash = Literal["keyed", "colliding"]


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per step, until `last_step`."""

    last_step: int
    abort: float = 0.0
    abort_in_flight: float = 0.0
    row_error: float = 0.0
    poison: float = 0.0
    """NaN in the KV that a row has just written; the row reports it."""
    step_error: float = 0.0
    """Every row of a step fails at once."""
    preempt: float = 0.0
    forget_cache: float = 0.0


@dataclass(frozen=True, slots=True)
class PaceSpec:
    """Steps bounded by time, as a value; durations are in steps of the simulation's clock."""

    costs: UnitCosts
    target_s: float
    quantum: int

    def build(self) -> StepPace:
        """Return a fresh pace."""
        return StepPace(StepCostModel(self.costs), self.target_s, quantum=self.quantum)


class Arrival(NamedTuple):
    """When a request arrives."""

    step: int
    spec: RequestSpec


def can_serve(limits: SchedulerLimits, spec: RequestSpec) -> bool:
    """Return whether it can be served at all: stated here a second time,
    so that the refusals are checked."""
    num_prompt = len(spec.prompt_token_ids)
    size, num_blocks = limits.block_size, 0
    num_places = ceil_div(min(num_prompt + spec.max_tokens, limits.max_model_len) - 1, size)
    for window in limits.windows:
        num_kept = num_places
        if window is not None:  # or at least the last full block, and two steps in flight
            num_tokens = max(window - 1, size) + 2 * limits.max_num_batched_tokens
            num_kept = ceil_div(num_tokens, size) + 2
        num_blocks += min(num_places, num_kept)
    return num_prompt < limits.max_model_len and num_blocks <= limits.num_blocks


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a run depends on."""

    seed: int
    limits: SchedulerLimits
    arrivals: tuple[Arrival, ...]
    faults: Faults
    hash: Hash = "keyed"
    pace: PaceSpec | None = None

    @property
    def max_steps(self) -> int:
        """A bound on the steps after the last fault and the last arrival.

        An admitted sequence gains a token before it can be preempted, so a sequence is admitted at
        most `max_tokens` times and each time computes its tokens once, at no less than one step's
        share of the budget.
        """
        budget = self.limits.max_num_batched_tokens if self.pace is None else 1
        total = 0
        for _, spec in self.arrivals:
            width = spec.beam.beam_width * 2 if spec.beam is not None else spec.num_sequences
            length = len(spec.prompt_token_ids) + spec.max_tokens
            total += width * spec.max_tokens * (ceil_div(length, budget) + 2)
        return total + 10


def make_scenario(seed: int, *, is_liveness: bool = False, has_windows: bool = False) -> Scenario:
    """Return the scenario of a seed. In liveness mode faults end early and everything
    accepted must then end in time. With windows, one or several groups of layers share the pool."""
    random = Random(seed)
    limits = _limits(random)
    if has_windows:
        limits = _with_windows(limits, Random(seed ^ 0x3147))
    documents = [tuple(random.randrange(3) for _ in range(limits.num_slots + 8)) for _ in range(3)]
    num_requests = random.randint(1, 14)
    arrivals = tuple(
        _Draw(random, limits, documents).arrival(number) for number in range(num_requests)
    )
    last_step = random.randint(1, 40) if is_liveness else 300
    hash_kind: Hash = "colliding" if random.random() < 0.15 else "keyed"
    return Scenario(seed, limits, arrivals, _faults(random, last_step), hash_kind, _pace(random))


def _limits(random: Random) -> SchedulerLimits:
    num_blocks, block_size = random.randint(4, 16), random.choice((1, 2, 3, 4, 8, 16))
    num_rows = random.randint(1, 6)
    max_model_len = random.randint(4, max(4, min(60, num_blocks * block_size + 4)))
    is_chunked = random.random() < 0.75
    least = num_rows if is_chunked else max(num_rows, max_model_len)
    budget = least + random.randint(0, 12)
    policy, caches, watermark = (
        random.choice(POLICIES),
        random.random() < 0.8,
        random.choice((0.0, 0.0, 0.1)),
    )
    num_partial = random.choice((1, 1, 2, 4)) if is_chunked else 1
    return SchedulerLimits(
        num_blocks, block_size, num_rows, budget, max_model_len, policy, caches, is_chunked,
        watermark, num_partial, random.randint(1, num_partial), random.choice((0, 0, 3)),
    )  # fmt: skip


def _with_windows(limits: SchedulerLimits, random: Random) -> SchedulerLimits:
    """One to three groups, at least one of them with a window, and longer sequences."""
    near, far = random.randint(1, 6), random.randint(2, 16)
    windows = random.choice(
        ((near,), (far,), (None, near), (None, far), (None, near, near), (None, near, far))
    )
    longest = 60 if limits.enable_chunked_prefill else min(limits.max_num_batched_tokens, 60)
    return replace(limits, windows=windows, max_model_len=random.randint(4, longest))


def _pace(random: Random) -> PaceSpec | None:
    if random.random() < 0.5:
        return None
    costs = UnitCosts(*(random.choice((0.01, 0.1, 1.0)) for _ in range(NUM_COSTS)))
    return PaceSpec(costs, random.choice((0.5, 2.0, 10.0)), random.choice((1, 2, 4)))


def _keep(number: int, prompt_len: int) -> tuple[Keep, ...]:
    """Some prompts are kept, and some of them a beginning for longer than the rest."""
    random = Random(number ^ 0x4EE9)
    seconds = random.choice((0.0, 0.0, 5.0, 50.0))
    beginning = Keep(random.randrange(prompt_len + 1), 4.0 * seconds)
    kept = (beginning, Keep(None, seconds)) if random.random() < 0.5 else (Keep(None, seconds),)
    return kept if seconds else ()


def _faults(random: Random, last_step: int) -> Faults:
    if random.random() < 0.25:
        return Faults(0)

    def chance() -> float:
        return random.choice((0.0, 0.01, 0.05))

    return Faults(
        last_step, chance(), chance(), chance() / 2, chance() / 2, chance() / 5,
        preempt=random.choice((0.0, 0.1, 0.5)), forget_cache=random.choice((0.0, 0.05)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Draw:
    """Draws requests; prompts share prefixes of common documents."""

    random: Random
    limits: SchedulerLimits
    documents: Sequence[tuple[int, ...]]

    def arrival(self, number: int) -> Arrival:
        random = self.random
        prompt, max_tokens = self._lengths()
        beam, stops = None, frozenset[int]()
        if random.random() < 0.2:
            beam, stops = self._beam()
        elif random.random() < 0.7:
            stops = frozenset({STOP_TOKEN})
        step = random.choice((0, 0, random.randint(0, 40)))
        spec = RequestSpec(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=self._sampling(number),
            num_sequences=random.choice((1, 1, 1, 2, 4)),
            beam=beam,
            stop_token_ids=stops,
            priority=random.choice((0, 0, 1, 2)),
            namespace=random.choice(((), (), ("tenant",))),
            reads_cache=random.random() < 0.9,
            keep=_keep(number, len(prompt)),
        )
        tenant, weight = random.choice((("", 1.0), ("a", 1.0), ("b", 3.0)))
        return Arrival(step, replace(spec, tenant=tenant, weight=weight))

    def _lengths(self) -> tuple[tuple[int, ...], int]:
        """Return a prompt and how many tokens may follow; one in twenty cannot be served."""
        random, limits = self.random, self.limits
        total = min(limits.longest_len(limits.max_model_len) + 1, limits.max_model_len)
        if random.random() < 0.05:
            return self._prompt(total + random.randint(0, 5)), random.randint(1, 4)
        num_prompt = max(1, min(random.randint(1, total - 1), random.randint(1, total - 1)))
        return self._prompt(num_prompt), random.randint(1, min(12, total - num_prompt))

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        num_shared = self.random.randint(0, num_tokens)
        shared = self.random.choice(self.documents)[:num_shared]
        return shared + tuple(
            self.random.randrange(VOCAB_SIZE) for _ in range(num_tokens - len(shared))
        )

    def _sampling(self, number: int) -> RowSampling:
        random = self.random
        return RowSampling(
            seed=number,
            temperature=random.choice((0.0, 1.0)),
            min_tokens=random.choice((0, 0, 3)),
            stop_token_ids=(STOP_TOKEN,),
            num_logprobs=random.choice((None, None, 0, 2)),
            num_prompt_logprobs=random.choice((None, None, None, 0, 2)),
        )

    def _beam(self) -> tuple[BeamSettings, frozenset[int]]:
        """Return settings, and the tokens that end a beam."""
        random = self.random
        width = random.choice((1, 2, 3))
        stops = random.choice(
            (frozenset[int](), frozenset({STOP_TOKEN}), frozenset({STOP_TOKEN, 10}))
        )
        length_penalty = random.choice((0.0, 1.0, 2.0, -0.5))
        return BeamSettings(width, length_penalty, random.choice((False, True, "never"))), stops
