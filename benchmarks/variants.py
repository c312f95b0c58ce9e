"""Variants: an engine, the form of its weights, and settings; and the process that an engine runs in, driven by `peers.runner`.

A variant's name says all: `quire:bfloat16`, `vllm:w8a8`, `transformers:float32:way=paged`. An engine that reads another format
than Hugging Face's finds its files beside the model: for a model `M2`, `openvino:int8` reads `M2-openvino-int8` (a folder or,
with `.gguf` at the end, a file) if that exists, else `M2` itself.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench.workload import BenchRequest

ENGINES = ("quire", "transformers", "vllm", "openvino", "llamacpp")
BITS = {"float32": 32, "bfloat16": 16, "bf16": 16, "int8": 8, "w8a8": 8, "q8_0": 8.5, "int4": 4.5, "q4_0": 4.5}
"""The forms, and bits a weight, with those of scales where they count."""
_ANSWER_S = 1800.0
"""An engine that is silent for so long has failed; compiling a model can take minutes."""
_ROOT = Path(__file__).parent.parent


class Variant(NamedTuple):
    """An engine, a form, and settings of its own."""

    engine: str
    form: str
    extra: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Variant:
        """From its name; ValueError says what is wrong."""
        engine, *rest = text.split(":")
        if engine not in ENGINES or not rest or rest[0] not in BITS or not all("=" in each for each in rest[1:]):
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
        """Where its weights lie, see above."""
        beside = folder.resolve().with_name(f"{folder.resolve().name}-{self.engine}-{self.form}")
        return next((each for each in (beside, beside.with_name(beside.name + ".gguf")) if each.exists()), folder)


class Seat(NamedTuple):
    """What an engine's process needs to know besides its variant."""

    folder: Path
    vocab_size: int
    num_threads: int
    programs: dict[str, str]
    """By engine: the Python that has it, or for llamacpp the server; Quire's own Python for those not named."""
    preloads: dict[str, str]
    """By engine: LD_PRELOAD."""


class PeerProcess:
    """An engine in a process of its own, loaded and warmed up; idle between runs."""

    def __init__(self, variant: Variant, seat: Seat) -> None:
        self.variant = variant
        program = seat.programs.get(variant.engine, sys.executable)
        python = sys.executable if variant.engine == "llamacpp" else program
        command = [python, "-m", f"benchmarks.peers.{variant.engine}", "--model", str(variant.files(seat.folder)), "--form"]
        command += [
            variant.form,
            "--threads",
            str(seat.num_threads),
            "--vocab-size",
            str(seat.vocab_size),
            "--program",
            program,
        ]
        command += [argument for each in variant.extra for argument in ("--extra", each)]
        env = dict(os.environ, OMP_NUM_THREADS=str(seat.num_threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        if variant.engine in seat.preloads:
            env["LD_PRELOAD"] = seat.preloads[variant.engine]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, cwd=_ROOT, env=env, text=True, **pipes)
        self.description: dict[str, Any] = self._answer()
        """`ready_s`, `version`, `settings`."""

    def run(self, requests: Sequence[BenchRequest]) -> dict[str, Any]:
        """One timed run: `wall_s`, `cpu_s`, `token_s` (of a single sequence), `peak_rss_bytes`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        is_ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        line = self._process.stdout.readline() if is_ready else ""
        if not line:
            if not is_ready:
                self._process.kill()
            self._process.communicate()
            self._errors.seek(0)
            errors = self._errors.read()[-3000:].decode(errors="replace")
            self.close()
            raise RuntimeError(f"{self.variant.name} failed with exit code {self._process.returncode}:\n{errors}")
        answer: dict[str, Any] = json.loads(line)
        return answer
