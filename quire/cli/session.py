"""An engine for one command: requests are judged before the weights are loaded,
and run to their end in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.core.params import SamplingParams
from quire.engine.assembly.builder import assemble, build_executor
from quire.engine.assembly.preparation import PreparedModel
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import Prompt

if TYPE_CHECKING:
    from quire.engine.loop.engine import Engine


class PromptJob(NamedTuple):
    """A prompt and how to complete it."""

    prompt: Prompt
    params: SamplingParams


def check(prepared: PreparedModel, jobs: Sequence[PromptJob]) -> None:
    """Raise what adding these requests would raise, without a model:
    the same engine does the judging."""
    engine = assemble(prepared, build_executor(prepared.planned, "null"))
    for number, job in enumerate(jobs):
        engine.add_request(str(number), job.prompt, job.params)


def load(prepared: PreparedModel) -> Engine:
    """Return an engine that is ready to run."""
    return assemble(prepared, build_executor(prepared.planned))


def run(
    engine: Engine, jobs: Sequence[PromptJob], after_step: Callable[[], None] | None = None
) -> Iterator[RequestOutput]:
    """Run jobs together; yields their outputs in the kind that each wants, with the job's number as
    request id.

    If the caller stops early, or an exception passes through, none of them stays in the engine.
    """
    try:
        for number, job in enumerate(jobs):
            engine.add_request(str(number), job.prompt, job.params)
        while engine.has_work:
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                yield output
            if after_step is not None:
                after_step()
    finally:
        for number in range(len(jobs)):
            engine.abort(str(number))
