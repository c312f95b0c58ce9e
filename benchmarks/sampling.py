"""Sampling alone: milliseconds a step for 64 rows of a vocabulary of 151,936, beside one read of
the logits.

    python -m benchmarks.sampling [--rows 64] [--vocab 151936] [--threads 2]

Logits are normally distributed with a standard deviation of 3. What is timed is `Sampler.sample`,
so everything between the head's product and the tokens; its parts are the kernels' own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from quire.core.plan import RowSampling
from quire.kernels import cpu
from quire.kernels.cpu.sampling import NativeSampling
from quire.sampling import SampledRow, Sampler

CASES = {
    "greedy": RowSampling(temperature=0.0),
    "temperature 1": RowSampling(temperature=1.0),
    "top_p 0.9": RowSampling(temperature=1.0, top_p=0.9),
    "top_k 40": RowSampling(temperature=1.0, top_k=40),
    "min_p 0.05": RowSampling(temperature=1.0, min_p=0.05),
    "all penalties": RowSampling(
        temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "logprobs 5": RowSampling(temperature=1.0, num_logprobs=5),
}


def median_s(work: Callable[[], object]) -> tuple[float, float]:
    """Best and median of twelve calls."""
    work()
    times = []
    for _ in range(12):
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return min(times), sorted(times)[len(times) // 2]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    cpu.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(options.rows, options.vocab, generator=generator) * 3
    tokens = torch.randint(options.vocab, (options.rows, 512), generator=generator).int().numpy()
    sampler = Sampler(NativeSampling())
    best, median = median_s(lambda: logits.sum())
    print(f"{'one read of the logits':24} {best * 1e3:8.2f} {median * 1e3:8.2f} ms")
    best, median = median_s(lambda: sampler.kernels.argmax(logits))
    print(f"{'peaks':24} {best * 1e3:8.2f} {median * 1e3:8.2f} ms")
    for name, sampling in CASES.items():
        rows = [
            SampledRow(
                sampling=sampling._replace(seed=i),
                position=512,
                prompt_token_ids=tokens[i, :256],
                output_token_ids=tokens[i, 256:],
                num_samples=1,
                num_candidates=0,
            )
            for i in range(options.rows)
        ]
        best, median = median_s(lambda rows=rows: sampler.sample(logits, rows))  # type: ignore[misc]
        print(f"{name:24} {best * 1e3:8.2f} {median * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
