"""What `generate`, `chat` and `beam_search` return."""

from quire.engine.outputs import (
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
    "CompletionOutput",
    "FlatLogprobs",
    "Logprob",
    "RequestOutput",
]
