"""A server and an engine in one thread, their messages encoded and decoded:
what a supervisor does, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.core.params import SamplingParams
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.front.requests import RequestBuilder
from quire.engine.loop.step_loop import StepLoop
from quire.engine.process.journal import Journal
from quire.engine.process.messages import Down, StepDeltas, Up
from quire.engine.process.service import Service

MAX_STEPS = 20_000


class Relay:
    """Requests on an engine that can be replaced at any step."""

    def __init__(
        self, requests: RequestBuilder, journal: Journal, make_loop: Callable[[], StepLoop]
    ) -> None:
        self.requests = requests
        self.journal = journal
        self.outputs: dict[str, list[RequestOutput]] = {}
        self._make_loop = make_loop
        self.service = Service(make_loop())
        self.num_steps = 0

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.journal.add(
            self.requests.sampling(name, ParsedPrompt(None, prompt), self.requests.digest(params))
        )

    def replace_engine(self) -> None:
        """The engine is gone, with everything it knew."""
        self.journal.leave_engine()
        self.service = Service(self._make_loop())

    def step(self) -> None:
        for message in self.journal.take_messages():
            self._tell(message)
        for entry in self.journal.entries.values():
            if not entry.is_sent:
                entry.is_sent = True
                for message in self.journal.telling(entry):
                    self._tell(message)
        deltas = self.service.step()
        self.num_steps += 1
        if deltas is not None:
            travelled: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(deltas), type=Up)
            assert isinstance(travelled, StepDeltas)
            for output in self.journal.take(travelled):
                self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, *, replace_every: int = 0) -> dict[str, list[RequestOutput]]:
        """Step until nothing is left; a new engine after every `replace_every` steps,
        and mid-way through others."""
        for _ in range(MAX_STEPS):
            if not self.journal.entries:
                return self.outputs
            self.step()
            # A grammar that is being compiled would be begun for ever, and never ready.
            has_its_time = not any(
                each.parked() for each in self.service.loop.scheduler.admission.prerequisites
            )
            if replace_every and self.num_steps % replace_every == 0 and has_its_time:
                self.replace_engine()
        raise AssertionError(f"still busy after {MAX_STEPS} steps")

    def _tell(self, message: Down) -> None:
        travelled: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Down)
        assert self.service.handle(travelled) is None
