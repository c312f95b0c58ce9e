"""Commands to all replicas: carried out by each or by none, whatever happens to one meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.common.pages import CAN_DISCARD
from quire.common.residence import KV_CACHE, PARTS, WEIGHTS
from quire.config.engine import EngineConfig
from quire.engine.front.client import Client
from quire.engine.front.outputs import RequestOutput
from quire.engine.process.watch import WatchConfig
from quire.engine.replicas.engine import ReplicatedEngine
from quire.errors import EngineError, NotAvailableError, QuireError
from tests.engine.replicas.test_processes import NULL_ENGINE, OPTIONS, _answer, _client, _run
from tests.engine.replicas.test_processes import _until as until_ready

pytestmark = pytest.mark.slow

PROMPT: Any = {"prompt_token_ids": [9, 8, 7, 30, 31]}
QUICK = WatchConfig(silence_timeout_s=2.0)


@contextmanager
def _engine(model: Path) -> Iterator[ReplicatedEngine]:
    """Two replicas of the null executor, whose weights are a number."""
    config = EngineConfig(
        model=str(model), data_parallel_size=2, skip_tokenizer_init=True, **OPTIONS
    )
    engine = ReplicatedEngine(config, command=NULL_ENGINE, watch=QUICK)
    try:
        yield engine
    finally:
        engine.close()


def _tokens(engine: ReplicatedEngine, count: int = 4) -> list[list[int]]:
    """Answers of requests that go to both replicas: all the same while their weights are."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    for place in range(count):
        engine.add_request(f"r{place}", PROMPT, params)
    answers: list[list[int]] = []
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, RequestOutput) and output.error is None
            if output.finished:
                answers.append(list(output.outputs[0].token_ids))
    assert len(answers) == count
    return answers


def _freeze(engine: ReplicatedEngine, replica: int) -> None:
    """Have a replica answer nothing until its supervisor replaces it."""
    pid = engine.replicas[replica].engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)


def _until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120.0
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _update(engine: ReplicatedEngine, key: str) -> None:
    engine.replace_weights(engine.load_weights(key), f"v{key}")


def test_all_replicas_compute_with_other_weights_or_none_does(tiny_config: Path) -> None:
    with _engine(tiny_config) as engine:
        first = _tokens(engine)
        _update(engine, "5")
        fifth = _tokens(engine)
        assert engine.weight_version == "v5"
        assert all(each == fifth[0] for each in fifth) and fifth != first
        with pytest.raises(EngineError, match="no key"):
            _update(engine, "nothing")
        _freeze(engine, 1)
        with pytest.raises(EngineError, match=r"replica 1: .* lost meanwhile"):
            _update(engine, "6")
        assert engine.weight_version == "v5" and not engine.asleep
        _until(lambda: engine.replicas[1].is_ready)
        assert _tokens(engine) == fifth
        _update(engine, "6")
        sixth = _tokens(engine)
        assert all(each == sixth[0] for each in sixth) and sixth != fifth


def test_replicas_with_different_weights_answer_nothing(tiny_config: Path) -> None:
    """What they began with cannot be loaded again here."""
    with _engine(tiny_config) as engine:
        _freeze(engine, 1)
        with pytest.raises(EngineError, match="different weights"):
            _update(engine, "6")
        assert engine.asleep == (WEIGHTS,)
        _until(lambda: engine.replicas[1].is_ready)
        with pytest.raises(EngineError, match="different weights"):
            engine.wake_up()
        assert engine.asleep == (WEIGHTS,)
        _update(engine, "6")
        assert not engine.asleep
        answers = _tokens(engine)
        assert all(each == answers[0] for each in answers)


def test_an_interrupted_command_leaves_no_replica_behind(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with _engine(tiny_config) as engine:
        _update(engine, "5")
        fifth = _tokens(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine._inbox, "run", interrupt)
            with pytest.raises(KeyboardInterrupt):
                _update(engine, "6")
            with pytest.raises(KeyboardInterrupt):
                engine.wake_up()
        assert engine.asleep and engine.weight_version == "v5"
        engine.wake_up()
        assert not engine.asleep and _tokens(engine) == fifth
        with monkeypatch.context() as patch:
            patch.setattr(engine._inbox, "run", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.sleep(1)
        assert engine.asleep == PARTS
        engine.wake_up()
        assert not engine.asleep and _tokens(engine) == fifth


def test_all_replicas_sleep_or_none_does(tiny_config: Path) -> None:
    with _engine(tiny_config) as engine:
        answers = _tokens(engine)
        engine.add_request("waits", PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
        with pytest.raises(NotAvailableError, match="while requests run; 1 do"):
            engine.reset_prefix_cache(preempts=True)
        engine.sleep(1)
        assert list(engine.asleep) == list(PARTS)
        assert {each.state for each in engine.replicas} == {"sleeping"}
        engine.wake_up((WEIGHTS,))
        assert engine.asleep == (KV_CACHE,)
        engine.wake_up()
        while engine.has_work:
            engine.step()
        _freeze(engine, 0)
        with pytest.raises(EngineError, match=r"replica 0: .* lost meanwhile"):
            engine.sleep(2)
        assert not engine.asleep
        _until(lambda: all(each.is_ready for each in engine.replicas))
        assert engine.reset_prefix_cache() and _tokens(engine) == answers


def test_a_replica_that_is_given_up_is_not_waited_for(tiny_config: Path) -> None:
    config = EngineConfig(
        model=str(tiny_config), data_parallel_size=2, skip_tokenizer_init=True, **OPTIONS
    )
    watch = WatchConfig(silence_timeout_s=2.0, max_restarts=0)
    engine = ReplicatedEngine(config, command=NULL_ENGINE, watch=watch)
    try:
        _freeze(engine, 1)
        with pytest.raises(QuireError, match="engines in a row"):
            engine.sleep(1)
        with pytest.raises(EngineError, match="replica 1 does not answer; it is failed"):
            engine.reset_prefix_cache()
    finally:
        engine.close()


def test_a_server_updates_its_replicas_one_after_another(tiny_config: Path) -> None:
    async def scenario() -> None:
        async with _client(tiny_config, silence_timeout_s=2.0) as client:

            async def answers(round_: str) -> list[list[list[int]]]:
                """Of requests that come at once, so that both replicas have some."""
                asked = [_answer(client, 1, f"{round_} {each}") for each in range(4)]
                return await asyncio.gather(*asked)

            assert client.weight_version == "0"
            first = await _answer(client, 1, "first")
            assert await client.update_weights("5") == "1"
            fifth = await answers("fifth")
            assert all(each == fifth[0] for each in fifth) and fifth[0] != first
            pid = client.status().replicas[1].engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            update = asyncio.create_task(client.update_weights("6", "six"))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="under way"):
                await client.update_weights("7")
            with pytest.raises(QuireError, match=r"^replica 1 does not take the weights: .* lost"):
                await update
            assert client.weight_version == "1"
            await until_ready(lambda: all(each.is_ready for each in client.status().replicas))
            assert await answers("again") == fifth

    _run(scenario)


def test_one_that_cannot_go_back_keeps_no_other_from_it(tiny_config: Path) -> None:
    """Replica 0 does not find the former weights again once replica 2 has refused the new ones."""

    async def scenario() -> None:
        async with _client(tiny_config, 3) as client:
            await client.update_weights("5")
            asked: list[tuple[str, int]] = []
            update_one = client._update_one

            async def some(folder: str, version: str, waits: bool, replica: int) -> None:
                asked.append((folder, replica))
                if (folder, replica) in (("6", 2), ("5", 0)):
                    raise EngineError(f"{folder} is gone")
                await update_one(folder, version, waits, replica)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(client, "_update_one", some)
                with pytest.raises(
                    EngineError, match=r"different weights.*\(replica 0: 5 is gone\)"
                ):
                    await client.update_weights("6")
            assert asked == [("6", 0), ("6", 1), ("6", 2), ("5", 0), ("5", 1)]
            await client.update_weights("7")
            seventh = await asyncio.gather(*(_answer(client, 1, str(each)) for each in range(6)))
            assert all(each == seventh[0] for each in seventh)

    _run(scenario)


def _states(client: Client) -> list[str]:
    return [each.state for each in client.status().replicas]


def test_all_replicas_of_a_server_sleep_or_none_does(tiny_config: Path) -> None:
    async def scenario() -> None:
        async with _client(tiny_config, silence_timeout_s=2.0) as client:
            pid = client.status().replicas[1].engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EngineError, match=r"replica 1 does not sleep: .* lost meanwhile"):
                await client.sleep(1)
            assert _states(client)[0] == "ready"
            await until_ready(lambda: _states(client) == ["ready", "ready"])
            expected = await _answer(client, 1, "awake")
            await client.sleep(1)
            assert _states(client) == ["sleeping", "sleeping"]
            pid = client.status().replicas[0].engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EngineError, match=r"^replica 0 does not wake up: .* lost"):
                await client.wake_up()
            await until_ready(lambda: _states(client) == ["sleeping", "ready"])
            await client.wake_up()
            assert _states(client) == ["ready", "ready"]
            assert await _answer(client, 1, "again") == expected

    _run(scenario)


def test_who_leaves_while_replicas_go_to_sleep_leaves_none_awake(tiny_config: Path) -> None:
    async def scenario() -> None:
        async with _client(tiny_config, silence_timeout_s=100.0) as client:
            pid = client.status().replicas[0].engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            falling_asleep = asyncio.create_task(client.sleep(1))
            await until_ready(lambda: bool(client._questions))  # it is told, and does not hear
            falling_asleep.cancel()
            with pytest.raises(asyncio.CancelledError):
                await falling_asleep
            os.kill(pid, signal.SIGCONT)
            await until_ready(lambda: _states(client) == ["sleeping", "sleeping"])
            await client.wake_up()
            assert _states(client) == ["ready", "ready"]

    _run(scenario)


@pytest.mark.skipif(not CAN_DISCARD, reason="weights cannot be replaced here")
def test_programs_replace_weights_and_sleep(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.engine.test_weight_updates import OPTIONS as MODEL_OPTIONS
    from tests.engine.test_weight_updates import write

    write(tmp_path / "a", 1.0)
    write(tmp_path / "b", 1.25)
    prompts: Any = [{"prompt_token_ids": [place, 8, 7, 30]} for place in range(4)]
    params = SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True, temperature=0.0)

    def answers(llm: LLM) -> list[Any]:
        found = llm.generate(prompts, params, use_tqdm=False)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]

    expected = {}
    for name in ("a", "b"):
        with LLM(str(tmp_path / name), **MODEL_OPTIONS) as llm:
            expected[name] = answers(llm)
    with LLM(str(tmp_path / "a"), data_parallel_size=2, **MODEL_OPTIONS) as llm:
        assert answers(llm) == expected["a"]
        with pytest.raises(NotAvailableError, match="takes a folder"):
            llm.update_weights({})
        with pytest.raises(NotAvailableError, match="give the name of a method"):
            llm.collective_rpc(lambda worker: worker)
        assert llm.update_weights(tmp_path / "b", version="b") == "b"
        assert answers(llm) == expected["b"] and llm.weight_version == "b"
        llm.sleep(1)
        assert llm.is_sleeping()
        with pytest.raises(EngineError, match="asleep"):
            llm.generate(prompts, params, use_tqdm=False)
        llm.wake_up()
        assert llm.reset_prefix_cache() and answers(llm) == expected["b"]
        assert llm.collective_rpc("update_weights", args=(str(tmp_path / "a"),)) == ["2"]
        assert answers(llm) == expected["a"]

    async def stream() -> list[int]:
        options = {**MODEL_OPTIONS, "data_parallel_size": 2}
        async with AsyncLLM(str(tmp_path / "a"), **options) as engine:
            await engine.update_weights(str(tmp_path / "b"), requests="finish")
            await engine.sleep(2)
            await engine.wake_up()
            last = None
            async for output in engine.generate(prompts[0], params):
                last = output
            assert last is not None and last.weight_version == "1"
            return list(last.outputs[0].token_ids)

    assert asyncio.run(stream()) == list(expected["b"][0][0])
