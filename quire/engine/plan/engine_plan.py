"""What an engine is built from: every decision of a plan, and the reasons that `quire plan` prints.

`quire.engine.plan.planning` makes it; everything else reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from quire.common.frozen_record import FrozenRecord

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.config.limits import SchedulerLimits
    from quire.core.step_cost import UnitCosts
    from quire.engine.plan.adapters import AdapterPlan
    from quire.engine.plan.experts import ExpertPlan
    from quire.engine.plan.graphs import GraphPlan
    from quire.engine.plan.images import ImagePlan
    from quire.engine.plan.speculation import DraftPlan
    from quire.engine.plan.tiers import TierPlan
    from quire.engine.plan.transfers import TransferPlan
    from quire.models.declaration import DecoderSpec
    from quire.models.kv_layout import KVLayout
    from quire.models.pooling import PoolingSpec
    from quire.quant.formats import WeightFormats


class Decision(NamedTuple):
    """One value and why it was chosen."""

    name: str
    value: str
    reason: str


class Notes:
    """Decisions, in the order in which they are made."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def add(self, name: str, value: object, reason: str) -> None:
        """Note a decision."""
        self.decisions.append(Decision(name, str(value), reason))

    def extend(self, decisions: Iterable[tuple[str, object, str]]) -> None:
        """Note decisions that were made elsewhere."""
        for decision in decisions:
            self.add(*decision)

    def given(self, name: str, value: int | None, default: int, reason: str) -> int:
        """Decide on a value that the user may give, and note it."""
        self.add(name, default if value is None else value, reason if value is None else "given")
        return default if value is None else value


class EnginePlan(FrozenRecord):
    """Everything that an engine is built from."""

    config: EngineConfig
    spec: DecoderSpec
    formats: WeightFormats
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    kv_format: str
    """One of `quire.common.kv_formats.KV_FORMATS`."""
    attention_module: str | None
    """The library whose attention a GPU computes with; None for the kernels here."""
    limits: SchedulerLimits
    step_costs: UnitCosts
    """What steps are estimated to cost."""
    pooling: PoolingSpec | None
    """What vectors are made of; None where the model makes none."""
    generates: bool
    """Whether the model makes text."""
    target_step_s: float | None
    """How long a step should take where outputs are streamed; None where it may take any time."""
    is_overlapped: bool
    """Whether each step is planned while the one before it is computed."""
    graphs: GraphPlan | None
    """Of steps that are recorded and replayed; None where every step is launched."""
    num_threads: int
    """Of each rank."""
    weight_bytes: int
    kv_layout: KVLayout
    kv_bytes_per_token: int
    """Of all groups of layers, as long as none has given anything back."""
    kv_bytes: int
    is_kv_populated: bool
    """Whether all of it is resident from the start."""
    workspace_bytes: int
    adapters: AdapterPlan | None
    """Room for adapters; None where none are served."""
    images: ImagePlan | None
    """How images are read; None where the model reads none."""
    draft: DraftPlan | None
    """A model that drafts beside it; None where none does."""
    experts: ExpertPlan | None
    """Which experts are in memory; None where all are, or there are none."""
    tiers: TierPlan | None
    """What is kept of the KV cache besides the pool; None where nothing is."""
    transfers: TransferPlan | None
    """Its part in transfers of keys and values; None where it has none."""
    decisions: tuple[Decision, ...]

    @property
    def adapter_bytes(self) -> int:
        """Memory of adapters, at most."""
        return 0 if self.adapters is None else self.adapters.num_bytes

    @property
    def image_bytes(self) -> int:
        """Memory of encoded images, at most."""
        return 0 if self.images is None else self.images.num_bytes

    @property
    def total_bytes(self) -> int:
        """Memory of all replicas at most."""
        return self.replica_bytes * self.config.data_parallel_size

    @property
    def replica_bytes(self) -> int:
        """Memory at most: weights, KV cache, workspace, adapters, encoded images, a draft model."""
        kept = (self.adapters, self.images, self.draft, self.tiers, self.transfers)
        others = sum(each.num_bytes for each in kept if each is not None)
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes + others
