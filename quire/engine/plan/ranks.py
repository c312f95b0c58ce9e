"""What each of several ranks holds of a model, before any is started; and what ranks cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from quire.common.numbers import format_bytes
from quire.config.engine import EngineConfig
from quire.config.processes import MAX_RANKS
from quire.engine.plan.experts import mixtures
from quire.engine.plan.machine import Machine
from quire.errors import ConfigError
from quire.models.cutting import divisible_tokens
from quire.models.declaration import DecoderSpec
from quire.models.lowering import lower, projection_sizes
from quire.models.tensors import DTYPE_BYTES
from quire.program.operations import Program
from quire.program.sharding import Shares, cache_heads, shard
from quire.program.stages import Stage, cut_into_stages, most_stages
from quire.quant.formats import WeightFormats

PP = "pipeline_parallel_size"


class RankShare(NamedTuple):
    """What one rank holds."""

    weight_bytes: int
    kv_share: float
    """Of what one process would keep of each token."""


def check_ranks(config: EngineConfig, spec: DecoderSpec) -> None:
    """Raise ConfigError for what is not available with several processes of one model."""
    if config.num_processes == 1:
        return
    refused = {
        "device='cuda'": config.device == "cuda",
        # torch's products, whose bits depend on how many outputs a weight has
        f"kernels={config.kernels!r}": config.kernels not in ("auto", "cpu"),
        f"expert_memory={config.expert_memory!r}": config.expert_memory is not None,
    }
    _refuse(refused, sizes_of(config))
    if config.pipeline_parallel_size > 1:
        _refuse(_refused_of_stages(config, spec), f"{PP}={config.pipeline_parallel_size}")
    most = most_stages(lower(spec)[0])
    if config.pipeline_parallel_size > most:
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size} is too many: "
            f"{spec.architecture} has {most} layers to divide; give at most {most}"
        )
    if config.enable_expert_parallel:
        _check_experts(config.tensor_parallel_size, spec)


def _refused_of_stages(config: EngineConfig, spec: DecoderSpec) -> dict[str, bool]:
    refused = {"a draft head that reads inner layers": bool(spec.kept)}
    if len({layer.window for layer in spec.kv_layers}) > 1:
        # a block is of some layers alone, and which of the stages has these is not known there
        which = "of a model with layers of several windows"
        refused |= {
            f"kv_cache_dir={config.kv_cache_dir!r} {which}": config.kv_cache_dir is not None,
            f"kv_offloading_size={config.kv_offloading_size!r} {which}": bool(
                config.kv_offloading_size
            ),
            f"kv_transfer_config {which}": config.kv_transfer is not None,
        }
    return refused


def _refuse(given: Mapping[str, bool], sizes: str) -> None:
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(f"{name} is not available with {sizes} yet; leave one of them out")


def sizes_of(config: EngineConfig) -> str:
    """Name the options that divide one model among processes."""
    given = ("tensor_parallel_size", "pipeline_parallel_size")
    return " and ".join(
        f"{name}={getattr(config, name)}" for name in given if getattr(config, name) > 1
    )


def _check_experts(num_ranks: int, spec: DecoderSpec) -> None:
    """Raise ConfigError unless every rank can have as many experts of each layer."""
    counts = sorted({len(each.experts) for each in mixtures(spec)})
    if not counts:
        raise ConfigError(
            f"enable_expert_parallel=True, and {spec.architecture} has no experts; leave it out"
        )
    for count in counts:
        if count % num_ranks:
            possible = [str(size) for size in range(2, MAX_RANKS + 1) if count % size == 0]
            raise ConfigError(
                f"enable_expert_parallel=True: {count} experts cannot be divided among "
                f"tensor_parallel_size={num_ranks} processes; give a size that divides them "
                f"({', '.join(possible)}), or leave enable_expert_parallel out"
            )


def cores_of_each(machine: Machine, num_ranks: int) -> tuple[int, str]:
    """Return how many cores one of the processes has, and why."""
    if num_ranks == 1:
        return machine.num_cores, machine.cores_reason
    reason = f"of each process: {machine.num_cores} {machine.cores_reason}, divided by {num_ranks}"
    return max(1, machine.num_cores // num_ranks), reason


def decisions(
    config: EngineConfig, spec: DecoderSpec, formats: WeightFormats, dtype: str
) -> Iterator[tuple[str, object, str]]:
    """Give what `quire plan` says of ranks and stages, where there are several."""
    num_ranks, is_by_expert = config.tensor_parallel_size, config.enable_expert_parallel
    num_stages = config.pipeline_parallel_size
    shares = rank_shares(spec, formats, dtype, (num_stages, num_ranks), is_by_expert=is_by_expert)
    if num_ranks > 1:
        yield "tensor_parallel_size", num_ranks, f"given; {_held(shares)}"
    if num_stages > 1:
        stages = stages_of(spec, num_stages)
        layers = ", ".join(str(len(stage.caches)) for stage in stages)
        reason = f"given; layers of each stage: {layers}"
        yield "pipeline_parallel_size", num_stages, f"{reason}; {_held(shares)}"
    if is_by_expert:
        count = max(len(each.experts) for each in mixtures(spec))
        yield "enable_expert_parallel", True, f"given; a rank holds {count // num_ranks} of {count}"


def _held(shares: Sequence[RankShare]) -> str:
    largest = format_bytes(max(share.weight_bytes for share in shares))
    kv = ", ".join(f"{share.kv_share:.0%}" for share in shares)
    return f"a process holds at most {largest} of the weights, of the KV cache {kv}"


def stages_of(spec: DecoderSpec, num_stages: int) -> list[Stage]:
    program, parameters = lower(spec)
    return cut_into_stages(program, projection_sizes(parameters), num_stages)


def rank_shares(
    spec: DecoderSpec,
    formats: WeightFormats,
    dtype: str,
    shape: tuple[int, int],
    *,
    is_by_expert: bool = False,
) -> tuple[RankShare, ...]:
    """Return what each process holds, of so many stages and ranks of each; empty of one alone.
    Weights that every rank holds all of count for each."""
    num_stages, num_ranks = shape
    if num_stages * num_ranks == 1:
        return ()
    found, num_tokens = [], divisible_tokens(spec)
    for stage in stages_of(spec, num_stages):
        for rank in range(num_ranks):
            divided = stage.program, Shares()
            if num_ranks > 1:
                divided = shard(
                    stage.program, rank, num_ranks, num_tokens, is_by_expert=is_by_expert
                )
            found.append(_share(spec, formats, dtype, stage, divided))
    return tuple(found)


def _share(
    spec: DecoderSpec,
    formats: WeightFormats,
    dtype: str,
    stage: Stage,
    part: tuple[Program, Shares],
) -> RankShare:
    (program, parameters), (divided, shares) = lower(spec), part
    spared = 0.0
    for number, parts in enumerate(parameters.linears):
        num_outputs = sum(part.num_outputs for part in parts)
        held: int | None = None
        is_end = parts == (spec.head,)
        if number not in stage.linears and not (is_end and stage.is_first):
            held = 0
        elif number in shares.linears:
            held = sum(map(len, shares.linears[number]))
        elif shares.tokens is not None and is_end:
            held = len(shares.tokens)
        is_counted = not (spec.is_tied and is_end) or formats.of(parts) is not None
        if held is not None and is_counted:
            spared += formats.part_bytes(parts, dtype) * (1 - held / num_outputs)
    num_others = 0
    if not stage.is_first:
        num_others = spec.vocab_size
    elif shares.tokens is not None:
        num_others = spec.vocab_size - len(shares.tokens)
    if num_others:
        spared += num_others * spec.hidden_size * DTYPE_BYTES[dtype]
    whole, own = sum(cache_heads(program)), sum(cache_heads(divided))
    kv_share = own / whole if whole else 0.0
    return RankShare(formats.weight_bytes(spec, dtype) - round(spared), kv_share)
