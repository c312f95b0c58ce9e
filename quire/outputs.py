"""What the calls of `LLM` return."""

from quire.engine.front.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestOutput,
)
from quire.engine.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FlatLogprobs",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]
