"""How many files a reader opens to follow a request in and a token out: a ratchet, as that on lines.

A chat is served by the parts that `quire serve` is made of, its two processes as two threads. A
file is on the path if a function of it is on the stack where the request, or the token, takes its
next form or passes to the next thread: the stations below. What was on the stack before the request
came (a thread's loop) is not counted, nor are functions that only return to one that is.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import httpx
import pytest
from servers import MODEL, serve

import quire
from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.process.channel import Channel
from quire.engine.process.host import Host, build_loop
from quire.engine.process.journal import Journal
from quire.engine.process.launcher import EngineProcess
from quire.engine.process.link import start_message
from quire.engine.process.messages import Down, Up
from quire.engine.process.supervisor import Supervisor
from quire.engine.process.watch import WatchConfig

MAX_FILES_IN, MAX_FILES_OUT, MAX_CALLS = 14, 15, 3
"""They may be lowered at any time; raising one wants a reason."""
WAY_IN = (
    "BoundedProtocol.on_body",
    "read_json",
    "PromptEncoder.encode_chat",
    "GenerationRun.submit",
    "RequestBuilder.sampling",
    "Supervisor.add",
    "Journal.add",
    "Channel.send",
    "Channel.receive",
    "Scheduler.add",
)
WAY_OUT = (
    "greedy_results",
    "Scheduler.update",
    "_delta",
    "Channel.send",
    "Channel.receive",
    "JournalEntry.take",
    "OutputProcessor.process",
    "Stream.put",
    "GenerationRun._take",
    "_ChatEvents.take",
    "ChunkWriter.write",
)
EXECUTION = ("InlineExecutor.execute", "DecoderModel.forward")
pytestmark = pytest.mark.slow
_PACKAGE = str(Path(quire.__file__).parent)

Call = tuple[str, str]
"""(file, function)."""


class Calls:
    """The calls into the package while it is on, each with those on the stack that are as new.

    The engine's second token waits until `has_begun` is set: the answer's head and what is there by
    then leave on another path than the tokens that follow.
    """

    def __init__(self) -> None:
        self.stacks: list[tuple[Call, ...]] = []
        self.is_on = False
        self.has_begun = threading.Event()
        self._new: set[int] = set()
        """The frames that began since; they are held, so that none has the id of another."""
        self._held: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self.is_on or not _is_ours(frame):
            return
        self._new.add(id(frame))
        self._held.append(frame)
        stack: list[Call] = []
        each: FrameType | None = frame
        while each is not None:
            if id(each) in self._new:
                stack.append((each.f_code.co_filename, each.f_code.co_qualname))
            each = each.f_back
        if stack[0][1] == WAY_OUT[0] and len(self.places(WAY_OUT[0])) == 1:
            assert self.has_begun.wait(60), "no token was sent"
        self.stacks.append(tuple(stack[::-1]))

    def stop(self) -> None:
        """Keep the stacks, and let go of the frames with all that is in them."""
        self.is_on = False
        self._held.clear()

    def path(self, stations: tuple[str, ...], first: int, last: int) -> list[str]:
        """The files on the stacks at all stations, from one call to another."""
        found = [stack for stack in self.stacks[first : last + 1] if stack[-1][1] in stations]
        assert {stack[-1][1] for stack in found} == set(stations), "a station has another name now"
        files = dict.fromkeys(file for stack in found for file, _ in stack)
        return [file.removeprefix(_PACKAGE) for file in files]

    def places(self, name: str) -> list[int]:
        """Where in `stacks` a function is called."""
        return [place for place, stack in enumerate(self.stacks) if stack[-1][1] == name]


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


class _EngineThread:
    """Stands for the engine's process."""

    pid = 0

    def __init__(self, start: Any, calls: Calls) -> None:
        ours, theirs = socket.socketpair()
        self.channel: Channel[Up] = Channel(ours, Up)
        self.channel.send(start)

        def run() -> None:
            sys.setprofile(calls)
            Host(Channel(theirs, Down), build_loop).run()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def describe_end(self) -> str:
        return ""

    def kill(self) -> None:
        self.channel.close()
        self._thread.join(20)


@contextmanager
def _served(calls: Calls) -> Iterator[str]:
    options = {"num_threads": 1, "kv_cache_memory": "4MiB", "max_num_seqs": 4}
    prepared = prepare_model(EngineConfig.from_options(MODEL, options), is_for_here=False)
    start = start_message(prepared.planned.plan, prepared.planned.files)

    def launch() -> EngineProcess:
        sys.setprofile(calls)  # in the supervisor's thread
        return cast("EngineProcess", _EngineThread(start, calls))

    watch = WatchConfig(silence_timeout_s=60, step_timeout_s=60)
    client = Client(prepared, Supervisor(launch, Journal(prepared.tokenizer), watch))
    client.link.start()
    try:
        with serve(client) as server:
            deadline_s = time.monotonic() + 60
            while not client.status().is_ready:
                assert time.monotonic() < deadline_s, client.status().reason
                time.sleep(0.01)
            server.loop.call_soon_threadsafe(sys.setprofile, calls)
            yield f"{server.v1}/chat/completions"
            server.loop.call_soon_threadsafe(sys.setprofile, None)
    finally:
        client.link.close()


@pytest.fixture(scope="module")
def calls() -> Calls:
    """Of a stream of three tokens."""
    calls = Calls()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
    with _served(calls) as url:
        calls.is_on = True
        with httpx.stream("POST", url, json={**body, "temperature": 0}, timeout=60) as answer:
            text = ""
            for piece in answer.iter_text():
                text += piece
                calls.has_begun.set()
        calls.stop()
    assert answer.status_code == 200 and text.endswith("data: [DONE]\n\n"), text
    return calls


def test_a_chat_passes_through_few_files(calls: Calls) -> None:
    files = calls.path(WAY_IN, 0, calls.places("Scheduler.add")[0])
    assert len(files) <= MAX_FILES_IN, files


def test_a_token_passes_through_few_files(calls: Calls) -> None:
    files = calls.path(
        WAY_OUT, calls.places("greedy_results")[1], calls.places("ChunkWriter.write")[-1]
    )
    assert len(files) <= MAX_FILES_OUT, files


def test_few_calls_lie_between_a_plan_and_the_model(calls: Calls) -> None:
    execute, forward = EXECUTION
    stack = [name for _, name in calls.stacks[calls.places(forward)[0]]]
    assert len(stack) - 1 - stack.index(execute) <= MAX_CALLS, stack
