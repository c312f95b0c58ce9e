"""What one step may compute of prompts, and how it is divided among them.

Owns the room that is left for prompts in the step being planned: tokens, and time where a
`StepPace` is kept. Which prompt is asked about next is the order of service, and the scheduler's
business.

With `max_num_partial_prefills` above 1 a step is divided twice. First, short prompts, each of which
is computed whole, while they take no more than half of the room if a long one is under way; then
long ones, in order, with all that is left. So a short prompt does not wait behind a long one.

Where steps are bounded by time, a short prompt is not divided between two steps: its first token
comes no sooner for the part that is computed before, and those computed with it wait for that part.
A prompt that takes more than half of a step, but has at most a quarter of the longest one's tokens
to go, is divided: beside a long one it gets up to three quarters of each step. On a slow processor
that is what tells a question from a book; a long one never gets less than a quarter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.config.limits import SchedulerLimits
from quire.core.plan import RowWork
from quire.core.scheduler.pace import StepPace
from quire.core.scheduler.plan_builder import PlanBuilder

_SHORT_SHARE = 0.5
"""Of a step's room: what short prompts may take beside a long one,
and what a prompt may take to count as short."""
_DIVIDED_SHARE = 0.75
"""Of a step's room: what prompts of several steps may take beside one that is much longer. Two
cores with AVX2 compute 40 tokens of Qwen3-0.6B in bfloat16 in a step of 0.36 s: with half of it a
prompt of 50 tokens took four steps, with three quarters two."""
_MUCH_LONGER = 4
"""Times as many tokens to go."""


class PromptRoom:
    """The room for prompts in one step after another."""

    def __init__(
        self, limits: SchedulerLimits, builder: PlanBuilder, pace: StepPace | None
    ) -> None:
        self._limits, self._builder, self._pace = limits, builder, pace
        self._all_tokens = self._num_tokens_taken = 0
        self._all_s = self._left_s = math.inf
        self._is_first_pass = self._has_served_long = False
        self._num_long = self._num_pending = self._longest_gap = 0

    def open(
        self, decodes: list[RowWork], queued_len: int, context_len: int, longest_gap: int
    ) -> None:
        """Begin with a step that holds `decodes` so far; see `StepPace.prompt_s` for the lengths.

        `longest_gap` is the most tokens that a prompt under way has to go.
        """
        self._longest_gap = longest_gap
        self._all_tokens, self._num_tokens_taken = self._builder.num_tokens_left, 0
        self._all_s = self._left_s = (
            math.inf
            if self._pace is None
            else self._pace.prompt_s(decodes, queued_len, context_len)
        )
        self._is_first_pass, self._num_long, self._num_pending = False, 0, 0

    def serve_short(self) -> None:
        """Serve only short prompts until `serve_long`."""
        self._is_first_pass, self._num_long, self._num_pending = True, 0, 0

    def serve_long(self) -> None:
        """Serve any prompt, as many long ones side by side as the limits allow."""
        self._is_first_pass = self._has_served_long = False
        self._num_long = min(self._num_long, self._limits.max_long_partial_prefills)

    @property
    def has_room(self) -> bool:
        """Whether another prompt may be admitted in this step."""
        if not self._builder.num_tokens_left:
            return False
        if self._is_first_pass and self._num_pending >= self._limits.max_num_partial_prefills:
            return False
        return (
            not self._num_tokens_taken
            or self._fitting(0, self._limits.max_model_len, self._left_s) > 0
        )

    def take(self, start: int, gap: int, undivided: Sequence[tuple[int, int]] = ()) -> int:
        """Return how many of a sequence's next `gap` tokens this step computes, from position
        `start` on, and all or none of each of the spans `undivided`; they are taken.

        0 where there is no room, or it is not the sequence's turn.
        """
        count = gap
        if gap > 1:  # with one token to go, the cache holding the rest, it is as good as a decode
            count = self._short(start, gap) if self._is_first_pass else self._long(start, gap)
        if 0 < count < gap and undivided:
            count = self._whole(start, count, undivided)
        if count:
            self._num_tokens_taken += count
            if self._pace is not None:
                self._left_s -= self._pace.model.chunk_s(start, count)
        return count

    def _whole(self, start: int, count: int, undivided: Sequence[tuple[int, int]]) -> int:
        """Return a count near `count` that divides no span: it ends before one, or, where that is
        the first thing to compute, behind it. The limits leave room for one in each step."""
        for first, end in undivided:
            if first < start + count < end:
                if first > start:
                    return first - start
                return end - start if end - start <= self._builder.num_tokens_left else 0
        return count

    def _short(self, start: int, gap: int) -> int:
        """Return all of a short prompt or nothing, and what there is room for of one that is short
        beside the longest only."""
        count = 0
        if self._is_short(start, gap):
            if gap <= self._builder.num_tokens_left and self._fits_beside_long(start, gap):
                return gap
        elif self._is_divided(gap):
            count = self._part_beside_long(start, gap)
        else:
            self._num_long += 1
        self._num_pending += count < gap
        return count

    def _is_divided(self, gap: int) -> bool:
        is_bounded = self._pace is not None and self._pace.is_bounding
        return is_bounded and gap * _MUCH_LONGER <= self._longest_gap

    def _part_beside_long(self, start: int, gap: int) -> int:
        """Return what a divided prompt gets; not in whole quanta, since the long one's chunk fills
        the tiles."""
        assert self._pace is not None
        share = _DIVIDED_SHARE if self._num_long else 1.0
        seconds = share * self._all_s - (self._all_s - self._left_s)
        return self._pace.model.chunk_len(seconds, start, min(gap, self._builder.num_tokens_left))

    def _is_short(self, start: int, gap: int) -> bool:
        threshold = self._limits.long_prefill_token_threshold
        if threshold:
            return gap <= threshold
        return (
            gap <= _SHORT_SHARE * self._all_tokens
            and self._chunk_s(start, gap) <= _SHORT_SHARE * self._all_s
        )

    def _fits_beside_long(self, start: int, gap: int) -> bool:
        share = _SHORT_SHARE if self._num_long else 1.0
        taken_s = self._all_s - self._left_s if self._pace is not None else 0.0
        fits = self._num_tokens_taken + gap <= share * self._all_tokens
        return fits and (
            taken_s + self._chunk_s(start, gap) <= share * self._all_s or not self._num_tokens_taken
        )

    def _long(self, start: int, gap: int) -> int:
        """Return what is left, divided by the long prompts that are still to be served."""
        num_sharing = max(1, self._num_long)
        self._num_long -= 1
        most = min(
            gap, max(1, self._builder.num_tokens_left // num_sharing), self._builder.num_tokens_left
        )
        if most < gap and not self._limits.enable_chunked_prefill:
            return 0
        seconds = self._left_s / num_sharing
        count = self._fitting(start, most, seconds)
        if count < gap and self._is_better_whole(start, gap):
            return 0
        if not count and not self._has_served_long and self._pace is not None:
            # what shorter prompts leave, however little, or it would stand still while they come
            count = self._pace.model.chunk_len(seconds, start, most)
        self._has_served_long = True
        return count

    def _is_better_whole(self, start: int, gap: int) -> bool:
        """Return whether a prompt should wait for the next step, which computes all of it."""
        is_bounded = self._pace is not None and self._pace.is_bounding
        return is_bounded and self._num_tokens_taken > 0 and self._is_short(start, gap)

    def _fitting(self, start: int, most: int, seconds: float) -> int:
        """Return at most `most` tokens that take up to `seconds`:
        whole quanta where time is what bounds them."""
        if self._pace is None:
            return most
        quantum = self._pace.quantum
        count = self._pace.model.chunk_len(seconds, start, most)
        if count < most:
            count -= count % quantum
        if not count and not self._num_tokens_taken:
            count = min(most, quantum)  # however slow the machine, each step brings prompts forward
        return count

    def _chunk_s(self, start: int, count: int) -> float:
        return 0.0 if self._pace is None else self._pace.model.chunk_s(start, count)
