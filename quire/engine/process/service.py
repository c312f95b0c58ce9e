"""An engine as its process serves it: messages in, steps, messages out. Knows no threads or
signals; what builds it, and the signs of life beside its steps, are `host.py`'s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from quire.common.residence import UNDER_WAY
from quire.common.watch_clock import WatchClock
from quire.core.kvcache.events import KVEventBatch
from quire.core.request import FinishReason, Request, Sequence
from quire.core.scheduler.scheduler import Progress
from quire.engine.loop.cache import CachedTokens, Cleared, answer_on_cache
from quire.engine.loop.counters import count
from quire.engine.loop.step_loop import StepLoop
from quire.engine.process.channel import Channel, FrameTooLarge, ProtocolError, wait
from quire.engine.process.messages import (
    NO_LISTS,
    Abort,
    AddRequest,
    AskCache,
    CacheAnswered,
    Command,
    Done,
    Down,
    Finish,
    Forget,
    Heartbeat,
    Inspect,
    Inspected,
    InspectedBlock,
    Lists,
    Pause,
    Question,
    Refused,
    Seen,
    ServeStats,
    Sleep,
    Start,
    StepDeltas,
    TokenDelta,
    UpdateWeights,
    WakeUp,
)
from quire.engine.process.shared_lists import with_lists
from quire.engine.process.updates import WeightUpdate
from quire.errors import NotAvailableError, QuireError, RequestError

_MAX_UNSENT_BYTES = 8 << 20
"""A server that takes nothing for so long is frozen or gone; computing on would only pile up."""
_LOADING_S = 0.01
"""So often an engine that has nothing to do looks whether its next weights are loaded."""
_FLUSH_S = 0.25
"""So often such a server is tried again."""
_MOST_COUNTED_S = 1.0
"""Of a step's time between two heartbeats, of which there are four a second."""


class Service:
    """The requests of one engine, by the server's numbers."""

    def __init__(self, loop: StepLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self.loop = loop
        self._clock = WatchClock(_MOST_COUNTED_S, clock)
        loop.record_steps()
        self._requests: dict[int, Request] = {}
        self._numbers: dict[str, int] = {}
        self._lists: dict[int, tuple[Lists, frozenset[int]]] = {}
        """Lists, with the tokens of theirs that end a sequence."""
        self._step_began_s: float | None = None
        self._update: WeightUpdate | None = None

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute, and it can be."""
        return self.loop.can_step

    def serve_round(self, channel: Channel[Down]) -> None:
        """Serve one round: what the server says, then a step, then its results. Waits without a
        limit while there is nothing to do. Raises ChannelClosed, or ProtocolError."""
        if self._update is not None and not self.has_work:
            wait((channel,), (), _LOADING_S)
        elif not self.has_work:
            while not wait((channel,), (), 0.0) and not self.loop.has_work and self.loop.idle():
                pass
            wait((channel,), (), None)
        for message in channel.receive():
            if isinstance(message, Start):
                raise ProtocolError("an engine is started once")
            reply = self.handle(message)
            if reply is not None:
                channel.send(reply)
        done = None if self._update is None else self._update.take_in()
        if done is not None:
            self._update = None
            channel.send(done)
        while channel.num_unsent_bytes > _MAX_UNSENT_BYTES:
            wait((), (channel,), _FLUSH_S)
            channel.flush()
        if self.has_work:
            self._step_began_s = self._clock()
            deltas = self.step()
            self._step_began_s = None
            if deltas is not None:
                self._report(deltas, channel)

    def _report(self, deltas: StepDeltas, channel: Channel[Down]) -> None:
        """Send what a step brought; a request whose share does not fit a message fails,
        and no other."""
        try:
            channel.send(deltas)
        except FrameTooLarge:
            for delta in deltas.deltas:
                try:
                    channel.send(StepDeltas((delta,)))
                except FrameTooLarge as error:
                    reason = f"the output is too large: {error}; ask for fewer log-probabilities"
                    channel.send(self._failed(delta, reason))

    def handle(
        self,
        message: Lists | Forget | AddRequest | Abort | Finish | Question | Command,
    ) -> Refused | Seen | Done | None:
        """Carry out what the server says; returns what it must hear at once."""
        if isinstance(message, AddRequest):
            return self._add(message)
        if isinstance(message, UpdateWeights):
            if self._update is not None:
                return Done(message.number, self.loop.asleep, UNDER_WAY)
            self._update = WeightUpdate(self.loop, message)
            return None
        if isinstance(message, Question | Sleep | WakeUp | Pause):
            return answer(self.loop, message)
        if isinstance(message, Lists):
            self._lists[message.number] = message, frozenset(message.stop_token_ids)
        elif isinstance(message, Forget):
            self._lists.pop(message.number, None)
        elif isinstance(message, Abort):
            self._end(message.number)
        else:
            self._finish(message)
        return None

    def step(self) -> StepDeltas | None:
        """Run one step; returns what it brought, all of it in one message.
        Never raises for a bug or a broken executor."""
        deltas = tuple(self._deltas(self.loop.advance()))
        return StepDeltas(deltas) if deltas else None

    def _failed(self, delta: TokenDelta, message: str) -> StepDeltas:
        """End a request whose outcome cannot be told; returns what can be said of it."""
        self._end(delta.number)
        return StepDeltas(
            (
                TokenDelta(
                    delta.number, delta.index, finish_reason=FinishReason.ERROR.value, error=message
                ),
            )
        )

    def heartbeat(self) -> Heartbeat:
        """Return a picture, taken from another thread while steps go on:
        its numbers may be of two neighbouring steps."""
        began_s = self._step_began_s
        step_age_s = None if began_s is None else self._clock() - began_s
        return Heartbeat(step_age_s=step_age_s, **count(self.loop.scheduler).counters())

    def _add(self, message: AddRequest) -> Refused | None:
        try:
            spec = (
                message.spec
                if message.lists == NO_LISTS
                else with_lists(message.spec, *self._lists[message.lists])
            )
            request = self.loop.scheduler.add(spec, message.resumed)
        except RequestError as error:
            return Refused(message.number, str(error))
        self._requests[message.number] = request
        self._numbers[request.request_id] = message.number
        return None

    def _finish(self, message: Finish) -> None:
        request = self._requests.get(message.number)
        if request is not None:
            for sequence in request.sequences:
                if sequence.index == message.index:
                    self.loop.scheduler.finish(sequence, FinishReason.STOP)
            if request.is_finished:
                self._forget(request)

    def _end(self, number: int) -> None:
        request = self._requests.get(number)
        if request is not None:
            self.loop.scheduler.abort(request.request_id)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[self._numbers.pop(request.request_id)]
        request.release()

    def _deltas(self, progress: list[Progress]) -> Iterator[TokenDelta]:
        by_sequence: dict[Sequence, list[Progress]] = {}
        for each in progress:
            by_sequence.setdefault(each.sequence, []).append(each)
        for sequence, mine in by_sequence.items():
            number = self._numbers.get(sequence.request.request_id)
            if number is not None:
                yield _delta(number, sequence, mine)
        for request in {sequence.request: None for sequence in by_sequence}:
            if request.is_finished and request.request_id in self._numbers:
                self._forget(request)


def answer(loop: StepLoop, question: Question | Sleep | WakeUp | Pause) -> Seen | Done:
    """Carry out a command, or return what a loop that records its steps says of them."""
    if isinstance(question, Sleep | WakeUp | Pause):
        return _carry_out(loop, question)
    if isinstance(question, AskCache):
        return _answer_on_cache(loop, question)
    recorder = loop.recorder
    assert recorder is not None
    if isinstance(question, Inspect):
        return Inspected(
            question.number, recorder.inspect(question.engine, question.since, loop.now())
        )
    return InspectedBlock(question.number, recorder.content(question.block, question.step))


def _answer_on_cache(loop: StepLoop, asked: AskCache) -> CacheAnswered:
    found = answer_on_cache(loop, asked.question)
    return CacheAnswered(
        asked.number,
        found if isinstance(found, KVEventBatch) else None,
        found if isinstance(found, CachedTokens) else None,
        found if isinstance(found, Cleared) else None,
    )


def _carry_out(loop: StepLoop, command: Sleep | WakeUp | Pause) -> Done:
    try:
        if isinstance(command, Sleep):
            loop.sleep(command.level)
        elif isinstance(command, WakeUp):
            loop.wake_up(command.parts)
        elif command.holds:
            loop.pause()
        else:
            loop.resume()
    except QuireError as error:
        is_lasting = isinstance(error, NotAvailableError)
        return Done(command.number, loop.asleep, str(error), is_lasting)
    return Done(command.number, loop.asleep)


def _delta(number: int, sequence: Sequence, progress: list[Progress]) -> TokenDelta:
    """Return what happened to one sequence in one step."""
    request = sequence.request
    token_ids = tuple(each.token_id for each in progress if each.token_id is not None)
    has_ended = any(each.token_id is None for each in progress)
    is_first = bool(token_ids) and sequence.num_output_tokens == len(token_ids)
    reason, stop = sequence.finish_reason, sequence.stop_reason
    metrics = request.metrics
    return TokenDelta(
        number=number,
        index=sequence.index,
        token_ids=token_ids,
        logprobs=tuple(each.logprobs for each in progress if each.logprobs is not None),
        finish_reason=reason.value if has_ended and reason is not None else None,
        stop_token_id=stop if isinstance(stop, int) else None,
        error=request.error,
        prompt_logprobs=tuple(request.prompt_logprobs) if is_first and sequence.index == 0 else (),
        pooled=request.pooled if has_ended else b"",
        cumulative_logprob=sequence.cumulative_logprob if request.comes_at_once else 0.0,
        served=ServeStats(
            metrics.first_scheduled_s,
            metrics.num_prefix_hit_tokens,
            metrics.num_cache_write_tokens,
            metrics.cache_miss,
            metrics.num_preemptions,
            metrics.num_prefill_chunks,
            metrics.waited_for,
            metrics.num_waited_steps,
            metrics.num_accepted_tokens,
            metrics.num_rejected_tokens,
            metrics.weight_versions,
        )
        if is_first or has_ended
        else None,
    )
