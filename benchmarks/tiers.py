"""What a disk behind the KV pool gains where prompts come back, costs where none does, and keeps
over a restart: an engine with a disk and one without, on the same requests in turns.

    python -m benchmarks.tiers prefixes --model ./folder --trace mooncake.jsonl.gz --divide 8
    python -m benchmarks.tiers nothing --model ./folder
    python -m benchmarks.tiers restart --model ./folder --trace mooncake.jsonl.gz --divide 8

**prefixes**: turns of real conversations, one request after the other, whose pool holds a quarter
of all blocks. The time to the first token of all turns, and of those that go on where an earlier
one ended. What an answer adds to a conversation is computed as part of a prompt between two
requests, and is not timed: the blocks are those that decoding would have made.
**nothing**: prompts that no other begins like, in bursts, so that what is written behind one
request is written beside the next.
**restart**: a share of the turns is served, and the next ones both by an engine that goes on and
by one that was started anew over a copy of the folder: the share of prompt tokens that each finds.
With `--simulate` the scheduler, the tiers and their files are the real ones, and the model's plan
says how long steps take.

The engines take turns within each request, and who begins changes with each. Weights are the
folder's, or random.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.conversations import Turn, conversations
from benchmarks.servers import report
from quire.common.numbers import ceil_div
from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.core.scheduler.tiers import TierStats, stored_prefixes
from quire.core.tiers import TIERS
from quire.engine.assembly.builder import build_engine
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine
from quire.errors import EngineError
from quire.executor.inline import InlineExecutor
from quire.sim.tier_replay import TierModel, TierReplay
from quire.tiers.companion import StoredBlocks

PLAIN, DISK = "no tier", "disk"
_WRITTEN_S = 60.0
"""A disk that has not taken a request's blocks by then is not measured."""
_POLL_S = 0.002
_WARM_UP_LENS = (200, 60, 200)
"""Tokens of the prompts that teach an engine what steps cost."""
_DISK_BYTES = 40 << 30


@dataclass
class Contender:
    """One engine, and what it measured."""

    engine: Engine
    first_token_s: list[float] = field(default_factory=list)
    num_hit_tokens: list[int] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    """Of this process, for each measured burst and all that is written behind it."""
    num_asked: int = 0

    def ask(self, prompts: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
        """Answer prompts that come at once, a token each: seconds to each first token, and tokens
        that were found."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        for prompt in prompts:
            self.engine.add_request(str(self.num_asked), {"prompt_token_ids": list(prompt)}, params)
            self.num_asked += 1
        found = dict[str, tuple[float, int]]()
        while len(found) < len(prompts):
            for output in self.engine.step():
                if isinstance(output, RequestOutput) and output.finished:
                    metrics = output.metrics
                    if metrics.first_token_s is None:
                        raise EngineError(f"request {output.request_id} failed: {output.error}")
                    seconds = metrics.first_token_s - metrics.arrival_s
                    found[output.request_id] = seconds, metrics.num_prefix_hit_tokens
        return [found[name] for name in sorted(found, key=int)]

    def measure(self, prompts: Sequence[Sequence[int]]) -> None:
        """Answer them, have their blocks written, and remember what was measured."""
        started_s = time.process_time()
        found = self.ask(prompts)
        self.settle()
        self.processor_s.append(time.process_time() - started_s)
        for seconds, num_hit_tokens in found:
            self.first_token_s.append(seconds)
            self.num_hit_tokens.append(num_hit_tokens)

    def settle(self) -> None:
        """Wait until all blocks are written that are to be."""
        while self.engine.idle():
            pass
        executor, until = self.engine.executor, time.monotonic() + _WRITTEN_S
        assert isinstance(executor, InlineExecutor)
        if not self._has_disk:
            return
        half = executor.worker.companions.of(TIERS)
        assert isinstance(half, StoredBlocks)
        while half.is_busy:
            if time.monotonic() > until:
                raise EngineError(f"blocks are not written after {_WRITTEN_S:g} s")
            time.sleep(_POLL_S)

    @property
    def _has_disk(self) -> bool:
        return stored_prefixes(self.engine.scheduler.admission.prerequisites) is not None

    @property
    def stats(self) -> TierStats:
        """Of the disk."""
        found = stored_prefixes(self.engine.scheduler.admission.prerequisites)
        return TierStats() if found is None else found.stats


def _start(stack: ExitStack, args: argparse.Namespace, num_blocks: int, folder: str) -> Contender:
    """Start an engine; without a disk where `folder` is empty."""
    config = _config(args)
    if folder:
        config = replace(config, kv_cache_dir=folder, kv_disk_size=_DISK_BYTES)
    plan = prepare_model(config).planned.plan
    block_bytes = plan.kv_bytes // plan.limits.num_blocks
    engine = build_engine(replace(config, kv_cache_memory=num_blocks * block_bytes))
    stack.callback(engine.close)
    return Contender(engine)


def _config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=args.model,
        load_format="auto" if list(Path(args.model).glob("*.safetensors")) else "dummy",
        dtype=args.dtype,
        quantization=args.quantization,
        skip_tokenizer_init=True,
        num_threads=args.threads,
        block_size=args.block_size,
    )


def _warm_up(contenders: Sequence[Contender], args: argparse.Namespace) -> None:
    """Teach each what steps cost, and have its list of stored blocks read."""
    random = Random(1)
    for length in _WARM_UP_LENS:
        prompt = [random.randrange(10, args.vocab_size) for _ in range(length)]
        for each in contenders:
            each.ask([prompt])
            each.settle()


def _num_blocks(turns: Sequence[Turn], args: argparse.Namespace) -> tuple[int, int]:
    """Blocks of all histories together, and of the pool: a part of them, but what the longest
    needs."""
    size = args.block_size
    distinct = {
        hash(turn.history[:end]) for turn in turns for end in range(size, len(turn.history), size)
    }
    longest = ceil_div(max(len(turn.history) for turn in turns), size) + 2
    return len(distinct), max(longest, ceil_div(len(distinct), args.memory))


def _turns(args: argparse.Namespace) -> list[Turn]:
    turns = conversations(
        args.trace,
        args.turns,
        divide=args.divide,
        max_len=args.max_len,
        min_turns=args.min_turns,
        vocab_size=args.vocab_size,
    )
    if not any(turn.is_continuing for turn in turns):
        raise SystemExit(f"{args.trace} has no conversations that fit; see --divide, --max-len")
    return turns


def _in_order(contenders: Mapping[str, Contender], number: int) -> Iterator[Contender]:
    """Take turns with who begins."""
    ordered = list(contenders.values())
    yield from ordered if number % 2 else reversed(ordered)


def prefixes(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure conversations."""
    turns = _turns(args)
    num_distinct, num_blocks = _num_blocks(turns, args)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-tiers-"))
        contenders = {
            name: _start(stack, args, num_blocks, where)
            for name, where in ((PLAIN, ""), (DISK, folder))
        }
        _warm_up(list(contenders.values()), args)
        until = time.monotonic() + args.budget
        for number, turn in enumerate(turns):
            if time.monotonic() > until:
                turns = turns[:number]
                break
            for each in _in_order(contenders, number):
                each.measure([turn.prompt])
                if len(turn.history) > len(turn.prompt):
                    each.ask([turn.history])
                    each.settle()
            _say(f"turn {number + 1} of {len(turns)}", contenders)
        stats = contenders[DISK].stats
    lines = [
        f"{len(turns)} turns, {sum(turn.is_continuing for turn in turns)} of which continue; "
        f"{num_distinct} blocks of histories, a pool of {num_blocks}; "
        f"{stats.num_restored_blocks} restored, {stats.num_faulty_blocks} faulty",
        *_table(turns, contenders),
        _processor_line(contenders),
    ]
    return _figures(contenders, lengths=[len(turn.prompt) for turn in turns]), lines


def _table(turns: Sequence[Turn], contenders: Mapping[str, Contender]) -> list[str]:
    kinds = {
        "all turns": list(range(len(turns))),
        "turns that continue": [n for n, turn in enumerate(turns) if turn.is_continuing],
        "first turns": [n for n, turn in enumerate(turns) if not turn.is_continuing],
    }
    lines = [f"{'median time to first token':28} {PLAIN:>10} {DISK:>10} {'ratio':>7} {'found':>14}"]
    for kind, numbers in kinds.items():
        if numbers:
            medians = [
                statistics.median(each.first_token_s[number] for number in numbers)
                for each in contenders.values()
            ]
            some = [turns[number] for number in numbers]
            shares = [
                _share([each.num_hit_tokens[number] for number in numbers], some)
                for each in contenders.values()
            ]
            lines.append(
                f"{kind:28} {medians[0]:8.3f} s {medians[1]:8.3f} s "
                f"{medians[0] / medians[1]:6.2f}x {100 * shares[0]:5.1f}/{100 * shares[1]:5.1f} %"
            )
    return lines


def _processor_line(contenders: Mapping[str, Contender]) -> str:
    """Which a busy machine disturbs less."""
    plain, disk = (each.processor_s for each in contenders.values())
    ratios = [second / first for first, second in zip(plain, disk, strict=True)]
    return (
        f"processor time, with what is written behind: {PLAIN} {sum(plain):.1f} s, "
        f"{DISK} {sum(disk):.1f} s, {sum(disk) / sum(plain):.4f} times as much; "
        f"median of the ratios {statistics.median(ratios):.4f}"
    )


def nothing(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure bursts of prompts of which nothing is found."""
    random = Random(args.seed)
    longest = max(args.prompt_len, *_WARM_UP_LENS)
    num_blocks = 2 * args.burst * (ceil_div(longest, args.block_size) + 1)
    ratios = list[float]()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-tiers-"))
        contenders = {
            name: _start(stack, args, num_blocks, where)
            for name, where in ((PLAIN, ""), (DISK, folder))
        }
        _warm_up(list(contenders.values()), args)
        until = time.monotonic() + args.budget
        for number in range(args.bursts):
            if time.monotonic() > until:
                break
            prompts = [
                [random.randrange(10, args.vocab_size) for _ in range(args.prompt_len)]
                for _ in range(args.burst)
            ]
            for each in _in_order(contenders, number):
                each.measure(prompts)
            plain, disk = (sum(each.first_token_s[-args.burst :]) for each in contenders.values())
            ratios.append(disk / plain)
            _say(f"burst {number + 1} of {args.bursts}", contenders)
    medians = [statistics.median(each.first_token_s) for each in contenders.values()]
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    lines = [
        f"median time to first token: {PLAIN} {medians[0]:.3f} s, {DISK} {medians[1]:.3f} s, "
        f"{medians[1] / medians[0]:.4f} times as long",
        f"ratio of a burst: median {statistics.median(ratios):.4f}, "
        f"mean {statistics.fmean(ratios):.4f} (standard error {spread:.4f})",
        _processor_line(contenders),
    ]
    return _figures(contenders, ratios=ratios), lines


def restart(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure what is found after a restart."""
    turns = _turns(args)
    before, after = turns[: -args.after], turns[-args.after :]
    _, num_blocks = _num_blocks(turns, args)
    if args.simulate:
        found = _simulated(before, after, num_blocks, args)
        return {"num_hit_tokens": found}, _restart_lines(found, before, after)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-tiers-"))
        going_on = _start(stack, args, num_blocks, f"{folder}/a")
        _warm_up([going_on], args)
        _serve(going_on, before, "before")
        shutil.copytree(f"{folder}/a", f"{folder}/b")
        # a record's identity has the folder's secret in it, and not its name
        started = _start(stack, args, num_blocks, f"{folder}/b")
        for name, each in (("going on", going_on), ("started anew", started)):
            _serve(each, after, name)
    first, second = (each.num_hit_tokens for each in (going_on, started))
    hits = (first[: len(before)], first[len(before) :], second)
    figures = _figures({"going on": going_on, "started anew": started})
    return figures, _restart_lines(hits, before, after)


_Hits = tuple[list[int], list[int], list[int]]
"""Tokens that were found of each turn: before, after it by an engine that goes on, and by one that
was started anew."""


def _restart_lines(hits: _Hits, before: Sequence[Turn], after: Sequence[Turn]) -> list[str]:
    ideal = _share([turn.num_known for turn in after], after)
    shares = [_share(each, after) for each in hits[1:]]
    return [
        f"{len(before)} turns before, of whose prompt tokens "
        f"{100 * _share(hits[0], before):.1f} % were found",
        f"the {len(after)} after: going on {100 * shares[0]:.1f} %, "
        f"started anew {100 * shares[1]:.1f} %, a cache of unlimited size {100 * ideal:.1f} %",
    ]


def _simulated(
    before: Sequence[Turn], after: Sequence[Turn], num_blocks: int, args: argparse.Namespace
) -> _Hits:
    plan = prepare_model(_config(args)).planned.plan
    limits = replace(plan.limits, num_blocks=num_blocks)
    payload_bytes = plan.kv_bytes // plan.limits.num_blocks * len(limits.windows)
    model = TierModel(limits, plan.step_costs, payload_bytes)

    def serve(replay: TierReplay, turns: Sequence[Turn], name: str) -> list[int]:
        found = []
        for number, turn in enumerate(turns):
            found.append(replay.serve(f"{name}{number}", turn.prompt, 1).num_hit_tokens)
            if len(turn.history) > len(turn.prompt):
                replay.serve(f"{name}{number}+", turn.history, 1)
        return found

    with tempfile.TemporaryDirectory(prefix="quire-tiers-") as folder:
        replay = TierReplay(model, Path(folder) / "a", _DISK_BYTES)
        first = serve(replay, before, "before")
        replay.settle()
        shutil.copytree(f"{folder}/a", f"{folder}/b")
        going_on = serve(replay, after, "after")
        replay.close()
        again = TierReplay(model, Path(folder) / "b", _DISK_BYTES)
        started = serve(again, after, "after")
        again.close()
    return first, going_on, started


def _share(num_hit_tokens: Sequence[int], turns: Sequence[Turn]) -> float:
    """Of the prompt tokens of some turns."""
    return sum(num_hit_tokens[: len(turns)]) / sum(len(turn.prompt) for turn in turns)


def _serve(contender: Contender, turns: Sequence[Turn], name: str) -> None:
    for number, turn in enumerate(turns):
        contender.measure([turn.prompt])
        if len(turn.history) > len(turn.prompt):
            contender.ask([turn.history])
            contender.settle()
        _say(f"{name}, turn {number + 1} of {len(turns)}", {name: contender})


def _say(what: str, contenders: Mapping[str, Contender]) -> None:
    each = ", ".join(
        f"{name} {one.first_token_s[-1]:.3f} s ({one.num_hit_tokens[-1]} found, "
        f"{one.processor_s[-1]:.2f} s of processors)"
        for name, one in contenders.items()
    )
    print(f"{what}: {each}", file=sys.stderr, flush=True)


def _figures(contenders: Mapping[str, Contender], **others: Any) -> dict[str, Any]:
    return {
        name: {
            "first_token_s": each.first_token_s,
            "num_hit_tokens": each.num_hit_tokens,
            "processor_s": each.processor_s,
        }
        for name, each in contenders.items()
    } | others


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.tiers"
    )
    parser.add_argument("what", choices=("prefixes", "nothing", "restart"))
    parser.add_argument("--model", required=True, help="a folder; without weights, random ones")
    parser.add_argument("--vocab-size", type=int, default=151936, help="(default: 151936)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--quantization", help="of the weights (default: none)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: all)")
    parser.add_argument("--block-size", type=int, default=16, help="(default: 16)")
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="begin nothing after so many seconds"
    )
    group = parser.add_argument_group("conversations")
    group.add_argument("--trace", type=Path, help="with block hashes, or of lengths")
    group.add_argument("--turns", type=int, default=60, help="(default: 60)")
    group.add_argument("--divide", type=int, default=1, help="all lengths by this (default: 1)")
    group.add_argument("--max-len", type=int, default=2000, help="of a prompt (default: 2000)")
    group.add_argument("--min-turns", type=int, default=4, help="of each (default: 4)")
    group.add_argument(
        "--memory", type=int, default=4, help="one part of so many is the pool (default: 4)"
    )
    group.add_argument("--after", type=int, default=100, help="turns after it (default: 100)")
    group.add_argument("--simulate", action="store_true", help="a restart without the model")
    group = parser.add_argument_group("nothing")
    group.add_argument("--bursts", type=int, default=20, help="(default: 20)")
    group.add_argument("--burst", type=int, default=3, help="prompts at once (default: 3)")
    group.add_argument("--prompt-len", type=int, default=256, help="(default: 256)")
    group.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.what != "nothing" and args.trace is None:
        parser.error(f"{args.what} needs --trace")
    measure = {"prefixes": prefixes, "nothing": nothing, "restart": restart}[args.what]
    figures, lines = measure(args)
    report(figures, lines, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
