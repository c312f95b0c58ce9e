"""`quire rerank`: the lines of text files in the order of how well they answer a query."""

from __future__ import annotations

import argparse
import json
from contextlib import closing

from quire.cli.embed import engine_options, shows_progress
from quire.cli.options import add_engine_options
from quire.cli.output_file import check_output, open_output
from quire.cli.parser import UsageError
from quire.cli.text_lines import (
    TextLine,
    add_file_arguments,
    check_apart,
    lines_named,
    read_all_lines,
)

EXAMPLES = """\
examples:
  quire rerank BAAI/bge-reranker-v2-m3 -q "What do foxes eat?" documents.txt --top-n 5
  quire rerank quire-storyteller --runner pooling -q "a fox" stories.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    add_engine_options(parser, exclude=("skip_tokenizer_init",))
    add_file_arguments(parser, "document")
    parser.add_argument("-q", "--query", required=True, metavar="TEXT", help="what is asked")
    parser.add_argument("--top-n", type=int, metavar="N", help="the best N alone")
    parser.add_argument(
        "--instruction", metavar="TEXT", help="for models whose template has room for one"
    )
    parser.add_argument(
        "--truncate-prompt-tokens",
        type=int,
        metavar="N",
        help="keep N tokens of query and document, -1 as many as the model takes",
    )
    parser.add_argument(
        "--max-tokens-per-query", type=int, metavar="N", help="read N tokens of the query"
    )
    parser.add_argument(
        "--max-tokens-per-doc", type=int, metavar="N", help="read N tokens of each document"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--output", metavar="FILE", help="write to a file")
    group.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.usage = "quire rerank [OPTIONS] MODEL -q TEXT [FILE ...]"


def run(args: argparse.Namespace) -> int:
    """Run the command: one JSON object for each document, the best first."""
    from quire.llm import LLM

    if args.top_n is not None and args.top_n < 1:
        raise UsageError(f"--top-n={args.top_n} must be at least 1; leave it out for all documents")
    check_apart(args.files, args.output)
    lines = read_all_lines(args.files)
    documents = [line.text for line in lines]
    options = engine_options(args)
    check_output(args.output)
    query = TextLine(args.query, "--query")
    with (
        closing(LLM(args.model, **options)) as llm,
        lines_named([query], "data_1"),
        lines_named(lines, "data_2"),
    ):
        outputs = llm.score(
            args.query,
            documents,
            use_tqdm=shows_progress(args),
            truncate_prompt_tokens=args.truncate_prompt_tokens,
            instruction=args.instruction,
            max_tokens_per_query=args.max_tokens_per_query,
            max_tokens_per_doc=args.max_tokens_per_doc,
        )
    scores = [output.outputs.score for output in outputs]
    order = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
    with open_output(args.output) as file:
        for number in order[: args.top_n]:
            record = {"index": number, "score": scores[number], "text": documents[number]}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return 0
