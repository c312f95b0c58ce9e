"""Outlets: what becomes of a step's hidden states, one class for each kind of `Task`."""

from __future__ import annotations

from quire.nn.decoder import DecoderModel
from quire.sampling import Sampler
from quire.worker.outlets.interface import Outlet
from quire.worker.outlets.prompt_scores import PromptScoreOutlet
from quire.worker.outlets.tokens import TokenOutlet
from quire.worker.outlets.weighing import WeighingOutlet
from quire.worker.rows import RowTable


def outlets_for(model: DecoderModel, rows: RowTable, sampler: Sampler) -> tuple[Outlet, ...]:
    """Make the outlets for all tasks of a model that generates."""
    return (
        TokenOutlet(model, rows, sampler),
        PromptScoreOutlet(model, rows, sampler),
        WeighingOutlet(model),
    )
