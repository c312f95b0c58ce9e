"""`quire plugin check`: whether a platform computes what it must, and to the bit what it must."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.kernels.conformance import Verdict

EXAMPLES = """\
examples:
  quire plugin check my-device
  quire plugin check my-device --kernels-only

The exit code is 1 if a check failed, 2 if the platform cannot be loaded here.
"""
_PROMPT = [3 + 7 * place % 240 for place in range(53)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("name", metavar="NAME", help="as the package calls the platform")
    parser.add_argument(
        "--kernels-only", action="store_true", help="check operations alone, and run no model"
    )
    parser.add_argument(
        "--model", default="quire-storyteller", help="the model that is run (a small one)"
    )
    parser.add_argument("--verbose", action="store_true", help="also name what is right")


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 if a check failed."""
    from quire.kernels.conformance import check_kernels
    from quire.kernels.platforms import platform_kernels

    kernels = platform_kernels(args.name)
    num_checked = num_wrong = 0
    for verdict in _all(check_kernels(kernels), args):
        num_checked += 1
        num_wrong += verdict.problem is not None
        if verdict.problem is not None:
            print(f"FAIL  {verdict.name}: {verdict.problem}")
        elif args.verbose:
            print(f"ok    {verdict.name}")
    outcome = "all are right" if not num_wrong else f"{num_wrong} are wrong"
    print(f"{num_checked} checks of {args.name}, and {outcome}.")
    return 1 if num_wrong else 0


def _all(of_kernels: Iterator[Verdict], args: argparse.Namespace) -> Iterator[Verdict]:
    yield from of_kernels
    if not args.kernels_only:
        yield from _check_engine(args.model, args.name)


def _check_engine(model: str, name: str) -> Iterator[Verdict]:
    """Compare a model's answers under other circumstances with those of each request alone."""
    from quire.kernels.conformance import Verdict

    prompts = [_PROMPT[:length] for length in (1, 16, 33, 53)]
    alone = [_answers(model, name, [prompt])[0] for prompt in prompts]
    circumstances: dict[str, dict[str, Any]] = {
        "all in one batch": {},
        "prompts in pieces": {"max_num_batched_tokens": 16},
        "blocks of another size": {"block_size": 8},
        "nothing is cached": {"enable_prefix_caching": False},
    }
    for what, options in circumstances.items():
        found = _answers(model, name, prompts, **options)
        text = None if found == alone else "tokens or log-probabilities differ"
        yield Verdict(f"model: {what}", text)


def _answers(model: str, name: str, prompts: list[list[int]], **options: Any) -> list[object]:
    from quire.core.params import SamplingParams
    from quire.llm import LLM

    params = SamplingParams(temperature=0.8, seed=5, max_tokens=6, logprobs=1, ignore_eos=True)
    settings = {"kv_cache_memory": "16MiB", "num_threads": 1, "max_num_seqs": 4, **options}
    with closing(LLM(model, platform=name, **settings)) as llm:
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]
