"""How answers are chosen, and what form they have: the parameters of `generate`,
`chat` and `beam_search`."""

from quire.core.beam_params import BeamSearchParams
from quire.core.params import BeamRules, RequestOutputKind, SamplingParams
from quire.core.repetition import RepetitionDetectionParams
from quire.core.structure import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "BeamRules",
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
