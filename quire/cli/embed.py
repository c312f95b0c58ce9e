"""`quire embed`: vectors of the lines of text files, as JSON lines or as one NumPy array."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from quire.cli.options import add_engine_options, engine_config
from quire.cli.output_file import OutputError, check_output, open_output
from quire.cli.text_lines import add_file_arguments, check_apart, lines_named, read_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = Iterator[tuple[str, NDArray[np.float32]]]
    """Texts, and what was made of them."""

EXAMPLES = """\
examples:
  quire embed BAAI/bge-small-en-v1.5 documents.txt --output vectors.npy
  echo "What is a fox?" | quire embed ./my-model --prompt-name query
  quire embed quire-embedder stories.txt
"""
_TEXTS_AT_ONCE = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    add_engine_options(parser, exclude=("skip_tokenizer_init",))
    add_file_arguments(parser, "text")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output",
        metavar="FILE",
        help="write to a file: a name that ends in .npy gets one float32 array [texts, elements]",
    )
    group.add_argument(
        "--dimensions", type=int, metavar="N", help="the first N elements (Matryoshka models)"
    )
    group.add_argument(
        "--prompt-name", metavar="NAME", help="which of the model's prompts to put before texts"
    )
    group.add_argument(
        "--truncate-prompt-tokens",
        type=int,
        metavar="N",
        help="keep the first N tokens of a text, -1 as many as the model takes",
    )
    group.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.usage = "quire embed [OPTIONS] MODEL [FILE ...]"


def shows_progress(args: argparse.Namespace) -> bool:
    """Whether there is a terminal to show it on."""
    return not args.no_progress and sys.stderr.isatty()


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from quire.core.pooling import PoolingParams
    from quire.llm import LLM

    params = PoolingParams(
        dimensions=args.dimensions,
        prompt_name=args.prompt_name,
        truncate_prompt_tokens=args.truncate_prompt_tokens,
    )
    options = engine_options(args)
    check_apart(args.files, args.output)
    check_output(args.output)
    given = read_lines(args.files)
    texts = chain([next(given)], given)  # before the model is loaded: there may be none
    with closing(LLM(args.model, **options)) as llm:

        def vectors() -> Iterator[tuple[str, NDArray[np.float32]]]:
            """Texts and their vectors, so many at a time that files of any length can be read."""
            while lines := list(islice(texts, _TEXTS_AT_ONCE)):
                group = [line.text for line in lines]
                with lines_named(lines, "prompts"):
                    outputs = llm.embed(group, params, use_tqdm=shows_progress(args))
                yield from zip(group, (output.outputs.data for output in outputs), strict=True)

        if args.output is not None and args.output.endswith(".npy"):
            _write_array(args.output, vectors())
        else:
            _write_lines(args.output, vectors())
    return 0


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of the engine's options, for `LLM`. Raises ConfigError."""
    engine_config(args)
    return {name: getattr(args, name) for name in args.engine_options if hasattr(args, name)}


def _write_lines(output: str | None, vectors: Vectors) -> None:
    with open_output(output) as file:
        for number, (text, vector) in enumerate(vectors):
            record = {"index": number, "text": text, "embedding": vector.tolist()}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _write_array(output: str, vectors: Vectors) -> None:
    import numpy as np

    made = np.stack([vector for _, vector in vectors])
    try:
        with open(output, "wb") as file:
            np.lib.format.write_array_header_1_0(
                file, np.lib.format.header_data_from_array_1_0(made)
            )
            file.write(made.data)  # NumPy's own way to a file does not say what failed
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror}") from None
