"""The inline executor: a worker in this process, called directly."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.plan import StepPlan, StepResult
from quire.executor.interface import Launched
from quire.sampling.processors import Processor, ProcessorTable
from quire.worker.memory import give_back
from quire.worker.residence import Loaded, Source
from quire.worker.worker import Worker


class InlineExecutor:
    """Runs plans on a worker in the calling thread."""

    def __init__(self, worker: Worker, processors: ProcessorTable) -> None:
        self.worker = worker
        self.processors = processors

    def launch(self, plan: StepPlan) -> Launched:
        """See `Executor.launch`."""
        return self.worker.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`."""
        return self.worker.launch(plan)()

    def register_processor(self, processor: Processor) -> str:
        """Make a per-request logits processor known;
        returns the name by which plans refer to it."""
        return self.processors.register(processor)

    def unregister_processor(self, name: str) -> None:
        """Forget a processor."""
        self.processors.unregister(name)

    def idle(self) -> bool:
        """See `Executor.idle`."""
        return self.worker.idle()

    def sleep(self, level: int) -> None:
        """See `Executor.sleep`."""
        self.worker.residence.sleep(level)

    def wake(self, parts: Sequence[str]) -> None:
        """See `Executor.wake`."""
        self.worker.residence.wake(parts)

    def load_weights(self, source: Source) -> Loaded:
        """See `Executor.load_weights`."""
        return self.worker.residence.load(source)

    def replace_weights(self, loaded: Loaded) -> None:
        """See `Executor.replace_weights`."""
        self.worker.residence.replace(loaded)

    def close(self) -> None:
        """Drop the model, its KV memory and the rows,
        also where a reference to the worker is still held."""
        held = vars(self.worker)
        if "companions" in held:
            self.worker.companions.close()
        device = self.worker.model.kernels.device if "model" in held else None
        held.clear()
        if device is not None:
            give_back(device)
