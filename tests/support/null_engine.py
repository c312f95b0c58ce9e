"""An engine's process without a model: the null executor, and prompts that kill or freeze it.
Run by tests as the command."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.limits import SchedulerLimits
from quire.core.plan import StepPlan, StepResult
from quire.engine.loop.step_loop import StepLoop
from quire.engine.process.host import main
from quire.executor.null import NullExecutor

VOCAB_SIZE = 256
DEADLY_TOKEN = 7
"""A prompt that begins with it kills the engine as it is computed."""
ENDLESS_TOKEN = 8
"""A prompt that begins with it makes a step that never ends."""
SLOW_TOKEN = 6
"""With a prompt that begins with it, a step takes `SLOW_STEP_S`:
nobody has to hurry to be in time for the others."""
STEP_S = 0.002
SLOW_STEP_S = 0.1


class Executor(NullExecutor):
    """Steps take time, as a model's do, and some prompts are deadly."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slow_rows: set[int] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self._slow_rows -= {row.row for row in plan.new_rows}
        self._slow_rows |= {row.row for row in plan.new_rows if row.token_ids[0] == SLOW_TOKEN}
        time.sleep(
            SLOW_STEP_S if any(item.row in self._slow_rows for item in plan.work) else STEP_S
        )
        for row in plan.new_rows:
            if row.token_ids[0] == DEADLY_TOKEN:
                os.kill(os.getpid(), signal.SIGSEGV)
            while row.token_ids[0] == ENDLESS_TOKEN:
                time.sleep(60)
        return super().execute(plan)


def build(config: EngineConfig) -> StepLoop:
    """A loop with the limits that the server asks for."""
    assert config.max_model_len is not None and config.max_num_seqs is not None
    limits = SchedulerLimits(
        num_blocks=4096, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len
    )
    return StepLoop(
        limits,
        Executor(limits.max_num_seqs, limits.num_blocks, 16, vocab_size=VOCAB_SIZE),
        time.monotonic,
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), build))
