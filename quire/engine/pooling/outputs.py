"""What `embed`, `classify`, `score`, `encode` and `reward` return. Names and fields are those that
users of vLLM know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.core.request import RequestMetrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class PoolingOutput:
    """A vector, or one for each token."""

    data: NDArray[np.float32]
    """float32 [D], or [tokens, D]"""

    def tolist(self) -> list[Any]:
        """As lists of numbers."""
        found: list[Any] = self.data.tolist()
        return found


class EmbeddingOutput:
    """A text's vector."""

    def __init__(self, data: NDArray[np.float32]) -> None:
        self.data = data
        """float32 [D]"""

    @cached_property
    def embedding(self) -> list[float]:
        """The same as a list."""
        found: list[float] = self.data.tolist()
        return found

    @property
    def hidden_size(self) -> int:
        """Its elements."""
        return len(self.data)


class ClassificationOutput:
    """A text's classes."""

    def __init__(self, data: NDArray[np.float32]) -> None:
        self.data = data
        """float32 [classes]"""

    @cached_property
    def probs(self) -> list[float]:
        """Their probabilities; logits with `use_activation=False`."""
        found: list[float] = self.data.tolist()
        return found

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.data)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float
    """A cosine, or what a cross-encoder's classifier says."""


@dataclass(slots=True)
class PoolingRequestOutput:
    """What came of one prompt."""

    request_id: str
    outputs: Any
    """`PoolingOutput`; of the subclasses, what their names say."""
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics = field(default_factory=RequestMetrics, repr=False)


class EmbeddingRequestOutput(PoolingRequestOutput):
    """`outputs` is an `EmbeddingOutput`."""


class ClassificationRequestOutput(PoolingRequestOutput):
    """`outputs` is a `ClassificationOutput`."""


class ScoringRequestOutput(PoolingRequestOutput):
    """`outputs` is a `ScoringOutput`."""
