"""Experts of which only some are in memory, as an engine plans them: how many, how often a step
finds those that it chooses, and what the others cost it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from quire.common.numbers import format_bytes, parse_bytes
from quire.config.engine import EngineConfig
from quire.engine.plan.machine import Machine
from quire.errors import CapacityError, ConfigError
from quire.models.blocks import ExpertsSpec
from quire.models.declaration import DecoderSpec
from quire.models.tensors import LinearSpec
from quire.quant.formats import WeightFormats

FILE_BYTES_PER_S = 5e9
"""Of experts that are read out of the system's cache of files and checked, by one core: two of a
Zen 5 reached 16e9 together. A disk may give less."""
_SKEW = 0.35
"""Of a router that does not choose all experts alike: a pool with a share s of the experts has
s ** _SKEW of the choices, 78 % for a half, as `python -m benchmarks.experts --skew 0.5` draws
them."""
_KV_BYTES = 1 << 30
"""Left for a KV cache where a model does not fit and a pool of experts is suggested."""


class ExpertPlan(NamedTuple):
    """A pool of experts."""

    num_bytes: int
    """Of the pool, at most."""
    num_experts: int
    """Of all layers."""
    num_resident: int
    file_bytes: int
    """Of all experts, which are in the file."""
    least: int
    """Experts that the pool must hold: those of one token in one layer."""
    hit_rate: float
    """Share of chosen experts that are in memory, if all are chosen alike."""
    likely_hit_rate: float
    """The same of a router with favourites."""
    missed_s: float
    """Seconds that a token waits for the others, likely."""
    reason: str

    @property
    def num_bytes_spared(self) -> int:
        """Of all experts, those that are not in memory."""
        return self.file_bytes - self.num_bytes


def mixtures(spec: DecoderSpec) -> Iterator[ExpertsSpec]:
    """Yield the mixtures of all layers."""
    for block in spec.blocks:
        for mixer in block.mixers:
            if isinstance(mixer, ExpertsSpec):
                yield mixer


def weights_of(mixture: ExpertsSpec) -> tuple[Sequence[LinearSpec], Sequence[LinearSpec]]:
    """Return what is stacked into its two weights: gates and ups, and downs."""
    _, ups, downs, *_ = mixture.projections
    return ups, downs


def expert_bytes(spec: DecoderSpec, formats: WeightFormats, dtype: str) -> int:
    """Return the memory of all experts."""
    return sum(
        formats.part_bytes(parts, dtype) for each in mixtures(spec) for parts in weights_of(each)
    )


def plan_experts(
    config: EngineConfig, spec: DecoderSpec, formats: WeightFormats, dtype: str, num_threads: int
) -> ExpertPlan | None:
    """Decide; None where all experts are in memory. Raises ConfigError for what cannot work."""
    given = config.expert_memory
    if given is None:
        return None
    if not any(mixtures(spec)):
        raise ConfigError(
            f"expert_memory={given!r} has no effect: {spec.architecture} has no experts; leave it "
            "out"
        )
    if config.device == "cuda" or config.kernels not in ("auto", "cpu"):
        where = "device='cuda'" if config.device == "cuda" else f"kernels={config.kernels!r}"
        raise ConfigError(
            f"expert_memory={given!r} is for the native kernels of the CPU, and not available "
            f"with {where}; leave one of them out"
        )
    num_bytes = parse_bytes(given, option="expert_memory")
    plan = pool_of(num_bytes, spec, formats, dtype, num_threads)
    if plan.num_resident < plan.least:
        size = largest_expert(spec, formats, dtype)
        raise CapacityError(
            f"expert_memory={given!r} holds {plan.num_resident} experts of {format_bytes(size)}, "
            f"and a token alone needs {plan.least} of a layer; give at least "
            f"{format_bytes(plan.least * size)}"
        )
    return plan


def largest_expert(spec: DecoderSpec, formats: WeightFormats, dtype: str) -> int:
    """Return the bytes of a place in the pool."""
    return max(
        sum(formats.part_bytes(parts, dtype) for parts in weights_of(each)) // len(each.experts)
        for each in mixtures(spec)
    )


def pool_of(
    num_bytes: int, spec: DecoderSpec, formats: WeightFormats, dtype: str, num_threads: int
) -> ExpertPlan:
    """Return what a pool of so many bytes comes to."""
    layers = list(mixtures(spec))
    num_experts = sum(len(each.experts) for each in layers)
    size = largest_expert(spec, formats, dtype)
    num_resident = min(num_bytes // size, num_experts)
    share = num_resident / num_experts
    likely = share**_SKEW
    chosen = sum(each.routing.num_chosen for each in layers) * size
    missed_s = (1 - likely) * chosen / (FILE_BYTES_PER_S * num_threads)
    reason = (
        f"{num_resident:,} of {num_experts:,} experts: {share:.0%} of choices are in memory if all "
        f"are chosen alike, {likely:.0%} with usual favourites"
    )
    least = max(each.routing.num_chosen for each in layers)
    return ExpertPlan(
        num_resident * size, num_experts, num_resident, expert_bytes(spec, formats, dtype), least,
        share, likely, missed_s, reason,
    )  # fmt: skip


@contextmanager
def suggesting(
    config: EngineConfig,
    spec: DecoderSpec,
    formats: WeightFormats,
    machine: Machine,
    dtype: str,
    fixed_bytes: int,
) -> Iterator[None]:
    """Where a model with experts does not fit, have the CapacityError say which pool of them would;
    `fixed_bytes` is what all but the KV cache takes, `machine.num_cores` those that compute."""
    try:
        yield
    except CapacityError as error:
        if machine.gpu is not None or config.expert_memory is not None or not any(mixtures(spec)):
            raise
        given = config.kv_cache_memory
        kv_bytes = _KV_BYTES if given is None else parse_bytes(given, option="kv_cache_memory")
        free = int(machine.available_memory * config.memory_utilization) - kv_bytes
        num_bytes = free - fixed_bytes + expert_bytes(spec, formats, dtype)
        plan = pool_of(max(0, num_bytes), spec, formats, dtype, machine.num_cores)
        if plan.num_resident < plan.least:
            raise
        raise CapacityError(
            f"{error}; or keep some experts in memory: expert_memory='{-(-plan.num_bytes >> 20)}"
            f"MiB' with a weights_cache has {plan.reason}, and a token waits "
            f"{1e3 * plan.missed_s:.0f} ms for the others"
        ) from None
