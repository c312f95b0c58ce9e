"""Replicas as processes: whatever becomes of one, its streams go on, and those of others never
stop."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import null_engine
import pytest

from quire import LLM, AsyncLLM, BeamSearchParams
from quire.config.engine import EngineConfig
from quire.core.params import RequestOutputKind, SamplingParams
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.process.watch import WatchConfig
from quire.engine.replicas.engine import ReplicatedEngine
from quire.engine.replicas.link import link_to
from quire.errors import ConfigError, InvalidParameterError, QuireError

pytestmark = pytest.mark.slow

NULL_ENGINE = (sys.executable, str(Path(null_engine.__file__)))
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "kv_cache_memory": "2MiB", "num_threads": 1, "max_num_seqs": 64,
}  # fmt: skip
DEADLINE_S = 300.0


@asynccontextmanager
async def _client(model: Path, replicas: int = 2, **watch: Any) -> AsyncIterator[Client]:
    config = EngineConfig(model=str(model), data_parallel_size=replicas, **OPTIONS)
    prepared = prepare_model(config, is_for_here=False)
    client = Client(prepared, link_to(prepared, WatchConfig(**watch), command=NULL_ENGINE))
    client.link.start()
    try:
        await _until(lambda: all(each.is_ready for each in client.status().replicas))
        yield client
    finally:
        await client.close()


def _are_ready_without(client: Client, pid: int | None) -> bool:
    return all(each.is_ready and each.engine_pid != pid for each in client.status().replicas)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not is_so():
            await asyncio.sleep(0.01)


async def _answer(client: Client, number: int, round_: str) -> list[list[int]]:
    rng = random.Random(number)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"n": 3}, {"logprobs": 2}]
    params = SamplingParams(
        max_tokens=200, ignore_eos=True, seed=number, output_kind=RequestOutputKind.DELTA,
        **kinds[number % 4],
    )  # fmt: skip
    prompt = [rng.randrange(9, 250) for _ in range(20)]
    request = client.prepare(
        f"r{number}/{round_}", ParsedPrompt(None, prompt), client.digest(params)
    )
    sequences: list[list[int]] = [[] for _ in range(params.n)]
    async for output in await client.generate(request):
        assert output.error is None
        for each in output.outputs:
            sequences[each.index] += each.token_ids
    return sequences


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(bounded())


def test_streams_survive_whatever_is_done_to_any_replica(tiny_config: Path) -> None:
    """32 streams over two replicas, killed and frozen in turn: no token lost, doubled or changed.
    QUIRE_TEST_KILLS wants more."""
    num_kills = int(os.environ.get("QUIRE_TEST_KILLS", "4"))
    rng = random.Random(11)

    async def scenario() -> None:
        async with _client(tiny_config, silence_timeout_s=2.0) as client:

            async def answers(round_: str) -> list[list[list[int]]]:
                return await asyncio.gather(*(_answer(client, i, round_) for i in range(32)))

            undisturbed = await answers("calm")
            for kill in range(num_kills):
                streams = asyncio.create_task(answers(str(kill)))
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                victim = client.status().replicas[kill % 2].engine_pid
                if victim is not None:
                    os.kill(victim, (signal.SIGKILL, signal.SIGSTOP)[kill // 2 % 2])
                assert await streams == undisturbed
                await _until(partial(_are_ready_without, client, victim))
            assert client.status().num_restarts == num_kills

    _run(scenario)


def test_the_other_replica_answers_while_one_is_replaced(tiny_config: Path) -> None:
    async def scenario() -> None:
        async with _client(tiny_config) as client:
            undisturbed = await _answer(client, 1, "calm")
            victim = client.status().replicas[0].engine_pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            await _until(lambda: not client.status().replicas[0].is_ready)
            assert client.status().is_ready
            assert await _answer(client, 1, "meanwhile") == undisturbed

    _run(scenario)


def test_both_replicas_work_and_are_drained(tiny_config: Path) -> None:
    async def scenario() -> None:
        async with _client(tiny_config) as client:
            streams = asyncio.gather(*(_answer(client, i, "x") for i in range(16)))
            await asyncio.sleep(0)
            counts = [each.num_requests for each in client.status().replicas]
            assert sum(counts) == 16 and max(counts) <= 12
            assert await client.drain(60.0)
            await streams
            assert client.status().state == "closed"

    _run(scenario)


def test_a_replica_is_inspected_by_its_number(tiny_config: Path) -> None:
    async def scenario() -> None:
        async with _client(tiny_config) as client:
            first, second = [await client.inspect("", -1, number) for number in range(2)]
            assert first is not None and second is not None and first.engine != second.engine

    _run(scenario)


def _engine(tiny_config: Path, **options: Any) -> ReplicatedEngine:
    config = EngineConfig(
        model=str(tiny_config), data_parallel_size=2, skip_tokenizer_init=True,
        **(OPTIONS | options),
    )  # fmt: skip
    return ReplicatedEngine(config, command=NULL_ENGINE)


def test_requests_are_aborted_and_what_cannot_travel_is_refused(tiny_config: Path) -> None:
    engine = _engine(tiny_config)
    try:
        prompt: Any = {"prompt_token_ids": [null_engine.SLOW_TOKEN, 3]}
        engine.add_request("a", prompt, SamplingParams(max_tokens=200, ignore_eos=True))
        with pytest.raises(InvalidParameterError, match="already in use"):
            engine.add_request("a", prompt, SamplingParams())
        while not engine.step():
            pass
        output = engine.abort("a")
        assert output is not None and output.finished
        assert output.outputs[0].finish_reason == "abort" and not engine.has_work
        assert engine.abort("a") is None
        with pytest.raises(InvalidParameterError, match="logits_processors are functions"):
            engine.add_request("b", prompt, SamplingParams(logits_processors=[lambda *a: a[-1]]))
        assert engine.reset_prefix_cache()
        with pytest.raises(AttributeError, match="in processes of their own"):
            _ = engine.scheduler
        assert {m.labels["engine"] for m in engine.metrics()} == {"0", "1"}
    finally:
        engine.close()
    with pytest.raises(QuireError, match="closed"):
        engine.add_request("c", prompt, SamplingParams())


def test_a_replica_that_cannot_be_built_is_said_at_once(tiny_config: Path) -> None:
    with pytest.raises(QuireError, match="engines in a row"):
        ReplicatedEngine(
            EngineConfig(
                model=str(tiny_config), data_parallel_size=2, skip_tokenizer_init=True, **OPTIONS
            ),
            watch=WatchConfig(max_restarts=0),
            command=("/bin/false",),
        )


def test_programs_get_the_answers_of_one_engine() -> None:
    prompts = ["Once upon a time", "The king", "A dog ran", "Once upon a time there was"]
    params = [SamplingParams(max_tokens=24, seed=place, logprobs=2) for place in range(4)]
    beams = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=0.5)
    options: dict[str, Any] = {"kv_cache_memory": "8MiB", "num_threads": 1}

    async def stream(llm: AsyncLLM, place: int) -> tuple[str, list[int]]:
        last = None
        async for output in llm.generate(prompts[place], params[place]):
            last = output
        assert last is not None and last.finished
        return last.outputs[0].text, list(last.outputs[0].token_ids)

    async def scenario() -> list[tuple[str, list[int]]]:
        async with AsyncLLM("quire-storyteller", data_parallel_size=2, **options) as llm:
            await llm.check_health()
            return list(await asyncio.gather(*(stream(llm, place) for place in range(4))))

    with LLM("quire-storyteller", **options) as llm:
        alone = llm.generate(prompts, params, use_tqdm=False)
        beams_alone = llm.beam_search(prompts, beams)
    with LLM("quire-storyteller", data_parallel_size=2, **options) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        assert llm.get_world_size() == 2
        beams_together = llm.beam_search(prompts, beams)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].text == other.outputs[0].text
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    for found, other_found in zip(beams_alone, beams_together, strict=True):
        assert found.sequences == other_found.sequences and len(found.sequences) == 3
    expected = [(each.outputs[0].text, list(each.outputs[0].token_ids)) for each in alone]
    assert asyncio.run(scenario()) == expected


def test_a_gpu_is_not_shared(tiny_config: Path) -> None:
    with pytest.raises(ConfigError):
        LLM(str(tiny_config), data_parallel_size=2, device="cuda")
