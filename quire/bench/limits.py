"""What the machine allows while other work runs: samples of its read bandwidth and of the best
large products known here.

A shared machine's speed swings by half within seconds. The best of a burst is a rate that nothing
could sustain over the seconds of a run, and holding one against the other makes any work look poor.
So limits are sampled in between the work that is held against them, each once and briefly, and what
the samples amount to is the median of their rates: what the machine did most of the time. The host
may take a processor away for a second or more. Such a moment costs the work its full length, and
hits few of the samples, or none: a mean over these would say more about that chance than about the
machine.

Owns the products, their operands and these sums. The products are torch's own and Quire's packed
projections: the limit is the best that anyone has. Never stops any process: the caller sees to
it that nothing else computes meanwhile.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from quire.bench.roofline import Peaks
from quire.engine.plan.machine import instruction_sets

logger = logging.getLogger(__name__)

_PROBE_S = 60.0
_READ_BYTES = 256 << 20
"""Several times any cache."""
_SHAPES = ((256, 1024, 4096), (512, 2048, 8192), (1024, 1024, 4096))
"""Rows, inputs and outputs of the products."""
_GPU_READ_BYTES, _GPU_SHAPES = 4 << 30, ((8192, 8192, 8192),)
_NUM_RANKINGS = 3
_NEAR = 0.8
"""Products below this share of the best of their kind, when they are ranked, are not sampled."""
_SAMPLE_S = 0.15
"""So long may a sample take; the best product of each kind is in it anyway. On two cores it took
0.13 s, and came out the same within 5 % whether the machine had been at work before it or had
computed nothing but samples.
"""

Call = Callable[[], object]


class Work(NamedTuple):
    """Something whose rate is a limit."""

    kind: str
    """"read", or the data type that is multiplied."""
    name: str
    amount: int
    """Bytes read or operations; a multiplication and an addition are two."""
    prepare: Callable[[], Call]
    """Makes operands, and gives what does the work once on them."""


class Pace(NamedTuple):
    """How a device is sampled."""

    every_s: float
    """Seconds of a run from one sample to the next."""
    num_tries: int
    """Of each work in a sample; the best counts."""
    keeps_operands: bool


CPU_PACE = Pace(2.0, 1, keeps_operands=True)
GPU_PACE = Pace(float("inf"), 20, keeps_operands=False)
"""Only before and after a run: nothing else computes on the device,
and its memory is the engine's."""


class LimitSample(NamedTuple):
    """The rates of one moment."""

    read_bytes_per_s: float
    ops_per_s: dict[str, dict[str, float]]
    """By data type and product; each sampler samples the same products every time."""


class LimitSampler:
    """Takes samples. The first call of `sample` ranks the products before, which takes some
    seconds.

    Each product is tried a few times, all in turns, and only those near the best of their kind
    (floating point, or integers of 8 bits) are sampled from then on, as many of them as fit into
    the time that a sample may take.
    """

    def __init__(
        self, works: Sequence[Work], pace: Pace, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`works` have one of kind "read"."""
        self.every_s = pace.every_s
        self._works, self._pace, self._clock = works, pace, clock
        self._calls: dict[Work, Call] = {}
        self._sampled: list[Work] | None = None

    def sample(self) -> LimitSample:
        """Measure every limit once."""
        import torch

        with torch.inference_mode():
            if self._sampled is None:
                self._sampled = self._ranked()
            rates = [(work, work.amount / self._seconds(work)) for work in self._sampled]
        products: dict[str, dict[str, float]] = {}
        for work, rate in rates[1:]:
            products.setdefault(work.kind, {})[work.name] = rate
        return LimitSample(rates[0][1], products)

    def _ranked(self) -> list[Work]:
        """Return what is sampled: reading first, then the best of each kind,
        then others near these while they fit."""
        seconds = dict.fromkeys(self._works, 0.0)
        for _ in range(_NUM_RANKINGS):
            for work in self._works:
                seconds[work] += self._seconds(work) / _NUM_RANKINGS
        (read,) = (work for work in self._works if work.kind == "read")
        chosen, near = [read], dict[Work, float]()
        for is_integer in (False, True):
            rates = {
                work: work.amount / seconds[work]
                for work in self._works
                if work is not read and (work.kind == "int8") == is_integer
            }
            if rates:
                best = max(rates, key=rates.__getitem__)
                chosen.append(best)
                near |= {
                    work: rate / rates[best] for work, rate in rates.items() if work is not best
                }
        taken_s = sum(seconds[work] for work in chosen)
        for work in sorted(near, key=near.__getitem__, reverse=True):
            if near[work] >= _NEAR and taken_s + seconds[work] <= _SAMPLE_S:
                chosen.append(work)
                taken_s += seconds[work]
        self._calls = {work: call for work, call in self._calls.items() if work in chosen}
        return chosen

    def _seconds(self, work: Work) -> float:
        call = self._calls.get(work)
        if call is None:
            call = work.prepare()
            call()  # the first call makes threads, buffers and plans
            if self._pace.keeps_operands:
                self._calls[work] = call
        return min(self._timed(call) for _ in range(self._pace.num_tries))

    def _timed(self, call: Call) -> float:
        before = self._clock()
        call()
        return self._clock() - before


def limit_sampler(device: str = "cpu") -> LimitSampler:
    """Return a sampler for a GPU, or for the CPU with as many threads as torch and the
    native kernels use at present."""
    is_gpu = device != "cpu"
    num_bytes, shapes = (_GPU_READ_BYTES, _GPU_SHAPES) if is_gpu else (_READ_BYTES, _SHAPES)
    works = [
        Work("read", "torch", num_bytes, partial(_read, num_bytes, device)),
        *_torch_products(shapes, device),
    ]
    if not is_gpu:
        works += _quire_products(shapes)
    return LimitSampler(works, GPU_PACE if is_gpu else CPU_PACE)


def typical(samples: Sequence[LimitSample]) -> Peaks:
    """Return the medians over samples of one sampler, of each data type with the
    product that was best at it."""
    rates, products = {}, {}
    for dtype, names in samples[0].ops_per_s.items():
        medians = {name: median(each.ops_per_s[dtype][name] for each in samples) for name in names}
        products[dtype] = max(medians, key=medians.__getitem__)
        rates[dtype] = medians[products[dtype]]
    return Peaks(median(each.read_bytes_per_s for each in samples), rates, products, len(samples))


def _torch_products(shapes: Sequence[tuple[int, int, int]], device: str) -> Iterator[Work]:
    for dtype in ("float32", "bfloat16", "int8"):
        if dtype == "bfloat16" and device == "cpu" and not torch_multiplies_bfloat16():
            logger.warning(
                "torch's bfloat16 GEMM ends the process on this machine; the limits are "
                "measured without it"
            )
            continue
        for shape in shapes:
            yield _work("torch", dtype, shape, partial(_torch_product, dtype, shape, device))


@functools.cache
def torch_multiplies_bfloat16() -> bool:
    """Return whether torch can, found out by another process:
    on some virtual machines with AMX it ends by an illegal instruction."""
    program = (
        "import torch; torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, "
        "dtype=torch.bfloat16)"
    )
    if "amx_tile" not in instruction_sets().split("+"):
        return True
    try:
        return (
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, timeout=_PROBE_S, check=False
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def _quire_products(shapes: Sequence[tuple[int, int, int]]) -> Iterator[Work]:
    """Packed weights with the engine's own inputs; none where the native kernels cannot run."""
    import torch

    from quire.kernels import cpu

    if not cpu.reasons_against("cpu", torch.bfloat16):
        for dtype, kind in (("bfloat16", "bf16"), ("int8", "int8")):
            for shape in shapes:
                yield _work("quire", dtype, shape, partial(_quire_product, kind, shape))


def _work(maker: str, dtype: str, shape: tuple[int, int, int], prepare: Callable[[], Call]) -> Work:
    rows, inner, columns = shape
    return Work(dtype, f"{maker} {rows}x{inner}x{columns}", 2 * rows * inner * columns, prepare)


def _read(num_bytes: int, device: str) -> Call:
    import torch

    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return _awaited(data.sum, device)


def _torch_product(dtype: str, shape: tuple[int, int, int], device: str) -> Call:
    import torch

    rows, inner, columns = shape
    a, b = (torch.randn(rows, inner, device=device), torch.randn(columns, inner, device=device).T)
    if dtype == "int8":
        # The products of 8-bit integers have no public name in torch; this one has been there since
        # 2.1.
        a, b = (each.mul(7).clamp(-127, 127).to(torch.int8) for each in (a, b))
        return _awaited(partial(torch._int_mm, a, b), device)
    return _awaited(
        partial(torch.mm, a.to(getattr(torch, dtype)), b.to(getattr(torch, dtype))), device
    )


def _quire_product(kind: str, shape: tuple[int, int, int]) -> Call:
    import torch

    from quire.bench.kernels import KINDS, pack_random
    from quire.kernels.cpu.linear import linear

    rows, inner, columns = shape
    return partial(
        linear, torch.randn(rows, inner).bfloat16(), pack_random(KINDS[kind], (columns, inner))
    )


def _awaited(call: Call, device: str) -> Call:
    """Return a call that waits for its work: a CPU's is done when it returns."""
    import torch

    def wait() -> None:
        call()
        torch.cuda.synchronize(device)

    return call if device == "cpu" else wait
