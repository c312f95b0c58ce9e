"""Memory that goes back to the system while an engine sleeps, and returns with the same bits."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run_all
from guesses import model_drafts

from quire import LLM
from quire.common.pages import CAN_DISCARD, discard
from quire.core.params import SamplingParams
from quire.core.scheduler.tiers import RestoreCosts
from quire.engine.front.async_llm import AsyncLLM
from quire.engine.loop.engine import Engine
from quire.errors import (
    CheckpointError,
    EngineError,
    InvalidParameterError,
    UnavailableError,
)
from quire.tiers import companion
from quire.weights.folder import resolve_model
from quire.worker import residence
from quire.worker.residence import Returnable
from tests.engine.conftest import DEVICE, MakeEngine
from tests.engine.test_tiers import answers, stats_of

pytestmark = pytest.mark.skipif(
    not CAN_DISCARD or DEVICE != "cpu", reason="this system does not take pages back"
)

PROMPT = [7 * place % 251 + 3 for place in range(40)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


def resident_bytes() -> int:
    """Anonymous memory of this process that is in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("RssAnon"))
    return int(found.split()[1]) << 10


def residence_of(engine: Engine) -> Returnable:
    residence = engine.executor.worker.residence  # type: ignore[attr-defined]
    assert isinstance(residence, Returnable)
    return residence


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("level", [1, 2])
def test_nearly_all_memory_of_weights_and_cache_goes_back(
    make_engine: MakeEngine, level: int
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 2}
    engine = make_engine(hf_overrides=sizes, num_blocks=8192)
    expected = answers(engine)
    weights = sum(tensor.nbytes for tensor in engine.executor.worker.model.weights.tensors)  # type: ignore[attr-defined]
    held = weights + engine.plan.kv_bytes
    before = resident_bytes()
    engine.sleep(level)
    assert before - resident_bytes() > 0.95 * held
    engine.wake_up()
    assert answers(engine) == expected
    assert abs(before - resident_bytes()) < 0.05 * held


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_requests_that_run_go_on_with_the_same_bits(make_engine: MakeEngine, overlap: str) -> None:
    expected = answers(make_engine(overlap=overlap))
    engine = make_engine(overlap=overlap)
    prompts = {"0": PROMPT[:41]}
    for level in (1, 2, 1):
        engine.add_request("late", {"prompt_token_ids": prompts["0"]}, PARAMS)
        for _ in range(4):
            engine.step()
        engine.sleep(level)
        assert not engine.can_step and engine.has_work
        engine.wake_up()
        (output,) = run_all(engine).values()
        assert output.finished and len(output.outputs[0].token_ids) == 12
        assert answers(engine) == expected


def test_it_wakes_in_parts_and_steps_once_all_are_there(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = answers(engine)
    engine.sleep(1)
    engine.sleep(2)  # it sleeps already
    engine.wake_up(("weights",))
    assert engine.asleep == ("kv_cache",) and not engine.idle()
    engine.wake_up(("weights", "kv_cache"))
    assert not engine.asleep and answers(engine) == expected


def test_a_cache_that_was_resident_is_so_again(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8192, populate_kv_cache="on")
    before = resident_bytes()
    engine.sleep(1)
    engine.wake_up(("weights",))
    assert before - resident_bytes() > 0.9 * engine.plan.kv_bytes
    engine.wake_up(("kv_cache",))
    assert before - resident_bytes() < 0.1 * engine.plan.kv_bytes


@pytest.mark.slow
def test_what_was_stored_before_is_restored_after_and_nothing_is_stored_wrong(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestoreCosts, "restore_s", lambda self, count: 0.0)
    monkeypatch.setattr(companion, "MAX_DELAY_S", 0.0)
    monkeypatch.setattr(companion, "PROMPT_PAUSE_S", 0.0)
    expected = answers(make_engine(block_size=8))
    engine = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    for num_steps in range(1, 14):
        engine.add_request("begun", {"prompt_token_ids": PROMPT}, PARAMS)
        for _ in range(num_steps):
            engine.step()
        engine.sleep(1)
        engine.wake_up()
        engine.abort("begun")
        assert answers(engine) == expected
        while engine.idle():
            pass
    assert stats_of(engine).num_restored_blocks > 0
    engine.close()
    again = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    assert answers(again) == expected and stats_of(again).num_restored_blocks > 0


def test_a_disk_that_is_full_leaves_the_engine_awake(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = answers(engine)

    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(EngineError, match="No space left on device; make room"):
            engine.sleep(1)
    assert engine.asleep == () and answers(engine) == expected


@pytest.mark.parametrize("doing", ["sleep 1", "sleep 2", "write", "wake"])
def test_ctrl_c_in_between_loses_no_weights(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    """Some of them are gone then, until the engine is woken up."""
    engine = make_engine()
    expected = answers(engine)
    if doing == "wake":
        engine.sleep(1)
    num_calls = 0

    def interrupt(call: Any, *given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt
        return call(*given)

    engine.add_request("lost", {"prompt_token_ids": PROMPT}, PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(residence, "discard", partial(interrupt, discard))
        for name in ("pwritev", "preadv") if doing in ("write", "wake") else ():
            patch.setattr(os, name, partial(interrupt, getattr(os, name)))
        patch.setattr(residence, "_CHUNK_BYTES", 1 << 12)
        with pytest.raises(KeyboardInterrupt):
            if doing == "wake":
                engine.wake_up()
            else:
                engine.sleep(2 if doing == "sleep 2" else 1)
    assert engine.asleep and not engine.can_step
    lost = [each.request_id for each in engine.take_lost()]
    assert lost == ([] if doing == "wake" else ["lost"]), "their sessions would wait for ever"
    engine.wake_up()
    run_all(engine)
    assert answers(engine) == expected
    engine.sleep(1)
    engine.wake_up()
    assert answers(engine) == expected


def test_short_transfers_are_carried_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = answers(engine)
    for name in ("pwritev", "preadv"):
        move = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda file, parts, at, move=move: move(file, [parts[0][:1000]], at)
        )
    engine.sleep(1)
    engine.wake_up()
    assert answers(engine) == expected


def test_files_that_were_replaced_are_not_loaded_again(
    make_engine: MakeEngine, tiny_config: Path, tmp_path: Path
) -> None:
    model = tmp_path / "config.json"
    shutil.copy(tiny_config, model)
    times = (model.stat().st_atime_ns, model.stat().st_mtime_ns)
    engine = make_engine(model=model)
    expected = answers(engine)
    engine.sleep(2)
    os.utime(model, (0, 0))
    with pytest.raises(CheckpointError, match="has been written to"):
        engine.wake_up()
    assert engine.asleep
    os.utime(model, ns=times)
    engine.wake_up()
    assert answers(engine) == expected


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_what_drafts_goes_and_returns_with_its_target(
    make_engine: MakeEngine,
    method: str,
    level: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residence, "discard", _spoil)
    name = "draft_config" if method == "draft_model" else f"{method}_config"
    config: Path = request.getfixturevalue(name)
    drafting = {"method": method, "model": str(config), "num_speculative_tokens": 2}
    expected = answers(make_engine())
    engine = make_engine(speculative_config=drafting)
    drafts = model_drafts(engine)
    before = [tensor.clone() for tensor in drafts.weights]
    for given in (level, 3 - level):
        assert answers(engine) == expected
        engine.sleep(given)
        assert not any(map(torch.equal, drafts.weights, before))
        engine.wake_up()
        assert all(map(torch.equal, drafts.weights, before))
    assert answers(engine) == expected


def _spoil(address: int, num_bytes: int) -> int:
    """Discard to the last byte, not whole pages alone."""
    ctypes.memset(address, 165, num_bytes)
    return num_bytes


def test_llm_sleeps_and_says_so() -> None:
    with LLM("quire-storyteller", kv_cache_memory="8MiB", num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        (expected,) = llm.generate("Once upon a time", params, use_tqdm=False)
        for level in (1, 2):
            llm.sleep(level)
            assert llm.is_sleeping()
            with pytest.raises(EngineError, match="asleep; call wake_up"):
                llm.generate("Once upon a time", params, use_tqdm=False)
            llm.wake_up()
            assert not llm.is_sleeping()
            (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        wrong: list[Any] = [0, 3, True, "1", 1.0, 2.0, [1], None]
        for level in wrong:
            with pytest.raises(InvalidParameterError, match="no level of sleep"):
                llm.sleep(level)
        odd: list[Any] = [5, None, ["a"], b"a"]
        for tags in (["weight"], [], odd[0]):
            with pytest.raises(InvalidParameterError, match="must be of weights, kv_cache"):
                llm.wake_up(tags)
        for source in odd:
            with pytest.raises(InvalidParameterError, match="give a folder with a checkpoint"):
                llm.update_weights(source)


def test_nothing_can_be_asked_of_an_engine_that_was_closed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.close()
    commands: list[Callable[[], object]] = [
        lambda: engine.sleep(1),
        engine.wake_up,
        lambda: engine.load_weights("quire-storyteller"),
        lambda: engine.replace_weights(None, "1"),
        lambda: engine.call_worker(lambda worker: worker),
        engine.reset_prefix_cache,
    ]
    for command in commands:
        with pytest.raises(EngineError, match="the engine is closed"):
            command()
    assert not engine.asleep


@pytest.mark.parametrize("policy", ["wait", "refuse"])
def test_requests_of_programs_wait_or_are_refused(policy: str) -> None:
    model = str(resolve_model("quire-storyteller"))

    async def scenario() -> None:
        options = {"kv_cache_memory": "8MiB", "num_threads": 1, "when_asleep": policy}
        async with AsyncLLM(model, **options) as llm:

            async def answer() -> list[int]:
                params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
                outputs = [each async for each in llm.generate("Once upon a time", params)]
                return list(outputs[-1].outputs[0].token_ids)

            expected = await answer()
            await llm.sleep()
            assert await llm.is_sleeping()
            if policy == "refuse":
                with pytest.raises(UnavailableError, match="asleep"):
                    await answer()
                await llm.wake_up()
            else:
                waiting = asyncio.create_task(answer())
                await asyncio.sleep(0.05)
                assert not waiting.done()
                await llm.wake_up(["weights"])
                await llm.wake_up(["kv_cache"])
                assert await waiting == expected
            assert not await llm.is_sleeping() and await answer() == expected

    asyncio.run(scenario())
