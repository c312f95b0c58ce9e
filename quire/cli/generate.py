"""`quire generate`: complete prompts together; stream texts,
or write one JSON object per prompt."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_config,
    sampling_params,
)
from quire.cli.output_file import OutputFile, open_output
from quire.cli.prompts import NamedPrompt, add_prompt_options, read_prompts

if TYPE_CHECKING:
    from quire.cli.session import PromptJob
    from quire.cli.terminal import StatusLine
    from quire.core.params import SamplingParams
    from quire.engine.assembly.preparation import PreparedModel
    from quire.engine.front.outputs import CompletionOutput, RequestOutput
    from quire.engine.loop.engine import Engine

EXAMPLES = """\
examples:
  quire generate quire-storyteller --chat -p "Tell me a story about a brave knight."
  quire generate ./my-model -p "Once upon a time" -p "The sea was" --temperature 0 --max-tokens 50
  quire generate ./my-model --prompts-file prompts.txt --json --output answers.jsonl
  echo "The capital of France is" | quire generate ./my-model --prompts-file - --n 3 --seed 7
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    add_prompt_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="one JSON object a prompt, in the order of the prompts"
    )
    group.add_argument(
        "--output", metavar="FILE", help="write to a file instead of standard output"
    )
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: the N likeliest tokens at each place",
    )
    group.add_argument("--no-progress", action="store_true", help="no progress bar")
    group.add_argument(
        "--quiet", action="store_true", help="no progress bar and no closing summary"
    )
    add_sampling_options(parser).add_argument(
        "--n", type=int, default=1, metavar="N", help="answers to each prompt"
    )
    add_engine_options(parser, exclude=("seed", "skip_tokenizer_init"))
    parser.usage = "quire generate [OPTIONS] MODEL -p TEXT [-p TEXT ...]"


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 if some request failed."""
    config = engine_config(args)
    from quire.cli.session import PromptJob, check, load
    from quire.cli.terminal import status_line
    from quire.engine.assembly.preparation import prepare_model

    prepared = prepare_model(config)
    params = _params(args, prepared)
    prompts = read_prompts(args, prepared.tokenizer)
    jobs = [PromptJob(each.prompt, params.clone()) for each in prompts]
    check(prepared, jobs)
    with open_output(args.output) as file:
        with status_line(is_enabled=not (args.quiet or args.no_progress)) as status:
            status.show(f"loading {args.model}")
            with closing(load(prepared)) as engine:
                started = time.monotonic()
                outputs = _generate(args, engine, (prompts, jobs), _Screen(file, status))
                wall_s = time.monotonic() - started
        if not args.quiet:
            _print_summary(engine, outputs, wall_s)
    return 1 if any(output.error is not None for output in outputs) else 0


def _params(args: argparse.Namespace, prepared: PreparedModel) -> SamplingParams:
    from quire.core.params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY if args.json else RequestOutputKind.CUMULATIVE
    return sampling_params(
        args, prepared.generation_config, n=args.n, logprobs=args.logprobs, output_kind=kind
    )


class _Screen(NamedTuple):
    """Where a run shows itself."""

    file: OutputFile
    status: StatusLine


def _generate(
    args: argparse.Namespace,
    engine: Engine,
    work: tuple[Sequence[NamedPrompt], Sequence[PromptJob]],
    screen: _Screen,
) -> list[RequestOutput]:
    """Run everything, showing it as asked; finished outputs in the order of the prompts."""
    from quire.cli.printer import StreamPrinter
    from quire.cli.session import run as run_jobs
    from quire.cli.terminal import printable

    prompts, jobs = work
    is_terminal = args.output is None and sys.stdout.isatty()
    printer = StreamPrinter(
        [each.text for each in prompts],
        args.n,
        lambda text: screen.file.write(printable(text) if is_terminal else text),
    )
    finished: dict[int, RequestOutput] = {}
    lines = _JsonLines(prompts, screen.file)
    progress = _ProgressLine(engine, screen.status, len(jobs))
    for output in run_jobs(engine, jobs, lambda: progress.show(len(finished))):
        if output.finished:
            finished[int(output.request_id)] = output
            progress.show(len(finished))
        if args.json:
            lines.take(finished)
        else:
            printer.take(output)
    return [finished[number] for number in sorted(finished)]


class _ProgressLine:
    """`███── 3/10 prompts, 5 running, 120.4 tokens/s, 0:07` on the status line."""

    def __init__(self, engine: Engine, status: StatusLine, num_jobs: int) -> None:
        self._engine = engine
        self._status = status
        self._num_jobs = num_jobs
        self._started_s = time.monotonic()

    def show(self, num_finished: int) -> None:
        """Show where things stand."""
        from quire.cli.terminal import progress_bar

        elapsed_s = max(1e-9, time.monotonic() - self._started_s)
        scheduler = self._engine.scheduler
        self._status.show(
            f"{progress_bar(num_finished / self._num_jobs)} {num_finished}/{self._num_jobs} "
            "prompts, "
            f"{len(scheduler.running)} running, "
            f"{scheduler.stats.num_generated_tokens / elapsed_s:,.1f} tokens/s, "
            f"{int(elapsed_s) // 60}:{int(elapsed_s) % 60:02}"
        )


class _JsonLines:
    """Writes finished outputs in the order of the prompts,
    each as soon as those before it are written."""

    def __init__(self, prompts: Sequence[NamedPrompt], file: OutputFile) -> None:
        self._prompts = prompts
        self._file = file
        self._num_written = 0

    def take(self, finished: dict[int, RequestOutput]) -> None:
        """Write what has its turn."""
        while self._num_written in finished:
            record = _record(
                self._num_written,
                self._prompts[self._num_written].text,
                finished[self._num_written],
            )
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._num_written += 1


def _record(number: int, prompt: str, output: RequestOutput) -> dict[str, Any]:
    """Return one line of --json."""
    metrics = output.metrics
    record: dict[str, Any] = {
        "index": number,
        "prompt": prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_prefix_hit_tokens": metrics.num_prefix_hit_tokens,
        "outputs": [_completion(each) for each in output.outputs],
        "first_token_s": None
        if metrics.first_token_s is None
        else round(metrics.first_token_s - metrics.arrival_s, 6),
        "total_s": None
        if metrics.finished_s is None
        else round(metrics.finished_s - metrics.arrival_s, 6),
        "num_preemptions": metrics.num_preemptions,
    }
    if output.error is not None:
        record["error"] = output.error
    return record


def _completion(output: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        record["cumulative_logprob"] = output.cumulative_logprob
        record["logprobs"] = [list(_alternatives(each)) for each in output.logprobs]
    return record


def _alternatives(by_token: Any) -> Iterator[dict[str, Any]]:
    for token_id, each in by_token.items():
        yield {
            "token_id": token_id,
            "token": each.decoded_token,
            "logprob": each.logprob,
            "rank": each.rank,
        }


def _print_summary(engine: Engine, outputs: Sequence[RequestOutput], wall_s: float) -> None:
    from quire.observe.summary import describe, summarize

    scheduler = engine.scheduler
    summary = summarize(
        outputs, scheduler.stats, num_blocks=scheduler.limits.num_blocks, wall_s=wall_s
    )
    print("\n" + "\n".join(describe(summary)), file=sys.stderr)
