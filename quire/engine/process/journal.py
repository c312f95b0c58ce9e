"""The requests in flight, as the server knows them: enough to go on with each of them on another
engine.

A request's tokens depend on its prompt, its parameters, its seed and the tokens it has, and on
nothing else that an engine holds: numbers do not depend on batch composition or history, and chance
is drawn by (seed, sequence, position). So an entry can be put to a new engine at any time, and the
answer goes on as if nothing had happened. Text, stop strings and log-probabilities that were
delivered live here already and are not made again.

Owned by the supervisor's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from quire.common.failures import log_failure
from quire.core.request import FinishReason, RequestRecord, SequenceRecord, SequenceStatus
from quire.core.request_spec import ResumedSequence
from quire.engine.front.output_processor import Happening, OutputProcessor
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.requests import PreparedRequest
from quire.engine.process.messages import (
    NO_LISTS,
    Abort,
    AddRequest,
    Down,
    Finish,
    Lists,
    ServeStats,
    StepDeltas,
    TokenDelta,
)
from quire.engine.process.shared_lists import SharedLists, without_lists
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class JournalEntry:
    """One request in flight: what it is, how far it got,
    and how it fared with the engines so far."""

    def __init__(self, number: int, prepared: PreparedRequest) -> None:
        self.number = number
        self.lists = NO_LISTS
        """The number of what it lists."""
        self.prepared = prepared
        self.request = RequestRecord(prepared.spec)
        self.is_sent = False
        """Whether the engine that runs now has it."""
        self.num_delivered = 0
        """Tokens that the engine that runs now has added."""
        self.num_fruitless = 0
        """Engines in a row that died with it before it had gained anything to speak of."""
        self._num_earlier_preemptions = 0
        self.sequence(0)

    def sequence(self, index: int) -> SequenceRecord:
        """Return what is known of one of its sequences; it begins with the prompt."""
        request = self.request
        for known in request.sequences:
            if known.index == index:
                return known
        sequence = SequenceRecord(request, index, list(request.prompt_token_ids))
        request.sequences = [*request.sequences, sequence]
        return sequence

    def to_message(self) -> AddRequest:
        """Return the request as an engine is to take it up: from its start, or from where it is."""
        sequences = self.request.sequences
        unfinished = [each for each in sequences if each.status is not SequenceStatus.FINISHED]
        has_begun = any(each.num_output_tokens for each in sequences)
        resumed = (
            tuple(ResumedSequence(each.index, tuple(each.output_token_ids)) for each in unfinished)
            if has_begun
            else ()
        )
        spec = self.prepared.spec
        spec = spec if self.lists == NO_LISTS else without_lists(spec)
        return AddRequest(self.number, spec, resumed, self.lists)

    def take(self, delta: TokenDelta, now: float) -> list[Happening]:
        """Take in what a step brought one sequence; what comes after its end here (a stop string)
        is void."""
        request = self.request
        sequence = self.sequence(delta.index)
        if delta.served is not None:
            self._note_stats(delta.served)
        if sequence.status is SequenceStatus.FINISHED:
            return []
        if delta.prompt_logprobs and not request.prompt_logprobs:
            request.prompt_logprobs.extend(delta.prompt_logprobs)
        request.pooled = delta.pooled or request.pooled
        sequence.token_ids += delta.token_ids
        self.num_delivered += len(delta.token_ids)
        if delta.token_ids:
            metrics = request.metrics
            metrics.first_token_s = now if metrics.first_token_s is None else metrics.first_token_s
            metrics.last_token_s = now
        if delta.error is not None:
            request.error = delta.error
        if delta.finish_reason is not None:
            self._end(sequence, FinishReason(delta.finish_reason), now)
            sequence.stop_reason = delta.stop_token_id
        records = delta.logprobs or (None,) * len(delta.token_ids)
        progress: list[Happening] = [
            (sequence, token_id, record)
            for token_id, record in zip(delta.token_ids, records, strict=True)
        ]
        sequence.cumulative_logprob += delta.cumulative_logprob
        for record in delta.logprobs:
            sequence.cumulative_logprob += record.logprob
        if delta.finish_reason is not None:
            progress.append((sequence, None, None))
        return progress

    def end(self, reason: FinishReason, error: str | None = None) -> list[Happening]:
        """End whatever of it is unfinished."""
        self.request.error = error if error is not None else self.request.error
        unfinished = [
            each for each in self.request.sequences if each.status is not SequenceStatus.FINISHED
        ]
        for sequence in unfinished:
            self._end(sequence, reason, time.monotonic())
        return [(sequence, None, None) for sequence in unfinished]

    def leave_engine(self) -> None:
        """Note that the engine that had it is gone."""
        self.is_sent = False
        self.num_delivered = 0
        self._num_earlier_preemptions = self.request.metrics.num_preemptions

    def _end(self, sequence: SequenceRecord, reason: FinishReason, now: float) -> None:
        sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
        if self.request.is_finished:
            self.request.metrics.finished_s = now

    def _note_stats(self, served: ServeStats) -> None:
        metrics = self.request.metrics
        if metrics.first_scheduled_s is None:
            metrics.first_scheduled_s = served.first_scheduled_s
            metrics.num_prefix_hit_tokens = served.num_prefix_hit_tokens
            metrics.cache_miss = served.cache_miss
            metrics.waited_for, metrics.num_waited_steps = (
                served.waited_for,
                served.num_waited_steps,
            )
        metrics.num_cache_write_tokens = max(
            metrics.num_cache_write_tokens, served.num_cache_write_tokens
        )
        metrics.num_prefill_chunks = served.num_prefill_chunks
        metrics.num_preemptions = self._num_earlier_preemptions + served.num_preemptions
        # of the engine that ended it; what an engine that was lost had drafted is not known
        metrics.num_accepted_tokens = served.num_accepted_tokens
        metrics.num_rejected_tokens = served.num_rejected_tokens
        for version in served.weight_versions:
            metrics.note_version(version)


class Journal:
    """All entries, and their texts. Ends sequences on behalf of the output processor,
    as a scheduler does."""

    def __init__(
        self, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.entries: dict[int, JournalEntry] = {}
        """By number, hence in order of arrival."""
        self._by_id: dict[str, JournalEntry] = {}
        self.lists = SharedLists()
        """What the requests in flight list."""
        self._outputs = OutputProcessor(tokenizer, self)
        self._clock = clock
        self._num_entries = 0
        self._messages: list[Down] = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, prepared: PreparedRequest) -> JournalEntry:
        """Begin to follow a request; if that fails, nothing of it is kept."""
        self._num_entries += 1
        entry = JournalEntry(self._num_entries, prepared)
        self._outputs.add(entry.request, prepared)
        entry.lists = self.lists.hold(prepared.digest)
        self.entries[entry.number] = entry
        self._by_id[entry.request.request_id] = entry
        return entry

    def telling(self, entry: JournalEntry) -> Iterator[Lists | AddRequest]:
        """Yield what tells the engine that runs now of a request: what it lists,
        where that is new there, and the request itself."""
        lists = self.lists.unsent(entry.lists)
        if lists is not None:
            yield lists
            self.lists.note_sent(entry.lists)  # now that it was sent
        yield entry.to_message()

    def take(self, deltas: StepDeltas) -> list[RequestOutput]:
        """Take in a step; returns what the requests' senders are to see."""
        now = self._clock()
        progress: list[Happening] = []
        for delta in deltas.deltas:
            entry = self.entries.get(delta.number)
            if entry is not None:
                progress += self._take(entry, delta, now)
        return self._deliver(progress)

    def _take(self, entry: JournalEntry, delta: TokenDelta, now: float) -> list[Happening]:
        """Return what a delta comes to; one that cannot be taken in ends its request."""
        try:
            return entry.take(delta, now)
        except Exception as error:
            log_failure(
                logger,
                f"request {entry.request.request_id} failed while its tokens were taken in",
                error,
            )
            self._messages.append(Abort(entry.number))
            return entry.end(
                FinishReason.ERROR, f"its tokens could not be taken in: {type(error).__name__}"
            )

    def end(
        self, entry: JournalEntry, reason: FinishReason, error: str | None = None
    ) -> list[RequestOutput]:
        """End a request from outside; returns its last output."""
        if entry.is_sent:
            self._messages.append(Abort(entry.number))
        return self._deliver(entry.end(reason, error))

    def find(self, request_id: str) -> JournalEntry | None:
        """Return the request of that id, if it is in flight."""
        return self._by_id.get(request_id)

    def take_messages(self) -> list[Down]:
        """Return what the engine must hear of what was decided here."""
        messages, self._messages = self._messages, []
        return messages

    def leave_engine(self) -> None:
        """Note that the engine is gone, and with it all messages to it."""
        self._messages.clear()
        self.lists.leave_engine()
        for entry in self.entries.values():
            entry.leave_engine()

    # What the output processor asks of it (`Ends`).

    def stop(self, sequence: SequenceRecord, matched: str) -> None:
        """End a sequence at a stop string; its engine would go on."""
        is_known_to_engine = sequence.status is not SequenceStatus.FINISHED
        entry = self._by_id[sequence.request.request_id]
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, matched
        if sequence.request.is_finished:
            sequence.request.metrics.finished_s = self._clock()
        if is_known_to_engine:
            self._messages.append(Finish(entry.number, sequence.index))

    def fail(self, request_id: str, message: str) -> None:
        """Fail a request whose output cannot be made."""
        entry = self._by_id.get(request_id)
        if entry is not None:
            entry.end(FinishReason.ERROR, message)
            self._messages.append(Abort(entry.number))

    def _deliver(self, progress: list[Happening]) -> list[RequestOutput]:
        outputs = self._outputs.process(progress)
        for output in outputs:
            if output.finished:
                entry = self._by_id.pop(output.request_id)
                del self.entries[entry.number]
                entry.request.release()
                forget = self.lists.release(entry.lists)
                if forget is not None:
                    self._messages.append(forget)
        return outputs
