"""What is measured: requests as token ids, made up from seeds, so that anyone can run the very same
work.

Lengths are fixed by the workload's seed; token ids are fresh in every repetition, so that nothing
is found in the prefix cache but what the workload itself shares. Owns no engine and no clock.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.common.bounded_files import MAX_DATA_BYTES, open_lines
from quire.errors import ConfigError
from quire.sim.traces import NO_TRACE

EDGE = 16
"""Ids this close to either end of a vocabulary are left out: special tokens live there."""


class BenchRequest(NamedTuple):
    """One request: greedy unless `temperature` says otherwise; the end-of-text token is ignored."""

    token_ids: list[int]
    num_output: int
    num_sequences: int = 1
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A recipe for requests."""

    name: str
    parameters: dict[str, Any]
    """All that is needed to make it again."""
    make: Callable[[random.Random, int], list[BenchRequest]]
    """(source of token ids, vocabulary size) -> requests."""

    def requests(self, repetition: int, vocab_size: int) -> list[BenchRequest]:
        """Return the requests of one repetition: the same lengths each time, other tokens."""
        return self.make(random.Random(f"{self.name}/{repetition}"), vocab_size)


def random_workload(
    num_requests: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    *,
    seed: int = 0,
    name: str = "random",
) -> Workload:
    """Lengths uniform in two inclusive ranges: drawn with `random.Random(seed)`,
    input before output, request by request."""
    shape = random.Random(seed)
    lengths = [(shape.randint(*input_len), shape.randint(*output_len)) for _ in range(num_requests)]
    parameters = {
        "num_requests": num_requests,
        "input_len": list(input_len),
        "output_len": list(output_len),
        "seed": seed,
    }
    return Workload(
        name,
        parameters,
        lambda rng, vocab: [BenchRequest(_ids(rng, p, vocab), o) for p, o in lengths],
    )


def prefix_workload(
    num_requests: int, prefix_len: int, own_len: int, output_len: int, *, name: str = "prefix"
) -> Workload:
    """Every prompt is one shared prefix and some tokens of its own."""

    def make(rng: random.Random, vocab_size: int) -> list[BenchRequest]:
        prefix = _ids(rng, prefix_len, vocab_size)
        return [
            BenchRequest(prefix + _ids(rng, own_len, vocab_size), output_len)
            for _ in range(num_requests)
        ]

    parameters = {
        "num_requests": num_requests,
        "prefix_len": prefix_len,
        "own_len": own_len,
        "output_len": output_len,
    }
    return Workload(name, parameters, make)


def parallel_workload(
    num_requests: int, input_len: int, num_sequences: int, output_len: int, *, name: str
) -> Workload:
    """Return several sampled sequences of each prompt, at temperature 1."""

    def make(rng: random.Random, vocab_size: int) -> list[BenchRequest]:
        prompts = [_ids(rng, input_len, vocab_size) for _ in range(num_requests)]
        return [BenchRequest(token_ids, output_len, num_sequences, 1.0) for token_ids in prompts]

    parameters = {
        "num_requests": num_requests,
        "input_len": input_len,
        "num_sequences": num_sequences,
        "output_len": output_len,
        "temperature": 1.0,
    }
    return Workload(name, parameters, make)


def trace_workload(path: Path, *, num_requests: int, max_model_len: int) -> Workload:
    """Return the first requests of a trace that fit `max_model_len`: their lengths, with random
    tokens, all at once.

    Raises ConfigError for a file that is not a trace, or in which nothing fits.
    """
    lengths: list[tuple[int, int]] = []
    num_skipped = 0
    for num_prompt, num_output in read_lengths(path):
        if len(lengths) == num_requests:
            break
        if num_prompt + num_output <= max_model_len:
            lengths.append((num_prompt, num_output))
        else:
            num_skipped += 1
    if not lengths:
        raise ConfigError(
            f"no request of {path} fits max_model_len={max_model_len}; raise it, or take "
            "another trace"
        )
    parameters = {
        "trace": path.name,
        "num_requests": len(lengths),
        "max_model_len": max_model_len,
        "num_too_long": num_skipped,
    }
    return Workload(
        "trace",
        parameters,
        lambda rng, vocab: [BenchRequest(_ids(rng, p, vocab), o) for p, o in lengths],
    )


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """(prompt_tokens, output_tokens) of each line of a .csv or .jsonl file, gzipped or not; those
    without either are left out.

    Raises ConfigError for anything else.
    """
    try:
        with open_lines(path, MAX_DATA_BYTES) as lines:
            is_csv = ".csv" in path.suffixes
            records = csv.DictReader(lines) if is_csv else (json.loads(line) for line in lines)
            pairs = [
                (int(record["prompt_tokens"]), int(record["output_tokens"])) for record in records
            ]
    except NO_TRACE as error:
        raise ConfigError(
            f"{path} is not a trace with prompt_tokens and output_tokens ({type(error).__name__})"
        ) from None
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror or error}") from None
    return [pair for pair in pairs if min(pair) > 0]


WORKLOADS: dict[str, Workload] = {
    "W1": random_workload(64, (16, 256), (16, 128), seed=0, name="W1"),
    "W2": prefix_workload(64, 512, 32, 32, name="W2"),
    "W3": random_workload(1, (128, 128), (128, 128), name="W3"),
    "W4": parallel_workload(8, 256, 8, 64, name="W4"),
    "W5": random_workload(1, (4096, 4096), (1, 1), name="W5"),
    "W6": random_workload(64, (128, 128), (64, 64), name="W6"),
    **{
        f"B{size}": random_workload(size, (64, 64), (64, 64), name=f"B{size}")
        for size in (1, 2, 4, 8, 16, 32, 64)
    },
}
"""The workloads that engines are compared on. W1: many requests of mixed lengths. W2: a shared
prefix. W3: one request. W4: parallel sampling. W5: one long prompt. W6: 32 clients of a server with
two requests each. B1 to B64: so many equal requests at once, for throughput against batch size.
"""


def totals(requests: Sequence[BenchRequest]) -> dict[str, int]:
    """Return what a set of requests amounts to."""
    return {
        "num_requests": len(requests),
        "num_sequences": sum(each.num_sequences for each in requests),
        "num_prompt_tokens": sum(len(each.token_ids) for each in requests),
        "num_output_tokens": sum(each.num_output * each.num_sequences for each in requests),
        "max_total_len": max(len(each.token_ids) + each.num_output for each in requests),
    }


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    edge = EDGE if vocab_size > 4 * EDGE else 0
    return [rng.randrange(edge, vocab_size - edge) for _ in range(count)]
