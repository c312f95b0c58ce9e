"""One present result, and what two of them say beside each other.

Owns the columns of docs/benchmarks/results.csv and the pairing of a peer's result with Quire's of
the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.variants import Variant

ENGINES = {
    "quire": "Quire",
    "vllm": "vLLM",
    "openvino": "OpenVINO",
    "llamacpp": "llama.cpp",
    "transformers": "Transformers",
    "torch": "sentence-transformers (torch)",
    "onnx": "sentence-transformers (ONNX Runtime)",
    "infinity": "infinity-emb",
}
WORKLOADS = {
    "W1": "64 mixed requests",
    "W2": "shared prefix",
    "W3": "one request",
    "W4": "parallel samples",
    "W5": "long prompt",
    **{f"B{size}": f"{size} equal requests" for size in (2, 4, 8, 16, 32, 64)},
    "B1": "1 request, 64 in and out",
}
_COUNTERPART = {"w8a8": "int8", "q8_0": "int8", "int8": "int8", "int4": "int4", "q4_0": "int4"}
"""The form of Quire's weights that a peer's form is held against; bfloat16 unless named here."""


class Result(NamedTuple):
    """One row: a value with all that is needed to judge and to repeat it."""

    machine: str
    date: str
    commit: str
    model: str
    workload: str
    engine: str
    format: str
    value: str
    unit: str
    share_of_limit: str
    rounds: str
    record: str
    command: str


def counterpart(variant: str) -> str:
    """Return Quire's variant that a variant is compared with: itself for one of Quire's."""
    parsed = Variant.parse(variant)
    return (
        variant
        if parsed.engine == "quire"
        else f"quire:{_COUNTERPART.get(parsed.form, 'bfloat16')}"
    )


def pairs(results: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    """Yield Quire's result and a peer's of the same run and workload, for every peer's result."""
    quire = {
        (each.record, each.workload, each.format): each
        for each in results
        if each.engine == "quire"
    }
    for each in results:
        if each.record and each.engine != "quire":
            form = counterpart(f"{each.engine}:{each.format}").removeprefix("quire:")
            if (mine := quire.get((each.record, each.workload, form))) is not None:
                yield mine, each


def factor(mine: Result, theirs: Result) -> float:
    """Return how many times as fast the first is as the second."""
    first, second = float(mine.value), float(theirs.value)
    return first / second if mine.unit == "tokens/s" else second / first


def label_of(result: Result) -> str:
    """Return engine and weights, for people."""
    parsed = Variant.parse(f"{result.engine}:{result.format}")
    extra = "".join(f", {each.replace('=', ' ')}" for each in parsed.extra)
    return f"{ENGINES[parsed.engine]} {parsed.form}{extra}"
