"""`quire embed`: vectors of the lines of text files, as JSON lines or as one NumPy array."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.cli.options import add_engine_options, engine_config
from quire.cli.output_file import OutputError, check_output, open_output
from quire.cli.text_lines import add_file_arguments, read_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.llm import LLM

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
    check_output(args.output)
    with closing(LLM(args.model, **options)) as llm:
        if args.output is not None and args.output.endswith(".npy"):
            _write_array(args, llm, params)
        else:
            _write_lines(args, llm, params)
    return 0


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of the engine's options, for `LLM`. Raises ConfigError."""
    engine_config(args)
    return {name: getattr(args, name) for name in args.engine_options if hasattr(args, name)}


def _write_lines(args: argparse.Namespace, llm: LLM, params: Any) -> None:
    with open_output(args.output) as file:
        for number, (text, vector) in enumerate(_vectors(args, llm, params)):
            record = {"index": number, "text": text, "embedding": vector.tolist()}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _write_array(args: argparse.Namespace, llm: LLM, params: Any) -> None:
    import numpy as np

    made = [vector for _, vector in _vectors(args, llm, params)]
    try:
        np.save(args.output, np.stack(made) if made else np.zeros((0, 0), np.float32))
    except OSError as error:
        raise OutputError(f"{args.output} cannot be written: {error.strerror}") from None


def _vectors(
    args: argparse.Namespace, llm: LLM, params: Any
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Texts and their vectors, so many at a time that files of any length can be read."""
    for texts in groups(read_lines(args.files), _TEXTS_AT_ONCE):
        outputs = llm.embed(texts, params, use_tqdm=not args.no_progress)
        yield from zip(texts, (output.outputs.data for output in outputs), strict=True)


def groups(lines: Iterator[str], count: int) -> Iterator[Sequence[str]]:
    """Lines, so many at a time."""
    while group := list(islice(lines, count)):
        yield group
