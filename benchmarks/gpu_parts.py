"""The parts of `benchmarks.gpu`: kernels, steps, start and peers, each a stream of figures with
their goals.

Owns how each is measured. Limits are those of the same process, measured before a model takes the
memory. Steps are timed by the engine's own clock; what the host leaves idle is read from the
device's own record of its kernels.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.variants import PeerProcess, Seat, Variant
from quire.bench.workload import BenchRequest, random_workload, totals, trace_workload
from quire.models.registry import declare

if TYPE_CHECKING:
    import torch

    from quire.bench.gpu_kernels import GpuLimits
    from quire.engine.loop.engine import Engine

MAX_MODEL_LEN, PADDED_BATCH = 8192, 32
START_S = 600.0
"""A process that has given no token by then has failed."""
HOST_GAP_S = 10e-6
"""Between kernels that follow each other on a device lie a few microseconds at most;
whatever is longer waits for the host."""
_NUM_TOGETHER, _NUM_PROFILED = 64, 32
_NUM_RECORDING = 64
"""Requests before those that count, in which Quire's small steps are recorded,
as those of a server have been."""
_START = """
import sys, time
from quire import LLM, SamplingParams
model, device, max_model_len = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = dict(load_format="dummy", skip_tokenizer_init=True, max_model_len=max_model_len)
llm = LLM(model, device=device, **options)
params = SamplingParams(max_tokens=1, temperature=0.0)
llm.generate([{"prompt_token_ids": list(range(16, 144))}], params, use_tqdm=False)
print(time.time())
"""


class Figure(NamedTuple):
    """Something measured."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    is_more_better: bool = True

    @property
    def is_reached(self) -> bool | None:
        """None without a goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.is_more_better else self.value <= self.goal


class Subject(NamedTuple):
    """What is measured."""

    folder: Path
    """With a model's `config.json`, and nothing else."""
    name: str
    device: str
    trace: Path | None
    num_requests: int
    num_peer_requests: int | None


def kernels(subject: Subject) -> Iterator[Figure]:
    """Attention of an 8-billion-parameter model's shapes, and the two limits."""
    import torch

    from quire.bench.gpu_kernels import attention_case, measure
    from quire.kernels.triton import load

    back_end, limits = load(subject.device), limits_of(torch.device(subject.device))
    yield Figure("copies", limits.copy_bytes_per_s / 1e9, "GB/s")
    yield Figure(
        "torch's bfloat16 product of 8,192 cubed", limits.matrix_ops_per_s / 1e12, "TFLOP/s"
    )
    decode = measure(attention_case(back_end, [1] * 64, [4096] * 64), limits, back_end.device)
    share = decode.bytes_per_s / limits.copy_bytes_per_s
    yield Figure("attention of 64 decodes over 4,096 positions, of copies", share, "", 0.8)
    prefill = measure(attention_case(back_end, [8192], [8192]), limits, back_end.device)
    share = prefill.ops_per_s / limits.matrix_ops_per_s
    yield Figure("attention of 8,192 positions, of that product", share, "", 0.55)


def steps(subject: Subject) -> Iterator[Figure]:
    """Decode steps: of one sequence, and of 256 at about 1,024 positions; and the host's share."""
    import torch

    limits = limits_of(torch.device(subject.device))
    engine = open_engine(subject)
    try:
        for num_sequences, context, goal in ((1, 256, 0.8), (256, 1024, 0.65)):
            seconds, num_bytes = decode_step(engine, num_sequences, context)
            name = f"{subject.name}, decode of {num_sequences} at {context}"
            yield Figure(name, 1e3 * seconds, "ms")
            yield Figure(
                f"{name}, of copies", num_bytes / seconds / limits.copy_bytes_per_s, "", goal
            )
            if subject.device == "cuda":
                idle, by_host = idle_shares(device_record(engine, num_sequences, context))
                yield Figure(f"{name}, the device is idle", idle, "")
                yield Figure(
                    f"{name}, waiting for the host", by_host, "", 0.03, is_more_better=False
                )
    finally:
        engine.close()


def start(subject: Subject) -> Iterator[Figure]:
    """Measure from a process's start to a first token: twice, as kernels are compiled the first
    time."""
    for name, goal in (("kernels compiled before or now", None), ("kernels compiled before", 15.0)):
        command = [
            sys.executable,
            "-c",
            _START,
            str(subject.folder),
            subject.device,
            str(MAX_MODEL_LEN),
        ]
        began = time.time()
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=START_S, env=dict(os.environ)
        )
        if done.returncode:
            raise RuntimeError(
                f"the process that starts an engine ended with {done.returncode}: "
                f"{done.stderr[-1000:]}"
            )
        seconds = float(done.stdout.split()[-1]) - began
        yield Figure(
            f"{subject.name}, first token, {name}", seconds, "s", goal, is_more_better=False
        )


def peers(subject: Subject) -> Iterator[Figure]:
    """Requests at once, greedy, and drawn three times each; Transformers on padded batches of 32,
    and its paged batching."""
    device = f"bfloat16:device={subject.device}"
    greedy, drawn = (requests_of(subject, repetition) for repetition in (0, 1))
    drawn = [each._replace(num_sequences=3, temperature=1.0) for each in drawn]
    lengths = "random lengths" if subject.trace is None else f"lengths of {subject.trace.name}"
    name = f"{subject.name}, {len(greedy)} requests with {lengths}"
    rates: dict[bool, float] = {}
    with opened_peer(
        subject, f"quire:{device}:load_format=dummy:max_model_len={MAX_MODEL_LEN}"
    ) as process:
        for is_drawn, asked in ((False, greedy), (True, drawn)):
            # other tokens than those that count
            process.run(requests_of(subject, -1 - is_drawn)[:_NUM_RECORDING])
            rates[is_drawn] = rate_of(process, asked)
            yield Figure(f"{name}, quire{', n=3' * is_drawn}", rates[is_drawn], "tokens/s")
    for way, extra, goals in (
        ("generate", f"batch={PADDED_BATCH}", {False: 24.0, True: 15.0}),
        ("generate_batch", "way=paged", {False: 3.0})
    ):  # fmt: skip
        with opened_peer(subject, f"transformers:{device}:{extra}") as process:
            for is_drawn, goal in goals.items():
                asked = drawn if is_drawn else greedy
                if subject.num_peer_requests is not None:
                    size = PADDED_BATCH // asked[0].num_sequences if way == "generate" else 1
                    asked = some_batches(asked, size, subject.num_peer_requests)
                rate = rate_of(process, asked)
                label = f"{way}{', n=3' * is_drawn}"
                yield Figure(
                    f"{name}, Transformers' {label} ({len(asked)} of them)", rate, "tokens/s"
                )
                yield Figure(
                    f"{name}, times Transformers' {label}", rates[is_drawn] / rate, "x", goal
                )


PARTS: dict[str, Callable[[Subject], Iterator[Figure]]] = {
    "kernels": kernels, "steps": steps, "start": start, "peers": peers,
}  # fmt: skip


def limits_of(device: torch.device) -> GpuLimits:
    """Copies and products; on a CPU, reading and products."""
    import torch

    from quire.bench.gpu_kernels import GpuLimits, measure_limits
    from quire.bench.limits import limit_sampler, typical

    if device.type == "cuda":
        found = measure_limits(device)
        torch.cuda.empty_cache()
        return found
    peaks = typical([limit_sampler().sample()])
    return GpuLimits(str(device), peaks.read_bytes_per_s, peaks.best_gemm)


def open_engine(subject: Subject) -> Engine:
    """Start with random weights."""
    from quire.config.engine import EngineConfig
    from quire.engine.assembly.builder import build_engine

    gc.collect()
    options: dict[str, Any] = {
        "device": subject.device,
        "max_model_len": MAX_MODEL_LEN,
        "skip_tokenizer_init": True,
    }
    return build_engine(EngineConfig(model=str(subject.folder), load_format="dummy", **options))


class Decodes(NamedTuple):
    """Requests of which all decode together for a while, at about some context."""

    requests: list[BenchRequest]
    num_ahead: int
    """Tokens that the first has when the last begins."""

    @classmethod
    def of(
        cls, engine: Engine, num_sequences: int, context: int, num_together: int, repetition: int
    ) -> Decodes:
        """Prompts come in one after another, as many tokens a step as the engine takes;
        each brings a token to those before."""
        num_ahead = -(-num_sequences * context // engine.plan.limits.max_num_batched_tokens)
        num_prompt, num_output = context - (num_ahead + num_together) // 2, num_ahead + num_together
        workload = random_workload(
            num_sequences, (num_prompt, num_prompt), (num_output, num_output)
        )
        return cls(workload.requests(repetition, engine.plan.spec.vocab_size), num_ahead)


def decode_step(engine: Engine, num_sequences: int, context: int) -> tuple[float, int]:
    """(seconds, bytes at least) of a step in which all sequences decode,
    at about `context` positions: medians."""
    from quire.bench.measure import measure

    measure(engine, Decodes.of(engine, num_sequences, context, _NUM_TOGETHER, -1).requests)
    while engine.idle():  # whatever is still to be recorded
        pass
    run = measure(engine, Decodes.of(engine, num_sequences, context, _NUM_TOGETHER, 0).requests)
    num_bytes = median(cost.num_bytes for cost in run.costs if cost.num_tokens == num_sequences)
    token_s = run.requests[-1].token_s[: _NUM_TOGETHER - 2]
    return median(b - a for a, b in pairwise(token_s[_NUM_TOGETHER // 4 :])), int(num_bytes)


def device_record(engine: Engine, num_sequences: int, context: int) -> list[tuple[float, float]]:
    """Return when the device was busy during some decode steps: (start, end) of each kernel and
    copy, in seconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from quire.bench.measure import measure, params_of

    measure(engine, Decodes.of(engine, num_sequences, context, 4 * _NUM_TOGETHER, -2).requests)
    while engine.idle():  # their shapes of steps may be others than those met before
        pass
    for number, each in enumerate(
        Decodes.of(engine, num_sequences, context, 4 * _NUM_TOGETHER, 1).requests
    ):
        engine.add_request(str(number), {"prompt_token_ids": each.token_ids}, params_of(each))
    scheduler = engine.scheduler
    while scheduler.waiting or min(each.num_output_tokens for each in scheduler.running) < 8:
        engine.step()
    _await_device()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(_NUM_PROFILED):
            engine.step()
        _await_device()
    for number in range(num_sequences):
        engine.abort(str(number))
    while engine.has_work:
        engine.step()
    on_device = (
        each
        for each in seen.events()
        if each.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    )
    busy = sorted((each.time_range.start / 1e6, each.time_range.end / 1e6) for each in on_device)
    return busy[len(busy) // 8 :]  # the profiler is still at its own start during the first steps


def _await_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def idle_shares(busy: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return, of the time from the first to the last, the share in which nothing ran,
    and the share of long pauses alone."""
    if not busy:
        raise RuntimeError("the profiler saw nothing on the device")
    ordered = sorted(busy)
    pauses, end = [], ordered[0][1]
    for began, ended in ordered[1:]:
        pauses.append(max(0.0, began - end))
        end = max(end, ended)
    span = end - ordered[0][0]
    return sum(pauses) / span, sum(each for each in pauses if each > HOST_GAP_S) / span


def requests_of(subject: Subject, repetition: int) -> list[BenchRequest]:
    """Return requests with the trace's lengths, or random ones; other tokens in each repetition."""
    vocab_size = declare(_config(subject)).vocab_size
    if subject.trace is not None:
        workload = trace_workload(
            subject.trace, num_requests=subject.num_requests, max_model_len=MAX_MODEL_LEN
        )
    else:
        workload = random_workload(subject.num_requests, (16, 512), (16, 512))
    return workload.requests(repetition, vocab_size)


def some_batches(requests: Sequence[BenchRequest], size: int, count: int) -> list[BenchRequest]:
    """About `count` of the requests: whole batches, evenly taken of those that all of them would
    make, sorted by length.

    Requests taken one by one would fill batches of more unlike lengths, of which more is padding.
    """
    ordered = sorted(requests, key=lambda each: (each.num_output, len(each.token_ids)))
    batches = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    num_taken = max(1, min(len(batches), count // size))
    return [
        each
        for number in range(num_taken)
        for each in batches[(2 * number + 1) * len(batches) // (2 * num_taken)]
    ]


@contextmanager
def opened_peer(subject: Subject, variant: str) -> Iterator[PeerProcess]:
    """An engine in a process of its own."""
    seat = Seat(
        subject.folder, declare(_config(subject)).vocab_size, len(os.sched_getaffinity(0)), {}, {}
    )
    process = PeerProcess(Variant.parse(variant), seat)
    try:
        yield process
    finally:
        process.close()


def rate_of(process: PeerProcess, requests: Sequence[BenchRequest]) -> float:
    """Return output tokens a second."""
    rate: float = totals(requests)["num_output_tokens"] / process.run(requests)["wall_s"]
    return rate


def _config(subject: Subject) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((subject.folder / "config.json").read_text())
    return config
