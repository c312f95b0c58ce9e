"""A trace, run for real: requests come when the trace says, and one engine serves them. What the
simulator says of the same trace is held against it.

Prompts and lengths of answers are the trace's; what the answers say is not, so prompts that go on
from an answer find in the cache what is before it (`without_answers`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.bench.measure import params_of
from quire.bench.workload import EDGE, BenchRequest
from quire.config.limits import SchedulerLimits
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import TokensPrompt
from quire.engine.loop.engine import Engine
from quire.errors import ConfigError, EngineError
from quire.sim.fleet import percentile
from quire.sim.traces import Trace

_SPREAD = 2_654_435_761
"""Odd, so that ids of blocks which follow one another are far apart (Knuth's multiplicative
hash)."""
_LONGEST_SLEEP_S = 0.05


class WaitingTimes(NamedTuple):
    """What requests waited for, in seconds, in any order."""

    first_token_s: Sequence[float]
    per_token_s: Sequence[float]
    """Of each request with several tokens, the mean time per token after the first."""

    def compared(self, simulated: WaitingTimes) -> list[str]:
        """Return both as text, and how far the simulation is off."""
        lines = []
        for name, real, other in zip(("first token", "per token"), self, simulated, strict=True):
            parts = []
            for percent, what in ((50.0, "median"), (95.0, "p95")):
                real_s, other_s = percentile(real, percent), percentile(other, percent)
                off = other_s / real_s - 1 if real_s else 0.0
                parts.append(
                    f"{what} {1e3 * real_s:.1f} ms real, {1e3 * other_s:.1f} ms simulated "
                    f"({off:+.1%})"
                )
            lines.append(f"{name:16} {'; '.join(parts)}")
        return lines


def without_answers(trace: Trace) -> Trace:
    """Return the trace with answers that share nothing with later prompts."""
    requests = tuple(replace(each, end_hashes=()) for each in trace.requests)
    return Trace(requests, trace.hash_block_size)


def check_fits(trace: Trace, limits: SchedulerLimits) -> None:
    """Raise ConfigError for a trace that holds requests the engine would refuse."""
    for number, each in enumerate(trace.requests):
        length = each.num_prompt_tokens + each.num_output_tokens
        if length > min(limits.max_model_len, limits.num_slots):
            raise ConfigError(
                f"request {number} of the trace takes {length} tokens; this engine has "
                f"max_model_len={limits.max_model_len} and room for {limits.num_slots}"
            )


def run_trace(engine: Engine, trace: Trace, speed: float) -> WaitingTimes:
    """Serve the whole trace, its arrivals `speed` times as fast as recorded. The engine is idle."""
    assert not engine.has_work
    vocab_size = engine.plan.spec.vocab_size
    requests = [_made(trace, number, vocab_size) for number in range(len(trace.requests))]
    first_s = trace.requests[0].arrival_s
    arrivals = [(each.arrival_s - first_s) / speed for each in trace.requests]
    began_s: dict[str, float] = {}
    ended_s: dict[str, float] = {}
    number, zero_s = 0, time.perf_counter()
    while number < len(requests) or engine.has_work:
        now_s = time.perf_counter() - zero_s
        while number < len(requests) and arrivals[number] <= now_s:
            prompt = TokensPrompt(prompt_token_ids=requests[number].token_ids)
            engine.add_request(str(number), prompt, params_of(requests[number]))
            number += 1
        if not engine.has_work:
            time.sleep(min(arrivals[number] - now_s, _LONGEST_SLEEP_S))
            continue
        outputs = engine.step()
        now_s = time.perf_counter() - zero_s
        for output in outputs:
            assert isinstance(output, RequestOutput)
            if output.error is not None:
                raise EngineError(f"a request of the trace failed: {output.error}")
            began_s.setdefault(output.request_id, now_s)
            if output.finished:
                ended_s[output.request_id] = now_s
    return _times(arrivals, began_s, ended_s, [each.num_output for each in requests])


def _made(trace: Trace, number: int, vocab_size: int) -> BenchRequest:
    """A request with the trace's tokens as ids of a vocabulary."""
    num_ids = max(1, vocab_size - 2 * EDGE)
    first = min(EDGE, vocab_size - 1)
    tokens = [first + token * _SPREAD % num_ids for token in trace.prompt(number)]
    return BenchRequest(tokens, trace.requests[number].num_output_tokens)


def _times(
    arrivals: Sequence[float],
    began_s: dict[str, float],
    ended_s: dict[str, float],
    num_outputs: Sequence[int],
) -> WaitingTimes:
    first, per_token = [], []
    for number, (arrival_s, num_output) in enumerate(zip(arrivals, num_outputs, strict=True)):
        name = str(number)
        first.append(began_s[name] - arrival_s)
        if num_output > 1:
            per_token.append((ended_s[name] - began_s[name]) / (num_output - 1))
    return WaitingTimes(first, per_token)
