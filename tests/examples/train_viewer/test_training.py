"""How the viewer is trained, and the folder that others read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.train_viewer.conversations import Encoder, train_tokenizer
from examples.train_viewer.export import write_folder
from examples.train_viewer.model import new_model, pixels_of
from examples.train_viewer.questions import Question
from examples.train_viewer.scenes import (
    COLORS,
    NUM_PATCHES,
    SHAPES,
    Scene,
    Thing,
    draw_scene,
    paint,
)
from examples.train_viewer.train import PatchLabels, PatchNames, train_decoder, train_tower
from quire import LLM, SamplingParams

pytestmark = pytest.mark.slow  # importing transformers' models alone takes seconds


SCENE = Scene(
    "white",
    (Thing("star", "red", "big", 0.25, 0.25, 0.2), Thing("cross", "blue", "small", 0.8, 0.5, 0.12)),
)
EDGE = int(NUM_PATCHES**0.5)


def test_the_label_of_a_patch_is_what_lies_on_it() -> None:
    labels = PatchLabels()(SCENE)
    assert (labels < torch.tensor(PatchLabels.COUNTS)[:, None]).all() and (labels >= 0).all()
    shapes, colors, sizes, numbers, x, y, columns, rows = labels.view(-1, EDGE, EDGE)
    names = tuple(COLORS)
    assert shapes[1, 1] == 1 + SHAPES.index("star") and shapes[EDGE - 1, EDGE - 1] == 0
    assert (colors[1, 1], colors[EDGE - 1, 0]) == (names.index("red"), names.index("white"))
    assert sizes[2, 2] == 2 and sizes[0, EDGE - 1] == 0
    assert (numbers[1, 1], numbers[4, 6], numbers[0, EDGE - 1]) == (1, 2, 0)
    assert (x[1, 1], y[1, 1], x[4, 6], y[4, 6], x[7, 0]) == (3, 3, 7, 5, 0)
    assert (columns[1, 3], rows[1, 3]) == (3, 1)


def test_the_name_of_a_patch_is_what_an_answer_says_of_it() -> None:
    tokenizer = train_tokenizer()
    names = PatchNames(tokenizer)(SCENE).view(EDGE, EDGE, -1)
    said = {
        place: tokenizer.decode(names[place].tolist()).split() for place in ((1, 1), (4, 6), (7, 0))
    }
    assert said[1, 1] == ["star", "red", "big", "one", "left", "top"]
    assert said[4, 6] == ["cross", "blue", "small", "two", "right", "middle"]
    assert set(said[7, 0]) == {"white"}


def test_a_few_steps_make_a_folder_that_the_engine_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = Encoder(tokenizer, NUM_PATCHES)
    model = new_model()
    before = {
        name: weight.detach().clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    train_tower(model.model.vision_tower, random.Random(0), 2.0)
    train_decoder(model, tokenizer, random.Random(0), 4.0)
    weights = dict(model.named_parameters())
    assert all(not torch.equal(before[name], weights[name]) for name in before)
    write_folder(model, tmp_path / "tokenizer.json", tmp_path / "made")

    image = paint(draw_scene(random.Random(5)), random.Random(5))
    question = Question("description", "What is this?", "")
    head = encoder.encode([question], has_picture=True).ids[:-2]
    read: Any = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "made", dtype=torch.float32
    )
    expected = read.generate(
        input_ids=torch.tensor([head]), pixel_values=pixels_of(image)[None],
        attention_mask=torch.ones(1, len(head), dtype=torch.long), max_new_tokens=16, do_sample=False,
    )[0, len(head) :].tolist()  # fmt: skip
    content = [
        {"type": "image_pil", "image_pil": image},
        {"type": "text", "text": question.text},
    ]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(str(tmp_path / "made"), dtype="float32", kv_cache_memory="16MiB") as llm:
        [output] = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    assert list(output.prompt_token_ids) == head
    assert list(output.outputs[0].token_ids) == expected[: len(output.outputs[0].token_ids)]
    assert len(output.outputs[0].token_ids) > 0
