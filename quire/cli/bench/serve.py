"""`quire bench serve`: a running server under load, by any server that speaks OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench.common import length_range
from quire.cli.output_file import open_output
from quire.cli.parser import UsageError
from quire.common.http_client import key_headers, server_root
from quire.common.json_text import read_json

if TYPE_CHECKING:
    from quire.bench.serving.arrivals import Arrivals
    from quire.bench.serving.dataset import Dataset

API_KEY_VARIABLE = "OPENAI_API_KEY"

EXAMPLES = """\
examples:
  quire bench serve --url http://127.0.0.1:8000 --num-requests 100 --request-rate 4
  quire bench serve --url http://127.0.0.1:8000 --max-concurrency 32 \\
    --goodput ttft:500 tpot:50 --html report.html
  quire bench serve --url http://127.0.0.1:8000 --trace azure2023_conv.csv.gz \\
    --speed-up 10 --max-total-len 4096
  quire bench serve --url https://api.example.com/v1 --endpoint chat \\
    --prompts-file questions.jsonl --model NAME

Random prompts are token ids where --vocab-size says of which vocabulary (Quire, vLLM and
llama.cpp take them), else words. Answers are greedy and go on to their full length (ignore_eos,
which these three know); --extra-body '{"ignore_eos": null}' takes that away for a server that
refuses it. The key may also be in OPENAI_API_KEY.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url", required=True, metavar="URL", help="where it is, with or without /v1"
    )
    server.add_argument(
        "--model", metavar="NAME", help="as the server knows it (default: the first that it names)"
    )
    server.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="(default: completions)",
    )
    server.add_argument("--api-key", metavar="KEY", help=f"(default: ${API_KEY_VARIABLE})")
    server.add_argument(
        "--extra-body", metavar="JSON", help="fields of every request; null takes a usual one away"
    )
    server.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="longest silence of the server (default: 600)",
    )
    _add_workload(parser)
    _add_load(parser)
    output = parser.add_argument_group("results")
    output.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives: ttft, tpot, itl, e2e",
    )
    output.add_argument(
        "--json", metavar="FILE", help="write the record to FILE, - for standard output"
    )
    output.add_argument("--html", metavar="FILE", help="write a report with plots to FILE")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset",
        choices=("random", "prefix"),
        default="random",
        help="kind of prompts (default: random)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="lengths, arrivals and shared prefixes from a .csv or .jsonl file (or .gz)",
    )
    group.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="one prompt a line; JSON lines with prompt, messages or turns",
    )
    group.add_argument("--num-requests", type=int, default=100, metavar="N", help="(default: 100)")
    group.add_argument(
        "--input-len", type=length_range, default=(128, 128), metavar="A:B", help="(default: 128)"
    )
    group.add_argument(
        "--output-len", type=length_range, default=(64, 64), metavar="A:B", help="(default: 64)"
    )
    group.add_argument(
        "--prefix-len",
        type=int,
        default=512,
        metavar="N",
        help="shared tokens of --dataset prefix (512)",
    )
    group.add_argument(
        "--num-prefixes",
        type=int,
        default=1,
        metavar="N",
        help="different shared prefixes (default: 1)",
    )
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="send token ids below N instead of words"
    )
    group.add_argument(
        "--max-total-len",
        type=int,
        metavar="N",
        help="leave out what of a trace is longer, answer included",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of lengths, tokens and arrivals (default: 0)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "load", "by default, a trace as it came, and everything else at once"
    )
    group.add_argument("--request-rate", type=float, metavar="X", help="requests a second")
    group.add_argument(
        "--end-rate",
        type=float,
        metavar="X",
        help="rate at the end: it changes linearly from --request-rate",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="1: Poisson (default); below: bursts; inf: constant gaps",
    )
    group.add_argument(
        "--speed-up",
        type=float,
        default=1.0,
        metavar="X",
        help="replay a trace so many times as fast",
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests in flight at most"
    )
    group.add_argument(
        "--duration", type=float, metavar="S", help="send nothing after so many seconds"
    )
    group.add_argument(
        "--warmups",
        type=int,
        default=1,
        metavar="N",
        help="requests before it that do not count (default: 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 if a request was not answered."""
    _check(args)
    from quire.bench.serving.load import LoadOptions
    from quire.bench.serving.report import render_html
    from quire.bench.serving.results import parse_objectives
    from quire.bench.serving.runner import ServeOptions, measure_server, render

    options = ServeOptions(
        url=server_root(args.url),
        headers=key_headers(args.api_key or os.environ.get(API_KEY_VARIABLE)),
        model=args.model,
        is_chat=args.endpoint == "chat",
        body=_extra_body(args.extra_body),
        arrivals=_arrivals(args),
        speed_up=args.speed_up,
        seed=args.seed,
        load=LoadOptions(max_concurrency=args.max_concurrency, duration_s=args.duration),
        num_warmups=args.warmups,
        timeout_s=args.timeout,
        objectives_ms=parse_objectives(args.goodput),
        command=shlex.join(without_key(["quire", *sys.argv[1:]])),
    )
    dataset = _dataset(args)
    with (
        open_output(None if args.json == "-" else args.json) as file,
        open_output(args.html) as page,
    ):
        record = asyncio.run(
            measure_server(options, dataset, lambda text: print(f"quire: {text}", file=sys.stderr))
        )
        if args.json is not None:
            file.write(json.dumps(record, indent=1) + "\n")
        if args.html is not None:
            page.write(render_html(record))
    print("\n".join(render(record)), file=sys.stderr if args.json == "-" else sys.stdout)
    return 0 if record["result"]["num_ok"] == record["result"]["num_requests"] else 1


def without_key(argv: list[str]) -> list[str]:
    """Return a command line that may be kept."""
    shown = [*argv]
    for place, word in enumerate(argv):
        if word == "--api-key" and place + 1 < len(argv):
            shown[place + 1] = "..."
        elif word.startswith("--api-key="):
            shown[place] = "--api-key=..."
    return shown


def _check(args: argparse.Namespace) -> None:
    for name in ("num_requests", "prefix_len", "num_prefixes", "max_concurrency", "max_total_len"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    if (
        args.warmups < 0
        or not 0 < args.timeout < math.inf
        or (args.duration is not None and not args.duration > 0)
    ):
        raise UsageError("--warmups must be at least 0; --timeout and --duration above 0")
    if args.trace is not None and args.prompts_file is not None:
        raise UsageError("give either --trace or --prompts-file")
    if args.end_rate is not None and args.request_rate is None:
        raise UsageError("--end-rate needs --request-rate, where the rate begins")


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        body = read_json(text)
    except ValueError as error:
        raise UsageError(f"--extra-body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise UsageError("--extra-body must be a JSON object")
    return body


def _arrivals(args: argparse.Namespace) -> Arrivals | None:
    from quire.bench.serving.arrivals import Arrivals

    if args.request_rate is None and args.trace is not None:
        return None
    rate = math.inf if args.request_rate is None else args.request_rate
    return Arrivals(rate, args.end_rate, args.burstiness)


def _dataset(args: argparse.Namespace) -> Dataset:
    from quire.bench.serving.dataset import (
        PromptWriter,
        Sizes,
        file_dataset,
        prefix_dataset,
        random_dataset,
        trace_dataset,
    )

    if args.prompts_file is not None:
        path, count = Path(args.prompts_file), args.num_requests
        return file_dataset(path, output_len=args.output_len, num_requests=count, seed=args.seed)
    writer = PromptWriter(args.vocab_size)
    if args.trace is not None:
        longest = args.max_total_len
        return trace_dataset(
            Path(args.trace), writer, num_requests=args.num_requests, max_total_len=longest
        )
    sizes = Sizes(args.num_requests, args.input_len, args.output_len)
    if args.dataset == "prefix":
        return prefix_dataset(
            sizes, writer, args.seed, prefix_len=args.prefix_len, num_prefixes=args.num_prefixes
        )
    return random_dataset(sizes, writer, args.seed)
