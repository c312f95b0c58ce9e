"""How answers are chosen, and what form they have: the parameters of `generate`,
`chat` and `beam_search`."""

from quire.core.params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.core.repetition import RepetitionDetectionParams
from quire.core.structure import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
