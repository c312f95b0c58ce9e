"""`quire chat`: a conversation in the terminal. Every turn sends the whole history; the prefix cache makes that cheap.

Ctrl-C stops an answer (what was said of it stays in the history), not the chat; Ctrl-D quits.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from quire.cli.options import add_engine_options, add_sampling_options, engine_config, sampling_params
from quire.cli.prompts import ChatEncoder, Message, add_chat_options
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.core.params import SamplingParams
    from quire.engine.engine import Engine
    from quire.engine.outputs import RequestOutput

EXAMPLES = """\
examples:
  quire chat quire-storyteller
  quire chat ./my-model --system "You answer in one sentence." --temperature 0.7 --verbose
"""

HELP = """\
/reset   forget the conversation (and keep the system message)
/quit    leave (also Ctrl-D)
/help    this list
Ctrl-C   stop the answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("chat")
    add_chat_options(group)
    group.add_argument("--verbose", action="store_true", help="after each answer: tokens, speed and what the cache held")
    add_sampling_options(parser)
    add_engine_options(parser, exclude=("seed", "skip_tokenizer_init"))


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = engine_config(args)
    from quire.cli.session import Job, check, load
    from quire.core.params import RequestOutputKind
    from quire.engine.builder import prepare_model

    prepared = prepare_model(config)
    params = sampling_params(args, prepared.generation_config, output_kind=RequestOutputKind.CUMULATIVE)
    encode = ChatEncoder(prepared.tokenizer, args.chat_template)
    start: list[Message] = [] if args.system is None else [{"role": "system", "content": args.system}]
    check(prepared, [Job(encode([*start, {"role": "user", "content": "Hello"}]), params)])
    engine = load(prepared)
    try:
        Conversation(engine, encode, params, start, is_verbose=args.verbose).hold()
    finally:
        engine.close()
    return 0


class Conversation:
    """Messages so far, and the loop that adds to them."""

    def __init__(
        self, engine: Engine, encode: ChatEncoder, params: SamplingParams, start: list[Message], *, is_verbose: bool
    ) -> None:
        self._engine = engine
        self._encode = encode
        self._params = params
        self._start = start
        self._is_verbose = is_verbose
        self._is_terminal = sys.stdin.isatty()
        self.messages = list(start)

    def hold(self) -> None:
        """Read, answer, repeat, until the input ends or /quit."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input())
            print(f"Chat with {self._engine.plan.config.model}. /help lists commands; Ctrl-D quits.", file=sys.stderr)
        for text in self._read_lines():
            if text in ("/quit", "/exit"):
                return
            if text == "/reset":
                self.messages = list(self._start)
                print("(forgotten)", file=sys.stderr)
            elif text.startswith("/"):
                print(HELP if text == "/help" else f"there is no command {text}; /help lists them", file=sys.stderr)
            else:
                self._turn(text)

    def _read_lines(self) -> Iterator[str]:
        while True:
            try:
                text = input("> " if self._is_terminal else "").strip()
            except EOFError:
                if self._is_terminal:
                    print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit leaves)", file=sys.stderr)
                continue
            if text:
                yield text

    def _turn(self, text: str) -> None:
        """Answer one message. One that cannot be answered is taken back, and the chat goes on."""
        self.messages.append({"role": "user", "content": text})
        started = time.monotonic()
        try:
            output = self._answer()
        except RequestError as error:
            self.messages.pop()
            print(f"(not answered: {error}; /reset starts anew)", file=sys.stderr)
            return
        if output is None or output.error is not None:
            self.messages.pop()
            print(f"(no answer{'' if output is None else f': {output.error}'})", file=sys.stderr)
            return
        self.messages.append({"role": "assistant", "content": output.outputs[0].text})
        if self._is_verbose:
            self._report(output, time.monotonic() - started)

    def _answer(self) -> RequestOutput | None:
        """Stream an answer; the last output there was, also where Ctrl-C cut it short. None if there was none at all."""
        from quire.cli.session import Job, run
        from quire.cli.terminal import printable

        latest, num_shown = None, 0
        with _interruptible() as interrupted:
            outputs = run(self._engine, [Job(self._encode(self.messages), self._params.clone())], interrupted.check)
            with contextlib.suppress(_StopAnswerError):
                for latest in outputs:
                    text = latest.outputs[0].text
                    sys.stdout.write(printable(text[num_shown:]))
                    sys.stdout.flush()
                    num_shown = len(text)
        print(" [stopped]" if interrupted.is_set else "")
        return latest

    def _report(self, output: RequestOutput, wall_s: float) -> None:
        num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        metrics = output.metrics
        first_s = 0.0 if metrics.first_token_s is None else metrics.first_token_s - metrics.arrival_s
        print(
            f"({num_prompt} prompt tokens, {metrics.num_prefix_hit_tokens} of them from the cache; {num_output} in the answer; "
            f"first after {1000 * first_s:.0f} ms, {num_output / max(wall_s, 1e-9):.1f} tokens/s)",
            file=sys.stderr,
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
