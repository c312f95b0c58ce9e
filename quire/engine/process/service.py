"""An engine as its process serves it: messages in, messages out. Knows no sockets,
threads or signals."""

from __future__ import annotations

from collections.abc import Iterator

from quire.core.request import FinishReason, Request, Sequence
from quire.core.scheduler.scheduler import Progress
from quire.engine.loop.counters import count
from quire.engine.loop.step_loop import StepLoop
from quire.engine.process.messages import (
    NO_LISTS,
    Abort,
    AddRequest,
    Finish,
    Forget,
    Heartbeat,
    Inspect,
    InspectBlock,
    Inspected,
    InspectedBlock,
    Lists,
    Refused,
    ServeStats,
    StepDeltas,
    TokenDelta,
)
from quire.engine.process.shared_lists import with_lists
from quire.errors import RequestError


class Service:
    """The requests of one engine, by the server's numbers."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop
        loop.record_steps()
        self._requests: dict[int, Request] = {}
        self._numbers: dict[str, int] = {}
        self._lists: dict[int, tuple[Lists, frozenset[int]]] = {}
        """Lists, with the tokens of theirs that end a sequence."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.loop.has_work

    def handle(
        self, message: Lists | Forget | AddRequest | Abort | Finish | Inspect | InspectBlock
    ) -> Refused | Inspected | InspectedBlock | None:
        """Carry out what the server says; returns what it must hear at once."""
        if isinstance(message, AddRequest):
            return self._add(message)
        if isinstance(message, Inspect | InspectBlock):
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

    def fail(self, delta: TokenDelta, message: str) -> StepDeltas:
        """End a request whose outcome cannot be told; returns what can be said of it."""
        self._end(delta.number)
        return StepDeltas(
            (
                TokenDelta(
                    delta.number, delta.index, finish_reason=FinishReason.ERROR.value, error=message
                ),
            )
        )

    def heartbeat(self, step_age_s: float | None) -> Heartbeat:
        """Return a picture, taken from another thread while steps go on:
        its numbers may be of two neighbouring steps."""
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


def answer(loop: StepLoop, question: Inspect | InspectBlock) -> Inspected | InspectedBlock:
    """Return what a loop that records its steps says of them."""
    recorder = loop.recorder
    assert recorder is not None
    if isinstance(question, Inspect):
        return Inspected(
            question.number, recorder.inspect(question.engine, question.since, loop.now())
        )
    return InspectedBlock(question.number, recorder.content(question.block, question.step))


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
        served=ServeStats(
            metrics.first_scheduled_s,
            metrics.num_prefix_hit_tokens,
            metrics.num_preemptions,
            metrics.num_prefill_chunks,
            metrics.waited_for,
            metrics.num_waited_steps,
            metrics.num_accepted_tokens,
            metrics.num_rejected_tokens,
        )
        if is_first or has_ended
        else None,
    )
