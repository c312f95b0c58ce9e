"""Requests with images outlive their engine: a new one encodes the images again, and goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from optional_packages import require
from timing import timed
from vision_models import PLACEHOLDER, picture, write_llava

from quire.config.engine import EngineConfig
from quire.core.params import RequestOutputKind, SamplingParams
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.process.link import supervised
from quire.engine.process.watch import WatchConfig
from quire.media.sources import ImageSource

require("transformers")
pytest.importorskip("PIL.Image")
pytestmark = [timed, pytest.mark.slow]

MAX_TOKENS = 120
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "kv_cache_memory": "4MiB",
    "num_threads": 1,
    "max_num_seqs": 4,
}
Told = tuple[list[int], list[Any]]
"""Tokens and their log-probabilities."""


@asynccontextmanager
async def _client(folder: Path) -> AsyncIterator[Client]:
    prepared = prepare_model(EngineConfig(model=str(folder), **OPTIONS), is_for_here=False)
    client = Client(prepared, supervised(prepared, WatchConfig()))
    client.link.start()
    try:
        yield client
    finally:
        await client.close()


async def _answer(client: Client, name: str, *, kill_after: int | None = None) -> Told:
    """Ask about two images; with `kill_after`, kill the engine once so many tokens were told."""
    assert client.images is not None
    sources = [ImageSource(picture(seed), "image") for seed in (1, 2)]
    images = await asyncio.to_thread(client.images.read, sources)
    prompt = client.images.expand([1, PLACEHOLDER, 9, PLACEHOLDER, 7], images)
    params = SamplingParams(
        temperature=0.8, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    parsed = ParsedPrompt(None, prompt.token_ids, images=prompt.images)
    stream = await client.generate(client.prepare(name, parsed, client.digest(params)))
    tokens, logprobs = list[int](), list[Any]()
    async for output in stream:
        assert output.error is None
        for each in output.outputs:
            tokens += each.token_ids
            logprobs += each.logprobs or []
        if kill_after is not None and len(tokens) >= kill_after:
            assert len(tokens) < MAX_TOKENS, "the answer had ended"
            pid = client.status().engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            kill_after = None
    assert kill_after is None
    return tokens, logprobs


def test_an_answer_about_images_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    write_llava(tmp_path)

    async def scenario() -> None:
        async with _client(tmp_path) as client:
            undisturbed = await _answer(client, "calm")
            assert len(undisturbed[0]) == len(undisturbed[1]) == MAX_TOKENS
            assert await _answer(client, "killed", kill_after=20) == undisturbed
            assert client.status().num_restarts == 1

    asyncio.run(asyncio.wait_for(scenario(), 200.0))
