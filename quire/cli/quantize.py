"""`quire quantize`: write a model's weights as integers, in a format that other engines read,
too."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.common.numbers import format_bytes

EXAMPLES = """\
examples:
  quire quantize ./my-model --to int8 -o ./my-model-int8
  quire quantize ./my-model --to int4 --weight-only -o ./my-model-w4a16
  quire generate ./my-model-int8 -p "Once upon a time"

Without this command, quantization=int8 or int4 quantizes in the same way each time that a model is
loaded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    parser.usage = "quire quantize MODEL --to FORMAT -o FOLDER [OPTIONS]"
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="model folder, Hugging Face name, or the shipped model's name",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("int8", "int4"),
        help="int8: W8A8 per output; int4: W4A8 in groups",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="the new model folder"
    )
    parser.add_argument(
        "--weight-only",
        action="store_true",
        help="int4 weights for floating-point activations (W4A16), which most engines read",
    )
    parser.add_argument(
        "--keep-head",
        action="store_true",
        help="leave the output head alone, for engines that need it so",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import numpy  # noqa: F401  # first: torch loses an interrupt while it imports numpy

    from quire.engine.assembly.quantization import quantize_model
    from quire.quant.writer import Recipe

    output = Path(args.output)
    recipe = Recipe(args.to, is_weight_only=args.weight_only, keeps_head=args.keep_head)
    quantize_model(args.model, recipe, output)
    num_bytes = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    print(f"{output}: {format_bytes(num_bytes)} of weights as {args.to}")
    return 0
