"""The record of a benchmark: one JSON schema for all of them, and the check that a record keeps to
it.

docs/benchmarks/records.md explains each field. A record names everything that is needed to judge
the numbers and to measure
again: machine, versions, commit, decisions of the engine, workload, and the limits of the machine
in the same run.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from quire import __version__
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.plan.machine import Machine

SCHEMA = "quire-bench/3"

Number = (int, float)
_SPREAD = {"mean": Number, "p50": Number, "p90": Number, "p99": Number}
_OPTIONAL = type(None)

RESULT_SHAPE: dict[str, Any] = {
    "wall_s": Number,
    "requests_per_s": Number,
    "prompt_tokens_per_s": Number,
    "output_tokens_per_s": Number,
    "total_tokens_per_s": Number,
    "ttft_s": _SPREAD,
    "tpot_s": [_SPREAD, _OPTIONAL],
    "itl_s": [_SPREAD, _OPTIONAL],
    "e2e_s": _SPREAD,
    "prefix_hit_rate": Number,
    "kv_waste": Number,
    "num_preemptions": Number,
    "peak_num_blocks": Number,
    "peak_block_share": Number,
    "num_steps": Number,
    "step_overhead_s": Number,
    "overhead_share": Number,
    "roofline": {
        "flops": Number,
        "num_bytes": Number,
        "flops_share": Number,
        "bytes_share": Number,
        "roofline_share": Number,
        "peak_flops_per_s": Number,
        "peak_bytes_per_s": Number,
        "num_samples": Number,
    },
}

_CIRCUMSTANCES: dict[str, Any] = {
    "schema": str,
    "kind": str,
    "started_at": str,
    "command": str,
    "machine": {
        "cpu": str,
        "num_cores": int,
        "total_memory_bytes": int,
        "available_memory_bytes": int,
        "load_average_1min": Number,
        "system": str,
        "gpu": [str, _OPTIONAL],
    },
    "versions": {"quire": str, "python": str, "torch": str, "commit": [str, _OPTIONAL]},
}

SHAPE: dict[str, Any] = {
    **_CIRCUMSTANCES,
    "engine": {
        "model": str,
        "architecture": str,
        "num_parameters": int,
        "dtype": str,
        "kernels": str,
        "num_threads": int,
        "decisions": dict,
    },
    "workload": {"name": str, "parameters": dict, "totals": dict},
    "peaks": {
        "read_bytes_per_s": Number,
        "gemm_flops_per_s": dict,
        "products": dict,
        "num_samples": int,
    },
    "num_repetitions": int,
    "repetitions": list,
    "median": RESULT_SHAPE,
    "profile_s": [dict, _OPTIONAL],
}

_SERVE_SPREAD = [_SPREAD | {"p95": Number}, _OPTIONAL]
_OPTIONAL_NUMBER = [Number, _OPTIONAL]

SERVE_RESULT_SHAPE: dict[str, Any] = {
    "wall_s": Number,
    "num_requests": int,
    "num_ok": int,
    "statuses": dict,
    "errors": dict,
    "num_prompt_tokens": int,
    "num_output_tokens": int,
    "requests_per_s": Number,
    "output_tokens_per_s": Number,
    "total_tokens_per_s": Number,
    "goodput_requests_per_s": _OPTIONAL_NUMBER,
    "goodput_share": _OPTIONAL_NUMBER,
    "ttft_s": _SERVE_SPREAD,
    "tpot_s": _SERVE_SPREAD,
    "itl_s": _SERVE_SPREAD,
    "e2e_s": _SERVE_SPREAD,
    "refusal_s": _SERVE_SPREAD,
    "send_delay_s": _SERVE_SPREAD,
    "peak_concurrency": int,
    "client": {
        "cpu_s": Number,
        "cpu_s_per_output_token": Number,
        "cpu_share": Number,
        "lag_s": _SERVE_SPREAD,
    },
}

SERVE_SHAPE: dict[str, Any] = {
    **_CIRCUMSTANCES,
    "server": {
        "url": str,
        "model": str,
        "endpoint": str,
        "max_model_len": [int, _OPTIONAL],
        "version": [str, _OPTIONAL],
    },
    "workload": {"name": str, "parameters": dict, "totals": dict},
    "configuration": {
        "request_rate": _OPTIONAL_NUMBER,
        "end_rate": _OPTIONAL_NUMBER,
        "burstiness": _OPTIONAL_NUMBER,
        "speed_up": _OPTIONAL_NUMBER,
        "max_concurrency": [int, _OPTIONAL],
        "duration_s": _OPTIONAL_NUMBER,
        "num_warmups": int,
        "objectives_ms": dict,
        "body": dict,
    },
    "result": SERVE_RESULT_SHAPE,
    "series": {"interval_s": Number, "output_tokens_per_s": list, "in_flight": list},
    "requests": dict,
}


def problems(record: object, shape: Any = None, path: str = "") -> list[str]:
    """Return what is wrong with a record, by path: missing and unknown keys, wrong types.
    Empty for a good one."""
    if shape is None:
        shape = (
            SERVE_SHAPE if isinstance(record, Mapping) and record.get("kind") == "serve" else SHAPE
        )
    if isinstance(shape, Mapping):
        if not isinstance(record, Mapping):
            return [f"{path or 'record'} is {type(record).__name__}, not an object"]
        found = [f"{path}{key} is missing" for key in shape if key not in record]
        found += [f"{path}{key} is not in the schema" for key in record if key not in shape]
        for key in shape:
            if key in record:
                found += problems(record[key], shape[key], f"{path}{key}.")
        if not path:
            found += _problems_of_repetitions(record)
        return found
    if isinstance(shape, list):
        attempts = [problems(record, each, path) for each in shape]
        return [] if any(not attempt for attempt in attempts) else attempts[0]
    is_right = isinstance(record, shape) and not (
        isinstance(record, bool) and shape in (int, Number)
    )
    return [] if is_right else [f"{path.rstrip('.')} is {type(record).__name__}"]


def _problems_of_repetitions(record: Mapping[str, Any]) -> list[str]:
    found = (
        []
        if record.get("schema") == SCHEMA
        else [f"schema is {record.get('schema')!r}, not {SCHEMA!r}"]
    )
    repetitions = record.get("repetitions")
    if not isinstance(repetitions, list):
        return found
    for number, each in enumerate(repetitions):
        found += problems(each, RESULT_SHAPE, f"repetitions[{number}].")
    return found


def describe_machine(machine: Machine) -> dict[str, Any]:
    """Return the `machine` part. The load average tells whether others were at work."""
    return {
        "cpu": machine.cpu_name,
        "num_cores": machine.num_cores,
        "total_memory_bytes": machine.total_memory,
        "available_memory_bytes": machine.available_memory,
        "load_average_1min": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpu": None
        if machine.gpu is None
        else f"{machine.gpu.name}, driver for CUDA {machine.gpu.driver}",
    }


def describe_versions() -> dict[str, Any]:
    """Return the `versions` part."""
    return {
        "quire": __version__,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "commit": _commit(),
    }


def describe_engine(plan: EnginePlan, kernels: str) -> dict[str, Any]:
    """Return the `engine` part: what was decided."""
    return {
        "model": plan.config.model,
        "architecture": plan.spec.architecture,
        "num_parameters": plan.spec.num_parameters,
        "dtype": plan.dtype,
        "kernels": kernels,
        "num_threads": plan.num_threads,
        "decisions": {each.name: each.value for each in plan.decisions},
    }


def timestamp() -> str:
    """Now, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _commit() -> str | None:
    """Return the commit that is checked out where this package lies, with "+" if files differ from
    it; None outside a repository."""
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
