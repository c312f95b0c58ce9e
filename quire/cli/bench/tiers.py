"""`quire bench tiers`: what a disk behind the KV pool is worth on a real trace, simulated and
measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.cli.options import add_engine_options, engine_config
from quire.cli.parser import UsageError

EXAMPLES = """\
examples:
  quire bench tiers ./my-model --trace multiturn.jsonl.gz --kv-cache-memory 256MiB
  quire bench tiers ./my-model --trace multiturn.jsonl.gz --sizes 0,1GiB,8GiB --simulate-only
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="a .csv or .jsonl trace with block hashes, gzipped or not",
    )
    group.add_argument(
        "--limit", type=int, default=100, metavar="N", help="its first requests (default: 100)"
    )
    group.add_argument(
        "--sizes",
        default="0,256MiB,4GiB",
        metavar="BYTES,...",
        help="sizes of the disk, 0 for none (default: 0,256MiB,4GiB)",
    )
    group.add_argument(
        "--output-len", type=int, default=1, metavar="N", help="tokens of an answer (default: 1)"
    )
    group.add_argument(
        "--simulate-only", action="store_true", help="do not load and measure the model"
    )
    add_engine_options(parser, exclude=("skip_tokenizer_init", "kv_cache_dir", "kv_disk_size"))


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from quire.common.numbers import parse_bytes

    if args.limit < 1 or args.output_len < 1:
        raise UsageError("--limit and --output-len must be at least 1")
    sizes = [
        0 if size.strip() == "0" else parse_bytes(size.strip(), option="sizes")
        for size in args.sizes.split(",")
    ]
    config = engine_config(args, skip_tokenizer_init=True)
    from quire.bench.tiers import ideal_share, measure_tiers, prompts_of, render
    from quire.engine.assembly.preparation import prepare_model
    from quire.sim.traces import read_trace

    trace = read_trace(args.trace, limit=args.limit)
    plan = prepare_model(config).planned.plan
    longest = plan.limits.longest_len(plan.limits.max_model_len) - args.output_len
    prompts = prompts_of(trace, args.limit, longest, plan.spec.vocab_size)
    rows = measure_tiers(
        plan,
        prompts,
        sizes,
        max_tokens=args.output_len,
        is_measured=not args.simulate_only,
        say=lambda text: print(f"quire: {text}", file=sys.stderr),
    )
    print("\n".join(render(rows)))
    share = 100 * ideal_share(prompts, plan.limits.block_size)
    print(f"a cache of unlimited size finds {share:.1f} % ({len(prompts)} requests, medians)")
    return 0
