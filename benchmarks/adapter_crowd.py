"""Many registered adapters, few of which are used often: rates, and how long requests wait.

    python -m benchmarks.adapter_crowd --adapters 1000 --requests 2000

Requests choose adapters by Zipf's law: the k-th most popular one in proportion to `k ** -exponent`.
So many are answered at a time (`--at-once`), each next one following the one that has ended. The
same requests are answered by the model alone and with adapters, in turns. A request waits from its
arrival to its first token; *cold* are those whose adapter is none of the last `--max-cpu-loras`
that were chosen, and so has to be loaded, *warm* the others. Weights of adapters are random. Prints
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.adapters import write_adapter
from quire import LLM, LoRARequest, SamplingParams, TokensPrompt
from quire.core.adapters import Adapter
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine


class Crowd:
    """Requests of one length, and the adapter of each."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        rng = random.Random(0)
        weights = [(place + 1) ** -args.exponent for place in range(args.adapters)]
        self.chosen = rng.choices(range(args.adapters), weights, k=args.requests)
        self.prompts = [
            [rng.randrange(10, vocab_size) for _ in range(args.prompt_len)]
            for _ in range(args.requests)
        ]
        self.params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
        self._at_once, self._max_loaded = args.at_once, args.max_cpu_loras

    def is_cold(self) -> list[bool]:
        """Whether each request's adapter is none of those that were chosen last."""
        found, loaded = list[bool](), OrderedDict[int, None]()
        for adapter in self.chosen:
            found.append(adapter not in loaded)
            loaded[adapter] = None
            loaded.move_to_end(adapter)
            while len(loaded) > self._max_loaded:
                loaded.popitem(last=False)
        return found

    def run(self, engine: Engine, adapters: Sequence[Adapter | None]) -> list[float]:
        """Answer all; returns what each waited for its first token and, last, all took, in seconds.
        `adapters` are by number; with a single one, all requests have that."""
        began: dict[str, float] = {}
        waits: dict[str, float] = {}
        started, num_added, num_ended = time.perf_counter(), 0, 0
        while num_added < len(self.prompts) or engine.has_work:
            while num_added - num_ended < self._at_once and num_added < len(self.prompts):
                name, which = str(num_added), self.chosen[num_added] if len(adapters) > 1 else 0
                began[name] = time.perf_counter()
                prompt = TokensPrompt(prompt_token_ids=self.prompts[num_added])
                engine.add_request(name, prompt, self.params, adapter=adapters[which])
                num_added += 1
            for output in engine.step():
                assert isinstance(output, RequestOutput) and output.error is None
                num_ended += output.finished
                if output.request_id not in waits:
                    now = time.perf_counter()
                    waits[output.request_id] = now - began[output.request_id]
        total = time.perf_counter() - started
        return [*(waits[str(number)] for number in range(num_added)), total]


def _quantiles(waits: Sequence[float]) -> dict[str, float]:
    ordered = sorted(waits) or [0.0]
    places = {"median": 0.5, "p95": 0.95, "longest": 1.0}
    return {
        f"{name}_ms": round(1e3 * ordered[round(place * (len(ordered) - 1))], 1)
        for name, place in places.items()
    }


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Register all adapters, then answer the same requests in turns."""
    llm = LLM(
        args.model, enable_lora=True, max_loras=args.max_loras, max_lora_rank=args.rank,
        max_cpu_loras=args.max_cpu_loras, max_num_seqs=args.at_once, kv_cache_memory="256MiB",
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = llm.engine
    assert isinstance(engine, Engine)
    spec = engine.plan.spec
    adapters = [
        LoRARequest(f"{n}", n + 1, str(write_adapter(folder / f"{n}", spec, args.rank, n)))
        for n in range(args.adapters)
    ]
    began = time.perf_counter()
    chosen = [engine.adapters.chosen(each) for each in adapters]
    versions = [each.version for each in chosen if each is not None]
    registered_s = time.perf_counter() - began
    crowd = Crowd(args, spec.vocab_size)
    crowd.run(engine, [None])
    rates: dict[str, list[float]] = {"model_alone": [], "adapters": []}
    waits: dict[str, list[float]] = {"model_alone": [], "warm": [], "cold": []}
    for _ in range(args.rounds):
        turns: tuple[tuple[str, Sequence[Adapter | None]], ...]
        turns = (("model_alone", [None]), ("adapters", versions))
        for name, used in turns:
            *found, total_s = crowd.run(engine, used)
            rates[name].append(args.requests * args.output_len / total_s)
            for wait, is_cold in zip(found, crowd.is_cold(), strict=True):
                kind = ("cold" if is_cold else "warm") if name == "adapters" else name
                waits[kind].append(wait)
    pairs = zip(rates["adapters"], rates["model_alone"], strict=True)
    return {
        "adapters": args.adapters,
        "adapters_used": len(set(crowd.chosen)),
        "registered_per_s": round(args.adapters / registered_s),
        "tokens_per_s": {name: round(statistics.median(each)) for name, each in rates.items()},
        "share_of_model_alone": round(statistics.median(mine / base for mine, base in pairs), 3),
        "cold_share": round(sum(crowd.is_cold()) / args.requests, 3),
        "first_token": {name: _quantiles(each) for name, each in waits.items()},
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="quire-storyteller")
    parser.add_argument("--adapters", type=int, default=1000, help="that are registered")
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--max-loras", type=int, default=16)
    parser.add_argument("--max-cpu-loras", type=int, default=128)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), args)), flush=True)


if __name__ == "__main__":
    main()
