"""The engine as a server sees it, with the engine in this process."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from engines import hold_after

from quire.config.engine import EngineConfig
from quire.core.params import RequestOutputKind, SamplingParams
from quire.engine.assembly.builder import build_engine
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.front.model_info import model_info
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.front.streams import Stream
from quire.engine.loop.engine_thread import EngineThread
from quire.errors import InvalidParameterError, PromptTooLongError, UnavailableError
from quire.weights.folder import resolve_model

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "kv_cache_memory": "512KiB",
    "num_threads": 1,
    "max_num_seqs": 16,
}


@pytest.fixture
def client(tiny_config: Path) -> Iterator[Client]:
    config = EngineConfig(model=str(tiny_config), **OPTIONS)
    link = EngineThread(build_engine(config, is_streaming=True))
    link.start()
    yield Client(prepare_model(config), link)
    link.close()


async def _generate(
    client: Client, name: str, prompt: Sequence[int] = (3, 4, 5), **params: Any
) -> Stream:
    options = {
        "max_tokens": 8,
        "ignore_eos": True,
        "output_kind": RequestOutputKind.DELTA,
        **params,
    }
    digest = client.digest(SamplingParams(**options))
    return await client.generate(client.prepare(name, ParsedPrompt(None, prompt), digest))


async def _collect(
    client: Client, name: str, prompt: Sequence[int] = (3, 4, 5), **params: Any
) -> list[RequestOutput]:
    return [output async for output in await _generate(client, name, prompt, **params)]


def test_deltas_end_with_a_finished_output(client: Client) -> None:
    outputs = asyncio.run(_collect(client, "a", seed=1))
    assert sum(len(each.outputs[0].token_ids) for each in outputs) == 8
    assert [each.finished for each in outputs] == [False] * (len(outputs) - 1) + [True]
    assert client.status().is_ready and client.status().num_requests == 0


def test_what_can_never_be_served_is_refused_before_it_streams(client: Client) -> None:
    limit = client.model.max_model_len
    with pytest.raises(PromptTooLongError, match=str(limit)):
        asyncio.run(_collect(client, "long", [3] * limit))
    with pytest.raises(InvalidParameterError, match="vocabulary"):
        asyncio.run(_collect(client, "alien", [client.model.vocab_size]))
    with pytest.raises(InvalidParameterError, match="functions"):
        asyncio.run(_collect(client, "code", logits_processors=[lambda output, logits: logits]))


def test_leaving_early_ends_the_request(client: Client) -> None:
    async def leave() -> None:
        stream = await _generate(client, "a", max_tokens=200)
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert client.status().num_requests == 0


def test_a_closed_client_ends_streams_and_refuses(client: Client) -> None:
    async def close() -> tuple[RequestOutput, bool]:
        stream = await _generate(client, "a", max_tokens=200)
        hold_after(cast("EngineThread", client.link).engine, 3)
        await anext(stream)
        is_empty = await client.drain(0.0)
        with pytest.raises(UnavailableError, match="shutting down"):
            await _generate(client, "b")
        return [output async for output in stream][-1], is_empty

    last, is_empty = asyncio.run(close())
    assert last.finished and last.error is not None and not is_empty


def test_the_fingerprint_changes_with_the_numbers_and_not_with_the_limits(
    tiny_config: Path,
) -> None:
    def fingerprint(**options: Any) -> str:
        return model_info(
            prepare_model(EngineConfig(model=str(tiny_config), **{**OPTIONS, **options}))
        ).fingerprint

    assert fingerprint() == fingerprint(max_num_seqs=4, block_size=32)
    assert len({fingerprint(), fingerprint(dtype="bfloat16"), fingerprint(seed=5)}) == 3


def test_the_fingerprint_changes_with_the_weights_the_tokenizer_and_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(folder: Path) -> str:
        return model_info(
            prepare_model(EngineConfig(model=str(folder), kv_cache_memory="4MiB"))
        ).fingerprint

    model = resolve_model("quire-storyteller")
    same, other = tmp_path / "same", tmp_path / "other"
    for copy in (same, other):
        shutil.copytree(model, copy)
    (weights,) = other.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    half = len(content) // 2
    content[half:] = bytes(len(content) - half)  # of the same size and form, trained to nothing
    weights.write_bytes(content)
    alone = fingerprint(model)
    assert fingerprint(same) == alone != fingerprint(other)
    (same / "tokenizer.json").write_text((same / "tokenizer.json").read_text() + "\n")
    assert fingerprint(same) != alone
    monkeypatch.setattr("quire.engine.assembly.fingerprint.instruction_sets", lambda: "x86_64+avx2")
    assert fingerprint(model) != alone


def test_the_server_side_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import quire.engine.front.client, quire.engine.process.link, "
        "quire.engine.front.output_processor; print('ok')"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "ok\n"
    )
