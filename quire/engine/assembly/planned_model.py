"""A model that was found and understood, with the plan for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.config.engine import EngineConfig
from quire.engine.assembly.model_files import ModelFiles
from quire.engine.plan.engine_plan import EnginePlan

if TYPE_CHECKING:
    from torch import Tensor

    from quire.quant.gguf_formats import GgufStorage
    from quire.quant.storage import CheckpointStorage
    from quire.weights.head_start import HeadStart
    from quire.weights.packed_cache import PackedCache


class DraftFiles(NamedTuple):
    """A draft model that was found."""

    config: EngineConfig
    """As if it were served."""
    files: ModelFiles
    storage: CheckpointStorage | GgufStorage | None
    """As in `PlannedModel`."""


class PlannedModel(NamedTuple):
    """A model that was found and understood, and the plan for it; nothing is allocated yet."""

    plan: EnginePlan
    files: ModelFiles
    storage: CheckpointStorage | GgufStorage | None
    """How weights are stored that are not plain floating point; None where they all are."""
    head_start: HeadStart | None = None
    """Weights that are on their way already."""
    packed_cache: PackedCache | None = None
    """Weights that an earlier start packed, or the place for them."""
    draft: DraftFiles | None = None
    """The model that drafts, where one does."""
    given: Mapping[str, Tensor] | None = None
    """Weights that a program gave, in place of those of the files."""

    @property
    def folder(self) -> Path:
        """Where the model's files lie."""
        return self.files.folder

    @property
    def model_config(self) -> Mapping[str, object]:
        """What its `config.json` says, or would say."""
        return self.files.config
