"""An engine's process with the real model, in which prompts that begin with certain tokens break
one stage each.

Run by tests as the engine's command. Which token breaks what is `FAULTS`; every other request is
served as always.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.core.plan import StepPlan, StepResult
from quire.engine.loop.step_loop import StepLoop
from quire.engine.process.host import build_loop, main
from quire.executor.interface import Launched

FAULTS = {
    "its inputs cannot be built": 3801,
    "the model raises on it": 3802,
    "its logits are NaN": 3803,
    "its logits are infinite": 3804,
    "its KV memory holds NaN": 3805,
    "sampling raises on it": 3806,
    "its tokens cannot be taken in": 3807,
    "its prompt's scores are NaN": 3808,
}
NAMES = {token: name for name, token in FAULTS.items()}
FAULTY_SCORES = 7
"""Who asks for so many alternatives of the prompt's tokens gets none:
scores are not told apart by their prompt."""
SECRET = "secret text of /root/x.py at 0x7f00"


class Saboteur:
    """An executor around the real one."""

    def __init__(self, loop: StepLoop) -> None:
        inner: Any = loop.executor
        self._inner = inner
        self._worker = inner.worker
        self._wrap(self._worker, "_launch", self._launch)
        self._wrap(self._worker.rows, "apply", self._apply)
        sampler = self._worker.outlets[0].sampler
        self._wrap(sampler, "sample", self._sample)
        self._wrap(sampler, "prompt_logprobs", self._score)
        self._wrap(loop.scheduler, "add", self._add)

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(0.002)
        result: StepResult = self._inner.execute(plan)
        return result

    def launch(self, plan: StepPlan) -> Launched:
        result = self.execute(plan)
        return lambda: result

    def close(self) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(inner, *args, **kwargs))

    def _fault(self, row: int) -> str:
        return NAMES.get(int(self._worker.rows.token_ids[row][0]), "")

    def _launch(self, inner: Callable[..., Any], work: Any) -> Any:
        faults = {place: self._fault(item.row) for place, item in enumerate(work)}
        if "the model raises on it" in faults.values():
            raise RuntimeError(SECRET)
        for place, fault in faults.items():
            if fault == "its KV memory holds NaN" and work[place].start > 0:
                block = int(self._worker.rows.block_tables[work[place].row][0])
                self._worker.memory.caches[0][0][block] = float("nan")
        return inner(work)

    def _apply(self, inner: Callable[..., Any], plan: StepPlan) -> None:
        inner(plan)
        for new in plan.new_rows:
            if NAMES.get(new.token_ids[0]) == "its inputs cannot be built":
                self._worker.rows.block_tables[new.row] = 1 << 30

    @staticmethod
    def _sample(inner: Callable[..., Any], logits: torch.Tensor, rows: Any) -> Any:
        faults = [NAMES.get(int(row.prompt_token_ids[0])) for row in rows]
        if "sampling raises on it" in faults:
            raise RuntimeError(SECRET)
        spoilt = {"its logits are NaN": float("nan"), "its logits are infinite": float("inf")}
        logits = logits.clone()
        for place, fault in enumerate(faults):
            if fault in spoilt:
                logits[place, 7] = spoilt[fault]
        return inner(logits, rows)

    @staticmethod
    def _score(
        inner: Callable[..., Any], logits: torch.Tensor, target_ids: Any, sampling: Any
    ) -> Any:
        is_faulty = sampling.num_prompt_logprobs == FAULTY_SCORES
        return inner(logits * float("nan") if is_faulty else logits, target_ids, sampling)

    @staticmethod
    def _add(inner: Callable[..., Any], *args: Any) -> Any:
        request = inner(*args)
        if NAMES.get(request.prompt_token_ids[0]) == "its tokens cannot be taken in":
            request.strategy.absorb = _fail
        return request


def _fail(*_: object, **__: object) -> Any:
    raise RuntimeError(SECRET)


def build(config: EngineConfig) -> StepLoop:
    """The real loop, sabotaged."""
    loop = build_loop(config)
    loop.executor = Saboteur(loop)
    return loop


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), build))
