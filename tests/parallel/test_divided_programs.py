"""Ranks that each hold a part of every matrix give the bits of one process: here they are threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from program_cases import SPECS, WANTED, are_equal, build, run_ragged
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.cpu.kernels import CpuKernels
from quire.kernels.exchange import Exchange
from quire.kernels.interface import AttentionBatch, Kernels
from quire.kernels.interpreter import Interpreter
from quire.kernels.lora import StepAdapters
from quire.kernels.placed import StepContent
from quire.models.declaration import DecoderSpec
from quire.nn.builder import build_decoder
from quire.nn.decoder import DecoderModel
from quire.nn.head import DividedHead
from quire.nn.parts import ModelPart
from quire.parallel.shared_memory import RankCommand, SharedMemory, bytes_of_command, create_memory
from quire.program import operations as ops
from quire.program.passes import select_wanted
from quire.program.sharding import cache_heads, split_heads
from quire.quant.formats import formats_at_load
from quire.quant.linears import FloatLinears, LinearLoader, QuantizingLinears
from quire.weights.dummy import DummyWeights

pytestmark = pytest.mark.skipif(
    cpu.IMPORT_ERROR is not None or not hasattr(os, "memfd_create"),
    reason="ranks need the native module and memory without a name",
)
Caches = Sequence[tuple[Tensor, Tensor]]


@contextmanager
def exchanges(num_ranks: int) -> Iterator[list[Exchange]]:
    fileno = create_memory(bytes_of_command(0, 0))
    shared = SharedMemory(fileno, bytes_of_command(0, 0))
    yield [shared.exchange(rank, num_ranks, 5.0) for rank in range(num_ranks)]
    os.close(fileno)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run every rank's part in a thread of its own."""
    results: dict[int, Any] = {}

    def run(place: int, call: Callable[[], Any]) -> None:
        with torch.inference_mode():
            results[place] = call()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert len(results) == len(calls), "a rank has failed"
    return [results[place] for place in range(len(calls))]


class Ranks:
    """A group as one forward pass: the caches of one process are cut for it, and put together."""

    def __init__(self, models: Sequence[DecoderModel]) -> None:
        self._models = models

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv_caches: Caches,
        num_wanted: Tensor | None = None,
        adapters: StepAdapters | None = None,
        content: StepContent | None = None,
    ) -> Tensor:
        own = [
            [
                tuple(tensor[:, part].contiguous() for tensor in pair)
                for pair, part in zip(kv_caches, keys, strict=True)
            ]
            for keys in map(self._keys, range(len(self._models)))
        ]
        for caches, model in zip(own, self._models, strict=True):
            for place, layer in enumerate(model.spec.kv_layers):
                if layer.is_latent:
                    caches[place] = (caches[place][0], caches[place][0])
        found = at_once(
            *(
                lambda model=model, caches=caches: model.run(
                    token_ids, positions, batch, caches, num_wanted
                )
                for model, caches in zip(self._models, own, strict=True)
            )
        )
        for rank, caches in enumerate(own):
            for pair, mine, part in zip(kv_caches, caches, self._keys(rank), strict=True):
                for tensor, ours in zip(pair, mine, strict=True):
                    tensor[:, part] = ours
        states: Tensor = found[0]
        assert all(torch.equal(each, states) for each in found)
        return states

    def _keys(self, rank: int) -> list[slice]:
        counts = cache_heads(self._models[rank].program)
        found = []
        for count, attention in zip(counts, self._models[rank].spec.attentions, strict=True):
            layer = attention.kv_layer
            part = range(layer.num_kv_heads)
            if count < layer.num_kv_heads:
                heads = ops.Heads(attention.num_heads, layer.num_kv_heads, layer.head_dim)
                parts = split_heads(heads, len(self._models))
                assert parts is not None
                part = parts[rank][1]
            found.append(slice(part.start, part.stop))
        return found


def interpreted(model: DecoderModel) -> DecoderModel:
    program = model.program
    run = Interpreter(program, select_wanted(program), model.weights, model.kernels)
    return replace(model, run=run)


def build_ranks(
    spec: DecoderSpec,
    kernels: Kernels,
    ranks: Sequence[Exchange],
    dtype: str,
    method: str | None,
    **options: bool,
) -> list[DecoderModel]:
    return [build_one(spec, kernels, dtype, method, each, **options) for each in ranks]


def build_one(
    spec: DecoderSpec,
    kernels: Kernels,
    dtype: str,
    method: str | None,
    exchange: Exchange | None = None,
    *,
    is_by_expert: bool = False,
) -> DecoderModel:
    def quantize(floats: FloatLinears) -> LinearLoader:
        if method is None:
            return floats
        return QuantizingLinears(floats, formats_at_load(spec, method), torch.float32)

    return build_decoder(
        spec, DummyWeights(), kernels, dtype=dtype, max_model_len=64,
        part=ModelPart(exchange, is_by_expert), quantize=quantize,
    )  # fmt: skip


FAST = ("odd heads", "olmo2")
CASES = [
    pytest.param(name, num_ranks, marks=() if name in FAST and num_ranks == 3 else pytest.mark.slow)
    for name in SPECS
    for num_ranks in (2, 3)
]


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_ranks_give_the_bits_of_one_process(name: str, num_ranks: int) -> None:
    kernels = CpuKernels()
    whole = build(SPECS[name], kernels, "bfloat16")
    with exchanges(num_ranks) as ranks:
        models = build_ranks(SPECS[name], kernels, ranks, "bfloat16", None)
        for num_wanted in (None, WANTED[2]):
            expected, theirs = run_ragged(whole, num_wanted)
            found, ours = run_ragged(whole, num_wanted, Ranks(models))
            assert torch.equal(found, expected) and are_equal(ours, theirs)
        states = run_ragged(whole)[0]
        expected_logits, best = whole.logits(states), whole.best_tokens(states)
        for logits in at_once(*(lambda m=m: m.logits(states) for m in models)):
            assert torch.equal(logits, expected_logits)
        for chosen in at_once(*(lambda m=m: m.best_tokens(states) for m in models)):
            assert (chosen is None) == (best is None)
            if best is not None:
                assert all(map(torch.equal, chosen, best))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "method"), [("float32", None), ("bfloat16", "int4")])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_same_holds_in_every_form_of_weights(name: str, dtype: str, method: str | None) -> None:
    kernels = CpuKernels()
    whole = build_one(SPECS[name], kernels, dtype, method)
    with exchanges(3) as ranks:
        models = build_ranks(SPECS[name], kernels, ranks, dtype, method)
        expected, theirs = run_ragged(whole)
        for each in (models, list(map(interpreted, models))):
            found, ours = run_ragged(whole, None, Ranks(each))
            assert torch.equal(found, expected) and are_equal(ours, theirs)


MIXTURES = [
    pytest.param("olmoe", 3, "float32", None),
    *(
        pytest.param(name, num_ranks, dtype, method, marks=pytest.mark.slow)
        for name in ("qwen2 moe", "latent", "olmoe")
        for num_ranks in (2, 3)
        for dtype, method in (("bfloat16", None), ("bfloat16", "int8"), ("float32", "int4"))
    ),
]


@pytest.mark.parametrize(("name", "num_ranks", "dtype", "method"), MIXTURES)
def test_ranks_with_experts_of_their_own_give_the_bits_of_one_process(
    name: str, num_ranks: int, dtype: str, method: str | None
) -> None:
    kernels = CpuKernels()
    whole = build_one(SPECS[name], kernels, dtype, method)
    with exchanges(num_ranks) as ranks:
        models = build_ranks(SPECS[name], kernels, ranks, dtype, method, is_by_expert=True)
        for num_wanted in (None, WANTED[2]):
            expected, theirs = run_ragged(whole, num_wanted)
            found, ours = run_ragged(whole, num_wanted, Ranks(models))
            assert torch.equal(found, expected) and are_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "is_by_expert"), [("llama", False), ("olmoe", False), ("olmoe", True)]
)
def test_each_rank_holds_its_share_of_what_can_be_divided(name: str, is_by_expert: bool) -> None:
    kernels = CpuKernels()
    whole = build(SPECS[name], kernels)
    with exchanges(2) as ranks:
        models = build_ranks(
            SPECS[name], kernels, ranks, "float32", None, is_by_expert=is_by_expert
        )
    tables = sum(each.nbytes for each in whole.weights.ropes)
    for model in models:
        assert model.num_bytes - tables < 0.6 * (whole.num_bytes - tables)
        assert isinstance(model.divided_head, DividedHead)


def test_of_equal_logits_the_lowest_token_counts_across_ranks() -> None:
    kernels = CpuKernels()
    weight = torch.zeros(64, 8)
    weight[[5, 40]] = 1.0
    states = torch.ones(2, 8)
    with exchanges(2) as ranks:
        heads = [
            DividedHead(
                kernels, kernels.pack_linear(weight[part.start : part.stop]), each, part, 64
            )
            for each, part in zip(ranks, (range(32), range(32, 64)), strict=True)
        ]
        for ids, values in at_once(*(lambda head=head: head.argmax(states) for head in heads)):
            assert ids.tolist() == [5, 5] and values.tolist() == [8.0, 8.0]


def test_values_larger_than_the_buffer_go_through_in_pieces() -> None:
    num_rows, width = 700, 16384
    value = torch.arange(num_rows * width, dtype=torch.float32).view(num_rows, width)
    parts = [range(5000), range(5000, width)]
    with exchanges(2) as ranks:
        found = at_once(
            *(
                lambda each=each, part=part: each.columns(
                    value[:, part.start : part.stop], [part], width
                )
                for each, part in zip(ranks, parts, strict=True)
            )
        )
    assert all(torch.equal(each, value) for each in found)


def test_a_rank_that_says_nothing_is_noticed() -> None:
    fileno = create_memory(bytes_of_command(0, 0))
    try:
        alone = SharedMemory(fileno, bytes_of_command(0, 0)).exchange(0, 2, 0.2)
        with pytest.raises(RuntimeError, match="rank 1 gives no sign of life"):
            alone.columns(torch.ones(1, 1), [range(1)], 2)
        assert alone.native.is_lost
    finally:
        os.close(fileno)


def test_commands_arrive_as_they_were_sent() -> None:
    size = bytes_of_command(1024, 4)
    fileno = create_memory(size)
    try:
        memory = SharedMemory(fileno, size)
        tensors = (
            torch.arange(5), None, torch.ones(2, 3, dtype=torch.bfloat16),
            torch.zeros(0, dtype=torch.int32),
        )  # fmt: skip
        memory.write(RankCommand(3, (7, -1), tensors))
        kind, numbers, found = memory.read()
        assert (kind, numbers) == (3, (7, -1)) and found[1] is None
        for before, after in zip(tensors, found, strict=True):
            assert before is None or (after is not None and torch.equal(before, after))
    finally:
        os.close(fileno)
