"""An engine that computes nothing: requests go to replicas in processes of their own, and a step is
the outputs that have come from them.

For programs it is an `Engine`, for one thread at a time. A replica that dies or freezes is replaced
by its supervisor, and its requests go on; nothing of that is seen here. What would need the worker
in this process (logits processors) is refused. To pause, to sleep, to compute with other weights
and to forget what is cached are commands to all replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from quire.common.residence import PARTS, WEIGHTS
from quire.config.engine import EngineConfig
from quire.core.adapters import Adapter
from quire.core.params import SamplingParams
from quire.core.request import FIRST_VERSION
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Seen
from quire.engine.front.digest import Digest
from quire.engine.front.metrics import FinishedTotals, Metric, as_metrics
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import Prompt, parse_prompt
from quire.engine.front.requests import PreparedRequest
from quire.engine.front.served_model import ServedModel
from quire.engine.front.status import EngineStatus
from quire.engine.front.streams import Caller
from quire.engine.loop.cache import ClearCache
from quire.engine.loop.engine import Engine
from quire.engine.process.link import lasting_model_name
from quire.engine.process.messages import AskCache, Done, Pause, Sleep, UpdateWeights, WakeUp
from quire.engine.replicas.commands import Commands, failure_of, failure_of_any
from quire.engine.replicas.inbox import Inbox
from quire.engine.replicas.link import Replicas, link_to
from quire.errors import EngineError, InvalidParameterError, NotAvailableError

_WAIT_S = 0.01
"""That a step waits for an output: a command for the same thread waits as long."""
_POLL_S = 0.02
_ABORT_TIMEOUT_S = 10.0
"""Supervisors answer in a moment, whatever their engines do."""


class ReplicatedEngine(Engine):
    """The engine of a config with several replicas. Its constructor waits until all are loaded."""

    def __init__(
        self, config: EngineConfig, *, is_streaming: bool = False, **launch_options: Any
    ) -> None:
        """Raises ConfigError, or EngineError where a replica cannot be loaded."""
        if not is_streaming and config.target_step_ms is None:
            config = replace(config, target_step_ms=0.0)
        prepared = prepare_model(config, is_for_here=False)
        ServedModel.__init__(
            self,
            prepared.planned.plan,
            tokenizer=prepared.tokenizer,
            generation_config=prepared.generation_config,
            eos_token_ids=prepared.eos_token_ids,
            model_config=prepared.planned.model_config,
        )
        self.asleep = ()
        self._inbox = Inbox()
        self._open: dict[str, _Sink] = {}
        self._ready: list[RequestOutput] = []
        self.is_closed = False
        link = link_to(prepared, **launch_options)
        assert isinstance(link, Replicas), "one engine runs in this process"
        self._link = link
        self._commands = Commands(link, self._inbox)
        self._weights = (self.plan.config.model, FIRST_VERSION)
        """A folder, and what its weights are called."""
        self._is_divided = False
        """Whether replicas may compute with different weights: an update was interrupted."""
        self._link.start()
        try:
            self._wait_until_loaded()
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        """Say what of an engine there is not."""
        raise AttributeError(
            f"{name!r} is not here: with data_parallel_size above 1, schedulers and workers are in "
            "processes of their own"
        )

    @property
    def replicas(self) -> tuple[EngineStatus, ...]:
        """How each of them is doing."""
        return self._link.status(len(self._open), 0).replicas

    # -- requests
    # ----------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | Digest,
        *,
        adapter: Adapter | None = None,
        priority: int = 0,
    ) -> None:
        """See `Engine.add_request`."""
        digest = params if isinstance(params, Digest) else self.digest(params)
        if digest.params.logits_processors:
            raise InvalidParameterError(
                "logits_processors are functions, which do not travel to an engine process; use "
                "data_parallel_size=1",
                param="logits_processors",
            )
        parsed = parse_prompt(prompt, self.tokenizer, self.plan.spec.vocab_size, self.images)
        self.add(
            self.request_builder.sampling(
                request_id, parsed, digest, adapter=adapter, priority=priority
            )
        )

    def add(self, prepared: PreparedRequest) -> None:
        """See `Engine.add`."""
        self._require_open()
        request_id = prepared.spec.request_id
        if request_id in self._open:
            raise InvalidParameterError(
                f"request id {request_id!r} is already in use", param="request_id"
            )
        sink = self._open[request_id] = _Sink(self._inbox, prepared, self._take)
        self._link.add(prepared, sink)

    def abort(self, request_id: str) -> RequestOutput | None:
        """See `Engine.abort`."""
        sink = self._open.get(request_id)
        if sink is None:
            return None
        self._link.abort(request_id)
        deadline_s = time.monotonic() + _ABORT_TIMEOUT_S
        while request_id in self._open and time.monotonic() < deadline_s:
            self._inbox.run(_WAIT_S)
        self._open.pop(request_id, None)
        self._ready = [each for each in self._ready if each.request_id != request_id]
        return sink.last

    # -- commands
    # ----------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, *, preempts: bool = False) -> bool:
        """See `Engine.reset_prefix_cache`; NotAvailableError where `preempts` would concern a
        request that runs."""
        self._require_open()
        if preempts and self._open:
            raise NotAvailableError(
                "reset_prefix_cache(reset_running_requests=True) is not available with "
                f"data_parallel_size above 1 while requests run; {len(self._open)} do"
            )
        self._commands.ask(lambda number: AskCache(number, ClearCache(None)))
        return not self._open

    def sleep(self, level: int) -> None:
        """See `StepLoop.sleep`: all replicas do, or none."""
        self._require_open()
        if self.asleep:
            return
        self.asleep = PARTS  # also where the wait is interrupted: what is awake is woken again
        answers = self._commands.ask(lambda number: Sleep(number, level))
        failure = failure_of_any(answers)
        if failure is not None:
            self.wake_up(PARTS)
            raise failure
        self._note_asleep(answers)

    def wake_up(self, parts: tuple[str, ...] = PARTS) -> None:
        """See `StepLoop.wake_up`."""
        self._require_open()
        answers = self._commands.ask(lambda number: WakeUp(number, parts))
        self._note_asleep(answers)
        failure = failure_of_any(answers)
        if failure is not None:
            raise failure
        if self._is_divided and WEIGHTS in parts:
            self._go_back(range(self._link.num_replicas))
            self._is_divided = False
            self._note_asleep(answers)

    def pause(self) -> None:
        """See `StepLoop.pause`: all replicas are paused then, also such as are being replaced; or
        EngineError, and none is."""
        self._require_open()
        self.is_paused = True  # also where the wait is interrupted: `resume` tells all of them
        try:
            self._tell_to_pause(True)
        except EngineError:
            self.resume()
            raise

    def resume(self) -> None:
        """See `StepLoop.resume`."""
        self._require_open()
        self._tell_to_pause(False)
        self.is_paused = False

    def _tell_to_pause(self, holds: bool) -> None:
        """Tell those that are not given up, which compute nothing in any case."""
        replicas = [n for n, each in enumerate(self.replicas) if each.state != "failed"]
        self._commands.ask(lambda number: Pause(number, holds), replicas)

    @property
    def weight_version(self) -> str:
        """What the weights are called that all replicas compute with."""
        return self._weights[1]

    def load_weights(self, source: Any) -> Any:
        """Return what `replace_weights` takes: a folder, which every replica reads for itself.
        Raises NotAvailableError for tensors."""
        if not isinstance(source, str):
            raise NotAvailableError(
                "update_weights takes a folder with data_parallel_size above 1, for tensors do not "
                "travel to the engines' processes; save them as safetensors with the model's "
                "config.json, and give the folder"
            )
        return lasting_model_name(source)

    def replace_weights(self, loaded: Any, version: str) -> None:
        """See `StepLoop.replace_weights`: all replicas take the weights in, or those that did go
        back to the former ones."""
        self._require_open()
        self._is_divided, self.asleep = True, (WEIGHTS,)
        answers = self._commands.ask(lambda number: UpdateWeights(number, loaded, version, False))
        failure = failure_of_any(answers)
        if failure is not None:
            self._go_back([n for n, each in enumerate(answers) if failure_of(each) is None])
        else:
            self._weights = (loaded, version)
        self._is_divided = False
        self._note_asleep(answers)
        if failure is not None:
            raise failure

    def call_worker(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Raise NotAvailableError."""
        raise NotAvailableError(
            "collective_rpc with a function is not available with data_parallel_size above 1, for "
            "functions do not travel to the engines' processes; give the name of a method"
        )

    def _go_back(self, replicas: Sequence[int]) -> None:
        """Have replicas compute with the weights that all others have."""
        folder, version = self._weights
        answers = self._commands.ask(
            lambda number: UpdateWeights(number, folder, version, False), replicas
        )
        for failure in filter(None, map(failure_of, answers)):
            raise EngineError(
                "replicas compute with different weights, and the former ones cannot be loaded: "
                f"{failure}; call update_weights() again, or build another engine"
            )

    def _note_asleep(self, answers: list[Seen]) -> None:
        asleep = {part for each in answers if isinstance(each, Done) for part in each.asleep}
        asleep |= {WEIGHTS} if self._is_divided else set()
        self.asleep = tuple(part for part in PARTS if part in asleep)

    # -- the loop
    # ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._open or self._ready)

    @property
    def can_step(self) -> bool:
        """Whether `step` has anything to wait for."""
        return self.has_work

    def step(self) -> list[RequestOutput]:
        """Return what has come from the replicas, after a moment's wait where that is nothing."""
        if not self._ready:
            self._inbox.run(_WAIT_S)
        ready, self._ready = self._ready, []
        return ready

    def take_lost(self) -> list[RequestOutput]:
        """Return nothing: an interrupted wait loses no request."""
        return []

    def settle(self) -> None:
        """Do nothing: the replicas have moments of their own."""

    def idle(self) -> bool:
        """See `Executor.idle`: there is nothing to do here."""
        return False

    def record_steps(self) -> None:
        """Do nothing: each replica records its own."""

    def refuse_nested_call(self) -> None:
        """Do nothing: no code of a request's runs in this process."""

    @property
    def open_requests(self) -> Collection[str]:
        """Ids of the requests in flight."""
        return self._open

    def metrics(self) -> list[Metric]:
        """Return the counters of each replica. Requests and prompt tokens are those of all, and
        stand with the first one."""
        nothing = FinishedTotals(0, 0)
        found: list[Metric] = []
        for number, status in enumerate(self.replicas):
            finished = self._finished if number == 0 else nothing
            found += as_metrics(status, finished, self.plan.config.model, number)
        return found

    def close(self) -> None:
        """See `Engine.close`."""
        if not self.is_closed:
            self.is_closed = True
            self._link.close()
            self._open.clear()
            self.close_model()

    _finished = FinishedTotals(0, 0)

    def _require_open(self) -> None:
        if self.is_closed:
            raise EngineError("the engine is closed")

    def _take(self, output: RequestOutput) -> None:
        if output.finished and self._open.pop(output.request_id, None) is not None:
            count, num_tokens = self._finished
            self._finished = FinishedTotals(count + 1, num_tokens + len(output.prompt_token_ids))
        self._ready.append(output)

    def _wait_until_loaded(self) -> None:
        while any(each.state != "ready" for each in self.replicas):
            for each in self.replicas:
                if each.state in ("failed", "closed"):
                    raise EngineError(each.reason)
            time.sleep(_POLL_S)


class _Sink:
    """One request's outputs. Implements `OutputSink`."""

    def __init__(
        self, inbox: Inbox, prepared: PreparedRequest, take: Callable[[RequestOutput], None]
    ) -> None:
        self.loop: Caller = inbox
        self.last: RequestOutput | None = None
        self._prepared, self._take_output = prepared, take

    def put(self, output: RequestOutput) -> None:
        """See `OutputSink`."""
        self.last = output
        self._take_output(output)

    def fail(self, error: BaseException) -> None:
        """See `OutputSink`."""
        request_id, prompt = self._prepared.spec.request_id, self._prepared.prompt
        self.put(RequestOutput(request_id, prompt, [], [], finished=True, error=str(error)))
