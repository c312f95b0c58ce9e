"""What `embed`, `classify`, `score`, `encode` and `reward` return. Names and fields are those that
users of vLLM know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from quire.core.request import RequestMetrics
from quire.engine.front.outputs import RequestOutput
from quire.errors import RequestError

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


_Made = TypeVar("_Made", bound=PoolingRequestOutput)


def output_of(kind: type[_Made], output: RequestOutput, outputs: object) -> _Made:
    """What a call returns for one request, of which `outputs` was made."""
    return kind(
        request_id=output.request_id,
        outputs=outputs,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
        metrics=output.metrics,
    )


def vectors_of(output: RequestOutput) -> NDArray[np.float32]:
    """The vectors of an output, float32 [vectors, elements]: one, or one a token. RequestError
    where the request failed.
    """
    import numpy as np

    if output.error is not None:
        raise RequestError(f"request {output.request_id} failed: {output.error}")
    assert output.pooled is not None
    return np.frombuffer(output.pooled, "<f4").reshape(output.num_vectors, -1)


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The cosine of the angle between two vectors; 0 where one of them is zero."""
    import numpy as np

    x, y = a.astype(np.float64), b.astype(np.float64)
    lengths = float(np.sqrt(np.sum(x * x)) * np.sqrt(np.sum(y * y)))
    return float(np.sum(x * y)) / lengths if lengths else 0.0
