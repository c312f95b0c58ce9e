"""`quire bench kernels`: the CPU's projections in every weight format, or a GPU's kernels,
against the machine's limits."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from quire.cli.output_file import open_output
from quire.cli.parser import UsageError
from quire.config.engine import MAX_NUM_THREADS
from quire.errors import ConfigError

EXAMPLES = """\
examples:
  quire bench kernels
  quire bench kernels --device cuda --json kernels.json
  quire bench kernels --device cuda --tune quire/kernels/triton/tunings
  quire bench kernels --shape 2048x8192 --rows 1,64 --weights bf16,int4-g128 --num-threads 4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("kernels")
    group.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels (default: cpu)"
    )
    group.add_argument(
        "--shape",
        type=shape,
        default=(4096, 2048),
        metavar="NxK",
        help="outputs x inputs (default: 4096x2048)",
    )
    group.add_argument(
        "--rows",
        type=counts,
        default=[1, 4, 16, 64, 512],
        metavar="LIST",
        help="default: 1,4,16,64,512",
    )
    group.add_argument(
        "--weights", metavar="LIST", help="formats such as f32,bf16,int4-g128 (default: all)"
    )
    group.add_argument("--num-threads", type=int, metavar="N", help="default: one for each core")
    group.add_argument(
        "--isa", metavar="NAME", help="instruction set (default: the best that this machine has)"
    )
    group.add_argument(
        "--tune",
        metavar="FOLDER",
        help="measure a GPU's tile sizes and write them there as its tuning file",
    )
    group.add_argument(
        "--json", metavar="FILE", help="write the figures to FILE, - for standard output"
    )


def shape(text: str) -> tuple[int, int]:
    """`4096x2048`"""
    outputs, _, inputs = text.partition("x")
    if not (outputs.isdigit() and inputs.isdigit() and int(outputs) and int(inputs)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 4096x2048")
    return int(outputs), int(inputs)


def counts(text: str) -> list[int]:
    """`1,8,64`"""
    found = [int(each) if each.isdigit() else 0 for each in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts such as 1,8,64")
    return found


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.device == "cuda":
        return run_on_gpu(args)
    if args.tune is not None:
        raise UsageError("--tune applies to --device cuda only")
    if args.num_threads is not None and not 1 <= args.num_threads <= MAX_NUM_THREADS:
        raise UsageError(f"--num-threads must be at least 1 and at most {MAX_NUM_THREADS}")
    import numpy  # noqa: F401  # first: torch loses an interrupt while it imports numpy

    from quire.bench.kernels import KINDS, measure_limits, measure_linear, render
    from quire.kernels import cpu

    kinds = list(KINDS) if args.weights is None else args.weights.split(",")
    unknown = [each for each in kinds if each not in KINDS]
    if unknown:
        raise UsageError(f"--weights: {unknown[0]!r} is not one of {', '.join(KINDS)}")
    cpu.load()  # says what is missing where there are no native kernels
    for kind in kinds:
        size = KINDS[kind].group_size
        if size and args.shape[1] % size:
            raise ConfigError(
                f"--shape: groups of {size} ({kind}) do not divide {args.shape[1]} inputs"
            )
    with (
        cpu.using(isa=args.isa, num_threads=args.num_threads),
        open_output(None if args.json == "-" else args.json) as file,
    ):
        limits = measure_limits()
        times = [
            each for kind in kinds for each in measure_linear(kind, args.shape, args.rows, limits)
        ]
        if args.json is not None:
            figures = {
                "shape": args.shape,
                "limits": asdict(limits),
                "linear": [asdict(each) for each in times],
            }
            file.write(json.dumps(figures, indent=1) + "\n")
    print("\n".join(render(limits, times)), file=sys.stderr if args.json == "-" else sys.stdout)
    return 0


def run_on_gpu(args: argparse.Namespace) -> int:
    """Return every kernel of the GPU back end, with shapes of its own;
    the options of the CPU's projections do not apply."""
    for name in ("weights", "num_threads", "isa"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} applies to the CPU's kernels only")
    from quire.engine.plan.gpu import require_gpu

    gpu = require_gpu()
    if args.tune is not None:
        return tune_gpu(Path(args.tune), gpu.name)
    from quire.bench.gpu_kernels import cases, measure, measure_limits, render
    from quire.kernels.triton import load

    kernels = load("cuda")
    with open_output(None if args.json == "-" else args.json) as file:
        limits = measure_limits(kernels.device)
        times = [measure(case, limits, kernels.device) for case in cases(kernels)]
        if args.json is not None:
            file.write(
                json.dumps(
                    {"limits": asdict(limits), "kernels": [asdict(each) for each in times]},
                    indent=1,
                )
                + "\n"
            )
    print("\n".join(render(limits, times)), file=sys.stderr if args.json == "-" else sys.stdout)
    return 0


def tune_gpu(folder: Path, name: str) -> int:
    """Measure, and write the file that engines on this kind of GPU read."""
    if not folder.is_dir():
        raise UsageError(f"--tune: there is no folder {folder}")
    import torch

    from quire.bench.tuning import CANDIDATES, names_of, tune_device
    from quire.kernels.triton import load
    from quire.kernels.triton.tuning import file_name

    device = load("cuda").device
    found = tune_device(load("cuda").tuning, torch.device(device))
    found.write(folder / file_name(name))
    for entry in CANDIDATES:
        print(f"{entry}: {names_of(getattr(found, entry))}")
    print(f"written to {folder / file_name(name)}")
    return 0
