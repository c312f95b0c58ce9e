"""Transformers, in its two ways: `generate` on padded batches, and its paged continuous batching
(`generate_batch`).

Both get their natural best: `generate` takes requests sorted by length, so that little is padded;
the paged one is given the limit of each request. Forms: `float32`, `bfloat16`. Extra:
`way=generate` (the default) with `batch=16`, or `way=paged`; `device=cuda`. A folder without
weights gets random ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any

from benchmarks.peers.runner import Options, PeerEngine, serve
from quire.bench.workload import BenchRequest


class GeneratePeer:
    """`generate` on left-padded batches."""

    def __init__(self, options: Options) -> None:
        self._model = _load(options)
        self._batch_size = int(options.extra.get("batch", "16"))
        self.version = metadata.version("transformers")
        self.settings: dict[str, Any] = {
            "way": "generate",
            "batch_size": self._batch_size,
            "attention": "sdpa",
        }

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """See `PeerEngine`. Sorted by output length first:
        what a batch makes beyond a request's length is wasted."""
        ordered = sorted(requests, key=lambda each: (each.num_output, len(each.token_ids)))
        size = max(1, self._batch_size // requests[0].num_sequences)
        counts = []
        for start in range(0, len(ordered), size):
            counts += self._run_batch(ordered[start : start + size], None)
        return counts

    def stream(self, request: BenchRequest) -> list[float]:
        """See `PeerEngine`."""
        ticks = _Ticks()
        self._run_batch([request], ticks)
        return ticks.token_s[1:]  # the first call brings the prompt

    def close(self) -> None:
        """The process's end does it."""

    def _run_batch(self, requests: Sequence[BenchRequest], streamer: object) -> list[int]:
        import torch

        longest, first = max(len(each.token_ids) for each in requests), requests[0]
        token_ids = torch.ones((len(requests), longest), dtype=torch.long)
        mask = torch.zeros((len(requests), longest), dtype=torch.long)
        for row, each in enumerate(requests):
            token_ids[row, longest - len(each.token_ids) :] = torch.tensor(each.token_ids)
            mask[row, longest - len(each.token_ids) :] = 1
        config = _transformers().GenerationConfig(
            max_new_tokens=max(each.num_output for each in requests),
            num_return_sequences=first.num_sequences,
            eos_token_id=None,
            pad_token_id=1,
            **_sampling(first),
        )
        with torch.inference_mode():
            inputs = {
                "input_ids": token_ids.to(self._model.device),
                "attention_mask": mask.to(self._model.device),
            }
            out = self._model.generate(**inputs, generation_config=config, streamer=streamer)
        assert out.shape == (len(requests) * first.num_sequences, longest + config.max_new_tokens)
        return [each.num_output for each in requests for _ in range(each.num_sequences)]


class PagedPeer:
    """Paged continuous batching, with a limit of its own for each request."""

    def __init__(self, options: Options) -> None:
        self._model = _load(options)
        self._manager: Any = None
        self._key: tuple[int, float] | None = None
        self.version = metadata.version("transformers")
        is_gpu = self._model.device.type != "cpu"
        self._paging = (
            {} if is_gpu else {"block_size": 32, "num_blocks": 2048, "max_batch_tokens": 1024}
        )
        """On a GPU it measures for itself what fits."""
        self.settings: dict[str, Any] = {"way": "paged", "attention": "sdpa", **self._paging}

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """See `PeerEngine`."""
        return self._run(requests, None)

    def stream(self, request: BenchRequest) -> list[float]:
        """See `PeerEngine`."""
        token_s: list[float] = []
        self._run([request], token_s)
        return token_s

    def close(self) -> None:
        """See `PeerEngine`."""
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager = None

    def _run(self, requests: Sequence[BenchRequest], token_s: list[float] | None) -> list[int]:
        """Token times of a single request go to `token_s`."""
        manager = self._manager_for(requests[0])
        for each in requests:
            limits = {"max_new_tokens": each.num_output, "eos_token_id": -1}
            manager.add_request(each.token_ids, **limits, streaming=token_s is not None)
        counts: list[int] = []
        while len(counts) < sum(each.num_sequences for each in requests):
            output = manager.get_result(timeout=600)
            if output is None or output.error:
                raise RuntimeError(
                    f"generate_batch failed: {output.error if output else 'no result in 600 s'}"
                )
            if token_s is not None:
                token_s += [time.perf_counter()] * (len(output.generated_tokens) - len(token_s))
            if output.is_finished():
                counts.append(len(output.generated_tokens))
        return counts

    def _manager_for(self, request: BenchRequest) -> Any:
        """Return the manager for a way of sampling; made once, as a server would."""
        transformers = _transformers()
        key = (request.num_sequences, request.temperature)
        if key != self._key:
            self.close()
            config = transformers.GenerationConfig(
                max_new_tokens=128,
                num_return_sequences=request.num_sequences,
                eos_token_id=-1,
                pad_token_id=1,
                **_sampling(request),
            )
            paging = transformers.ContinuousBatchingConfig(**self._paging)
            self._manager = self._model.init_continuous_batching(
                generation_config=config, continuous_batching_config=paging
            )
            self._manager.start()
            self._key = key
        return self._manager


class _Ticks:
    """A streamer that notes when it is called."""

    def __init__(self) -> None:
        self.token_s: list[float] = []

    def put(self, _: object) -> None:
        """The prompt, then each token."""
        self.token_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def open_peer(options: Options) -> PeerEngine:
    """Either of the two, by the extra `way`."""
    ways: dict[str, type[GeneratePeer] | type[PagedPeer]] = {
        "generate": GeneratePeer,
        "paged": PagedPeer,
    }
    return ways[options.extra.get("way", "generate")](options)


def _sampling(request: BenchRequest) -> dict[str, Any]:
    if request.temperature == 0.0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}


def _load(options: Options) -> Any:
    import torch

    transformers = _transformers()
    torch.set_num_threads(options.num_threads)
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    settings = {"dtype": getattr(torch, options.form), "attn_implementation": "sdpa"}
    device = torch.device(options.extra.get("device", "cpu"))
    if any(options.model.glob("*.safetensors")):
        return (
            transformers.AutoModelForCausalLM.from_pretrained(options.model, **settings)
            .eval()
            .to(device)
        )
    with device:
        config = transformers.AutoConfig.from_pretrained(options.model)
        return transformers.AutoModelForCausalLM.from_config(config, **settings).eval()


def _transformers() -> Any:
    """Return the library, untyped as it is."""
    return import_module("transformers")


if __name__ == "__main__":
    serve(open_peer)
