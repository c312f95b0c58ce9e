"""A script that leaves an engine open ends as if it had closed it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ASYNC = """
import asyncio, itertools
from quire import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM("quire-storyteller")
    params = SamplingParams(max_tokens=500, ignore_eos=True, n=4)
    outputs = llm.generate("Once upon a time", params)
    for _ in range(5):
        await anext(outputs)
    return llm, outputs

left = asyncio.run(main())
"""

OFFLINE = """
import _thread, threading
from quire import LLM, SamplingParams

llm = LLM("quire-storyteller")
threading.Timer(0.5, _thread.interrupt_main).start()
try:
    llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=1500, ignore_eos=True))
except KeyboardInterrupt:
    pass
"""

STORING = """
import tempfile
from quire import LLM, SamplingParams

llm = LLM("quire-storyteller", kv_cache_dir=tempfile.mkdtemp())
llm.generate("Once upon a time", SamplingParams(max_tokens=4))
"""

ADAPTED = """
import json, pathlib, tempfile
import torch
from safetensors.torch import save_file
from quire import LLM, LoRARequest, SamplingParams

folder = pathlib.Path(tempfile.mkdtemp())
module = "model.layers.0.mlp.down_proj"
config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [module[6:]]}
(folder / "adapter_config.json").write_text(json.dumps(config))
llm = LLM("quire-storyteller", enable_lora=True)
mlp = llm.engine.plan.spec.blocks[0].mixers[1].down
halves = {"lora_A": torch.randn(4, mlp.num_inputs), "lora_B": torch.randn(mlp.num_outputs, 4)}
tensors = {f"base_model.model.{module}.{name}.weight": half for name, half in halves.items()}
save_file(tensors, folder / "adapter_model.safetensors")
adapter = LoRARequest("noise", 1, str(folder))
llm.generate("Once upon a time", SamplingParams(max_tokens=4), lora_request=adapter)
"""


@pytest.mark.parametrize(
    "script",
    [ASYNC, OFFLINE, STORING, ADAPTED],
    ids=["async", "offline", "storing", "adapted"],
)
def test_an_engine_left_open_in_a_step_ends_with_its_process(script: str) -> None:
    for _ in range(2):  # of the moments at which it ends, not all were harmful
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert "leaked" not in done.stderr and "Traceback" not in done.stderr, done.stderr
