"""Variants: an engine, the form of its weights, and settings; and the process that an engine runs
in, driven by `peers.runner`.

A variant's name says all: `quire:bfloat16`, `vllm:w8a8`, `transformers:float32:way=paged`. An
engine that reads another format than Hugging Face's finds its files beside the model: for a model
`M2`, `openvino:int8` reads `M2-openvino-int8` (a folder or, with `.gguf` at the end, a file) if
that exists, else `M2` itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import JsonProcess
from quire.bench.workload import BenchRequest

ENGINES = ("quire", "transformers", "vllm", "openvino", "llamacpp")
USUAL = {
    "quire": ("bfloat16", "int8", "int4"),
    "vllm": ("bfloat16", "w8a8"),
    "openvino": ("bfloat16", "int8", "int4"),
    "llamacpp": ("bf16", "q8_0", "q4_0"),
    "transformers": ("float32:batch=32",),
}
"""What is compared unless the user says otherwise, as far as it is there."""
_MODULES = {"vllm": "vllm", "openvino": "openvino_genai", "transformers": "transformers"}
BITS = {
    "float32": 32,
    "bfloat16": 16,
    "bf16": 16,
    "int8": 8,
    "w8a8": 8,
    "q8_0": 8.5,
    "int4": 4.5,
    "q4_0": 4.5,
}
"""The forms, and bits a weight, with those of scales where they count."""
ANSWER_S = 1800.0
"""An engine that is silent for so long has failed; compiling a model can take minutes."""


class Variant(NamedTuple):
    """An engine, a form, and settings of its own."""

    engine: str
    form: str
    extra: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse a name; ValueError says what is wrong."""
        engine, *rest = text.split(":")
        if (
            engine not in ENGINES
            or not rest
            or rest[0] not in BITS
            or not all("=" in each for each in rest[1:])
        ):
            known = f"engines are {', '.join(ENGINES)}; forms are {', '.join(BITS)}"
            raise ValueError(f"{text!r} is not ENGINE:FORM[:KEY=VALUE...]; {known}")
        return cls(engine, rest[0], tuple(rest[1:]))

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return ":".join((self.engine, self.form, *self.extra))

    @property
    def bytes_per_weight(self) -> float:
        """Of the matrices."""
        return BITS[self.form] / 8

    def files(self, folder: Path) -> Path:
        """Return where its weights lie, see above."""
        beside = folder.resolve().with_name(f"{folder.resolve().name}-{self.engine}-{self.form}")
        return next(
            (each for each in (beside, beside.with_name(beside.name + ".gguf")) if each.exists()),
            folder,
        )


class Seat(NamedTuple):
    """What an engine's process needs to know besides its variant."""

    folder: Path
    vocab_size: int
    num_threads: int
    programs: dict[str, str]
    """By engine: the Python that has it, or for llamacpp the server;
    Quire's own Python for those not named."""
    preloads: dict[str, str]
    """By engine: LD_PRELOAD."""


def installed(seat: Seat) -> tuple[list[Variant], list[str]]:
    """Return the usual variants of every engine that is there, and what is left out, with the
    reason."""
    found, missing = [], []
    for engine, forms in USUAL.items():
        if not _is_there(engine, seat.programs):
            missing.append(
                f"{engine}: not found; name it with --peer (benchmarks/README.md says how to "
                "install it)"
            )
            continue
        for variant in (Variant.parse(f"{engine}:{form}") for form in forms):
            has_own_files = engine in ("openvino", "llamacpp") or variant.form == "w8a8"
            if has_own_files and variant.files(seat.folder) == seat.folder:
                missing.append(
                    f"{variant.name}: no {seat.folder.resolve().name}-{engine}-{variant.form} "
                    "beside the model"
                )
            else:
                found.append(variant)
    return found, missing


def _is_there(engine: str, programs: Mapping[str, str]) -> bool:
    return (
        engine == "quire"
        or engine in programs
        or (engine in _MODULES and find_spec(_MODULES[engine]) is not None)
    )


class Engines:
    """The engines that are open: one at a time, or all that were requested so far."""

    def __init__(self, seat: Seat, *, is_resident: bool) -> None:
        self._seat = seat
        self._is_resident = is_resident
        self._open: dict[str, PeerProcess] = {}

    def find(self, variant: str) -> PeerProcess | None:
        """Return an open one."""
        return self._open.get(variant)

    def open(self, variant: str) -> PeerProcess:
        """Start one, and end the others unless they stay.
        RuntimeError says what it said when it failed."""
        if not self._is_resident:
            self.close()
        self._open[variant] = PeerProcess(Variant.parse(variant), self._seat)
        return self._open[variant]

    def drop(self, variant: str) -> None:
        """Forget one that has failed."""
        if variant in self._open:
            self._open.pop(variant).close()

    def close(self) -> None:
        """End all."""
        for variant in list(self._open):
            self.drop(variant)


class PeerProcess(JsonProcess):
    """An engine in a process of its own, loaded and warmed up; idle between runs."""

    def __init__(self, variant: Variant, seat: Seat) -> None:
        program = seat.programs.get(variant.engine, sys.executable)
        python = sys.executable if variant.engine == "llamacpp" else program
        command = [
            python,
            "-m",
            f"benchmarks.peers.{variant.engine}",
            "--model",
            str(variant.files(seat.folder)),
            "--form",
        ]
        command += [
            variant.form,
            "--threads",
            str(seat.num_threads),
            "--vocab-size",
            str(seat.vocab_size),
        ]
        command += ["--program", program]
        command += [argument for each in variant.extra for argument in ("--extra", each)]
        env = dict(
            os.environ,
            OMP_NUM_THREADS=str(seat.num_threads),
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
        )
        if variant.engine in seat.preloads:
            env["LD_PRELOAD"] = seat.preloads[variant.engine]
        super().__init__(variant.name, command, env)
        self.description: dict[str, Any] = self.answer(ANSWER_S)
        """`ready_s`, `version`, `settings`."""

    def run(self, requests: Sequence[BenchRequest]) -> dict[str, Any]:
        """Return the figures of one timed run: `started_s`, `wall_s`, `cpu_s`, `token_s` (of a
        single sequence), `peak_rss_bytes`."""
        self.send(requests)
        return self.answer(ANSWER_S)
