"""Rows from outside: put in the place of embeddings, or taken as they are, by every back end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from vision_models import (
    LLAVA,
    NUM_TOKENS,
    OWN_SIZES,
    PATCH,
    PLACE,
    picture,
    qwen_config,
)

from quire.common.frozen_record import replace
from quire.errors import ConfigError
from quire.kernels import cpu
from quire.kernels.interface import AttentionBatch
from quire.kernels.interpreter import Interpreter
from quire.kernels.placed import PlacedRows, Rotations, StepContent
from quire.kernels.selection import load
from quire.models.declaration import VisionSpec
from quire.models.image_places import tower_stages
from quire.models.image_processing import read_image_processing
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.nn.decoder import DecoderModel
from quire.nn.rope import mixed_rotations
from quire.nn.vision import VisionModel, parts_of
from quire.quant.linears import FloatLinears
from quire.weights.dummy import DummyWeights

DTYPES = ["float32", "bfloat16"]
BACK_ENDS = ["reference", *(["cpu"] if cpu.IMPORT_ERROR is None else [])]
PROCESSING = read_image_processing({"size": 28, "crop_size": 28})


def _vision() -> VisionSpec:
    vision = declare(LLAVA).vision
    assert vision is not None
    return vision


def _decoder(name: str, dtype: str) -> DecoderModel:
    return build_decoder(declare(LLAVA), DummyWeights(), load(name), dtype=dtype, max_model_len=64)


def _hidden(
    model: DecoderModel,
    run: Any,
    placed: PlacedRows | None,
    rotations: Rotations | None = None,
    wanted: int | None = None,
) -> Any:
    num_tokens = 9
    positions = torch.arange(num_tokens)
    batch = AttentionBatch(
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_len=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slots=positions,
        positions=positions,
        max_query_len=num_tokens,
        max_context_len=num_tokens,
    )
    caches = [(torch.zeros(1, 2, 16, 16, dtype=model.dtype),) * 2 for _ in range(2)]
    caches = [(keys.clone(), keys.clone()) for keys, _ in caches]
    num_wanted = None if wanted is None else torch.tensor([wanted], dtype=torch.int32)
    content = StepContent(placed, rotations)
    return run(positions + 5, positions, batch, caches, num_wanted, None, content)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACK_ENDS)
def test_placed_rows_stand_for_embeddings(name: str, dtype: str) -> None:
    """The rows of other tokens, put in their place, give what those tokens give."""
    model = _decoder(name, dtype)
    table: Any = model.weights.tables[0]
    tokens = torch.tensor([6, 1, 3])
    same = PlacedRows(tokens, table[tokens + 5].contiguous())
    plain = _hidden(model, model.run, None)
    assert torch.equal(_hidden(model, model.run, same), plain)
    other = PlacedRows(tokens, table[tokens + 50].contiguous())
    found = _hidden(model, model.run, other)
    assert torch.equal(found[:1], plain[:1]) and not torch.equal(found[1:], plain[1:])
    one_by_one = Interpreter(model.program, model.program, model.weights, model.kernels)
    assert torch.equal(_hidden(model, one_by_one, other), found)


@pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason="no native kernels")
@pytest.mark.parametrize(
    ("tokens", "shape", "dtype", "says"),
    [
        ([9], (1, 64), "float32", "at token 9 of 9"),
        ([-1], (1, 64), "float32", "at token -1"),
        ([0], (1, 32), "float32", "rows of 32 to be placed where it takes 64"),
        ([0], (1, 64), "bfloat16", "rows of"),
        ([0, 1], (1, 64), "float32", "placed_tokens"),
        ([0] * 10, (10, 64), "float32", "number of placed rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    tokens: list[int], shape: tuple[int, int], dtype: str, says: str
) -> None:
    model = _decoder("cpu", "float32")
    placed = PlacedRows(torch.tensor(tokens), torch.zeros(shape, dtype=getattr(torch, dtype)))
    with pytest.raises((ValueError, TypeError), match=says):
        _hidden(model, model.run, placed)


@pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason="no native kernels")
def test_a_program_without_such_operations_takes_no_rows() -> None:
    text = {**LLAVA["text_config"], "architectures": ["LlamaForCausalLM"]}
    model = build_decoder(
        declare(text), DummyWeights(), load("cpu"), dtype="float32", max_model_len=64
    )
    with pytest.raises(ValueError, match="takes no rows from outside"):
        _hidden(model, model.run, PlacedRows(torch.tensor([0]), torch.zeros(1, 64)))


def _rows(name: str, dtype: str) -> Any:
    floats = FloatLinears(DummyWeights(), load(name), getattr(torch, dtype))
    *pauses, rows = VisionModel(_vision(), PROCESSING, floats).encode(picture(1, 28, 28))
    assert pauses == [None] * 3, "five blocks, two a stage"
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_towers_of_all_back_ends_agree(dtype: str) -> None:
    want = _rows("reference", dtype).float()
    assert want.shape == (NUM_TOKENS, 64) and float(want.abs().max()) > 0.01
    for name in BACK_ENDS:
        found = _rows(name, dtype).float()
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("ends", [[5], [2, 5], [1, 2, 3, 4, 5]])
def test_parts_follow_one_another(ends: list[int]) -> None:
    tower = _vision().tower
    parts = parts_of(tower, [range(first, end) for first, end in itertools.pairwise([0, *ends])])
    assert sum((part.blocks for part in parts), ()) == tower.blocks
    assert parts[0].entry is tower.entry and all(part.entry is None for part in parts[1:])
    assert parts[0].width == 3 * PATCH * PATCH and all(part.width == 32 for part in parts[1:])


def test_a_part_of_a_tower_attends_to_one_thing() -> None:
    vision = replace(_vision(), window=2, whole_blocks=frozenset({1, 4}))
    assert tower_stages(vision) == (range(1), range(1, 2), range(2, 4), range(4, 5))
    assert tower_stages(_vision()) == (range(2), range(2, 4), range(4, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACK_ENDS)
def test_rotations_stand_for_positions(name: str, dtype: str) -> None:
    """Those of the same positions change no bit, however many hidden states are wanted; others
    do."""
    model = _decoder(name, dtype)
    table = model.weights.ropes[0]
    plain = _hidden(model, model.run, None)
    same = Rotations(torch.arange(9), table)
    mixed = mixed_rotations(table, torch.arange(9).repeat(3, 1), (0, 1, 2, 0, 1, 2, 2, 1))
    one_by_one = Interpreter(model.program, model.program, model.weights, model.kernels)
    for rotations in (same, Rotations(torch.arange(9), mixed)):
        assert torch.equal(_hidden(model, model.run, None, rotations), plain)
    other = Rotations(torch.arange(9) // 2, table)
    turned = _hidden(model, model.run, None, other)
    assert torch.equal(turned[:1], plain[:1]) and not torch.equal(turned[-1:], plain[-1:])
    for wanted in (None, 1, 9):
        for run in (model.run, one_by_one):
            assert torch.equal(_hidden(model, run, None, other, wanted)[-1:], turned[-1:])


@pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason="no native kernels")
@pytest.mark.parametrize(
    ("rows", "shape", "says"),
    [
        ([0] * 8 + [4], (4, 2, 8), "token 8 is turned by row 4 of 4"),
        ([-1] * 9, (4, 2, 8), "row -1"),
        ([0] * 9, (4, 2, 4), "4 pairs for heads that have 8"),
        ([0] * 8, (4, 2, 8), "rotated_by"),
        ([0] * 9, (4, 3, 8), "expected rotations"),
    ],
)
def test_rotations_that_do_not_fit_are_refused(
    rows: list[int], shape: tuple[int, ...], says: str
) -> None:
    model = _decoder("cpu", "float32")
    rotations = Rotations(torch.tensor(rows), torch.zeros(shape))
    with pytest.raises(ValueError, match=says):
        _hidden(model, model.run, None, rotations)


@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_tower_that_turns_its_patches_needs_rotations(name: str) -> None:
    vision = declare(qwen_config("Qwen2VL")).vision
    assert vision is not None
    floats = FloatLinears(DummyWeights(), load(name), torch.float32)
    tower = VisionModel(vision, read_image_processing(OWN_SIZES), floats)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises((ValueError, AssertionError), match="rotations from outside"):
        tower._stages[0].run(torch.zeros(4, 6 * PATCH**2), 0, ends)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_towers_over_images_of_any_size_agree(family: str, dtype: str) -> None:
    vision = declare(qwen_config(family)).vision
    assert vision is not None
    found = []
    for name in BACK_ENDS:
        floats = FloatLinears(DummyWeights(), load(name), getattr(torch, dtype))
        tower = VisionModel(vision, read_image_processing(OWN_SIZES), floats)
        *_, rows = tower.encode(picture(1, 3 * PLACE, 5 * PLACE))
        assert rows is not None
        found.append(rows.float())
    assert (
        found[0].shape == (15, 64 * vision.num_projectors) and float(found[0].abs().max()) > 0.001
    )
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(found[-1], found[0], atol=tolerance, rtol=tolerance)


def test_heads_that_the_kernels_lack_are_refused() -> None:
    config = LLAVA | {"vision_config": LLAVA["vision_config"] | {"hidden_size": 2080,
                                                                "num_attention_heads": 2}}  # fmt: skip
    vision = declare(config).vision
    assert vision is not None
    for name in BACK_ENDS:
        if name == "cpu":
            floats = FloatLinears(DummyWeights(), load(name), torch.float32)
            with pytest.raises(ConfigError, match="image tower"):
                VisionModel(vision, PROCESSING, floats)
