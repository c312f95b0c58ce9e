"""Pausing several replicas: nothing comes until they go on, whatever happens to one meanwhile, and
then the same bits."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import null_engine
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.front.outputs import RequestOutput
from quire.engine.process.watch import WatchConfig
from quire.engine.replicas.engine import ReplicatedEngine
from quire.errors import EngineError, InvalidParameterError
from tests.engine.replicas.test_commands import PROMPT, _engine, _freeze, _tokens, _until
from tests.engine.replicas.test_processes import NULL_ENGINE, OPTIONS, _run
from tests.engine.replicas.test_processes import _until as until

pytestmark = pytest.mark.slow

SLOW_PROMPT: Any = {"prompt_token_ids": [null_engine.SLOW_TOKEN, 8, 7, 30, 31]}
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, seed=3)


def _finish(engine: ReplicatedEngine, outputs: dict[str, list[int]]) -> dict[str, list[int]]:
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, RequestOutput) and output.error is None
            outputs[output.request_id] = list(output.outputs[0].token_ids)
    return outputs


def _begin(engine: ReplicatedEngine, count: int = 4) -> dict[str, list[int]]:
    """Requests that run on both replicas, and what has come of them."""
    for place in range(count):
        engine.add_request(f"r{place}", SLOW_PROMPT, SAMPLED)
    outputs: dict[str, list[int]] = {}
    while len(outputs) < count:
        for output in engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
    assert all(len(each) < 24 for each in outputs.values())
    return outputs


def _pids(engine: ReplicatedEngine) -> list[int]:
    return [each.engine_pid for each in engine.replicas if each.engine_pid is not None]


def _kill(engine: ReplicatedEngine) -> None:
    """Have all replicas be replaced."""
    former = _pids(engine)
    for pid in former:
        os.kill(pid, signal.SIGKILL)
    _until(
        lambda: (
            all(each.is_ready for each in engine.replicas) and not set(former) & set(_pids(engine))
        )
    )


def test_replicas_that_are_replaced_while_paused_come_back_paused(tiny_config: Path) -> None:
    with _engine(tiny_config) as engine:
        undisturbed = _finish(engine, _begin(engine))
        outputs = _begin(engine)
        engine.pause()
        engine.pause()
        assert engine.is_paused and engine.has_work
        for output in engine.step():  # what was computed before
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        _kill(engine)
        engine.add_request("late", PROMPT, SAMPLED)
        assert not [output for _ in range(50) for output in engine.step()]
        engine.abort("late")
        assert "late" not in engine.open_requests
        _kill(engine)  # none dies of a request that waits, nor does a request of these deaths
        engine.resume()
        assert not engine.is_paused
        assert _finish(engine, outputs) == undisturbed


def test_a_pause_holds_for_a_replica_that_is_lost_or_being_replaced(tiny_config: Path) -> None:
    with _engine(tiny_config) as engine:
        answers = _tokens(engine)
        _freeze(engine, 1)
        engine.pause()  # an engine that is lost computes nothing, and the next one is told
        _until(lambda: all(each.is_ready for each in engine.replicas))
        former = _pids(engine)[0]
        os.kill(former, signal.SIGKILL)
        _until(lambda: former not in _pids(engine))
        engine.resume()
        engine.pause()
        for place in range(4):
            engine.add_request(f"r{place}", PROMPT, SamplingParams(max_tokens=12, seed=3))
        _until(lambda: all(each.is_ready for each in engine.replicas))
        assert not [output for _ in range(50) for output in engine.step()]
        engine.sleep(1)
        engine.wake_up()
        assert not [output for _ in range(50) for output in engine.step()]
        for place in range(4):
            engine.abort(f"r{place}")
        assert not engine.has_work and engine.reset_prefix_cache()
        engine.resume()
        assert _tokens(engine) == answers


def test_replicas_that_sleep_while_paused_come_back_as_they_were(tiny_config: Path) -> None:
    with _engine(tiny_config) as engine:
        answers = _tokens(engine)
        engine.pause()
        engine.sleep(1)
        former = _pids(engine)
        for pid in former:
            os.kill(pid, signal.SIGKILL)
        _until(
            lambda: (
                all(each.state == "sleeping" for each in engine.replicas)
                and not set(former) & set(_pids(engine))
            )
        )
        engine.resume()
        assert {each.state for each in engine.replicas} == {"sleeping"}
        engine.wake_up()
        assert _tokens(engine) == answers


def test_a_replica_that_is_given_up_keeps_no_other_from_pausing(tiny_config: Path) -> None:
    config = EngineConfig(
        model=str(tiny_config), data_parallel_size=2, skip_tokenizer_init=True, **OPTIONS
    )
    watch = WatchConfig(silence_timeout_s=2.0, max_restarts=0)
    engine = ReplicatedEngine(config, command=NULL_ENGINE, watch=watch)
    try:
        os.kill(_pids(engine)[1], signal.SIGKILL)
        _until(lambda: engine.replicas[1].state == "failed")
        engine.pause()
        engine.add_request("r", PROMPT, SAMPLED)
        assert not [output for _ in range(50) for output in engine.step()]
        engine.resume()
        assert len(_finish(engine, {})["r"]) == 24
    finally:
        engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.pause()


def test_async_programs_pause_all_replicas_in_every_mode() -> None:
    options: dict[str, Any] = {"kv_cache_memory": "8MiB", "num_threads": 1}
    prompts = ["Once upon a time", "The king", "A dog ran", "There was"]
    params = [
        SamplingParams(max_tokens=80, ignore_eos=True, seed=place, logprobs=1) for place in range(4)
    ]

    async def scenario(llm: AsyncLLM) -> None:
        engine, lengths = llm._engine, dict[int, int]()
        assert isinstance(engine, ReplicatedEngine)

        async def stream(place: int) -> RequestOutput:
            async for output in llm.generate(prompts[place], params[place]):
                lengths[place] = len(output.outputs[0].token_ids)
            return output

        async def paused(mode: Any) -> list[RequestOutput]:
            lengths.clear()
            tasks = [asyncio.create_task(stream(place)) for place in range(4)]
            await until(lambda: len(lengths) == 4)
            await llm.pause_generation(mode=mode)
            assert await llm.is_paused()
            for _ in range(3):  # what was on its way has arrived after these
                await llm.check_health()
            before = dict(lengths)
            former = _pids(engine)[0]
            os.kill(former, signal.SIGKILL)
            late = asyncio.create_task(stream(0))
            await until(
                lambda: (
                    former not in _pids(engine) and all(each.is_ready for each in engine.replicas)
                )
            )
            await asyncio.sleep(0.2)
            assert lengths == before and not late.done()
            await llm.resume_generation()
            outputs = await asyncio.gather(*tasks)
            assert _texts([await late]) == alone[:1]
            return outputs

        for mode in ("keep", "wait"):
            assert _texts(await paused(mode)) == alone, mode
        ends = [each.outputs[0].finish_reason for each in await paused("abort")]
        assert "abort" in ends and set(ends) <= {"abort", "length"}
        with pytest.raises(InvalidParameterError, match="mode='nap' is unknown"):
            await llm.pause_generation(mode="nap")  # type: ignore[arg-type]
        await llm.pause_generation()
        waiting = asyncio.create_task(stream(1))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="sleeps or is paused"):
            await llm.update_weights("quire-storyteller", requests="finish")
        await llm.resume_generation()
        assert _texts([await waiting]) == alone[1:2]

    async def run() -> None:
        async with AsyncLLM("quire-storyteller", data_parallel_size=2, **options) as llm:
            await scenario(llm)

    with LLM("quire-storyteller", **options) as llm:
        alone = _texts(llm.generate(prompts, params, use_tqdm=False))
    _run(run)


def _texts(outputs: list[RequestOutput]) -> list[Any]:
    return [(each.outputs[0].text, each.outputs[0].logprobs) for each in outputs]
