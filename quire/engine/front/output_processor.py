"""From what happened to sequences to what users read: text, stop strings, log-probabilities by
token, best-of.

Owns the text side of every unfinished request. It tells the scheduler of one thing only: a sequence
whose text has reached a stop string. An exception here ends one request, never the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol, TypeVar, cast

from quire.common.failures import log_failure
from quire.core.params import RequestOutputKind
from quire.core.plan import TokenLogprobs
from quire.core.request import FinishReason, RequestRecord, SequenceRecord, SequenceStatus
from quire.engine.front.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    LogprobsByToken,
    RequestOutput,
)
from quire.engine.front.requests import PreparedRequest
from quire.engine.front.text_stream import TextStream
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Record = TypeVar("Record", LogprobsByToken, LogprobsByToken | None)
REPETITION_DETECTED = "repetition_detected"
"""vLLM's `stop_reason` of an answer that repeated itself."""


class Ends(Protocol):
    """Where sequences are ended: at a scheduler, or at what stands for one in another process."""

    def stop(self, sequence: SequenceRecord, matched: str) -> None:
        """End a sequence whose text has reached a stop string."""
        ...

    def fail(self, request_id: str, message: str) -> None:
        """Fail a request whose output cannot be made."""
        ...


Happening = tuple[SequenceRecord, int | None, TokenLogprobs | None]
"""Something happened to a sequence: it gained a token, ended (None), or both.
A scheduler's `Progress` is one."""


class _SequenceState:
    """What has been made of one sequence's tokens."""

    __slots__ = ("drafted", "is_flushed", "logprobs", "num_delivered", "num_shown", "stream")

    def __init__(self, stream: TextStream, has_logprobs: bool) -> None:
        self.stream = stream
        self.logprobs: list[LogprobsByToken] | None = [] if has_logprobs else None
        self.num_delivered = self.num_shown = 0
        """Tokens, and characters, of the deltas so far."""
        self.drafted: list[tuple[int, int]] = []
        """Of all text, the characters of draft tokens that no delta has told of yet."""
        self.is_flushed = False

    def note_drafted(self, first: int, end: int) -> None:
        """These characters came of a draft token."""
        if self.drafted and self.drafted[-1][1] == first:
            first, _ = self.drafted.pop()
        if first < end:
            self.drafted.append((first, end))

    def take(self) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Return the text of a delta, and its runs of draft tokens."""
        first, self.num_shown = self.num_shown, self.stream.num_chars
        drafted = tuple((start - first, end - first) for start, end in self.drafted)
        self.drafted.clear()
        return self.stream.take(), drafted


class RequestState:
    """A request as the user sees it."""

    def __init__(self, request: RequestRecord, asked: PreparedRequest) -> None:
        params = asked.params
        self.request = request
        self.params = params
        self.stop_strings = asked.digest.stop_strings
        self.prompt = asked.prompt
        self.transfer_params = asked.transfer_params
        self.prompt_token_ids = list(request.prompt_token_ids)
        """One list for all outputs: a stream's cost per token must not grow with its prompt."""
        self.sequences: dict[int, _SequenceState] = {}
        self.prompt_logprobs: list[LogprobsByToken | None] | None = None
        self.is_delta = params.output_kind is RequestOutputKind.DELTA
        self.is_ranked = params.num_sequences > params.n
        """Whether only the best of its sequences are shown, which are known at the end."""
        self.is_silent = self.is_ranked or params.output_kind is RequestOutputKind.FINAL_ONLY
        """Whether nothing is shown before the end."""
        self.is_scored = request.sampling.num_prompt_logprobs is not None


class OutputProcessor:
    """Text and outputs of all unfinished requests of one engine."""

    def __init__(self, tokenizer: Tokenizer | None, ends: Ends) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._states: dict[str, RequestState] = {}
        self._texts: dict[int, str] = {}
        """Of single tokens that log-probabilities name; bounded by the vocabulary."""

    def add(self, request: RequestRecord, asked: PreparedRequest) -> None:
        """Begin to follow a request."""
        self._states[request.request_id] = RequestState(request, asked)

    def process(self, progress: Sequence[Happening]) -> list[RequestOutput]:
        """Take in a step's progress; returns an output for each request that
        something happened to, as it asked. A sequence's tokens follow one another; all but the last
        were drafted."""
        touched: dict[str, RequestState] = {}
        began_s = perf_counter()
        for place, (sequence, token_id, logprobs) in enumerate(progress, 1):
            request = sequence.request
            state = self._states.get(request.request_id)
            if state is None:
                continue
            touched[request.request_id] = state
            try:
                is_followed = place < len(progress) and progress[place][0] is sequence
                if is_followed and not request.comes_at_once:
                    self._take_drafted(state, sequence, progress[place - 1], progress[place][1])
                else:
                    self._take(state, sequence, token_id, logprobs)
            except Exception as error:
                self._fail(state, sequence, error)
            ended_s = perf_counter()
            request.metrics.detokenize_s += ended_s - began_s
            began_s = ended_s
        outputs = []
        for request_id, state in touched.items():
            if not state.is_silent or state.request.is_finished:
                try:
                    outputs.append(self._snapshot(state))
                except Exception as error:
                    self._fail(state, state.request.sequences[0], error)
                    outputs.append(_bare_output(state))
            if state.request.is_finished:
                del self._states[request_id]
        return outputs

    def forget(self, request_id: str) -> RequestOutput | None:
        """Stop following an aborted request; returns its last output."""
        state = self._states.pop(request_id, None)
        return None if state is None else self._last_output(state)

    def end_all(self) -> list[RequestOutput]:
        """Follow nothing any more; returns the last outputs of the requests followed so far."""
        outputs = [self._last_output(state) for state in self._states.values()]
        self._states.clear()
        return outputs

    def _last_output(self, state: RequestState) -> RequestOutput:
        """Return the output of a request that was ended from outside, with the text that was held
        back."""
        for sequence in state.request.sequences:
            try:
                self._flush(self._state_of(state, sequence), sequence)
            except Exception as error:
                self._fail(state, sequence, error)
        try:
            return self._snapshot(state)
        except Exception as error:
            self._fail(state, state.request.sequences[0], error)
            return _bare_output(state)

    def _fail(self, state: RequestState, sequence: SequenceRecord, error: Exception) -> None:
        """End a request whose output cannot be made,
        also where its last token has ended it already."""
        log_failure(logger, f"request {sequence.name} failed while its output was made", error)
        message = f"the output could not be made: {type(error).__name__}"
        self._ends.fail(state.request.request_id, message)
        state.request.error = message
        sequence.finish_reason, sequence.stop_reason = FinishReason.ERROR, None

    # -- one token
    # ----------------------------------------------------------------------------------------------

    def _take_drafted(
        self, state: RequestState, sequence: SequenceRecord, one: Happening, after: int | None
    ) -> None:
        """Take what happened to a sequence before something else did in the same step."""
        _, token_id, logprobs = one
        stream = self._state_of(state, sequence).stream
        first = stream.num_chars
        self._take(state, sequence, token_id, logprobs)
        if token_id is not None and after is not None:
            self._state_of(state, sequence).note_drafted(first, stream.num_chars)

    def _take(
        self,
        state: RequestState,
        sequence: SequenceRecord,
        token_id: int | None,
        logprobs: TokenLogprobs | None,
    ) -> None:
        mine = self._state_of(state, sequence)
        if mine.is_flushed:
            return  # a stop string ended it at an earlier token of the same step
        if token_id is None:
            self._flush(mine, sequence)
            return
        if logprobs is not None and mine.logprobs is not None:
            mine.logprobs.append(self._by_token(logprobs, state.params.num_logprobs))
        is_stop_token = (
            sequence.finish_reason is FinishReason.STOP and sequence.stop_reason == token_id
        )
        if is_stop_token and not state.params.include_stop_str_in_output:
            return
        matched = mine.stream.append(token_id)
        if matched is not None:
            # The text decides, also where the same token reached the length limit.
            mine.is_flushed = True
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, matched
            self._ends.stop(sequence, matched)
            _cut(sequence, mine)

    def _flush(self, mine: _SequenceState, sequence: SequenceRecord) -> None:
        if mine.is_flushed:
            return
        mine.is_flushed = True
        matched = mine.stream.flush()
        if matched is not None:
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, matched

    def _state_of(self, state: RequestState, sequence: SequenceRecord) -> _SequenceState:
        mine = state.sequences.get(sequence.index)
        if mine is None:
            stream = TextStream(
                self._tokenizer, state.request.prompt_token_ids, state.params, state.stop_strings
            )
            mine = _SequenceState(stream, state.params.num_logprobs is not None)
            state.sequences[sequence.index] = mine
        return mine

    # -- outputs
    # ----------------------------------------------------------------------------------------------

    def _snapshot(self, state: RequestState) -> RequestOutput:
        request, shown = state.request, _shown(state)
        outputs = [self._completion(state, each, index) for index, each in shown]
        if state.is_delta:  # only now: where one of them cannot be made, none is delivered
            for (_, sequence), made in zip(shown, outputs, strict=True):
                state.sequences[sequence.index].num_delivered += len(made.token_ids)
        return RequestOutput(
            request_id=request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=outputs,
            finished=request.is_finished,
            prompt_logprobs=self._scores(state) if state.is_scored else None,
            pooled=None if request.generates else request.pooled,
            num_vectors=_num_vectors(request),
            metrics=request.metrics,
            error=request.error,
            kv_transfer_params=state.transfer_params
            if request.is_finished and request.error is None
            else None,
        )

    def _completion(
        self, state: RequestState, sequence: SequenceRecord, index: int
    ) -> CompletionOutput:
        mine = self._state_of(state, sequence)
        is_delta = state.is_delta
        first = mine.num_delivered
        token_ids = sequence.token_ids[len(state.prompt_token_ids) + first :]
        has_logprobs = mine.logprobs is not None
        reason = sequence.finish_reason
        text, drafted = mine.take() if is_delta else (mine.stream.text, tuple(mine.drafted))
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=sequence.cumulative_logprob
            if has_logprobs or state.request.comes_at_once
            else None,
            logprobs=_as_asked(state, mine.logprobs[first:]) if mine.logprobs is not None else None,
            finish_reason=reason.value
            if reason is not None and sequence.status is SequenceStatus.FINISHED
            else None,
            stop_reason=self._visible_stop(state, sequence),
            drafted=drafted,
        )

    def _visible_stop(self, state: RequestState, sequence: SequenceRecord) -> int | str | None:
        """Return the stop that the user requested; the model's own end of
        sequence is not worth a mention."""
        reason = sequence.stop_reason
        if sequence.finish_reason is FinishReason.REPETITION:
            return REPETITION_DETECTED
        return (
            None
            if isinstance(reason, int) and reason not in (state.params.stop_token_ids or ())
            else reason
        )

    def _scores(self, state: RequestState) -> list[LogprobsByToken | None] | None:
        records = self._prompt_logprobs(state)
        return None if records is None else _as_asked(state, records)

    def _prompt_logprobs(self, state: RequestState) -> list[LogprobsByToken | None] | None:
        request = state.request
        if len(request.prompt_logprobs) < len(request.prompt_token_ids):
            return None
        if state.prompt_logprobs is None:
            state.prompt_logprobs = [
                None if record is None else self._by_token(record, state.params.prompt_logprobs)
                for record in request.prompt_logprobs
            ]
        return state.prompt_logprobs

    def _by_token(self, record: TokenLogprobs, num_ranked: int | None) -> LogprobsByToken:
        """Return the records by token: the first `num_ranked` alternatives (all with -1) are in
        order of rank; those requested by id come after."""
        by_token = {
            record.token_id: Logprob(record.logprob, record.rank, self._text_of(record.token_id))
        }
        for rank, (token_id, logprob) in enumerate(
            zip(record.top_ids, record.top_logprobs, strict=True), start=1
        ):
            if token_id != record.token_id:
                is_ranked = num_ranked is not None and (num_ranked < 0 or rank <= num_ranked)
                by_token[token_id] = Logprob(
                    logprob, rank if is_ranked else None, self._text_of(token_id)
                )
        return by_token

    def _text_of(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode(
                [token_id], skip_special_tokens=False
            )
        return text


def _cut(sequence: SequenceRecord, mine: _SequenceState) -> None:
    """Take away the tokens that the same step brought behind those that were taken."""
    num_kept = len(sequence.request.prompt_token_ids) + mine.stream.num_tokens
    if len(sequence.token_ids) <= num_kept:
        return
    del sequence.token_ids[num_kept:]
    if mine.logprobs is not None:
        total = 0.0
        for token_id, record in zip(sequence.output_token_ids, mine.logprobs, strict=True):
            total += record[token_id].logprob  # in the order in which they came: the same sum
        sequence.cumulative_logprob = total


def _num_vectors(request: RequestRecord) -> int:
    """Of a request for vectors: one, or one for each token that is pooled."""
    pool = request.pool
    if pool is None:
        return int(not request.generates)
    return len(request.prompt_token_ids) - pool.num_skipped if pool.is_per_token else 1


def _shown(state: RequestState) -> list[tuple[int, SequenceRecord]]:
    """Return the sequences to be shown, with the index that each is shown under."""
    sequences = state.request.sequences
    if state.is_ranked:
        return list(
            enumerate(
                sorted(sequences, key=lambda sequence: -sequence.cumulative_logprob)[
                    : state.params.n
                ]
            )
        )
    return [(each.index, each) for each in sequences]


def _as_asked(state: RequestState, records: list[Record]) -> list[Record]:
    """Return the records, or the flat form, which reads like that list."""
    return cast("list[Record]", FlatLogprobs(records)) if state.params.flat_logprobs else records


def _bare_output(state: RequestState) -> RequestOutput:
    """Return what can be said of a request of which not even an output can be made."""
    request = state.request
    delivered = {index: each.num_delivered for index, each in state.sequences.items()}
    outputs = [
        CompletionOutput(
            each.index,
            "",
            each.output_token_ids[delivered.get(each.index, 0) :],
            finish_reason=FinishReason.ERROR.value,
        )
        for each in request.sequences[: state.params.n]
    ]
    return RequestOutput(
        request.request_id,
        state.prompt,
        list(request.prompt_token_ids),
        outputs,
        finished=True,
        error=request.error,
    )
