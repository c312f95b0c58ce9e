"""The scheduler's limits: numbers decided before the first step and never changed by a request."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, get_args

from quire.common.kv_windows import kept_window
from quire.common.numbers import ceil_div
from quire.errors import ConfigError

Policy = Literal["fcfs", "priority", "fair"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

MAX_SCORED_ROWS = 64
"""Rows of logits held at once while prompts are scored:
a whole chunk's would take gigabytes with large vocabularies."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much the scheduler may put into a step, and out of how much memory."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    """Rows: sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step."""
    max_model_len: int = 4096
    """Tokens in one sequence, prompt and output."""
    policy: Policy = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    watermark: float = 0.01
    """Share of the pool that admissions leave free while others run,
    so that these can grow before they preempt."""

    max_num_partial_prefills: int = 1
    """Prompts that may be under way at once; above 1, short ones are computed beside a long one,
    not behind it."""
    max_long_partial_prefills: int = 1
    """Of these, long ones that share a step."""
    long_prefill_token_threshold: int = 0
    """Prompts of more tokens are long; 0 means those that take more than half of
    a step's room for prompts."""
    windows: tuple[int | None, ...] = (None,)
    """Of each group of layers, which has a block for each `block_size` tokens of a sequence: the
    tokens back to which it looks, the query's own included. None: all of them."""
    max_steps_in_flight: int = 2
    """Steps that are planned before their outcomes are known."""

    def __post_init__(self) -> None:
        for name in (
            "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
            "max_num_partial_prefills", "max_long_partial_prefills",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.policy not in POLICIES:
            raise ConfigError(
                f"policy={self.policy!r} is unknown; use one of {', '.join(POLICIES)}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: "
                "a step could not give every running sequence one token; raise the first or "
                "lower the second"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_model_len={self.max_model_len}, and "
                "without chunked prefill a prompt must fit one step; raise the first, or "
                "enable chunked prefill"
            )
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                f"max_long_partial_prefills={self.max_long_partial_prefills} is above "
                f"max_num_partial_prefills={self.max_num_partial_prefills}, of which long "
                "prompts are a part; lower the first"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} must be "
                "at least 0"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark={self.watermark} must be at least 0 and below 1")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(
                f"windows={self.windows} must be one or more, each at least 1 or None"
            )

    @property
    def num_slots(self) -> int:
        """Tokens of which the whole pool holds everything that every group keeps of them."""
        return self.num_blocks // len(self.windows) * self.block_size

    @property
    def num_ahead(self) -> int:
        """Tokens of one sequence that steps in flight compute at most."""
        return self.max_steps_in_flight * self.max_num_batched_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at once at most: of a group with a window
        those of the window and of what is computed in one go."""
        num_places = ceil_div(num_tokens, self.block_size)
        return sum(min(num_places, self._max_places(window, num_places)) for window in self.windows)

    def num_blocks_kept(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds while it decodes, token by token."""
        num_places = ceil_div(num_tokens, self.block_size)
        return sum(
            num_places if window is None else min(num_places, ceil_div(window, self.block_size) + 1)
            for window in self.windows
        )

    def num_sequences(self, num_tokens: int) -> int:
        """Sequences of so many tokens that decode at once, the last of which was just let in."""
        num_spare = self.num_blocks - self.num_blocks_for(num_tokens)
        return 1 + num_spare // self.num_blocks_kept(num_tokens) if num_spare >= 0 else 0

    def longest_len(self, most: int) -> int:
        """The longest sequence, of at most so many tokens, that the whole pool holds."""
        lengths = range(self.block_size, most + self.block_size, self.block_size)
        num_places = bisect_right(lengths, self.num_blocks, key=self.num_blocks_for)
        return min(most, num_places * self.block_size)

    def _max_places(self, window: int | None, num_places: int) -> int:
        if window is None:
            return num_places
        return kept_window(window, self.block_size, self.num_ahead).max_places
