"""Requests in an engine process: they outlive it, the guilty ones end alone,
and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from null_engine import DEADLY_TOKEN, ENDLESS_TOKEN, SLOW_TOKEN
from timing import timed

from quire.core.params import RequestOutputKind, SamplingParams
from quire.engine.front.client import Client
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.front.status import EngineState
from quire.engine.front.streams import Stream, merge_deltas
from quire.engine.process.link import supervised
from quire.engine.process.supervisor import CONVICTED
from quire.errors import EngineError, InvalidParameterError, PromptTooLongError, UnavailableError

pytestmark = [timed, pytest.mark.slow]

MakeClient = Callable[..., AbstractAsyncContextManager[Client]]
DEADLINE_S = 200.0


class Answer(NamedTuple):
    token_ids: list[list[int]]
    error: str | None


Request = tuple[str, list[int], SamplingParams]


def _request(name: str, first: int = 3, *, prompt_len: int = 20, **params: Any) -> Request:
    rng = random.Random(f"prompt {name.split('/')[0]}")
    options = {
        "max_tokens": 40,
        "ignore_eos": True,
        "output_kind": RequestOutputKind.DELTA,
        "seed": len(name),
        **params,
    }
    prompt = [first, *(rng.randrange(9, 250) for _ in range(prompt_len - 1))]
    return name, prompt, SamplingParams(**options)


async def _generate(client: Client, request: Request) -> Stream:
    name, prompt, params = request
    return await client.generate(
        client.prepare(name, ParsedPrompt(None, prompt), client.digest(params))
    )


async def _answer(client: Client, request: Request) -> Answer:
    outputs = [output async for output in await _generate(client, request)]
    return _joined(outputs)


def _joined(outputs: list[RequestOutput]) -> Answer:
    assert [each.finished for each in outputs] == [False] * (len(outputs) - 1) + [True]
    num_sequences = max(len(each.outputs) for each in outputs)
    sequences: list[list[int]] = [[] for _ in range(num_sequences)]
    for output in outputs:
        for each in output.outputs:
            sequences[each.index] += each.token_ids
    return Answer(sequences, outputs[-1].error)


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait for what stays so once it is."""
    async with asyncio.timeout(60.0):
        while not is_so():
            await asyncio.sleep(0.01)


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(bounded())


def _pid(client: Client) -> int:
    pid = client.status().engine_pid
    assert pid is not None
    return pid


def _state(client: Client) -> EngineState:
    return client.status().state


def test_requests_are_taken_while_the_engine_loads_and_refused_when_they_never_fit(
    make_client: MakeClient,
) -> None:
    async def scenario() -> None:
        async with make_client() as client:
            assert _state(client) == "loading"
            answer = await _answer(client, _request("early"))
            assert answer.error is None and len(answer.token_ids[0]) == 40
            assert client.status().is_ready and client.status().num_requests == 0
            with pytest.raises(PromptTooLongError):
                await _generate(client, _request("long", prompt_len=10_000))
            with pytest.raises(InvalidParameterError, match="vocabulary"):
                await _generate(client, _request("alien", first=100_000))

    _run(scenario)


def test_streams_survive_kills_at_random_moments_with_the_same_tokens(
    make_client: MakeClient,
) -> None:
    """32 streams, the engine killed again and again: no token lost, doubled or changed.
    QUIRE_TEST_KILLS asks for more."""
    num_kills = int(os.environ.get("QUIRE_TEST_KILLS", "3"))
    rng = random.Random(11)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"n": 3}, {"logprobs": 2}]

    def requests(round_: str) -> list[Request]:
        return [
            _request(f"r{i}/{round_}", max_tokens=200, **{"seed": i, **kinds[i % 4]})
            for i in range(32)
        ]

    async def scenario() -> None:
        async with make_client() as client:
            undisturbed = await asyncio.gather(
                *(_answer(client, each) for each in requests("calm"))
            )
            num_done = 0
            while num_done < num_kills:
                streams = [
                    asyncio.create_task(_answer(client, each)) for each in requests(str(num_done))
                ]
                while num_done < num_kills and not all(stream.done() for stream in streams):
                    await asyncio.sleep(rng.uniform(0.0, 0.4))
                    if client.status().is_ready and client.status().num_requests:
                        os.kill(_pid(client), signal.SIGKILL)
                        num_done += 1
                        await _until(
                            lambda: not client.status().is_ready or not client.status().num_requests
                        )
                assert await asyncio.gather(*streams) == undisturbed
            await _until(lambda: client.status().num_restarts == num_kills)

    _run(scenario)


def test_an_engine_is_replaced_however_many_connections_are_open(make_client: MakeClient) -> None:
    """The new engine's descriptor is beyond 1024 then, which `select` could not wait for."""

    async def scenario() -> None:
        async with make_client() as client:
            undisturbed = await _answer(client, _request("calm"))
            open_files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
            try:
                os.kill(_pid(client), signal.SIGKILL)
                assert await _answer(client, _request("calm/2", seed=4)) == undisturbed
            finally:
                for descriptor in open_files:
                    os.close(descriptor)

    _run(scenario)


def test_a_frozen_engine_is_not_ready_and_is_replaced(make_client: MakeClient) -> None:
    async def scenario() -> None:
        async with make_client(silence_timeout_s=2.0) as client:
            undisturbed = await _answer(client, _request("calm", max_tokens=150))
            stream = await _generate(client, _request("calm/2", max_tokens=150, seed=4))
            outputs = [await anext(stream)]
            frozen = _pid(client)
            os.kill(frozen, signal.SIGSTOP)
            await _until(
                lambda: not client.status().is_ready or client.status().engine_pid != frozen
            )
            outputs += [output async for output in stream]
            assert _joined(outputs).token_ids == undisturbed.token_ids
            await _until(lambda: client.status().is_ready and _pid(client) != frozen)
            with pytest.raises(ProcessLookupError):
                os.kill(frozen, 0)

    _run(scenario)


def test_a_step_that_never_ends_is_no_progress_though_the_process_lives(
    make_client: MakeClient,
) -> None:
    async def scenario() -> None:
        async with make_client(step_timeout_s=0.6) as client:
            endless = asyncio.create_task(_answer(client, _request("endless", ENDLESS_TOKEN)))
            answer = await endless
            assert answer.error == CONVICTED
            assert (await _answer(client, _request("after"))).error is None

    _run(scenario)


def test_an_idle_engine_is_never_lost(make_client: MakeClient) -> None:
    async def scenario() -> None:
        async with make_client(silence_timeout_s=2.0, step_timeout_s=0.5) as client:
            await _until(lambda: client.status().is_ready)
            await asyncio.sleep(3.0)
            assert client.status().num_restarts == 0 and client.status().last_step_age_s is None

    _run(scenario)


def test_a_poisonous_request_fails_alone(make_client: MakeClient) -> None:
    async def scenario() -> None:
        async with make_client() as client:
            calm = await asyncio.gather(
                *(_answer(client, _request(f"r{place}", max_tokens=300)) for place in range(6))
            )
            streams = [
                asyncio.create_task(
                    _answer(client, _request(f"r{place}/x", max_tokens=300, seed=2))
                )
                for place in range(6)
            ]
            await asyncio.sleep(0.05)
            poison = asyncio.create_task(_answer(client, _request("poison", DEADLY_TOKEN)))
            assert (await poison).error == CONVICTED
            assert await asyncio.gather(*streams) == calm
            assert client.status().num_restarts == 3

    _run(scenario)


def test_an_engine_that_never_lives_is_given_up_and_says_so(
    make_client: MakeClient, tiny_config: Path
) -> None:
    from quire.config.engine import EngineConfig
    from quire.engine.assembly.preparation import prepare_model
    from quire.engine.process.watch import WatchConfig

    async def scenario() -> None:
        prepared = prepare_model(
            EngineConfig(model=str(tiny_config), load_format="dummy", kv_cache_memory="1MiB")
        )
        watch = WatchConfig(max_restarts=2, first_pause_s=0.05)
        client = Client(prepared, supervised(prepared, watch, command=("/bin/false",)))
        client.link.start()
        answer = await _answer(client, _request("a"))
        assert answer.error is not None and "3 engines in a row" in answer.error
        assert _state(client) == "failed" and "exit code" not in client.status().reason
        with pytest.raises(UnavailableError, match="failed"):
            await _generate(client, _request("b"))
        await client.close()

    _run(scenario)


def test_leaving_and_aborting_free_the_engine_in_every_phase(make_client: MakeClient) -> None:
    async def scenario() -> None:
        async with make_client() as client:
            loading = await _generate(client, _request("loading", max_tokens=200))
            await loading.aclose()
            decoding = await _generate(client, _request("decoding", SLOW_TOKEN, max_tokens=200))
            await anext(decoding)
            await decoding.aclose()
            aborted = await _generate(client, _request("aborted", SLOW_TOKEN, max_tokens=200))
            await anext(aborted)
            await client.abort("aborted")
            last = [output async for output in aborted][-1]
            assert last.finished and last.outputs[0].finish_reason == "abort"
            await _until(
                lambda: client.status().kv_usage == 0.0 and client.status().num_running == 0
            )
            assert client.status().num_requests == 0

    _run(scenario)


def test_an_engine_that_is_lost_while_it_sleeps_is_replaced_by_one_that_sleeps(
    make_client: MakeClient,
) -> None:
    async def scenario() -> None:
        async with make_client() as client:
            expected = await _answer(client, _request("calm", max_tokens=30))
            stream = await _generate(client, _request("calm/begun", SLOW_TOKEN, max_tokens=30))
            await anext(stream)
            await client.sleep(2)
            assert _state(client) == "sleeping" and not client.status().is_ready
            waiting = asyncio.create_task(_answer(client, _request("calm", max_tokens=30)))
            num_steps = client.status().num_steps
            pid = _pid(client)
            os.kill(pid, signal.SIGKILL)
            await _until(lambda: _state(client) == "sleeping" and _pid(client) != pid)
            await client.sleep()  # answered once the new engine has been told before
            assert client.status().num_steps in (0, num_steps) and not waiting.done()
            await client.wake_up(["kv_cache"])
            assert _state(client) == "sleeping"
            await client.wake_up()
            await _until(lambda: client.status().is_ready)
            assert await waiting == expected
            assert [output async for output in stream][-1].finished

    _run(scenario)


def test_an_engine_that_replaces_another_computes_with_the_weights_of_that_one(
    make_client: MakeClient,
) -> None:
    async def scenario() -> None:
        async with make_client() as client:
            former = await _answer(client, _request("calm", max_tokens=30))
            begun = asyncio.create_task(
                _answer(client, _request("calm/begun", SLOW_TOKEN, max_tokens=8))
            )
            await _until(lambda: client.status().num_running == 1)
            updating = asyncio.create_task(client.update_weights("7", requests="finish"))
            await asyncio.sleep(0)
            late = asyncio.create_task(_answer(client, _request("calm", max_tokens=30)))
            assert await updating == "1" == client.weight_version and begun.done()
            assert (await begun).error is None
            assert await late != former
            pid = _pid(client)
            os.kill(pid, signal.SIGKILL)
            await _until(lambda: client.status().is_ready and _pid(client) != pid)
            assert await _answer(client, _request("calm", max_tokens=30)) == await late
            with pytest.raises(EngineError, match="could not be loaded"):
                await client.update_weights("no key")
            assert await _answer(client, _request("calm", max_tokens=30)) == await late
            assert await client.update_weights("0", "first") == "first"
            assert await _answer(client, _request("calm", max_tokens=30)) == former

    _run(scenario)


def test_requests_of_an_engine_that_sleeps_cannot_finish_with_their_weights(
    make_client: MakeClient,
) -> None:
    """Neither are they answered with others, which they were to be spared."""

    async def scenario() -> None:
        async with make_client() as client:
            former = await _answer(client, _request("calm", SLOW_TOKEN, max_tokens=8))
            begun = asyncio.create_task(_answer(client, _request("calm", SLOW_TOKEN, max_tokens=8)))
            await _until(lambda: client.status().num_running == 1)
            await client.sleep()
            with pytest.raises(EngineError, match="its requests cannot finish; wake it up"):
                await client.update_weights("7", requests="finish")
            assert client.weight_version == "0"
            await client.wake_up()
            assert await begun == former
            await client.sleep()  # with nothing to finish
            assert await client.update_weights("7", requests="finish") == "2"

    _run(scenario)


def test_a_command_whose_engine_is_lost_is_answered(make_client: MakeClient) -> None:
    async def scenario() -> None:
        async with make_client() as client:
            stream = await _generate(client, _request("begun", ENDLESS_TOKEN))
            await _until(lambda: client.status().num_running == 1)
            sleeping = asyncio.create_task(client.sleep())
            await asyncio.sleep(0.3)
            os.kill(_pid(client), signal.SIGKILL)
            with pytest.raises(EngineError, match="lost meanwhile"):
                await sleeping
            await stream.aclose()

    _run(scenario)


def test_a_slow_reader_costs_one_output_and_loses_nothing(make_client: MakeClient) -> None:
    async def scenario() -> None:
        async with make_client() as client:
            prompt = await _answer(client, _request("calm", max_tokens=100))
            stream = await _generate(client, _request("calm/slow", max_tokens=100, seed=4))
            outputs = [await anext(stream)]
            await _until(lambda: client.status().num_requests == 0)
            outputs += [output async for output in stream]
            assert len(outputs) <= 3
            assert _joined(outputs) == prompt

    _run(scenario)


def test_a_drain_lets_requests_finish_and_takes_no_more(make_client: MakeClient) -> None:
    async def scenario() -> None:
        async with make_client() as client:
            stream = asyncio.create_task(_answer(client, _request("a", SLOW_TOKEN, max_tokens=20)))
            await _until(lambda: client.status().num_requests == 1)
            drain = asyncio.create_task(client.drain(20.0))
            await asyncio.sleep(0)
            assert client.status().is_draining
            with pytest.raises(UnavailableError) as refusal:
                await _generate(client, _request("b"))
            assert refusal.value.state == "draining" and refusal.value.retry_after_s
            assert await drain
            assert (await stream).error is None and _state(client) == "closed"

    _run(scenario)


def test_a_drain_that_takes_too_long_gives_everyone_a_last_word(make_client: MakeClient) -> None:
    async def scenario() -> None:
        async with make_client() as client:
            stream = asyncio.create_task(_answer(client, _request("endless", ENDLESS_TOKEN)))
            await _until(lambda: client.status().is_ready)
            pid = _pid(client)
            assert not await client.drain(0.2)
            answer = await stream
            assert answer.error == "the server is shutting down"
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    _run(scenario)


def test_merging_deltas_keeps_their_order() -> None:
    from quire.engine.front.outputs import CompletionOutput

    def delta(text: str, token_id: int, *, finished: bool = False) -> RequestOutput:
        return RequestOutput(
            "a", None, [1], [CompletionOutput(0, text, [token_id])], finished=finished
        )

    merged = merge_deltas(merge_deltas(delta("a", 1), delta("b", 2)), delta("c", 3, finished=True))
    assert (merged.outputs[0].text, merged.outputs[0].token_ids, merged.finished) == (
        "abc",
        [1, 2, 3],
        True,
    )
