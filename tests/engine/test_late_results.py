"""The overlapped loop on a device that is behind the host, beside the plain loop on one that is
not: the same answers.

The device (`late_device`) withholds what a step gave until the next one has been launched. Most
requests are plain, so that their tokens never go through the host; some ask for what is computed
there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_STEPS, run_all
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice
from replayed import replay_steps

from quire.config.engine import EngineConfig
from quire.core.beam_params import BeamSearchParams
from quire.core.params import SamplingParams
from quire.core.scheduler.audit import audit
from quire.engine.assembly.builder import build_engine
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine

pytestmark = pytest.mark.skipif(
    os.environ.get("QUIRE_TEST_DEVICE", "cpu") != "cpu",
    reason="stands in for a GPU; on one the other tests show the same",
)
MakeEngine = Callable[..., Engine]

PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 4},
    {"seed": 5, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"seed": 6, "temperature": 3.0, "min_p": 0.05, "stop_token_ids": list(range(10, 60))},
]
READ: list[dict[str, Any]] = [
    {"seed": 7, "presence_penalty": 0.9, "repetition_penalty": 1.2},
    {"seed": 8, "logprobs": 2},
    {"seed": 9, "n": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"seed": 10, "min_tokens": 4, "stop_token_ids": list(range(3, 200)), "logit_bias": {5: 4.0}},
    {"seed": 11, "structured_outputs": {"regex": "[a-f]{3,9}(-[0-9])*"}, "ignore_eos": False},
]
"""What needs tokens or logits on the host."""


@dataclass(frozen=True)
class Ask:
    """One request, and what becomes of it on the way."""

    prompt: list[int]
    options: dict[str, Any]
    max_tokens: int
    arrives: int
    """Steps before it comes."""
    aborted: int
    """Steps that it is given; 0 for all it wants."""


ASKS = st.builds(
    Ask,
    prompt=st.lists(st.integers(3, 90), min_size=1, max_size=40),
    options=st.sampled_from([*PLAIN, *PLAIN, *PLAIN, *READ]),
    max_tokens=st.integers(4, 12),
    arrives=st.integers(0, 12),
    aborted=st.sampled_from([0, 0, 0, 1, 3, 6]),
)


def _build(path: Path, **options: Any) -> Engine:
    sizes = {
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "max_model_len": 60,
        "num_threads": 1,
    }
    config = EngineConfig(
        model=str(path),
        load_format="dummy",
        tokenizer="quire-storyteller",
        dtype="float32",
        **{**sizes, **options},
    )
    return build_engine(config)


@pytest.fixture(scope="module")
def pair(tiny_config: Path) -> Iterator[tuple[Engine, Engine, LateDevice]]:
    """Engines with pools that hold one and a half of the longest requests."""
    memory = 22 * 4 * 2 * 2 * 2 * 16 * 4
    plain = _build(tiny_config, kv_cache_memory=memory, overlap="off")
    late = _build(tiny_config, kv_cache_memory=memory, overlap="on")
    assert late.plan.limits.num_blocks == 22
    yield plain, late, LateDevice(late)
    plain.close()
    late.close()


def _params(options: dict[str, Any], max_tokens: int) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": True, **options, "max_tokens": max_tokens})


def _answers(engine: Engine, asks: list[Ask], preempt_at: int) -> dict[str, Any]:
    """What became of each request that nobody aborted.
    Aborts and preemptions come when they come."""
    answers: dict[str, Any] = {}
    for step in range(MAX_STEPS):
        for number, ask in enumerate(asks):
            if ask.arrives == step:
                engine.add_request(
                    str(number),
                    {"prompt_token_ids": ask.prompt},
                    _params(ask.options, ask.max_tokens),
                )
            if ask.aborted and ask.arrives + ask.aborted == step:
                engine.abort(str(number))
        if step == preempt_at:
            engine.scheduler.preempt_all()
        if engine.has_work:
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                answers[output.request_id] = (output.error, output.outputs, output.prompt_logprobs)
            audit(engine.scheduler)
        elif step > 20:
            break
    assert not engine.has_work and engine.scheduler.manager.pool.num_used == 0
    while engine.scheduler.flights:
        engine.idle()
    return {str(number): answers[str(number)] for number, ask in enumerate(asks) if not ask.aborted}


@pytest.mark.slow
@given(asks=st.lists(ASKS, min_size=1, max_size=7), preempt_at=st.integers(0, 20))
@settings(max_examples=25, deadline=None)
def test_answers_are_the_same_whatever_happens_on_the_way(
    pair: tuple[Engine, Engine, LateDevice], asks: list[Ask], preempt_at: int
) -> None:
    plain, late, _ = pair
    expected = _answers(plain, asks, preempt_at=-1)
    assert all(error is None for error, *_ in expected.values())
    assert _answers(late, asks, preempt_at) == expected


def test_no_plain_step_waits_for_the_one_before(pair: tuple[Engine, Engine, LateDevice]) -> None:
    """Every step but those that nothing follows is read after the next one was launched;
    else the device's deadline fails."""
    plain, late, device = pair
    asks = [Ask([5 + number, 6, 7] * 4, options, 10, 0, 0) for number, options in enumerate(PLAIN)]
    expected = _answers(plain, asks, preempt_at=-1)
    num_steps, num_late, num_done = (
        device.num_steps,
        device.num_late,
        late.scheduler.stats.num_steps,
    )
    assert _answers(late, asks, preempt_at=-1) == expected
    num_done = late.scheduler.stats.num_steps - num_done
    assert device.num_steps - num_steps == num_done > 10
    assert device.num_late - num_late >= num_done - 2


def test_a_loop_that_waits_for_each_result_is_noticed(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("late_device.DEADLINE_S", 0.2)
    engine = _build(tiny_config, overlap="on", kv_cache_memory="1MiB")
    LateDevice(engine)
    worker = engine.executor.worker  # type: ignore[attr-defined]
    launch = worker.launch

    def and_wait(plan: Any) -> Any:
        result = launch(plan)()
        return lambda: result

    worker.launch = and_wait
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, _params(PLAIN[0], 8))
    outputs = run_all(engine)
    engine.close()
    assert "TimeoutError" in str(outputs["a"].error)


@pytest.mark.parametrize("is_replayed", [False, True], ids=["computed", "replayed"])
def test_the_shipped_model_tells_the_same_stories(is_replayed: bool) -> None:
    """Texts, stop strings and ends; and padded steps that are replayed,
    which fill in tokens where they were recorded."""
    options: dict[str, Any] = {
        "kv_cache_memory": "8MiB",
        "num_threads": 1,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
    }
    answers = []
    for overlap in ("off", "on"):
        engine = build_engine(EngineConfig(model="quire-storyteller", overlap=overlap, **options))
        device = LateDevice(engine) if overlap == "on" else None
        graphs = replay_steps(engine) if is_replayed and device is not None else None
        for number, more in enumerate([*PLAIN[:3], {"seed": 1, "stop": ["the ", "king", "."]}]):
            engine.add_request(
                str(number),
                "Once upon a time"[: 5 + 3 * number],
                SamplingParams(**more, max_tokens=24),
            )
        answers.append({name: (each.error, each.outputs) for name, each in run_all(engine).items()})
        engine.close()
        assert device is None or device.num_late > 20
        assert graphs is None or {shape.num_tokens for shape in graphs.shapes} >= {4}
    assert answers[0] == answers[1]


def test_beams_and_plain_rows_side_by_side(tiny_config: Path) -> None:
    found = []
    for overlap in ("off", "on"):
        engine = _build(tiny_config, overlap=overlap, kv_cache_memory="1MiB", max_num_seqs=8)
        if overlap == "on":
            LateDevice(engine)
        engine.add_request("p", {"prompt_token_ids": [5, 6, 7]}, _params(PLAIN[1], 14))
        engine.add_request(
            "b",
            {"prompt_token_ids": [5, 6, 7]},
            BeamSearchParams(beam_width=3, max_tokens=6).as_sampling(),
        )
        outputs: dict[str, Any] = {}
        while engine.has_work:
            outputs |= {each.request_id: each for each in engine.step()}
        found.append({name: getattr(each, "outputs", each) for name, each in outputs.items()})
        engine.close()
    assert found[0] == found[1]
