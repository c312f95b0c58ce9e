"""`quire doctor`: looks at this machine and installation, and says what is wrong or slow, and what
to do about it.

Owns the checks; each is one function that yields findings and changes nothing (one temporary file
is written and removed).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from quire import __version__
from quire.common.numbers import format_bytes
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.engine.plan.machine import Machine

Status = Literal["ok", "warning", "failure"]

REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "tqdm", "huggingface_hub")
OPTIONAL = {
    "starlette": "for quire serve and quire route: pip install 'quire-llm[serve]'",
    "pillow": "for images: pip install 'quire-llm[images]'",
    "triton": "for GPU kernels: pip install 'quire-llm[gpu]'",
    "transformers": "for benchmarks against it",
}
_ISA_FLAGS = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
)
_FLAGS_OF_ISAS = {
    "avx2": {"avx2", "fma"},
    "avxvnni": {"avx_vnni"},
    "avx512vnni": {"avx512_vnni"},
    "avx512bf16": {"avx512_bf16"},
    "amx": {"amx_bf16", "amx_int8"},
    "neon": {"asimd"},
    "neondot": {"asimddp"},
    "neoni8mm": {"asimddp", "i8mm"},
    "neonbf16": {"asimddp", "i8mm", "bf16"},
}
"""What a processor has that can run kernels of these names."""
_MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}

EXAMPLES = """\
examples:
  quire doctor
  quire doctor --json

The exit code is 1 if something keeps Quire from working; what only makes it slower is a warning.
"""


class Finding(NamedTuple):
    """One thing looked at."""

    name: str
    status: Status
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 if a check failed."""
    findings = examine()
    is_healthy = all(finding.status != "failure" for finding in findings)
    if args.json:
        print(
            json.dumps(
                {"healthy": is_healthy, "findings": [each._asdict() for each in findings]}, indent=2
            )
        )
    else:
        width = max(len(each.name) for each in findings)
        for name, status, detail in findings:
            print(f"{_MARKS[status]}  {name:<{width}}  {detail}")
        print(
            "\nQuire can run here."
            if is_healthy
            else "\nQuire cannot run here: see the lines marked FAIL."
        )
    return 0 if is_healthy else 1


def examine() -> list[Finding]:
    """Return all findings. A check that itself breaks is reported as one."""
    findings = []
    for check in CHECKS:
        try:
            findings += list(check())
        except Exception as error:
            name = check.__name__.removeprefix("_check_").replace("_", " ")
            findings.append(
                Finding(
                    name, "failure", f"the check itself failed: {type(error).__name__}: {error}"
                )
            )
    return findings


def _check_versions() -> Iterator[Finding]:
    yield Finding("quire", "ok", f"{__version__} in {Path(__file__).parent.parent}")
    is_recent = sys.version_info >= (3, 11)
    text = f"{platform.python_version()} ({sys.executable})" + (
        "" if is_recent else "; at least 3.11 is needed"
    )
    yield Finding("python", "ok" if is_recent else "failure", text)
    yield Finding(
        "system", "ok", f"{platform.system()} {platform.release()} on {platform.machine()}"
    )


def _check_packages() -> Iterator[Finding]:
    for name in REQUIRED:
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "failure", f"is not installed; pip install {name}")
    for name, purpose in OPTIONAL.items():
        try:
            yield Finding(name, "ok", f"{metadata.version(name)} (optional, {purpose})")
        except metadata.PackageNotFoundError:
            yield Finding(name, "ok", f"not installed (optional, {purpose})")


def _check_machine() -> Iterator[Finding]:
    from quire.engine.plan.machine import Machine

    machine = Machine.inspect()
    yield Finding("cpu", "ok", machine.cpu_name)
    flags = [flag for flag in _ISA_FLAGS if flag in _cpu_flags()]
    lacks_avx2 = platform.machine() == "x86_64" and "avx2" not in flags
    hint = "; without AVX2 the kernels are slow" if lacks_avx2 else ""
    yield Finding(
        "instructions",
        "warning" if lacks_avx2 else "ok",
        (", ".join(flags) or "none of note") + hint,
    )
    yield Finding(
        "cores",
        "ok",
        f"{machine.num_cores} to use ({machine.cores_reason}, of {os.cpu_count() or 1})",
    )
    yield _nodes(machine)
    memory = (
        f"{format_bytes(machine.available_memory)} free of {format_bytes(machine.total_memory)}"
    )
    is_short = machine.available_memory < 1 << 30
    hint = "; less than 1 GiB holds small models only" if is_short else ""
    yield Finding("memory", "warning" if is_short else "ok", memory + hint)


def _nodes(machine: Machine) -> Finding:
    if machine.num_nodes == 1:
        return Finding("memory nodes", "ok", "one, or all cores to use on the same one")
    advice = "bind the process to one node, or interleave its memory (docs/howto/threads.md)"
    return Finding(
        "memory nodes",
        "warning",
        f"the cores to use belong to {machine.num_nodes} NUMA nodes; {advice}",
    )


def _check_kernels() -> Iterator[Finding]:
    import torch

    from quire.kernels import cpu

    yield Finding(
        "torch threads",
        "ok",
        f"{torch.get_num_threads()} by default; the engine sets its own number",
    )
    usable: tuple[str, ...] | None = None
    for dtype in cpu.DTYPES:
        reasons = cpu.reasons_against("cpu", getattr(torch, dtype))
        name = f"native kernels, {dtype}"
        if reasons:
            yield Finding(
                name, "warning", f"not used, so slow reference kernels are: {'; '.join(reasons)}"
            )
        else:
            yield Finding(name, "ok", f"{cpu.isa()} (of {', '.join(cpu.supported_isas())})")
            usable = cpu.supported_isas()
    unused = [] if usable is None else unused_isas(_cpu_flags(), usable)
    if unused:
        detail = (
            f"the processor has what {', '.join(unused)} needs, and the kernels do not use it; "
            f"{_advice(unused)}"
        )
        yield Finding("instructions", "warning", detail)
    pools = openmp_pools()
    if len(pools) > 1:
        detail = (
            f"{len(pools)} pools will fight over the cores: {', '.join(pools)}; is one preloaded?"
        )
        yield Finding("OpenMP", "warning", detail)
    else:
        yield Finding("OpenMP", "ok", ", ".join(pools) or "none loaded")


def _check_gpu() -> Iterator[Finding]:
    """Report a GPU that could be used; one that is there and cannot is a warning;
    none is as usual."""
    from quire.engine.plan.gpu import inspect_gpu, reasons_against

    try:
        gpu = inspect_gpu()
    except QuireError as error:
        yield Finding("gpu", "ok", f"none to compute on: {error}")
        return
    capability = ".".join(map(str, gpu.capability))
    text = (
        f"{gpu.name} (compute capability {capability}), {format_bytes(gpu.free_memory)} free, "
        f"driver for CUDA {gpu.driver}"
    )
    reasons = reasons_against(gpu)
    if reasons:
        yield Finding("gpu", "warning", f"{text}; cannot be used: {'; '.join(reasons)}")
    else:
        yield Finding(
            "gpu",
            "ok",
            f"{text}; device=cuda computes on it, with kernels that have not been tried on one yet",
        )


def _check_models() -> Iterator[Finding]:
    from quire.weights.folder import SHIPPED_MODELS, read_model_config, resolve_model

    for name in SHIPPED_MODELS:
        try:
            folder = resolve_model(name)
            read_model_config(folder)
        except QuireError as error:
            yield Finding(name, "failure", str(error))
            continue
        has_weights = any(folder.glob("*.safetensors"))
        detail = str(folder) if has_weights else f"{folder} holds no weights; reinstall Quire"
        yield Finding(name, "ok" if has_weights else "failure", detail)


def _check_cache() -> Iterator[Finding]:
    """Check where models from the hub are kept: the nearest folder that exists must be writable."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    cache = Path(home).expanduser()
    folder = next(each for each in (cache, *cache.parents) if each.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(
            "model cache",
            "warning",
            f"{cache} cannot be written ({error.strerror}); models cannot be downloaded",
        )
    else:
        yield Finding("model cache", "ok", f"{cache} can be written")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _check_versions,
    _check_packages,
    _check_machine,
    _check_kernels,
    _check_gpu,
    _check_models,
    _check_cache,
)


def unused_isas(flags: set[str], supported: Sequence[str]) -> list[str]:
    """Return instruction sets that the processor has and the kernels do not use."""
    return [
        name for name, needed in _FLAGS_OF_ISAS.items() if needed <= flags and name not in supported
    ]


def _advice(unused: Sequence[str]) -> str:
    compiler = (
        "the compiler that built Quire did not know it: build again with one that does (GCC 11, "
        "Clang 12 or later)"
    )
    tiles = (
        "the system denies this process the tiles (a sandbox, a virtual machine, or Linux before "
        "5.16)"
    )
    return f"{compiler}, or {tiles}" if "amx" in unused else compiler


def openmp_pools() -> list[str]:
    """OpenMP runtimes that this process has loaded, by file (Linux)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    names = ("libgomp", "libiomp", "libomp")
    return sorted(path for path in paths if Path(path).name.startswith(names))


def _cpu_flags() -> set[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()
