"""Quire: LLM inference and serving on paged attention.

The public names load on first use, so that `import quire` costs nothing and a wrong option is
reported before any heavy library has been imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quire.common.garbage import uncollected
from quire.common.openmp import limit_spinning
from quire.common.version import __version__

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.core.beam_params import BeamSearchParams
    from quire.core.params import BeamRules, RequestOutputKind, SamplingParams
    from quire.core.pooling import PoolingParams
    from quire.core.repetition import RepetitionDetectionParams
    from quire.core.structure import GuidedDecodingParams, StructuredOutputsParams
    from quire.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from quire.engine.decisions.questions import Choice, Level, Option, Predicate, Score
    from quire.engine.front.absent import ModelRegistry
    from quire.engine.front.async_llm import AsyncLLM
    from quire.engine.front.async_llm import AsyncLLM as AsyncLLMEngine
    from quire.engine.front.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        FlatLogprobs,
        Logprob,
        RequestOutput,
    )
    from quire.engine.llm_engine import LLMEngine
    from quire.engine.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from quire.errors import NotAvailableError, QuireError
    from quire.inputs import PromptType, TextPrompt, TokensPrompt
    from quire.llm import LLM
    from quire.lora.request import LoRARequest

_HOMES = {
    "AsyncEngineArgs": "quire.engine.arg_utils",
    "AsyncLLM": "quire.engine.front.async_llm",
    "AsyncLLMEngine": "quire.engine.front.async_llm",
    "BeamRules": "quire.core.params",
    "BeamSearchOutput": "quire.engine.front.outputs",
    "BeamSearchParams": "quire.core.beam_params",
    "BeamSearchSequence": "quire.engine.front.outputs",
    "Choice": "quire.engine.decisions.questions",
    "ClassificationRequestOutput": "quire.engine.pooling.outputs",
    "CompletionOutput": "quire.engine.front.outputs",
    "EmbeddingRequestOutput": "quire.engine.pooling.outputs",
    "EngineArgs": "quire.engine.arg_utils",
    "EngineConfig": "quire.config.engine",
    "FlatLogprobs": "quire.engine.front.outputs",
    "GuidedDecodingParams": "quire.core.structure",
    "LLM": "quire.llm",
    "LLMEngine": "quire.engine.llm_engine",
    "LoRARequest": "quire.lora.request",
    "Level": "quire.engine.decisions.questions",
    "Logprob": "quire.engine.front.outputs",
    "ModelRegistry": "quire.engine.front.absent",
    "NotAvailableError": "quire.errors",
    "Option": "quire.engine.decisions.questions",
    "PoolingParams": "quire.core.pooling",
    "PoolingRequestOutput": "quire.engine.pooling.outputs",
    "Predicate": "quire.engine.decisions.questions",
    "PromptType": "quire.inputs",
    "QuireError": "quire.errors",
    "RepetitionDetectionParams": "quire.core.repetition",
    "RequestOutput": "quire.engine.front.outputs",
    "RequestOutputKind": "quire.core.params",
    "SamplingParams": "quire.core.params",
    "Score": "quire.engine.decisions.questions",
    "ScoringRequestOutput": "quire.engine.pooling.outputs",
    "StructuredOutputsParams": "quire.core.structure",
    "TextPrompt": "quire.inputs",
    "TokensPrompt": "quire.inputs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamRules",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Choice",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "FlatLogprobs",
    "GuidedDecodingParams",
    "LLMEngine",
    "Level",
    "LoRARequest",
    "Logprob",
    "ModelRegistry",
    "NotAvailableError",
    "Option",
    "PoolingParams",
    "PoolingRequestOutput",
    "Predicate",
    "PromptType",
    "QuireError",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Score",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

limit_spinning()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    with uncollected():
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
