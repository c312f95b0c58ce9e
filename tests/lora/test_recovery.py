"""An engine process that dies in the middle of answers with adapters: they go on with the same version."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from adapters import write_adapter

from quire.config.engine import EngineConfig
from quire.core.adapters import Adapter
from quire.core.params import RequestOutputKind, SamplingParams
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.front.streams import Stream
from quire.engine.process.link import supervised
from quire.engine.process.watch import WatchConfig
from quire.models.declaration import DecoderSpec

pytestmark = pytest.mark.slow

NUM_TOKENS = 200


async def _begin(client: Client, name: str, adapter: Adapter | None) -> Stream:
    params = SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, seed=3, output_kind=RequestOutputKind.DELTA
    )
    prompt = ParsedPrompt(None, [7, 8, 9, 10])
    return await client.generate(
        client.prepare(name, prompt, client.digest(params), adapter=adapter)
    )


async def _rest(stream: Stream) -> list[int]:
    found: list[int] = []
    async for output in stream:
        assert output.error is None
        found += output.outputs[0].token_ids
    return found


async def _scenario(model: Path, folder: Path, spec: DecoderSpec) -> None:
    config = EngineConfig(
        model=str(model), skip_tokenizer_init=True, kv_cache_memory="1MiB", enable_lora=True,
        num_threads=1,
    )  # fmt: skip
    prepared = prepare_model(config, is_for_here=False)
    client = Client(prepared, supervised(prepared, WatchConfig()))
    client.link.start()
    store = client.adapter_store
    assert store is not None
    try:
        adapters = [None, store.version_of(folder)]
        calm = [
            await _rest(await _begin(client, f"calm{n}", each)) for n, each in enumerate(adapters)
        ]
        assert calm[0] != calm[1]
        streams = [await _begin(client, f"{n}", each) for n, each in enumerate(adapters)]
        firsts = [(await anext(aiter(stream))).outputs[0].token_ids for stream in streams]
        write_adapter(folder, spec, seed=99)  # the folder is another version's by now
        assert store.version_of(folder) != adapters[1]
        pid = client.status().engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        rests = [await _rest(stream) for stream in streams]
        assert [first + rest for first, rest in zip(firsts, rests, strict=True)] == calm
        assert client.status().num_restarts == 1
    finally:
        await client.close()


def test_a_request_goes_on_with_its_version_after_the_engine_was_killed(
    model: Path, spec: DecoderSpec, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", spec)
    asyncio.run(asyncio.wait_for(_scenario(model, folder, spec), 200))
