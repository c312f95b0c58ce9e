"""Quire: LLM inference and serving on paged attention.

The public names load on first use, so that `import quire` costs nothing and a wrong option is reported before any heavy
library has been imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quire.common.openmp import limit_spinning
from quire.common.version import __version__

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.core.params import BeamSearchParams, SamplingParams
    from quire.core.repetition import RepetitionDetectionParams
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput
    from quire.errors import QuireError
    from quire.llm import LLM

_HOMES = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.engine.async_llm",
    "EngineConfig": "quire.config.engine",
    "SamplingParams": "quire.core.params",
    "BeamSearchParams": "quire.core.params",
    "RepetitionDetectionParams": "quire.core.repetition",
    "RequestOutput": "quire.engine.outputs",
    "CompletionOutput": "quire.engine.outputs",
    "BeamSearchOutput": "quire.engine.outputs",
    "Logprob": "quire.engine.outputs",
    "QuireError": "quire.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "QuireError",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

limit_spinning()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
