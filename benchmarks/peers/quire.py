"""Quire itself, as `LLM` gives it, with the settings that it chooses.

Forms: `bfloat16`, `float32`; any other is given to `quantization` (`int8`, `int4`), unless the
model is a file (GGUF).
Extra: any engine option, `kv_cache_dtype=int8`; `instruction_set=avx2` computes as on a processor
that has no better one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.runner import Options, serve
from quire import LLM, __version__
from quire.bench.measure import measure, params_of
from quire.bench.workload import BenchRequest
from quire.kernels import cpu


class QuirePeer:
    """See `PeerEngine`."""

    def __init__(self, options: Options) -> None:
        chosen: dict[str, Any] = {
            "num_threads": options.num_threads,
            "skip_tokenizer_init": True,
            "kv_cache_memory": "3GiB",
        }
        if options.form in ("bfloat16", "float32"):
            chosen["dtype"] = options.form
        elif options.model.is_dir():
            chosen["quantization"] = options.form
        extra = dict(options.extra)
        if "instruction_set" in extra:
            cpu.set_isa(extra.pop("instruction_set"))
        if options.extra.get("device") == "cuda":
            del chosen["kv_cache_memory"]  # what a GPU has is for this engine
        chosen |= {name: int(value) if value.isdigit() else value for name, value in extra.items()}
        self.version = __version__
        self._llm = LLM(str(options.model), **chosen)
        self.settings = {each.name: each.value for each in self._llm.engine.plan.decisions}

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """See `PeerEngine`."""
        prompts: list[Any] = [{"prompt_token_ids": each.token_ids} for each in requests]
        outputs = self._llm.generate(
            prompts, [params_of(each) for each in requests], use_tqdm=False
        )
        return [len(each.token_ids) for output in outputs for each in output.outputs]

    def stream(self, request: BenchRequest) -> list[float]:
        """See `PeerEngine`."""
        started = time.perf_counter()
        return [started + each for each in measure(self._llm.engine, [request]).requests[0].token_s]

    def close(self) -> None:
        """See `PeerEngine`."""
        self._llm.close()


if __name__ == "__main__":
    serve(QuirePeer)
