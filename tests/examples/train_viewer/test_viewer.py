"""The viewer's pictures, questions and chats, and what the shipped one answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image

import quire
from examples.train_viewer.conversations import (
    NOT_LEARNT,
    TURN_END,
    Encoder,
    draw_conversation,
)
from examples.train_viewer.evaluate import answers, count, unseen
from examples.train_viewer.questions import Question, ask, describe, place_of, shapes_of
from examples.train_viewer.scenes import (
    COLORS,
    NUM_PATCHES,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    draw_scene,
    is_held_out,
    paint,
)
from quire import LLM, SamplingParams

VIEWER = Path(quire.__file__).parent / "assets" / "quire-viewer"
TOKENIZER = tokenizers.Tokenizer.from_file(str(VIEWER / "tokenizer.json"))

STAR = Thing("star", "red", "big", 0.25, 0.3, 0.2)
DOT = Thing("circle", "blue", "small", 0.75, 0.8, 0.12)


def test_scenes_are_plain_and_some_pairs_are_never_drawn() -> None:
    rng = random.Random(0)
    held_out = {(shape, color) for shape in SHAPES for color in COLORS if is_held_out(shape, color)}
    assert 0 < len(held_out) < 12
    for number in range(600):
        has_held_out = number % 2 == 1
        scene = draw_scene(rng, has_held_out=has_held_out)
        pairs = {(thing.shape, thing.color) for thing in scene.things}
        assert has_held_out or not pairs & held_out
        assert list(scene.things) == sorted(scene.things, key=lambda thing: thing.x)
        for first, second in itertools.combinations(scene.things, 2):
            distance = np.hypot(first.x - second.x, first.y - second.y)
            assert distance > first.radius + second.radius
        for thing in scene.things:
            low, high = SIZES[thing.size]
            assert low <= thing.radius <= high and thing.color != scene.background


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_painted_in_its_colour_where_it_is(shape: str) -> None:
    scene = Scene("white", (Thing(shape, "green", "big", 0.3, 0.7, 0.2),))
    image = paint(scene, random.Random(1))
    assert image.mode == "RGB"
    pixels = np.asarray(image, int)
    height, width, _ = pixels.shape

    def distance(x: float, y: float, color: str) -> int:
        return int(np.abs(pixels[int(y * height), int(x * width)] - COLORS[color]).max())

    assert distance(0.3, 0.7, "green") < 40
    assert distance(0.8, 0.2, "white") < 40


def test_answers_say_what_the_scene_has() -> None:
    scene = Scene("grey", (STAR, DOT))
    assert describe(scene) == "A big red star and a small blue circle on a grey background."
    assert shapes_of(scene)[1] == {"size": "small", "color": "blue", "shape": "circle"}
    assert [place_of(each) for each in scene.things] == ["at the top left", "at the bottom right"]
    found = {
        question.text: question.answer
        for question in itertools.islice(ask(scene, random.Random(0)), 400)
    }
    expected = {
        "How many shapes are there?": "There are two shapes.",
        "How many stars are there?": "There is one star.",
        "Is the star left of the circle?": "Yes, the star is left of the circle.",
        "Is the star right of the circle?": None,
        "Is the circle above the star?": "No, the circle is below the star.",
        "Which is bigger, the circle or the star?": "The star is bigger than the circle.",
        "What shape is blue?": "The circle is blue.",
        "What color is the star?": "The star is red.",
        "What color is the background?": "The background is grey.",
        "Is there a red star?": "Yes, there is a red star.",
        "Is there a blue star?": "No, there is not a blue star.",
    }
    assert {text: found.get(text) for text in expected} == expected


def test_nothing_is_asked_that_the_picture_leaves_open() -> None:
    twins = Scene("white", (STAR, Thing("star", "blue", "big", 0.75, 0.75, 0.2)))
    asked = list(itertools.islice(ask(twins, random.Random(0)), 400))
    assert not {question.kind for question in asked} & {"colour", "place", "side", "size"}
    between = Thing("star", "red", "big", 0.39, 0.3, 0.2)
    assert place_of(between) is None


def test_a_tokens_target_is_an_answer_or_nothing() -> None:
    encoder = Encoder(TOKENIZER, num_rows=3)
    questions = [Question("a", "What is this?", "A star."), Question("b", "Where?", "On the left.")]
    talk = encoder.encode(questions, has_picture=True)
    assert talk.ids.count(encoder.image_id) == 3 and len(talk.ids) == len(talk.targets)
    learnt = [token for token in talk.targets if token != NOT_LEARNT]
    shown = TOKENIZER.decode(learnt, skip_special_tokens=False)
    assert shown == f"A star.{TURN_END}On the left.{TURN_END}"
    assert sum(talk.shares) == pytest.approx(2)
    assert [share > 0 for share in talk.shares] == [token != NOT_LEARNT for token in talk.targets]
    without = draw_conversation(encoder, random.Random(0), 3, scene=None)
    assert encoder.image_id not in without.ids


def test_an_answer_counts_if_it_is_the_right_one_word_for_word() -> None:
    pairs = unseen(6, has_held_out=True)
    assert len({question.kind for _, question in pairs}) > 5
    assert all(image is not None for image, _ in pairs)
    right = [question.answer for _, question in pairs]
    assert count(pairs, right)["all"] == (len(pairs), len(pairs))
    wrong = [f"{answer[:-1]}?" for answer in right]
    assert all(hits == 0 for hits, _ in count(pairs, wrong).values())
    number = len(pairs) // 2
    assert count(pairs, right[:number] + wrong[number:])["all"] == (number, len(pairs))


def picture(image: Image.Image, text: str) -> dict[str, Any]:
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": text}]
    return {"role": "user", "content": content}


def test_the_shipped_viewer_answers_about_pictures_it_has_not_seen(viewer: LLM) -> None:
    pairs = unseen(12, has_held_out=False)
    right, total = count(pairs, answers(viewer, pairs))["all"]
    assert right / total > 0.85


def test_a_picture_of_another_form_is_seen_whole_and_talked_about(viewer: LLM) -> None:
    """Training and serving write the same tokens, for one turn and for two."""
    image = Image.new("RGB", (301, 220), COLORS["yellow"])
    image.paste(Image.new("RGB", (90, 66), COLORS["blue"]), (30, 60))
    first, second = "What color is the background?", "What shape is blue?"
    params = SamplingParams(temperature=0.0, max_tokens=40)
    chat: Any = [picture(image, first)]
    [output] = viewer.chat(chat, params, use_tqdm=False)
    answer = output.outputs[0].text
    assert answer == "The background is yellow."
    chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": second}]
    [output] = viewer.chat(chat, params, use_tqdm=False)
    assert output.outputs[0].text == "The square is blue."
    turns = [Question("", first, answer), Question("", second, "")]
    talk = Encoder(TOKENIZER, NUM_PATCHES).encode(turns, has_picture=True)
    assert list(output.prompt_token_ids or []) == talk.ids[: len(output.prompt_token_ids or [])]
    assert talk.ids[len(output.prompt_token_ids or []) :] == talk.ids[-2:]  # the turn's end


@pytest.fixture(scope="module")
def viewer() -> Iterator[LLM]:
    with LLM("quire-viewer", kv_cache_memory="16MiB", num_threads=1) as llm:
        yield llm
