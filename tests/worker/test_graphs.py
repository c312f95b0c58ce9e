"""Recorded steps: how they are padded, which are recorded when,
and that padding reaches nobody's memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from engines import run_all
from replayed import ComputedGraphs, replay_steps
from torch import Tensor

from quire.common.graph_shapes import StepShape
from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.engine.assembly.builder import build_engine
from quire.engine.loop.engine import Engine
from quire.worker.batch import StepArrays, StepInputs
from quire.worker.graphs import GraphSettings, ScratchBlock, StepGraphs, padded
from quire.worker.prefixes import PrefixRun
from quire.worker.staging import Staging

SCRATCH = ScratchBlock(99, 4)
DEVICE = os.environ.get("QUIRE_TEST_DEVICE", "cpu")
"""Where engines compute: `make gpu-test` asks for a GPU, where the recording is the real one."""


def _arrays(
    query_lens: list[int], context_len: int = 9, runs: tuple[PrefixRun, ...] = ()
) -> StepArrays:
    """A step of these sequences, all of one context."""
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    num_tokens, num_sequences = int(starts[-1]), len(query_lens)
    numbers = np.arange(1, num_tokens + 1, dtype=np.int64)
    tables = np.arange(num_sequences * 3, dtype=np.int32).reshape(num_sequences, 3)
    lengths = np.full(num_sequences, context_len, np.int32)
    return StepArrays(
        starts,
        lengths,
        tables[None],
        numbers[None],
        numbers + 100,
        numbers + 200,
        max(query_lens),
        context_len,
        runs,
    )


@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [1, 5, 1], [8], [3, 3], [1] * 8])
def test_padding_adds_sequences_of_one_scratch_token_and_then_empty_ones(
    query_lens: list[int],
) -> None:
    arrays, shape = _arrays(query_lens), StepShape(8, 16)
    got = padded(arrays, shape, SCRATCH)
    num_tokens, num_sequences = sum(query_lens), len(query_lens)
    lengths = np.diff(got.query_start).tolist()
    num_padded = 8 - num_tokens
    assert lengths == query_lens + [1] * num_padded + [0] * (8 - num_sequences - num_padded)
    assert got.query_start[0] == 0 and got.query_start[-1] == 8
    assert got.block_tables.shape == (1, 8, 4)
    assert (got.block_tables[:, :num_sequences, :3] == arrays.block_tables).all()
    assert (got.block_tables[:, num_sequences:] == 99).all() and (
        got.context_len[num_sequences:] == 1
    ).all()
    assert (got.slots[:, num_tokens:] == 99 * 4).all() and (got.positions[num_tokens:] == 0).all()
    for mine, theirs in zip(got.parts[3:], arrays.parts[3:], strict=True):
        assert (mine[..., :num_tokens] == theirs).all() and mine.shape[-1] == 8
    assert [part.dtype for part in got.parts] == [part.dtype for part in arrays.parts]
    assert (got.max_query_len, got.max_context_len) == (8, 16)


class Steps:
    """Graphs around a forward pass that gives each token's id and position."""

    def __init__(
        self,
        *,
        max_num_tokens: int = 64,
        max_bytes: int = 100,
        backend: ComputedGraphs | None = None,
    ) -> None:
        self.backend = backend or ComputedGraphs()
        stage = Staging(torch.device("cpu"))
        settings = GraphSettings(max_num_tokens, 64, max_bytes, paying_uses=3)
        self.num_computed = 0
        self.graphs = StepGraphs(self._compute, stage, self.backend, settings, SCRATCH)

    def _compute(self, inputs: StepInputs) -> Tensor:
        self.num_computed += 1
        return torch.stack((inputs.token_ids, inputs.batch.positions), dim=1)

    def take(self, num_sequences: int) -> Tensor | None:
        return self.graphs.forward(_arrays([1] * num_sequences))


def test_a_shape_is_recorded_once_it_pays_and_then_replayed() -> None:
    steps = Steps()
    assert steps.take(3) is None and steps.take(4) is None and not steps.backend.num_recorded
    for num_sequences in (3, 4, 3):
        hidden = steps.take(num_sequences)
        assert hidden is not None
        assert hidden.tolist() == [[201 + place, 101 + place] for place in range(num_sequences)]
    assert steps.graphs.shapes == (StepShape(4, 64),)
    assert (steps.backend.num_recorded, steps.backend.num_replays) == (1, 3)


def test_idle_moments_record_the_most_used_shapes_first() -> None:
    steps = Steps()
    for num_sequences in (1, 8, 8, 20):
        assert steps.take(num_sequences) is None
    while steps.graphs.record_next():
        pass
    assert [shape.num_tokens for shape in steps.graphs.shapes] == [8, 1, 24]
    assert not steps.graphs.record_next()
    for num_sequences in (20, 8, 1, 17):
        hidden = steps.take(num_sequences)
        assert hidden is not None and hidden.tolist()[-1] == [
            200 + num_sequences,
            100 + num_sequences,
        ]


def test_no_more_is_recorded_than_was_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(backend=ComputedGraphs(bytes_each=60))
    for num_sequences in (1, 2, 4):
        steps.take(num_sequences)
    while steps.graphs.record_next():
        pass
    assert len(steps.graphs.shapes) == 2 and "120 bytes, planned were 100" in caplog.text
    assert [steps.take(4) for _ in range(5)] == [None] * 5
    assert steps.take(1) is not None, "what was recorded stays"


def test_a_shape_that_cannot_be_recorded_is_computed_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(ComputedGraphs):
        def record(self, compute: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing")

    steps = Steps(backend=Failing())
    assert [steps.take(2) for _ in range(6)] == [None] * 6
    assert (
        not steps.graphs.record_next() and caplog.text.count("no graph of steps of 2 tokens") == 1
    )


def test_large_steps_and_long_shared_prefixes_are_computed_without() -> None:
    steps = Steps(max_num_tokens=16)
    steps.graphs.settings = steps.graphs.settings._replace(min_shared_blocks=6)
    for _ in range(5):
        assert (
            steps.take(17) is None
            and steps.graphs.forward(_arrays([1] * 4, runs=(PrefixRun(0, 4, 2),))) is None
        )
    assert not steps.graphs.record_next()


def test_a_short_shared_prefix_is_no_reason_to_go_without() -> None:
    steps = Steps()
    steps.graphs.settings = steps.graphs.settings._replace(min_shared_blocks=7, paying_uses=1)
    arrays = _arrays([1] * 4, runs=(PrefixRun(0, 4, 2),))
    assert steps.graphs.forward(arrays) is not None and steps.graphs.shapes


def _engine(**options: object) -> Engine:
    small = {
        "kv_cache_memory": "8MiB",
        "num_threads": 1,
        "max_num_batched_tokens": 6,
        "max_num_seqs": 4,
        **options,
    }
    return build_engine(EngineConfig(model="quire-storyteller", device=DEVICE, **small))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"kernels": "reference"}], ids=["decodes", "decodes beside pieces of prompts"]
)
def test_padded_tokens_change_no_answer_and_no_block_of_the_pool(options: dict[str, str]) -> None:
    caches, answers = [], []
    for is_replayed in (False, True):
        engine = _engine(**({} if DEVICE == "cuda" else options))
        graphs = replay_steps(engine) if is_replayed else None
        memory = engine.executor.worker.memory  # type: ignore[attr-defined]
        for tensor in (tensor for pair in memory.caches for tensor in pair):
            tensor.zero_()
        for number, prompt in enumerate(("Once upon a time", "The king said that", "One day")):
            engine.add_request(
                str(number), prompt, SamplingParams(seed=number, max_tokens=6, ignore_eos=True)
            )
        answers.append({name: output.outputs for name, output in run_all(engine).items()})
        assert graphs is None or len(graphs.shapes) > 1
        num_blocks = engine.plan.limits.num_blocks
        caches.append([tensor[:num_blocks].clone() for pair in memory.caches for tensor in pair])
        engine.close()
    assert answers[0] == answers[1]
    for plain, replayed in zip(*caches, strict=True):
        assert torch.equal(plain, replayed)


def test_an_idle_engine_records() -> None:
    engine = _engine()
    graphs = replay_steps(engine)
    graphs.settings = graphs.settings._replace(paying_uses=1000)
    engine.add_request("a", "Once upon", SamplingParams(max_tokens=4, ignore_eos=True))
    run_all(engine)
    assert not graphs.shapes
    while engine.idle():
        pass
    assert (
        StepShape(1, engine.plan.limits.max_model_len) in graphs.shapes
        or StepShape(1, 512) in graphs.shapes
    )
    engine.close()
