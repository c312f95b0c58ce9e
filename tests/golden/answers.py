"""What a case answers on one back end, as text that keeps every bit, and where two answers differ
first.

Log-probabilities are kept as the float32 nearest to them: what is behind that comes from the C
library's logarithm.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from quire import BeamSearchParams, SamplingParams
from quire.engine.front.outputs import BeamSearchOutput, LogprobsByToken, RequestOutput
from quire.kernels import cpu
from quire.kernels.triton.interpretation import is_interpreted
from tests.golden.cases import Case, Requests, start
from tests.golden.exact_functions import ExactFunctions, exact_interpreter

Answer = Mapping[str, list[str]]
"""A request's name to a line for each of its sequences, "tokens | their log-probabilities | digest
of all else that is reported", and one for the prompt's log-probabilities where there are any.
"""


class Backend(NamedTuple):
    """What computes."""

    kernels: str
    """"cpu", "reference" or "triton"."""
    isa: str | None = None
    """The instruction set of the native kernels."""

    @property
    def name(self) -> str:
        """For people, and with `record` for the file."""
        return self.isa or self.kernels

    @property
    def record(self) -> str:
        """The name of its records. An instruction set that is emulated
        shares those of the real one."""
        return self.name.removesuffix("emulated")

    def compute(self, case: Case, path: Path) -> Answer:
        """Answer all requests of a case, whose checkpoint is at `path`, in a new engine."""
        with self._active(), ExactFunctions(), start(case, path, self.kernels) as llm:
            return {name: lines for requests in case.rounds for name, lines in _run(llm, requests)}

    @contextmanager
    def _active(self) -> Iterator[None]:
        with (
            exact_interpreter() if self.kernels == "triton" else nullcontext(),
            cpu.using(isa=self.isa) if self.isa is not None else nullcontext(),
        ):
            yield


def backends(case: Case) -> list[Backend]:
    """All of this machine that the case is recorded for."""
    has_native, has_triton = (
        cpu.IMPORT_ERROR is None,
        is_interpreted() and find_spec("triton") is not None,
    )
    isas = [*cpu.supported_isas(), *cpu.emulated_isas()] if has_native else []
    found = (
        [Backend("cpu", isa) for isa in isas]
        + [Backend("reference")]
        + [Backend("triton")] * has_triton
    )
    return [each for each in found if each.kernels in case.kernels and case.is_possible]


def _run(llm: Any, requests: Requests) -> Iterator[tuple[str, list[str]]]:
    """Samples run together, and then beams."""
    for kind, ask in ((SamplingParams, _samples), (BeamSearchParams, _beams)):
        chosen = {
            name: request for name, request in requests.items() if isinstance(request[1], kind)
        }
        if chosen:
            yield from zip(chosen, ask(llm, *zip(*chosen.values(), strict=True)), strict=True)


def _samples(llm: Any, prompts: Any, params: Any) -> list[list[str]]:
    outputs = llm.generate(
        [{"prompt_token_ids": each} for each in prompts], list(params), use_tqdm=False
    )
    return [_lines(output) for output in outputs]


def _beams(llm: Any, prompts: Any, params: Any) -> list[list[str]]:
    found: list[BeamSearchOutput] = []
    for prompt, each in zip(prompts, params, strict=True):
        found += llm.beam_search([{"prompt_token_ids": prompt}], each)
    assert all(each.sequences for each in found), [each.error for each in found]
    return [
        [_line(beam.token_ids, [beam.cumulative_logprob, beam.score]) for beam in each.sequences]
        for each in found
    ]


def _lines(output: RequestOutput) -> list[str]:
    assert output.error is None, output.error
    lines = []
    for each in output.outputs:
        logprobs = [
            entries[token].logprob
            for token, entries in zip(each.token_ids, each.logprobs or (), strict=False)
        ]
        cached = [f"{output.num_cached_tokens} from the cache"] * (output.num_cached_tokens > 0)
        lines.append(
            " | ".join([_line(each.token_ids, logprobs), *_digest(each.logprobs), *cached])
        )
    return [*lines, *(f"prompt | {digest}" for digest in _digest(output.prompt_logprobs))]


def _line(token_ids: list[int], logprobs: list[float]) -> str:
    return " | ".join(
        [" ".join(map(str, token_ids)), *([" ".join(map(_hex, logprobs))] if logprobs else [])]
    )


def _hex(logprob: float) -> str:
    return struct.pack(">f", logprob).hex()


def _digest(places: Iterable[LogprobsByToken | None] | None) -> list[str]:
    """Of tokens, their order, ranks and log-probabilities; nothing where none were wanted."""
    if places is None:
        return []
    entries = [
        [(token, _hex(each.logprob), each.rank) for token, each in (place or {}).items()]
        for place in places
    ]
    return [hashlib.sha256(repr(entries).encode()).hexdigest()[:8]]


def difference(found: Answer, recorded: Answer) -> str | None:
    """The first thing in which an answer differs from the record, for people;
    None where it is the same."""
    if found.keys() != recorded.keys():
        return f"requests {sorted(found)}, recorded {sorted(recorded)}"
    for name in found:
        for index, (line, other) in enumerate(
            zip_longest(found[name], recorded[name], fillvalue="nothing")
        ):
            if line != other:
                where = "prompt" if line.startswith("prompt") else f"sequence {index}"
                return f"request {name!r}, {where}: {_first(line, other)}"
    return None


def _first(line: str, other: str) -> str:
    """Where two lines differ."""
    for part, (ours, theirs) in enumerate(
        zip_longest(line.split(" | "), other.split(" | "), fillvalue="nothing")
    ):
        for place, (mine, its) in enumerate(
            zip_longest(ours.split(), theirs.split(), fillvalue="nothing")
        ):
            if mine == its:
                continue
            if part == 0:
                return f"token {place} is {mine}, recorded {its}"
            if (
                part == 1
                and len(mine) == len(its) == 8
                and " | " in line
                and not line.startswith("prompt")
            ):
                return f"log-probability {place} is {_shown(mine)}, recorded {_shown(its)}"
            return f"what else is reported ({mine}) is not what was recorded ({its})"
    raise AssertionError("the lines are equal")


def _shown(digits: str) -> str:
    value: float = struct.unpack(">f", bytes.fromhex(digits))[0]
    return f"{value!r} (0x{digits})"
