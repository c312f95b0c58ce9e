"""Says which memory of an engine can go back to the system while it sleeps, and how weights that
were discarded return."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.common.file_states import States, check_unchanged
from quire.common.pages import CAN_DISCARD
from quire.engine.assembly.loading import LoadedModel, load_model
from quire.engine.assembly.planned_model import PlannedModel
from quire.engine.assembly.preparation import begin_loading

if TYPE_CHECKING:
    from torch import Tensor

    from quire.lora.table import AdapterTable
    from quire.worker.memory import KVMemory
    from quire.worker.residence import Residence


class Held(NamedTuple):
    """What was built of a planned model."""

    model: LoadedModel
    memory: KVMemory
    adapters: AdapterTable | None
    states: States
    """Of the model's files before they were loaded."""


def residence_of(planned: PlannedModel, held: Held) -> Residence:
    """Return what gives an engine's memory back and brings it back."""
    from quire.worker.residence import Fixed, Returnable

    plan = planned.plan
    reason = _refusal(planned)
    if reason is not None:
        return Fixed(reason)
    weights, images = held.model.decoder.weights.tensors, held.model.images
    if images is not None:
        weights = [*weights, *images.tensors]
    is_decoder_alone = images is None and held.model.pooler is None
    cache = plan.config.weights_cache
    return Returnable(
        weights,
        held.memory,
        (lambda: _reload(planned, held)) if is_decoder_alone else None,
        None if cache is None else Path(cache).expanduser(),
        plan.num_threads,
        is_populated=plan.is_kv_populated,
    )


def _refusal(planned: PlannedModel) -> str | None:
    plan = planned.plan
    if plan.device != "cpu":
        return "on a GPU it is not available yet; end the server, and start it when it is needed"
    if plan.config.tensor_parallel_size > 1:
        return "with tensor_parallel_size it is not available yet; take one process"
    if plan.experts is not None:
        return "with expert_memory it is not available yet: experts leave memory by themselves"
    if planned.draft is not None:
        return "beside a draft model it is not available yet; take the method 'suffix' or 'ngram'"
    if not CAN_DISCARD:
        return "it needs Linux: this system does not take pages back"
    return None


def _reload(planned: PlannedModel, held: Held) -> Sequence[Tensor]:
    """Load the weights of the decoder once more. Raises CheckpointError where the files are not
    those that were loaded."""
    check_unchanged(held.states)
    again = begin_loading(planned._replace(head_start=None, packed_cache=None))
    loaded = load_model(again, held.model.decoder.kernels, held.adapters)
    check_unchanged(held.states)
    return loaded.decoder.weights.tensors
