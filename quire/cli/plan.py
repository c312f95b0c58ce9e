"""`quire plan`: what the engine would decide for a model on this machine, with reasons and costs.
Loads no weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from quire.cli.options import add_engine_options, engine_config
from quire.common.numbers import format_bytes
from quire.core.step_cost import StepCostModel, StepWork
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.engine.plan.engine_plan import EnginePlan
    from quire.engine.plan.machine import Machine

_CHUNK = 512
"""Tokens of the prompt whose speed is estimated."""
EXAMPLES = """\
examples:
  quire plan quire-storyteller
  quire plan ./my-model --max-model-len 8192 --kv-cache-memory 2GiB
  quire plan ./config.json --load-format dummy --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = engine_config(args)
    from quire.engine.assembly.loading import check_files
    from quire.engine.assembly.preparation import machine_for, plan_engine

    machine = machine_for(config)
    planned = plan_engine(config, machine)
    check_files(planned, may_be_absent=True)
    plan = planned.plan
    record = describe(plan, machine)
    record["kernels"] = _kernels(plan)
    print(json.dumps(record, indent=2) if args.json else render(record))
    return 0


def describe(plan: EnginePlan, machine: Machine) -> dict[str, Any]:
    """Return the plan as plain values: bytes, counts, and each decision with its reason."""
    spec, limits, flops = plan.spec, plan.limits, plan.spec.flops_per_token()
    return {
        "model": plan.config.model,
        "architecture": spec.architecture,
        "num_parameters": spec.num_parameters,
        "num_layers": len(spec.blocks),
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "is_tied": spec.is_tied,
        "device": plan.device,
        "machine": {
            "cpu": machine.cpu_name,
            "num_cores": machine.num_cores,
            "gpu": None if machine.gpu is None else machine.gpu.name,
            "total_memory_bytes": machine.total_memory
            if machine.gpu is None
            else machine.gpu.total_memory,
            "available_memory_bytes": machine.available_memory
            if machine.gpu is None
            else machine.gpu.free_memory,
        },
        "decisions": [each._asdict() for each in plan.decisions],
        "memory": {
            "weight_bytes": plan.weight_bytes,
            "kv_bytes": plan.kv_bytes,
            "workspace_bytes": plan.workspace_bytes,
            "adapter_bytes": plan.adapter_bytes,
            "image_bytes": plan.image_bytes,
            "replica_bytes": plan.replica_bytes,
            "total_bytes": plan.total_bytes,
            "kv_bytes_per_token": plan.kv_bytes_per_token,
            "weight_bytes_per_token": plan.formats.token_bytes(spec, plan.dtype),
        },
        "capacity": {
            "num_blocks": limits.num_blocks,
            "num_tokens": limits.num_slots,
            "num_sequences_of_max_len": limits.num_sequences(limits.max_model_len),
        },
        "estimated_steps": _estimated_steps(plan),
        "flops_per_token": {
            "layers": flops.layers,
            "head": flops.head,
            "attention_at_max_len": spec.attention_flops(limits.max_model_len),
        },
    }


def _estimated_steps(plan: EnginePlan) -> dict[str, float]:
    """Return what the engine starts from where it bounds steps by time; measured steps correct
    it."""
    model = StepCostModel(plan.step_costs)
    chunk = model.seconds(StepWork(1, 0, _CHUNK, 0, _CHUNK, _CHUNK * _CHUNK / 2))
    return {
        "decode_s": model.seconds(StepWork(1, 1, 1, 1, 1, 1.0)),
        "prompt_tokens_per_s": _CHUNK / chunk,
    }


def _adapters(memory: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A line where adapters are served."""
    num_bytes = memory["adapter_bytes"]
    return [("adapters", format_bytes(num_bytes), "at most")] if num_bytes else []


def _images(memory: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A line where images are read."""
    num_bytes = memory["image_bytes"]
    return [("images", format_bytes(num_bytes), "rows of encoded ones")] if num_bytes else []


def _replicas(memory: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A line where there are several replicas, of which the lines above are one."""
    one, together = memory["replica_bytes"], memory["total_bytes"]
    return [] if one == together else [("a replica", format_bytes(one), f"of {together // one}")]


def _memory(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return what takes memory, how much, and of what."""
    memory, total = record["memory"], record["memory"]["total_bytes"]
    return [
        ("weights", format_bytes(memory["weight_bytes"]), _weights_read(memory)),
        ("KV cache", format_bytes(memory["kv_bytes"]), _capacity(memory, record["capacity"])),
        ("workspace", format_bytes(memory["workspace_bytes"]), "at most, in a full step"),
        *_adapters(memory),
        *_images(memory),
        *_replicas(memory),
        ("total", format_bytes(total), _share(total, record["machine"])),
    ]


def render(record: dict[str, Any]) -> str:
    """Return the plan for people."""
    flops = record["flops_per_token"]
    sections = [
        f"{record['model']}: {record['architecture']}, {record['num_parameters']:,} "
        f"parameters, {record['num_layers']} layers, "
        f"hidden {record['hidden_size']}, vocabulary {record['vocab_size']:,}",
        _section(
            "Decisions",
            [(each["name"], each["value"], each["reason"]) for each in record["decisions"]],
        ),
        _section("Memory", _memory(record)),
        _section(
            "Steps, as estimated before any is measured",
            [
                (
                    "one token",
                    f"{1e3 * record['estimated_steps']['decode_s']:,.1f} ms",
                    "of one request with a short context",
                ),
                (
                    "prompt",
                    f"{record['estimated_steps']['prompt_tokens_per_s']:,.0f} tokens/s",
                    "of a short prompt",
                ),
            ],
        ),
        _section(
            "Operations per token",
            [
                ("layers", _gflop(flops["layers"]), "matrix products of every computed token"),
                ("output head", _gflop(flops["head"]), "for sampled tokens only"),
                (
                    "attention",
                    _gflop(flops["attention_at_max_len"]),
                    "for the last token of the longest sequence",
                ),
            ],
        ),
        _section(
            "Kernels",
            [("back end", record["kernels"]["name"], record["kernels"]["detail"])]
            + [("not chosen", "", reason) for reason in record["kernels"]["reasons"]],
        ),
    ]
    return "\n\n".join(sections)


def _kernels(plan: EnginePlan) -> dict[str, Any]:
    """Return the back end that would run, and what speaks against a better one."""
    from quire.engine.assembly.builder import select

    try:
        selection = select(plan)
    except ConfigError as error:
        return {"name": "none", "detail": str(error), "reasons": []}
    name = type(selection.kernels).__name__.removesuffix("Kernels").lower()
    detail = (
        f"on {plan.num_threads} threads"
        if plan.device == "cpu"
        else "compiled at first use, kept in Triton's cache"
    )
    if name == "cpu":
        from quire.kernels import cpu

        detail = f"instruction set {cpu.isa()} of {', '.join(cpu.supported_isas())}, {detail}"
    return {"name": name, "detail": detail, "reasons": list(selection.reasons)}


def _section(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join([title, *_lines(rows, widths)])


def _lines(rows: Iterable[tuple[str, str, str]], widths: Sequence[int]) -> Iterable[str]:
    for name, value, reason in rows:
        yield f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {reason}".rstrip()


def _weights_read(memory: dict[str, int]) -> str:
    return f"of which one token alone reads {format_bytes(memory['weight_bytes_per_token'])}"


def _capacity(memory: dict[str, int], capacity: dict[str, int]) -> str:
    return (
        f"{capacity['num_tokens']:,} tokens in {capacity['num_blocks']:,} blocks, "
        f"{format_bytes(memory['kv_bytes_per_token'])} a token; "
        f"{capacity['num_sequences_of_max_len']} of the longest sequences"
    )


def _share(num_bytes: int, machine: dict[str, Any]) -> str:
    available, total = machine["available_memory_bytes"], machine["total_memory_bytes"]
    return (
        f"of {format_bytes(available)} free and {format_bytes(total)} in all "
        f"({num_bytes / max(1, available):.0%} of free)"
    )


def _gflop(num_flops: int) -> str:
    return f"{num_flops / 1e9:.3f} GFLOP" if num_flops >= 1e7 else f"{num_flops / 1e6:.3f} MFLOP"
