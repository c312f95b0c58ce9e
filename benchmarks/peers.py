"""The engines that are compared, each behind the same two methods: make ready, and run requests to their full lengths.

Every one gets its natural best: Quire its continuous batches, `generate` padded batches of requests sorted by length (so that
little is padded), `generate_batch` its own paged continuous batching.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quire.bench.workload import BenchRequest


class Variant(NamedTuple):
    """An engine with its dtype and, for padded batches, their size: "quire:bfloat16", "generate:float32:16"."""

    engine: str
    dtype: str
    batch_size: int = 0

    @classmethod
    def parse(cls, text: str) -> Variant:
        """From its name; ValueError says what is wrong."""
        engine, _, rest = text.partition(":")
        dtype, _, batch = rest.partition(":")
        if engine not in ENGINES or dtype not in ("float32", "bfloat16") or (engine == "generate") != batch.isdigit():
            raise ValueError(f"{text!r} is not quire:DTYPE, paged:DTYPE or generate:DTYPE:BATCH (float32 or bfloat16)")
        return cls(engine, dtype, int(batch or 0))

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return ":".join((self.engine, self.dtype, *([str(self.batch_size)] if self.batch_size else [])))


class Peer(Protocol):
    """An engine with a model loaded."""

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """Run all requests; the number of tokens of every sequence."""
        ...

    def close(self) -> None:
        """End threads and free memory."""
        ...


class QuirePeer:
    """This engine as `LLM` gives it, with the settings that it chooses itself."""

    def __init__(self, folder: Path, variant: Variant, num_threads: int) -> None:
        from quire import LLM

        self._llm = LLM(str(folder), dtype=variant.dtype, num_threads=num_threads, skip_tokenizer_init=True)

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """See `Peer`."""
        from quire.bench.measure import params_of

        prompts: list[Any] = [{"prompt_token_ids": each.token_ids} for each in requests]
        outputs = self._llm.generate(prompts, [params_of(each) for each in requests], use_tqdm=False)
        return [len(each.token_ids) for output in outputs for each in output.outputs]

    def close(self) -> None:
        """See `Peer`."""
        self._llm.close()


class GeneratePeer:
    """Transformers' `generate` on left-padded batches."""

    def __init__(self, folder: Path, variant: Variant, num_threads: int) -> None:
        self._model = _load_transformers(folder, variant, num_threads)
        self._batch_size = variant.batch_size

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """See `Peer`. Sorted by output length first: what a batch makes beyond a request's length is wasted."""
        ordered = sorted(requests, key=lambda each: (each.num_output, len(each.token_ids)))
        size = max(1, self._batch_size // requests[0].num_sequences)
        counts = []
        for start in range(0, len(ordered), size):
            counts += self._run_batch(ordered[start : start + size])
        return counts

    def close(self) -> None:
        """See `Peer`."""

    def _run_batch(self, requests: Sequence[BenchRequest]) -> list[int]:
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
            out = self._model.generate(input_ids=token_ids, attention_mask=mask, generation_config=config)
        assert out.shape == (len(requests) * first.num_sequences, longest + config.max_new_tokens)
        return [each.num_output for each in requests for _ in range(each.num_sequences)]


class PagedPeer:
    """Transformers' paged continuous batching (what `generate_batch` runs on), with a limit of its own for each request."""

    def __init__(self, folder: Path, variant: Variant, num_threads: int) -> None:
        self._model = _load_transformers(folder, variant, num_threads)
        self._manager: Any = None
        self._key: tuple[int, float] | None = None

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """See `Peer`."""
        manager = self._manager_for(requests[0])
        for each in requests:
            manager.add_request(each.token_ids, max_new_tokens=each.num_output, eos_token_id=-1)
        counts: list[int] = []
        while len(counts) < sum(each.num_sequences for each in requests):
            output = manager.get_result(timeout=600)
            if output is None or output.error:
                raise RuntimeError(f"generate_batch failed: {output.error if output else 'no result in 600 s'}")
            if output.is_finished():
                counts.append(len(output.generated_tokens))
        return counts

    def close(self) -> None:
        """See `Peer`."""
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager = None

    def _manager_for(self, request: BenchRequest) -> Any:
        """One manager for each way of sampling; made once, as a server would."""
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
            paging = transformers.ContinuousBatchingConfig(block_size=32, num_blocks=2048, max_batch_tokens=1024)
            self._manager = self._model.init_continuous_batching(generation_config=config, continuous_batching_config=paging)
            self._manager.start()
            self._key = key
        return self._manager


ENGINES: dict[str, Callable[[Path, Variant, int], Peer]] = {"quire": QuirePeer, "generate": GeneratePeer, "paged": PagedPeer}


def open_peer(folder: Path, variant: Variant, num_threads: int) -> Peer:
    """Load a model into an engine."""
    return ENGINES[variant.engine](folder, variant, num_threads)


def _sampling(request: BenchRequest) -> dict[str, Any]:
    if request.temperature == 0.0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}


def _load_transformers(folder: Path, variant: Variant, num_threads: int) -> Any:
    import torch

    transformers = _transformers()
    torch.set_num_threads(num_threads)
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dtype = getattr(torch, variant.dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def _transformers() -> Any:
    """The library, untyped as it is."""
    return import_module("transformers")
