"""What `generate`, `chat` and `beam_search` return."""

from quire.engine.front.absent import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.engine.front.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestOutput,
)

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "FlatLogprobs",
    "Logprob",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringRequestOutput",
]
