"""Models whose images keep sizes of their own, and count their places by row and column."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from optional_packages import require
from vision_models import (
    OWN_SIZES,
    PLACE,
    PLACEHOLDER,
    picture,
    qwen_config,
    write_qwen,
)

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import plan_engine
from quire.errors import ConfigError, InvalidParameterError, UnsupportedModelError

torch = pytest.importorskip("torch")
pillow = pytest.importorskip("PIL.Image")
require("transformers")

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "kv_cache_memory": "4MiB",
    "num_threads": 1,
    "max_num_seqs": 8,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 3}
START, END = PLACEHOLDER + 1, PLACEHOLDER + 3


class Model(NamedTuple):
    """One family: its folder, transformers' model, and an engine."""

    folder: Path
    theirs: Any
    llm: LLM


@pytest.fixture(scope="module", params=["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder: Path = tmp_path_factory.mktemp("own_sizes")
    theirs = write_qwen(folder, request.param)
    with LLM(str(folder), **OPTIONS) as llm:
        yield Model(folder, theirs, llm)


def _prompt(*images: Any, before: tuple[int, ...] = (1, 5)) -> Any:
    token_ids = list(before)
    for number in range(len(images)):
        token_ids += [START, PLACEHOLDER, END, 9 + number]
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": list(images)}}


def _run(llm: LLM, *prompts: Any, **params: Any) -> list[Any]:
    return llm.generate(list(prompts), SamplingParams(**{**GREEDY, **params}), use_tqdm=False)


def _images(*sizes: tuple[int, int]) -> list[Any]:
    return [pillow.fromarray(picture(number, *size)) for number, size in enumerate(sizes)]


def _check(theirs: Any, output: Any, images: list[Any]) -> None:
    """Whether greedy tokens and log-probabilities are transformers' own."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    assert output.error is None
    settings = {key: OWN_SIZES[key] for key in OWN_SIZES if key != "image_processor_type"}
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    token_ids = torch.tensor([prompt + answer])
    inputs = Qwen2VLImageProcessorPil(**settings)(images, return_tensors="pt")
    kinds = (token_ids == PLACEHOLDER).int()
    with torch.no_grad():
        logits = theirs(input_ids=token_ids, mm_token_type_ids=kinds, **inputs).logits[0]
    logits = logits[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer
    expected, scale = torch.log_softmax(logits, -1), float(logits.abs().max())
    for place, entry in enumerate(output.outputs[0].logprobs):
        for token_id, found in entry.items():
            assert abs(found.logprob - float(expected[place, token_id])) < 1e-4 * scale


@pytest.mark.slow_combinations
@pytest.mark.parametrize(
    "sizes",
    [[(40, 30)], [(14, 150)], [(28, 28), (90, 31)], [(100, 200), (33, 40), (14, 60)]],
    ids=str,
)
def test_answers_are_those_of_transformers(sizes: list[tuple[int, int]], model: Model) -> None:
    images = _images(*sizes)
    [output] = _run(model.llm, _prompt(*images))
    _check(model.theirs, output, images)


def test_further_turns_are_those_of_transformers(model: Model) -> None:
    """The second turn finds the first one in the cache, its positions behind an image included."""
    images = _images((61, 45), (30, 90))
    [first] = _run(model.llm, _prompt(images[0], before=(3, 3)))
    turn = [3, 3, START, PLACEHOLDER, END, 9, *first.outputs[0].token_ids, 7, START, PLACEHOLDER]
    prompt = {"prompt_token_ids": [*turn, END, 8], "multi_modal_data": {"image": images}}
    [second] = _run(model.llm, prompt)
    assert second.num_cached_tokens > len(first.prompt_token_ids)
    _check(model.theirs, second, images)


def test_bits_are_the_same_in_chunks_and_from_the_cache(model: Model) -> None:
    images = _images((50, 64), (30, 30))
    prompts = [_prompt(*images), _prompt(images[1], before=(4,)), {"prompt_token_ids": [3, 4, 5]}]
    expected = [_run(model.llm, each)[0].outputs[0].logprobs for each in prompts]
    with LLM(str(model.folder), **OPTIONS, max_num_batched_tokens=8) as llm:
        for _ in range(2):
            found = _run(llm, *prompts)
            assert [each.outputs[0].logprobs for each in found] == expected
        assert found[0].num_cached_tokens > 0


def test_the_operator_says_how_large_images_are(model: Model) -> None:
    settings = {"max_pixels": 4 * PLACE**2}
    prompt = _prompt(*_images((200, 200)))
    with LLM(str(model.folder), **OPTIONS, mm_processor_kwargs=settings) as llm:
        [small] = _run(llm, prompt)
    [large] = _run(model.llm, prompt)
    assert len(small.prompt_token_ids) == 6 + 3 and len(large.prompt_token_ids) == 6 + 15
    assert small.outputs[0].token_ids != large.outputs[0].token_ids


def test_a_prompt_says_how_large_its_images_are(model: Model) -> None:
    prompt = _prompt(*_images((200, 200)))
    [large, small, again] = _run(
        model.llm,
        prompt,
        {**prompt, "mm_processor_kwargs": {"max_pixels": 4 * PLACE**2}},
        prompt,
    )
    assert len(small.prompt_token_ids) == 6 + 3 and len(large.prompt_token_ids) == 6 + 15
    assert again.outputs[0].logprobs == large.outputs[0].logprobs != small.outputs[0].logprobs


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"size": 3}, r"\['size'\].*takes min_pixels and max_pixels"),
        ({"max_pixels": 3}, "max_pixels=3"),
        ({"min_pixels": True}, "min_pixels=True"),
        ({"max_pixels": 1 << 40}, "max_pixels=1099511627776"),
        (3, "must be a dict"),
    ],
)
def test_settings_of_a_prompt_that_mean_nothing_are_refused(
    settings: Any, says: str, model: Model
) -> None:
    with pytest.raises(InvalidParameterError, match=says):
        _run(model.llm, {**_prompt(*_images((40, 30))), "mm_processor_kwargs": settings})


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    def make(config: dict[str, Any], processor: Any = None, **options: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = str(tmp_path / "config.json")
        if processor is not None:
            (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
        config_of_engine = EngineConfig(model=model, load_format="dummy", **{**OPTIONS, **options})
        return plan_engine(config_of_engine).plan

    return make


def test_the_largest_image_is_planned(plan: Any) -> None:
    images = plan(qwen_config("Qwen2_5_VL")).images
    assert images.max_places == 256, "max_model_len"
    large = plan(qwen_config("Qwen2_5_VL"), mm_processor_kwargs={"max_pixels": 9 * 28**2}).images
    assert images.workspace_bytes > large.workspace_bytes


@pytest.mark.parametrize(
    ("processor", "options", "error", "says"),
    [
        ({**OWN_SIZES, "patch_size": 14}, {}, ConfigError, r"\(14, 2, 2\).*\(7, 2, 2\)"),
        ({**OWN_SIZES, "min_pixels": 10**7}, {}, UnsupportedModelError, "min_pixels"),
        ({**OWN_SIZES, "max_pixels": 0}, {}, UnsupportedModelError, "max_pixels"),
        ({**OWN_SIZES, "size": 3}, {}, UnsupportedModelError, "shortest_edge"),
        (None, {"mm_processor_kwargs": {"x": 1}}, UnsupportedModelError, "x=1"),
    ],
)
def test_processors_that_do_not_fit_are_refused(
    processor: Any, options: Any, error: type[Exception], says: str, plan: Any
) -> None:
    with pytest.raises(error, match=says):
        plan(qwen_config("Qwen2VL"), processor, **options)


def test_an_image_that_is_too_large_is_refused(model: Model) -> None:
    refusal = pytest.raises(InvalidParameterError, match=r"takes 24 places.*at most 16")
    with LLM(str(model.folder), **OPTIONS, max_model_len=16) as llm, refusal:
        _run(llm, _prompt(*_images((56, 84))))
