"""Streams from the engine's thread: complete, separate, and ended promptly."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import hold_after

from quire.core.params import RequestOutputKind, SamplingParams
from quire.engine.front.async_llm import AsyncLLM
from quire.engine.front.outputs import RequestOutput
from quire.errors import EngineError, InvalidParameterError
from quire.llm import LLM

OPTIONS = {
    "load_format": "dummy",
    "kv_cache_memory": "512KiB",
    "num_threads": 1,
    "max_num_seqs": 16,
}


@pytest.fixture
def llm(tiny_config: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(tiny_config), **OPTIONS)
    yield llm
    llm.close()


def _params(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "ignore_eos": True, "temperature": 0.0, **options})  # type: ignore[arg-type]


def test_steps_are_bounded_by_time_where_outputs_are_streamed(
    llm: AsyncLLM, tiny_config: Path
) -> None:
    assert llm.scheduler.pace is not None and llm.scheduler.pace.target_s == 0.2
    assert LLM(str(tiny_config), **OPTIONS).engine.scheduler.pace is None


async def _collect(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in llm.generate({"prompt_token_ids": prompt}, params)]


def test_a_stream_grows_token_by_token(llm: AsyncLLM) -> None:
    outputs = asyncio.run(_collect(llm, [3, 4, 5], _params()))
    assert [len(each.outputs[0].token_ids) for each in outputs] == list(range(1, 17))
    assert [each.finished for each in outputs] == [False] * 15 + [True]


def test_deltas_join_to_the_whole(llm: AsyncLLM) -> None:
    whole = asyncio.run(_collect(llm, [3, 4, 5], _params()))[-1].outputs[0].token_ids
    deltas = asyncio.run(_collect(llm, [3, 4, 5], _params(output_kind=RequestOutputKind.DELTA)))
    assert [token for each in deltas for token in each.outputs[0].token_ids] == whole


@pytest.mark.slow
def test_no_cross_talk_among_many_clients(llm: AsyncLLM, tiny_config: Path) -> None:
    """64 clients with prompts of their own, some of which leave early:
    each answer equals the one given alone."""
    rng = random.Random(5)
    jobs = [
        (
            [rng.randrange(3, 250) for _ in range(rng.randint(1, 60))],
            _params(seed=i, temperature=1.0),
        )
        for i in range(64)
    ]

    async def client(place: int) -> list[int] | None:
        prompt, params = jobs[place]
        await asyncio.sleep(rng.random() / 20)
        async for output in llm.generate({"prompt_token_ids": prompt}, params):
            if place % 5 == 0 and len(output.outputs[0].token_ids) >= 3:
                return None
        return output.outputs[0].token_ids

    async def all_clients() -> list[list[int] | None]:
        return await asyncio.gather(*(client(place) for place in range(len(jobs))))

    answers = asyncio.run(all_clients())
    with LLM(str(tiny_config), **OPTIONS) as alone:
        for (prompt, params), answer in zip(jobs, answers, strict=True):
            if answer is not None:
                [output] = alone.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
                assert answer == output.outputs[0].token_ids
    assert sum(answer is None for answer in answers) == 13


def test_leaving_early_frees_the_request(llm: AsyncLLM) -> None:
    async def leave() -> None:
        stream = llm.generate({"prompt_token_ids": [3] * 40}, _params(max_tokens=200))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while llm._engine.has_work:
                await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert llm._engine.scheduler.manager.pool.num_used == 0


def test_a_refusal_reaches_its_stream_alone(llm: AsyncLLM) -> None:
    async def both() -> Sequence[object]:
        good = _collect(llm, [3, 4, 5], _params())
        bad = _collect(llm, [3, 9999], _params())
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = asyncio.run(both())
    assert isinstance(bad, InvalidParameterError) and isinstance(good, list) and good[-1].finished


def test_an_id_in_use_is_refused_without_harm_to_its_owner(llm: AsyncLLM) -> None:
    async def twice() -> Sequence[object]:
        async def run() -> list[int]:
            stream = llm.generate({"prompt_token_ids": [3, 4]}, _params(), request_id="same")
            return [output async for output in stream][-1].outputs[0].token_ids

        return await asyncio.gather(run(), run(), return_exceptions=True)

    outcomes = asyncio.run(twice())
    assert sum(isinstance(each, InvalidParameterError) for each in outcomes) == 1
    assert sum(isinstance(each, list) and len(each) == 16 for each in outcomes) == 1


def test_an_id_that_is_none_is_refused_without_harm_to_others(llm: AsyncLLM) -> None:
    async def run(request_id: Any) -> str | None:
        stream = llm.generate({"prompt_token_ids": [3, 4]}, _params(), request_id=request_id)
        return [output async for output in stream][-1].outputs[0].finish_reason

    async def all_of_them() -> Sequence[object]:
        bad = [run(each) for each in (["x"], 5, object(), "\ud83d")]
        outcomes = await asyncio.gather(run("good"), *bad, return_exceptions=True)
        with pytest.raises(InvalidParameterError, match="request_id=5"):
            await llm.abort([5])  # type: ignore[list-item]
        return [*outcomes, await run(None)]

    good, *refused, later = asyncio.run(all_of_them())
    assert good == later == "length"
    assert all(isinstance(each, InvalidParameterError) for each in refused)


def test_a_dead_engine_ends_every_stream(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    make_step, num_steps = llm._engine.step, 0

    def die_on_the_third() -> Sequence[Any]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise SystemExit("killed")
        return make_step()

    llm._engine.step = die_on_the_third  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="the engine died"):
        asyncio.run(_collect(llm, [3, 4], _params(max_tokens=200)))
    with pytest.raises(EngineError):
        asyncio.run(_collect(llm, [3], _params()))


def test_close_ends_open_streams(llm: AsyncLLM) -> None:
    hold_after(llm._engine, 3)

    async def run() -> None:
        async for _ in llm.generate({"prompt_token_ids": [3, 4]}, _params(max_tokens=200)):
            await asyncio.get_running_loop().run_in_executor(None, llm.close)

    with pytest.raises(EngineError, match="closed"):
        asyncio.run(run())


def test_a_forked_process_is_refused_and_the_engine_goes_on(llm: AsyncLLM) -> None:
    async def ask() -> list[RequestOutput]:
        return await asyncio.wait_for(_collect(llm, [3, 4, 5], _params()), 60)

    expected = asyncio.run(ask())[-1].outputs[0].token_ids
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(ask())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told.startswith("EngineError: the engine runs in process"), told
    assert asyncio.run(ask())[-1].outputs[0].token_ids == expected


def test_what_has_an_engine_is_neither_pickled_nor_copied(llm: AsyncLLM, tiny_config: Path) -> None:
    with LLM(str(tiny_config), **OPTIONS) as offline:
        for owner in (llm, offline, offline.llm_engine):
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(EngineError, match="can be neither pickled nor copied"):
                    copied(owner)
