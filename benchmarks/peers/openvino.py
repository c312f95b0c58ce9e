"""OpenVINO GenAI: its continuous batching pipeline on the CPU plugin, on a folder exported by
optimum-intel.

Forms: `bfloat16`, `int8`, `int4` say how the folder was exported (weights only; computation in the
plugin's choice of type).
Extra: `precision` (the plugin's hint for computation: f32, bf16), `kv` (KV_CACHE_PRECISION: u8 by
default), `kv_gib`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from benchmarks.peers.runner import Options, serve
from quire.bench.workload import BenchRequest


class OpenVinoPeer:
    """See `PeerEngine`."""

    def __init__(self, options: Options) -> None:
        self._numpy, self._openvino, self._genai = (
            import_module(name) for name in ("numpy", "openvino", "openvino_genai")
        )
        self._numbers = itertools.count()
        self.version = str(self._genai.__version__)
        scheduler: Any = self._genai.SchedulerConfig()
        scheduler.cache_size = int(options.extra.get("kv_gib", "3"))
        scheduler.max_num_batched_tokens = int(options.extra.get("max_batched", "2048"))
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": options.num_threads,
            "NUM_STREAMS": 1,
        }
        if "precision" in options.extra:
            properties["INFERENCE_PRECISION_HINT"] = options.extra["precision"]
        if "kv" in options.extra:
            properties["KV_CACHE_PRECISION"] = options.extra["kv"]
        self.settings = {
            "cache_gib": scheduler.cache_size,
            "max_batched": scheduler.max_num_batched_tokens,
            **properties,
        }
        self._pipeline: Any = self._genai.ContinuousBatchingPipeline(
            str(options.model), scheduler, "CPU", properties
        )

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """See `PeerEngine`."""
        outputs = self._pipeline.generate(
            [self._tensor(each) for each in requests], [self._config(each) for each in requests]
        )
        return [len(token_ids) for output in outputs for token_ids in output.m_generation_ids]

    def stream(self, request: BenchRequest) -> list[float]:
        """See `PeerEngine`."""
        handle = self._pipeline.add_request(
            next(self._numbers), self._tensor(request), self._config(request)
        )
        token_s: list[float] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            if handle.can_read():
                num_new = sum(len(each.generated_ids) for each in handle.read().values())
                token_s += [time.perf_counter()] * num_new
        return token_s

    def close(self) -> None:
        """The process's end does it."""

    def _tensor(self, request: BenchRequest) -> Any:
        return self._openvino.Tensor(
            self._numpy.array([request.token_ids], dtype=self._numpy.int64)
        )

    def _config(self, request: BenchRequest) -> Any:
        config: Any = self._genai.GenerationConfig()
        config.max_new_tokens = request.num_output
        config.ignore_eos = True
        config.num_return_sequences = request.num_sequences
        if request.temperature > 0:
            config.do_sample, config.temperature, config.top_p = True, request.temperature, 1.0
        return config


if __name__ == "__main__":
    serve(OpenVinoPeer)
