"""`quire chat`: a conversation in the terminal, with a model that is loaded here, or with a server
(`--url`).

Every turn sends the whole history; the prefix cache makes that cheap. Ctrl-C stops an answer (what
was said of it stays in the history), not the chat; Ctrl-D quits.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from quire.cli import remote_chat
from quire.cli.conversation import AnswerError, ChatSession, Reply
from quire.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_config,
    sampling_params,
)
from quire.cli.parser import UsageError
from quire.cli.prompts import ChatEncoder, Message, add_chat_options
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.core.params import SamplingParams
    from quire.engine.front.outputs import RequestOutput
    from quire.engine.loop.engine import Engine

EXAMPLES = """\
examples:
  quire chat quire-storyteller
  quire chat ./my-model --system "You answer in one sentence." --temperature 0.7 --verbose
  quire chat --url http://127.0.0.1:8000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("chat")
    add_chat_options(group)
    group.add_argument(
        "--verbose",
        action="store_true",
        help="after each answer: tokens, speed and what the cache held",
    )
    remote_chat.add_arguments(group)
    add_sampling_options(parser)
    add_engine_options(parser, exclude=("seed", "skip_tokenizer_init"), is_model_needed=False)
    parser.usage = f"{parser.prog} [OPTIONS] MODEL\n       {parser.prog} [OPTIONS] --url URL"


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    start: list[Message] = (
        [] if args.system is None else [{"role": "system", "content": args.system}]
    )
    if args.url is not None:
        _refuse_engine_options(args)
        ChatSession(remote_chat.RemoteModel(args), start, is_verbose=args.verbose).hold()
        return 0
    if args.model is None:
        raise UsageError("give a MODEL to load, or --url of a server")
    if args.model_name is not None or args.api_key is not None:
        raise UsageError("--model-name and --api-key are for a server; give its --url")
    config = engine_config(args)
    from quire.cli.session import PromptJob, check, load
    from quire.core.params import RequestOutputKind
    from quire.engine.assembly.preparation import prepare_model

    prepared = prepare_model(config)
    params = sampling_params(
        args, prepared.generation_config, output_kind=RequestOutputKind.CUMULATIVE
    )
    encode = ChatEncoder(prepared.tokenizer, args.chat_template)
    check(prepared, [PromptJob(encode([*start, {"role": "user", "content": "Hello"}]), params)])
    engine = load(prepared)
    try:
        ChatSession(LocalModel(engine, encode, params), start, is_verbose=args.verbose).hold()
    finally:
        engine.close()
    return 0


def _refuse_engine_options(args: argparse.Namespace) -> None:
    """Refuse options of a model that is loaded here: they would have no effect."""
    given = [name for name in args.engine_options if hasattr(args, name)]
    if args.model is not None:
        raise UsageError(
            f"give either a MODEL to load ({args.model!r}) or --url; the model's name there "
            "is --model-name"
        )
    if given or args.chat_template is not None:
        option = (given or ["chat_template"])[0].replace("_", "-")
        raise UsageError(
            f"--{option} is for a model that is loaded here; with --url, the server decides"
        )


class LocalModel:
    """An engine of this process."""

    def __init__(self, engine: Engine, encode: ChatEncoder, params: SamplingParams) -> None:
        self.name = engine.plan.config.model
        self._engine = engine
        self._encode = encode
        self._params = params

    def answer(self, messages: Sequence[Message], show: Callable[[str], None]) -> Reply:
        """See `Model`."""
        try:
            return self._answer(messages, show)
        except RequestError as error:
            raise AnswerError(str(error)) from None

    def _answer(self, messages: Sequence[Message], show: Callable[[str], None]) -> Reply:
        from quire.cli.session import PromptJob, run

        latest: RequestOutput | None = None
        num_shown = 0
        with _interruptible() as interrupted:
            outputs = run(
                self._engine,
                [PromptJob(self._encode(messages), self._params.clone())],
                interrupted.check,
            )
            with contextlib.suppress(_StopAnswerError):
                for latest in outputs:
                    text = latest.outputs[0].text
                    show(text[num_shown:])
                    num_shown = len(text)
        if latest is None or latest.error is not None:
            raise AnswerError("stopped before it began" if latest is None else str(latest.error))
        metrics = latest.metrics
        return Reply(
            text=latest.outputs[0].text,
            is_stopped=interrupted.is_set,
            num_prompt=len(latest.prompt_token_ids),
            num_cached=metrics.num_prefix_hit_tokens,
            num_output=len(latest.outputs[0].token_ids),
            first_s=None
            if metrics.first_token_s is None
            else metrics.first_token_s - metrics.arrival_s,
        )


class _StopAnswerError(Exception):
    """Ctrl-C during an answer, raised between two steps, where the engine is whole."""


class _Interruption:
    def __init__(self) -> None:
        self.is_set = False

    def check(self) -> None:
        """Between steps."""
        if self.is_set:
            raise _StopAnswerError

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: remember it until the step is done; a second one does not wait."""
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextlib.contextmanager
def _interruptible() -> Iterator[_Interruption]:
    """Ctrl-C inside the block is noted instead of raised."""
    interruption = _Interruption()
    before = signal.signal(signal.SIGINT, interruption.handle)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
