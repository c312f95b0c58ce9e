"""What a disk behind the KV pool is worth on a real trace: the share of prompt tokens that are
found, and the time to the first token, for disks of several sizes.

Simulated, with the durations that the model's plan expects, and measured on the model itself. In
both, requests come one after the other, in the order of the trace; tokens stand for the trace's
hashes, so that prompts share what they shared in production.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.common.seeds import mix64
from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.engine.assembly.builder import build_engine
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine
from quire.engine.plan.engine_plan import EnginePlan
from quire.errors import ConfigError, EngineError
from quire.sim.tier_replay import Served, TierModel, TierReplay
from quire.sim.traces import Trace

_FIRST_TOKEN = 3
"""Below are the ids of special tokens, in most vocabularies."""


@dataclass(frozen=True, slots=True)
class TierRow:
    """One line of the report."""

    disk_bytes: int
    simulated: tuple[Served, ...]
    measured: tuple[Served, ...]
    """Empty where nothing was measured."""


def prompts_of(trace: Trace, limit: int, max_len: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the first prompts of a trace as tokens of a vocabulary, cut to `max_len`. Equal
    beginnings stay equal, and others differ within a few tokens."""
    size, found = trace.hash_block_size, []
    for number in range(min(limit, len(trace.requests))):
        tokens = trace.prompt(number)[:max_len]
        found.append(
            tuple(
                _FIRST_TOKEN
                + mix64(tokens[place - place % size] ^ (place % size) << 40)
                % (vocab_size - _FIRST_TOKEN)
                for place in range(len(tokens))
            )
        )
    return found


def measure_tiers(
    plan: EnginePlan,
    prompts: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    *,
    max_tokens: int,
    is_measured: bool,
    say: Callable[[str], None],
) -> list[TierRow]:
    """Return a row for each size of the disk. Raises ConfigError."""
    if not prompts:
        raise ConfigError("the trace has no request")
    rows = []
    for disk_bytes in sizes:
        say(f"a disk of {disk_bytes / 2**20:,.0f} MiB")
        with tempfile.TemporaryDirectory(prefix="quire-tiers-") as folder:
            simulated = _simulate(plan, prompts, Path(folder), disk_bytes, max_tokens)
        measured: tuple[Served, ...] = ()
        if is_measured:
            with tempfile.TemporaryDirectory(prefix="quire-tiers-") as folder:
                measured = _measure(plan.config, prompts, folder, disk_bytes, max_tokens)
        rows.append(TierRow(disk_bytes, simulated, measured))
    return rows


def _simulate(
    plan: EnginePlan,
    prompts: Sequence[tuple[int, ...]],
    folder: Path,
    disk_bytes: int,
    max_tokens: int,
) -> tuple[Served, ...]:
    limits = plan.limits
    payload_bytes = plan.kv_bytes // limits.num_blocks * len(limits.windows)
    model = TierModel(plan.limits, plan.step_costs, payload_bytes)
    replay = TierReplay(model, folder if disk_bytes else None, disk_bytes)
    try:
        return tuple(
            replay.serve(str(number), prompt, max_tokens) for number, prompt in enumerate(prompts)
        )
    finally:
        replay.close()


def _measure(
    config: EngineConfig,
    prompts: Sequence[tuple[int, ...]],
    folder: str,
    disk_bytes: int,
    max_tokens: int,
) -> tuple[Served, ...]:
    if disk_bytes:
        config = replace(config, kv_cache_dir=folder, kv_disk_size=disk_bytes)
    engine = build_engine(config)
    try:
        _serve(engine, "warm-up", (5, 4, 3, 2), max_tokens)
        return tuple(
            _serve(engine, str(number), prompt, max_tokens) for number, prompt in enumerate(prompts)
        )
    finally:
        engine.close()


def _serve(engine: Engine, name: str, prompt: tuple[int, ...], max_tokens: int) -> Served:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
    while True:
        for output in engine.step():
            if isinstance(output, RequestOutput) and output.finished:
                metrics = output.metrics
                if metrics.first_token_s is None:
                    raise EngineError(f"request {name} of the trace failed: {output.error}")
                seconds = metrics.first_token_s - metrics.arrival_s
                return Served(len(prompt), metrics.num_prefix_hit_tokens, seconds)


def ideal_share(prompts: Sequence[tuple[int, ...]], block_size: int) -> float:
    """Return the share of prompt tokens that a cache of unlimited size finds, in whole blocks."""
    known, num_hits, num_tokens = set[int](), 0, 0
    for prompt in prompts:
        num_tokens += len(prompt)
        is_hit, digest = True, 0
        for start in range(0, len(prompt) - 1, block_size):
            block = prompt[start : start + block_size]
            digest = hash((digest, block))
            is_hit = is_hit and digest in known and start + block_size < len(prompt)
            num_hits += block_size * is_hit
            if len(block) == block_size:
                known.add(digest)
    return num_hits / num_tokens


def render(rows: Sequence[TierRow]) -> list[str]:
    """Return the report as text."""
    lines = [
        f"{'disk':>12} {'hits, simulated':>16} {'first token':>12} "
        f"{'hits, measured':>16} {'first token':>12}"
    ]
    for row in rows:
        cells = [*_cells(row.simulated), *_cells(row.measured)]
        size = f"{row.disk_bytes / 2**20:,.0f} MiB" if row.disk_bytes else "none"
        lines.append(f"{size:>12} {cells[0]:>16} {cells[1]:>12} {cells[2]:>16} {cells[3]:>12}")
    return lines


def _cells(served: Sequence[Served]) -> tuple[str, str]:
    """Return the share of prompt tokens that were found, and the median time to the first token."""
    if not served:
        return "-", "-"
    share = sum(each.num_hit_tokens for each in served) / sum(
        each.num_prompt_tokens for each in served
    )
    median_s = statistics.median(each.first_token_s for each in served)
    return f"{100 * share:.1f} %", f"{1e3 * median_s:,.1f} ms"
