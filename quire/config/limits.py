"""The scheduler's limits: numbers decided before the first step and never changed by a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size
