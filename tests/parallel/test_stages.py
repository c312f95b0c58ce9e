"""A pipeline's stages, one after the other in this process, give the bits of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from program_cases import SPECS, WANTED, are_equal, run_ragged, wanted_rows
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.cpu.kernels import CpuKernels
from quire.kernels.interface import AttentionBatch
from quire.kernels.lora import StepAdapters
from quire.kernels.placed import StepContent
from quire.models.lowering import lower
from quire.nn.builder import build_decoder
from quire.nn.decoder import DecoderModel
from quire.nn.parts import ModelPart
from quire.parallel import pipeline
from quire.parallel.adapters import FollowedAdapters
from quire.parallel.divided import asked
from quire.parallel.pipeline import of_stage, run_stage, split_step, with_states
from quire.program.stages import most_stages
from quire.weights.dummy import DummyWeights

pytestmark = pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason="needs the native module")
Caches = Sequence[tuple[Tensor, Tensor]]


def build_stages(name: str, num_stages: int) -> list[DecoderModel]:
    return [
        build_decoder(
            SPECS[name], DummyWeights(), CpuKernels(), dtype="bfloat16", max_model_len=64,
            part=ModelPart(stage=stage, num_stages=num_stages),
        )
        for stage in range(num_stages)
    ]  # fmt: skip


class Chain:
    """All stages as one forward pass."""

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
        found: list[Tensor] = []
        for piece in split_step(len(self._models), batch, num_wanted):
            part = slice(piece.tokens.start, piece.tokens.stop)
            first, *later = self._models
            caches = first.caches
            assert caches is not None
            states = first.run(
                token_ids[part], positions[part], of_stage(piece.batch, caches),
                kv_caches[: len(caches)],
            )  # fmt: skip
            command = asked(token_ids[part], positions[part], piece.batch, piece.num_wanted)
            for model in later:
                assert model.caches is not None
                own = kv_caches[model.caches.start : model.caches.stop]
                command, row, states = run_stage(
                    model.run, with_states(command, piece.tokens.start, states), own, model.caches, FollowedAdapters(),
                    is_last=model is later[-1],
                )  # fmt: skip
                assert row == piece.tokens.start
            found.append(states)
        return torch.cat(found)


CASES = [
    pytest.param(name, marks=() if name in ("gpt2", "latent") else pytest.mark.slow)
    for name in SPECS
]


@pytest.mark.parametrize("name", CASES)
def test_stages_give_the_bits_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_decoder(
        SPECS[name], DummyWeights(), CpuKernels(), dtype="bfloat16", max_model_len=64
    )
    for num_stages in range(2, most_stages(lower(SPECS[name])[0]) + 1):
        models = build_stages(name, num_stages)
        tables = sum(each.nbytes for each in whole.weights.ropes)
        assert sum(each.num_bytes for each in models) <= whole.num_bytes + num_stages * tables
        for least in (1, 5, 1000):
            monkeypatch.setattr(pipeline, "LEAST_TOKENS", least)
            for num_wanted in (None, WANTED[2]):
                expected, theirs = run_ragged(whole, num_wanted)
                found, ours = run_ragged(whole, num_wanted, Chain(models))
                assert are_equal(ours, theirs)
                rows = range(len(expected)) if num_wanted is None else wanted_rows(num_wanted)
                assert torch.equal(found[list(rows)], expected[list(rows)])


def test_pieces_have_every_token_once_and_end_where_sequences_go_on() -> None:
    lengths = torch.tensor([70, 1, 1, 90], dtype=torch.int32)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    context = lengths + torch.tensor([30, 5, 9, 0], dtype=torch.int32)
    positions = torch.cat(
        [torch.arange(int(c - n), int(c)) for c, n in zip(context, lengths, strict=True)]
    )
    batch = AttentionBatch(
        starts, context, torch.arange(40, dtype=torch.int32).view(4, 10), positions + 1000,
        positions, 90, 100,
    )  # fmt: skip
    wanted = torch.tensor([1, 1, 1, 60], dtype=torch.int32)
    pieces = list(split_step(2, batch, wanted))
    assert [each.tokens for each in pieces] == [
        range(0, 32), range(32, 64), range(64, 97), range(97, 129), range(129, 162),
    ]  # fmt: skip
    assert len(list(split_step(2, batch, wanted, sees_ahead=True))) == 1
    num_wanted = torch.zeros(4, dtype=torch.int32)
    for piece in pieces:
        own, part = piece.batch, slice(piece.tokens.start, piece.tokens.stop)
        assert torch.equal(own.positions, positions[part])
        ends = own.query_start[1:].long() - 1
        assert torch.equal(own.context_len.long(), own.positions[ends] + 1)
        assert own.max_query_len == int(own.query_start.diff().max())
        assert piece.num_wanted is not None
        rows = own.block_tables[:, 0] // 10
        num_wanted.index_add_(0, rows, piece.num_wanted)
    assert torch.equal(num_wanted, wanted)
