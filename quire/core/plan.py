"""The seam between the two planes: a `StepPlan` goes down, a `StepResult` comes up, and nothing
else crosses.

Both are flat records of numbers, strings and tuples, so that they can be written to a file,
replayed, simulated, or sent to another process or machine. A *row* is a sequence's place in the
worker's batch; it persists between steps, and a plan carries only what changed. The worker applies
a plan in this order: `removed_rows`, `new_rows`, `appended_tokens`, `replaced_blocks`,
`appended_blocks`, `copies`, and then computes `work`.

A token sampled for a row is appended to that row by the worker itself, so that the next step does
not have to wait until the token has travelled up and down again. As a rule that is one token; where
tokens beyond the known ones were computed and turned out to be right, it is these and one more: a
row that has computed all its tokens knows one more than it has computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from quire.core.adapters import Adapter
from quire.core.grammars import Grammar
from quire.core.images import PlacedImage

PLAN_VERSION = 4
NOT_FINITE = (
    "the model computed numbers that are not finite (NaN or infinity) for this sequence; it "
    "cannot go on"
)
"""The error of a row whose numbers went wrong."""
NO_TOKEN_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, min_tokens, processors and "
    "structured_outputs forbid all of "
    "them together"
)
"""The error of a row that needed too much memory at once."""

Record = tuple[Any, ...]
"""A `NamedTuple` of numbers, strings and tuples that one feature declares
and both of its halves know."""


class CompanionError(Exception):
    """The worker's half of a feature has raised; `name` is the key of its records."""

    def __init__(self, name: str) -> None:
        super().__init__(f"what makes {name} ready has failed")
        self.name = name


ANY_STATE = -1


class ThinkTagTokens(NamedTuple):
    """The tokens of a model's two think tags: automata whose states count the
    bytes of a mark spelt so far.

    Steps are (state, token id, next state), or with `ANY_STATE` a step from every state that has
    none for that token. The first mark is not there where no step leads on; where none leads on in
    the second one, its state is 0 again.
    """

    begin_steps: tuple[tuple[int, int, int], ...]
    begin_len: int
    """The state in which the first mark is complete;
    the second one is where it has passed all states of `end_token_ids`."""
    end_steps: tuple[tuple[int, int, int], ...]
    end_token_ids: tuple[int, ...]
    """By state: the token that goes on with the second mark."""


class ThinkingBudget(NamedTuple):
    """The reasoning budget of a row: behind so many tokens of reasoning the closing
    mark is written for the model."""

    max_tokens: int
    is_open: bool
    """Whether the prompt has begun the reasoning, so that it needs no opening tag."""
    marks: ThinkTagTokens


class RowSampling(NamedTuple):
    """All that the sampler must know of one row: plain values, checked by `SamplingParams` before
    they get here.

    Rows that come of one body refer to the same tuples, however many they are: code that derives
    data from a long one keeps it by the tuple's identity.
    """

    seed: int = 0
    """64-bit key of the counter-based generator."""
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    """While fewer output tokens exist, `stop_token_ids` cannot be sampled."""
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is forbidden where the ones before
    it have just been generated."""
    num_logprobs: int | None = None
    """Alternatives to report with each sampled token; 0 reports the sampled one alone,
    -1 the whole vocabulary."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens reported in every `TokenLogprobs` whatever their rank."""
    num_prompt_logprobs: int | None = None
    logprobs_mode: str = "raw_logprobs"
    """One of raw_logprobs, processed_logprobs, raw_logits, processed_logits."""
    processors: tuple[str, ...] = ()
    """Names of per-request logits processors registered with the executor."""
    grammar: Grammar | None = None
    """Only tokens that continue an output of this form can be sampled;
    the end of sequence only where it is complete."""
    thinking: ThinkingBudget | None = None
    adapter: Adapter | None = None
    """What the row is computed with besides the model's weights."""
    adapter_start: int = 0
    """The position from which on that is so."""
    images: tuple[PlacedImage, ...] = ()
    """What stands at some positions of the prompt in place of tokens, in ascending order."""
    num_unseen: int = 0
    """The prompt's last tokens, which attend to those before and no token attends to; only where
    attention is not causal."""


class NewRow(NamedTuple):
    """A sequence takes a row: first admission, resumption after preemption, or a fork."""

    row: int
    name: str
    """For logs and errors only."""
    token_ids: tuple[int, ...]
    """Every token known so far: prompt, then output."""
    num_prompt_tokens: int
    block_table: tuple[int, ...]
    """Place by place, a block of each group of layers; -1 where nothing reads it any more."""
    sampling: RowSampling


class Task(Protocol):
    """What is to become of some of a row's hidden states: a small frozen record.
    The worker has an outlet for each kind."""

    def num_wanted(self, num_tokens: int) -> int:
        """Count those of the last of the work's `num_tokens` tokens
        whose hidden states it needs."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample tokens from the logits of the last computed position.

    Sample `i` uses `derive_seed(seed, i)`; only sample 0 is appended to the row.
    """

    count: int = 1
    """1 as a rule, `n` where `n` sequences fork from here."""

    def num_wanted(self, num_tokens: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Verify:
    """Sample the token after the last known one, and after each of some that may come next: as long
    as those are what was sampled.

    The work ends with `token_ids`, which the row does not know. What is sampled is what would have
    been sampled one token at a time; all of it is appended to the row.
    """

    token_ids: tuple[int, ...]

    def num_wanted(self, num_tokens: int) -> int:
        return len(self.token_ids) + 1


@dataclass(frozen=True, slots=True)
class Candidates:
    """Report the best tokens of the last computed position with their log-probabilities,
    and sample none."""

    count: int

    def num_wanted(self, num_tokens: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """Report the log-probabilities of the prompt's tokens from position `first` on.

    The token at position p is scored by the logits of p - 1, up to `start + num_tokens` or the end
    of the prompt, whichever is first.
    """

    first: int

    def num_wanted(self, num_tokens: int) -> int:
        return num_tokens


ONE_SAMPLE: tuple[Task, ...] = (Sample(),)


class RowWork(NamedTuple):
    """One row's share of a step: compute `num_tokens` tokens from position `start`,
    and do the tasks with what comes of it."""

    row: int
    start: int
    num_tokens: int
    tasks: tuple[Task, ...] = ()
    """None while tokens are still to be computed, as a rule."""

    @property
    def num_wanted(self) -> int:
        """Its last tokens whose hidden states its tasks need."""
        num_wanted = 0
        for task in self.tasks:
            num_wanted = max(num_wanted, task.num_wanted(self.num_tokens))
        return num_wanted

    @property
    def num_ahead(self) -> int:
        """Its last tokens, which the row does not know: its tasks bring them."""
        return sum(len(task.token_ids) for task in self.tasks if isinstance(task, Verify))

    @property
    def num_samples(self) -> int:
        """Tokens that its tasks sample."""
        return sum(task.count for task in self.tasks if isinstance(task, Sample))


class AppendedTokens(NamedTuple):
    row: int
    token_ids: tuple[int, ...]


class AppendedBlocks(NamedTuple):
    """A row's block table gets new places, with a block of each group of layers."""

    row: int
    blocks: tuple[int, ...]


class ReplacedBlock(NamedTuple):
    """Entry `entry` of a row's block table now names `block` (copy-on-write, or a merge of
    identical blocks); -1 where it was given back, being behind a window."""

    row: int
    entry: int
    block: int


class BlockCopy(NamedTuple):
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as the control plane wants it."""

    step_id: int
    work: tuple[RowWork, ...] = ()
    removed_rows: tuple[int, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    appended_tokens: tuple[AppendedTokens, ...] = ()
    replaced_blocks: tuple[ReplacedBlock, ...] = ()
    appended_blocks: tuple[AppendedBlocks, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    orders: dict[str, tuple[Record, ...]] = field(default_factory=dict)
    """By a feature's name: what its half in the control plane orders of its half in the worker."""
    version: int = PLAN_VERSION

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(work.num_tokens for work in self.work)


class TokenLogprobs(NamedTuple):
    """A token's log-probability (natural logarithm) and its best alternatives.

    `rank` is 1 for the most likely token. `top_ids` and `top_logprobs` are sorted from the most
    likely down and hold the requested alternatives; the token itself need not be among them.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class WorkResult(NamedTuple):
    """What came of the tasks of one `RowWork`."""

    token_ids: tuple[int, ...] = ()
    """Of `Sample`, or of `Verify`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per sampled token where the row reports them; of `Candidates` one,
    whose alternatives are the candidates."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of `ScorePrompt`."""
    pooled: bytes = b""
    """Of the tasks of `quire.core.pooling`, where their prompt has ended: float32 numbers,
    little-endian."""
    error: str | None = None
    """Set where this row alone failed (non-finite logits, a processor that raised);
    the other fields are then empty."""
    num_rejected: int = 0
    """Of the work's last tokens, those that are not the row's: their keys and values are void, and
    so are its blocks that hold no others, on both sides of the seam."""

    def join(self, other: WorkResult) -> WorkResult:
        """Put together what came of different tasks of one row; an error stands for all of them."""
        if self.error is not None or other.error is not None:
            return WorkResult(error=self.error or other.error)
        return WorkResult(
            self.token_ids + other.token_ids,
            self.logprobs + other.logprobs,
            self.prompt_logprobs + other.prompt_logprobs,
            num_rejected=self.num_rejected + other.num_rejected,
            pooled=self.pooled + other.pooled,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a `StepPlan`: one `WorkResult` per `RowWork`, in the same order."""

    step_id: int
    results: tuple[WorkResult, ...] = ()
    elapsed_s: float = 0.0
    news: dict[str, tuple[Record, ...]] = field(default_factory=dict)
    """By a feature's name: what its half in the worker has to say,
    of this plan's orders or of earlier ones."""
    version: int = PLAN_VERSION
