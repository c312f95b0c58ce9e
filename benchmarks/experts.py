"""Experts of which only some are in memory: hits and tokens/s by their share, for one request and
for many.

    python -m benchmarks.experts --layers 4 --rounds 3

The model is OLMoE-1B-7B cut to some layers, with random weights and a router that has favourites:
row r of each layer's router, in an order drawn for the layer, is multiplied by (r + 1) ** -skew.
The larger a row, the more its logits vary, and the more often they are among the largest: with a
skew of 0.5 half of the experts get 78 % of the choices, with 1 they get 92 %. Tokens are sampled at
temperature 1 from seeds, so that no text repeats itself. Prints a JSON line for each share and
number of requests: tokens/s (medians of rounds), what is left of those with all experts in memory,
the hit rate, what was read a token and how long steps waited for it.

`--cold` drops the file from the system's cache after each step, as where it is much larger than
memory; the time that this takes is not counted. `--ahead` runs each round twice, with and without
experts read ahead, and prints a line for each. The layers of a random model turn their rows to
something unlike, those of a trained one add a little: `--damping 0.1` multiplies what attention and
experts add by as much. How many forecasts were right is printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.models import OLMOE_1B_7B, write_random_model
from quire import LLM, SamplingParams
from quire.engine.front.prompts import Prompt
from quire.engine.loop.counters import EngineCounters, count
from quire.engine.plan.experts import expert_bytes
from quire.kernels.cpu.paging import PagedExperts
from quire.models.registry import declare
from quire.quant.formats import WeightFormats, formats_at_load
from quire.worker.experts import ExpertReports

_PROMPT_LEN = 32


def write_model(folder: Path, num_layers: int, skew: float, damping: float) -> dict[str, Any]:
    """Write the model, unless it is there, and return its config."""
    config = {**OLMOE_1B_7B, "num_hidden_layers": num_layers}
    if (folder / "config.json").exists():
        return config
    generator = torch.Generator().manual_seed(1)

    def favour(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("mlp.gate.weight"):
            rows = torch.randperm(len(tensor), generator=generator)
            return (tensor.float() * ((rows + 1.0) ** -skew)[:, None]).to(torch.bfloat16)
        return tensor * damping if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor

    write_random_model(config, folder, favour)
    return config


class Pools:
    """The pools of engines that are made, and their files, which are dropped after each step."""

    def __init__(self, folder: Path, *, are_cold: bool) -> None:
        self._folder, self._are_cold = folder, are_cold
        self.made: list[PagedExperts] = []
        self.dropping_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See what is made and done meanwhile."""
        fill, take_news = PagedExperts.fill, ExpertReports.take_news

        def filled(pool: PagedExperts) -> None:
            self.made.append(pool)
            fill(pool)

        def after_step(reports: ExpertReports, wait_s: float) -> Any:
            began = time.perf_counter()
            drop_from_cache(self._folder)
            self.dropping_s += time.perf_counter() - began
            return take_news(reports, wait_s)

        with ExitStack() as stack:
            stack.enter_context(patch.object(PagedExperts, "fill", filled))
            if self._are_cold:
                stack.enter_context(patch.object(ExpertReports, "take_news", after_step))
            yield


def generate(llm: LLM, num_requests: int, num_tokens: int, seed: int, pools: Pools) -> float:
    """Output tokens/s of requests that begin together, without their prompts' step."""
    rng = random.Random(seed)
    prompts: list[Prompt] = [
        {"prompt_token_ids": [rng.randrange(50000) for _ in range(_PROMPT_LEN)]}
        for _ in range(num_requests)
    ]

    def run(max_tokens: int) -> None:
        params = [
            SamplingParams(max_tokens=max_tokens, seed=seed + i, ignore_eos=True)
            for i in range(num_requests)
        ]
        llm.generate(prompts, params, use_tqdm=False)

    run(1)  # prompts are in the prefix cache now
    began, dropping_s = time.perf_counter(), pools.dropping_s
    run(num_tokens)
    elapsed_s = time.perf_counter() - began - (pools.dropping_s - dropping_s)
    return num_requests * num_tokens / elapsed_s


def drop_from_cache(folder: Path) -> None:
    """Have the system forget the experts' file."""
    for path in folder.glob("*.experts.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(
    llm: LLM, num_requests: int, args: argparse.Namespace, pools: Pools
) -> Iterator[dict[str, Any]]:
    """All rounds of one engine and number of requests; for each of the ways of reading."""
    generate(llm, num_requests, args.tokens, 1000, pools)  # the pool learns
    ways = (True, False) if args.ahead and pools.made else (True,)
    rates: dict[bool, list[float]] = {way: [] for way in ways}
    uses = {way: Counter[str]() for way in ways}
    for seed in range(args.rounds):
        for reads_ahead in ways if seed % 2 else reversed(ways):
            for pool in pools.made[-1:]:
                pool.set_reads_ahead(reads_ahead)
            before = count(llm.engine.scheduler)
            rate = generate(llm, num_requests, args.tokens, 2000 + 100 * seed, pools)
            rates[reads_ahead].append(rate)
            uses[reads_ahead].update(_difference(before, count(llm.engine.scheduler)))
    pairs = list(zip(rates[True], rates.get(False, ()), strict=len(ways) > 1))
    num_tokens = args.rounds * num_requests * (args.tokens + 1)
    for way, use in uses.items():
        yield {
            **({"ahead": way} if len(ways) > 1 else {}),
            **(
                {"of_not_ahead": round(statistics.median(a / b for a, b in pairs), 3)}
                if way and pairs
                else {}
            ),
            "tokens_per_s": round(statistics.median(rates[way]), 2),
            "hit_rate": round(use["hits"] / max(1, use["hits"] + use["misses"]), 3),
            "mib_read_per_token": round(use["bytes"] / num_tokens / 2**20, 2),
            "wait_ms_per_token": round(1e3 * use["wait_s"] / num_tokens, 2),
            "forecasts_per_token": round(use["forecast"] / num_tokens, 2),
            "right": round(use["foreseen"] / max(1, use["forecast"]), 3),
            "mib_ahead_per_token": round(use["ahead"] / num_tokens / 2**20, 2),
        }


def _difference(before: EngineCounters, after: EngineCounters) -> dict[str, Any]:
    return {
        "hits": after.num_expert_hits - before.num_expert_hits,
        "misses": after.num_expert_misses - before.num_expert_misses,
        "bytes": after.expert_bytes_read - before.expert_bytes_read,
        "wait_s": after.expert_wait_s - before.expert_wait_s,
        "forecast": after.num_experts_forecast - before.num_experts_forecast,
        "foreseen": after.num_experts_foreseen - before.num_experts_foreseen,
        "ahead": after.expert_bytes_ahead - before.expert_bytes_ahead,
    }


def run(folder: Path, args: argparse.Namespace) -> None:
    """Measure and print every combination; the first of each number is all experts in memory."""
    model = folder / f"olmoe-{args.layers}-{args.skew:g}-{args.damping:g}"
    config = write_model(model, args.layers, args.skew, args.damping)
    pools = Pools(folder / "cache", are_cold=args.cold)
    spec, quantization = declare(config), args.quantization
    formats = WeightFormats() if quantization is None else formats_at_load(spec, quantization)
    whole, resident = expert_bytes(spec, formats, "bfloat16"), dict[int, float]()
    options = {
        "skip_tokenizer_init": True, "kv_cache_memory": "1GiB", "quantization": quantization,
        "num_threads": args.threads,
    }  # fmt: skip
    for share in (None, *args.shares):
        paged = {} if share is None else {
            "expert_memory": int(whole * share) + 1, "weights_cache": str(folder / "cache"),
        }  # fmt: skip
        with pools.watching():
            llm = LLM(str(model), **options, **paged)
            for num_requests in args.requests:
                for found in measure(llm, num_requests, args, pools):
                    base = resident.setdefault(num_requests, found["tokens_per_s"])
                    line = {
                        "share": "all, not paged" if share is None else share,
                        "requests": num_requests,
                        **found, "of_resident": round(found["tokens_per_s"] / base, 3),
                    }  # fmt: skip
                    print(json.dumps(line), flush=True)
        pools.made.clear()
        llm.close()
        del llm
        gc.collect()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--skew", type=float, default=1.0, help="of routers; 0: no favourites")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64, help="of each request and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--cold", action="store_true", help="files are not in the system's cache")
    parser.add_argument("--ahead", action="store_true", help="with and without reading ahead")
    parser.add_argument("--damping", type=float, default=1.0, help="of what layers add")
    parser.add_argument("--folder", type=Path, help="for the model and its files; kept")
    args = parser.parse_args()
    if args.folder is not None:
        run(args.folder, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args)


if __name__ == "__main__":
    main()
