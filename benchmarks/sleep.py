"""How much memory sleeping gives back, and how long waking takes to the first token.

    python -m benchmarks.sleep --model ./folder --rounds 3

The whole KV cache is in memory before the engine sleeps. Given back is what this process holds less
of anonymous memory (RssAnon, Linux), over the bytes of weights and KV cache. The first token is one
of a prompt of 32 tokens, from the call of `wake_up` on; the weights are in the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.servers import report
from quire.common.numbers import format_bytes
from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.engine.assembly.builder import build_engine
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine
from quire.executor.inline import InlineExecutor

_PROMPT = list(range(100, 132))


class Slept(NamedTuple):
    """One time asleep."""

    level: int
    held_bytes: int
    returned_bytes: int
    sleep_s: float
    first_token_s: float
    is_same: bool
    """Whether the answer is the one of before."""


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("RssAnon"))
    return int(found.split()[1]) << 10


def _answer(engine: Engine, name: str) -> tuple[list[int], float]:
    """Tokens, and when the first of them came (monotonic)."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": _PROMPT}, params)
    while True:
        for output in engine.step():
            if isinstance(output, RequestOutput) and output.finished:
                first_token_s = output.metrics.first_token_s
                assert first_token_s is not None, output.error
                return list(output.outputs[0].token_ids), first_token_s


def _sleep(engine: Engine, level: int, expected: list[int], name: str) -> Slept:
    executor = engine.executor
    assert isinstance(executor, InlineExecutor)
    weights = sum(tensor.nbytes for tensor in executor.worker.model.weights.tensors)
    before, started_s = _resident_bytes(), time.monotonic()
    engine.sleep(level)
    asleep_s, after = time.monotonic(), _resident_bytes()
    woken_s = time.monotonic()
    engine.wake_up()
    tokens, first_token_s = _answer(engine, name)
    return Slept(
        level,
        weights + engine.plan.kv_bytes,
        before - after,
        asleep_s - started_s,
        first_token_s - woken_s,
        tokens == expected,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each level; exit code 1 if an answer changed."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.sleep"
    )
    parser.add_argument("--model", required=True, help="a folder with weights")
    parser.add_argument("--dtype", default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--quantization", help="of the weights (default: none)")
    parser.add_argument("--kv-cache-memory", default="512MiB", help="(default: 512MiB)")
    parser.add_argument("--levels", default="1,2", help="(default: 1,2)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    args = parser.parse_args(argv)
    engine = build_engine(
        EngineConfig(
            model=args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            kv_cache_memory=args.kv_cache_memory,
            populate_kv_cache="on",
            skip_tokenizer_init=True,
            num_threads=args.threads,
        )
    )
    expected, _ = _answer(engine, "before")
    found: list[Slept] = []
    for level in map(int, args.levels.split(",")):
        for number in range(args.rounds):
            found.append(_sleep(engine, level, expected, f"{level}-{number}"))
            print(found[-1], file=sys.stderr, flush=True)
    engine.close()
    figures: dict[str, Any] = {"slept": [each._asdict() for each in found]}
    report(figures, [_line(found, level) for level in sorted({s.level for s in found})], args.json)
    return 0 if all(each.is_same for each in found) else 1


def _line(found: Sequence[Slept], level: int) -> str:
    mine = [each for each in found if each.level == level]
    share = min(each.returned_bytes / each.held_bytes for each in mine)
    sleep_s = statistics.median(each.sleep_s for each in mine)
    first_s = statistics.median(each.first_token_s for each in mine)
    same = all(each.is_same for each in mine)
    return (
        f"level {level}: {100 * share:.1f} % of {format_bytes(mine[0].held_bytes)} given back, "
        f"asleep after {sleep_s:.2f} s, the first token {first_s:.2f} s after waking "
        f"(at most {max(each.first_token_s for each in mine):.2f} s), "
        f"answers are {'the same' if same else 'OTHERS'}"
    )


if __name__ == "__main__":
    sys.exit(main())
