"""Gemma 3 with images: the answers of transformers, and the same bits however an image is computed,
whose tokens see one another both ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optional_packages import require
from vision_models import (
    GEMMA,
    GEMMA_FRAME,
    GEMMA_PLACES,
    GEMMA_PROCESSOR,
    GEMMA_TOKENS,
    PLACEHOLDER,
    picture,
    write_gemma3,
    write_gemma3_tokenizer,
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
    "max_num_seqs": 4,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 3}
TEXT = list(range(20, 45))


def _prompt(*images: Any, salt: int = 0, text: list[int] = TEXT, **more: Any) -> Any:
    """A prompt with a place for each image between other tokens."""
    token_ids = [1, 5 + salt]
    for number in range(len(images)):
        token_ids += [GEMMA_FRAME[0], PLACEHOLDER, GEMMA_FRAME[1], 9 + number, *text]
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": list(images)}, **more}


def _run(llm: LLM, *prompts: Any, **params: Any) -> list[Any]:
    return llm.generate(list(prompts), SamplingParams(**{**GREEDY, **params}), use_tqdm=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gemma3")
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return write_gemma3(folder)


@pytest.fixture(scope="module")
def llm(folder: Path, theirs: Any) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as found:
        yield found


def _logits(theirs: Any, token_ids: list[int], images: list[Any]) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    pixels = Gemma3ImageProcessorPil(**GEMMA_PROCESSOR)(images, return_tensors="pt")
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        return theirs(
            input_ids=ids,
            pixel_values=pixels["pixel_values"],
            token_type_ids=(ids == PLACEHOLDER).long(),
        ).logits[0]


@pytest.mark.parametrize(
    "sizes", [[(40, 30)], [(28, 28)], [(90, 31), (29, 200)], [(33, 40), (60, 28), (28, 61)]]
)
def test_answers_are_those_of_transformers(
    sizes: list[tuple[int, int]], llm: LLM, theirs: Any
) -> None:
    images = [pillow.fromarray(picture(n, *size)) for n, size in enumerate(sizes)]
    [output] = _run(llm, _prompt(*images), prompt_logprobs=1)
    assert output.error is None
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    assert prompt.count(PLACEHOLDER) == GEMMA_PLACES * len(sizes)
    logits = _logits(theirs, prompt + answer, images)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    expected = torch.log_softmax(logits, -1)
    scale = float(logits.abs().max())
    for place, entry in enumerate(output.outputs[0].logprobs):
        for token_id, found in entry.items():
            want = float(expected[len(prompt) - 1 + place, token_id])
            assert abs(found.logprob - want) < 1e-4 * scale
    for place, entry in enumerate(output.prompt_logprobs[1:], 1):
        for token_id, found in entry.items():
            assert abs(found.logprob - float(expected[place - 1, token_id])) < 1e-4 * scale


def test_an_image_sees_itself_both_ways(llm: LLM, theirs: Any) -> None:
    """What transformers gives without the mask for images is something else."""
    image = pillow.fromarray(picture(1))
    [output] = _run(llm, _prompt(image), prompt_logprobs=1)
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    pixels = Gemma3ImageProcessorPil(**GEMMA_PROCESSOR)([image], return_tensors="pt")
    ids = torch.tensor([list(output.prompt_token_ids)])
    with torch.no_grad():
        causal = theirs(input_ids=ids, pixel_values=pixels["pixel_values"]).logits[0]
    causal = torch.log_softmax(causal, -1)
    token_id, found = next(iter(output.prompt_logprobs[-1].items()))
    assert abs(found.logprob - float(causal[-2, token_id])) > 1e-3


VARIANTS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 12},
    "chunks of odd blocks": {"max_num_batched_tokens": 13, "block_size": 8},
    "no cache": {"enable_prefix_caching": False},
    "a tiny pool": {"kv_cache_memory": 300_000, "max_num_batched_tokens": 12, "block_size": 8},
    "whole prompts": {"enable_chunked_prefill": False},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_bits_are_the_same_however_an_image_is_computed(
    variant: str, folder: Path, llm: LLM
) -> None:
    prompts = [
        _prompt(picture(1, 40, 40)),
        _prompt(picture(2, 20, 90), picture(1, 40, 40), salt=1),
        _prompt(picture(3), picture(3), picture(4), salt=2),
        _prompt(picture(1, 40, 40), text=TEXT[:9]),
    ]
    expected = [_run(llm, each)[0].outputs[0].logprobs for each in prompts]
    with LLM(str(folder), **{**OPTIONS, **VARIANTS[variant]}) as other:
        for _ in range(2):  # the second time out of the cache, where there is one
            found = _run(other, *prompts)
            assert [each.outputs[0].logprobs for each in found] == expected


def test_a_prefix_may_end_within_an_image(folder: Path, llm: LLM) -> None:
    """Blocks of four: the first has a token and three of an image's four places. Other prompts then
    take the blocks of the pool, the last ones of a prefix first."""
    media = {"multi_modal_data": {"image": picture(6)}}
    longer = {"prompt_token_ids": [7, PLACEHOLDER, 11, 12], **media}
    expected = _run(llm, longer)[0].outputs[0].logprobs
    pool = {"block_size": 4, "kv_cache_memory": 24 * 2048, "max_model_len": 40}
    hits = set()
    for count in range(1, 5):
        with LLM(str(folder), **{**OPTIONS, **pool}) as small:
            _run(small, {"prompt_token_ids": [7, PLACEHOLDER], **media}, max_tokens=1)
            _run(small, {"prompt_token_ids": list(range(60, 96))}, max_tokens=1)
            _run(small, {"prompt_token_ids": list(range(160, 160 + 4 * count))}, max_tokens=1)
            [found] = _run(small, longer)
            hits.add(found.num_cached_tokens)
            assert found.outputs[0].logprobs == expected
    assert 4 in hits, hits


def test_a_step_has_room_for_an_image(folder: Path, theirs: Any) -> None:
    options = {**OPTIONS, "max_num_batched_tokens": 2 * GEMMA_PLACES + 3}
    with pytest.raises(ConfigError, match=r"all 4 places.*give at least 12"):
        LLM(str(folder), **options)


@pytest.fixture(scope="module")
def speaking(folder: Path, theirs: Any) -> Iterator[LLM]:
    write_gemma3_tokenizer(folder)
    options = {key: value for key, value in OPTIONS.items() if key != "skip_tokenizer_init"}
    with LLM(str(folder), **options) as found:
        yield found


@pytest.mark.parametrize("pan", [False, True])
def test_prompts_are_those_of_transformers(pan: bool, speaking: LLM, folder: Path) -> None:
    """What frames an image is written before the text is encoded: lines that meet are one token."""
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    place, before, behind = GEMMA_TOKENS
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="</s>",
        extra_special_tokens={"image_token": place, "boi_token": before, "eoi_token": behind},
    )
    settings = {**PAN, "do_pan_and_scan": pan}
    processor: Any = Gemma3Processor(
        Gemma3ImageProcessorPil(**GEMMA_PROCESSOR), tokenizer, image_seq_length=GEMMA_PLACES
    )
    images = [pillow.fromarray(picture(1, 30, 95)), pillow.fromarray(picture(2, 28, 28))]
    text = f"user\n{before}What\n\n{before}\n is it?\n"
    want = processor(text=[text], images=[images], **settings)["input_ids"][0]
    more: dict[str, Any] = {"mm_processor_kwargs": settings}
    [raw] = _run(speaking, {"prompt": text, "multi_modal_data": {"image": images}, **more})
    assert list(raw.prompt_token_ids) == list(want)
    parts = [
        {"type": "image_pil", "image_pil": images[0]},
        {"type": "text", "text": "What"},
        {"type": "text", "text": f"is {before}it?"},
    ]
    [chat] = speaking.chat(
        [{"role": "user", "content": parts}], SamplingParams(**GREEDY), use_tqdm=False, **more
    )
    shown = list(chat.prompt_token_ids)
    count = shown.count(PLACEHOLDER) // GEMMA_PLACES
    assert count == (4 if pan else 1) and shown.count(GEMMA_FRAME[0]) == count
    again = processor(text=[f"user\n{before}Whatis "], images=[images[:1]], **settings)
    again = again["input_ids"][0]
    assert shown[: len(again)] == list(again), "what a user spells is no mark"


PAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 10}


@pytest.mark.parametrize("size", [(30, 100), (75, 30), (40, 40), (30, 35)])
def test_crops_are_those_of_transformers(size: tuple[int, int], llm: LLM, theirs: Any) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    image = pillow.fromarray(picture(1, *size))
    settings = {**GEMMA_PROCESSOR, **PAN, "pan_and_scan_max_num_crops": 4,
                "pan_and_scan_min_ratio_to_activate": 1.2}  # fmt: skip
    inputs = Gemma3ImageProcessorPil(**settings)([image], return_tensors="pt")
    count = 1 + int(inputs["num_crops"][0])
    assert (count > 1) == (max(size) / min(size) >= 1.2)
    token_ids = [1]
    for number in range(count):
        token_ids += [GEMMA_FRAME[0], PLACEHOLDER, GEMMA_FRAME[1], 9 + number]
    prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": image},
              "mm_processor_kwargs": PAN}  # fmt: skip
    [output] = _run(llm, prompt)
    asked, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    ids = torch.tensor([asked + answer])
    with torch.no_grad():
        logits = theirs(
            input_ids=ids,
            pixel_values=inputs["pixel_values"],
            token_type_ids=(ids == PLACEHOLDER).long(),
        ).logits[0, len(asked) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer


def test_settings_that_mean_nothing_are_refused(llm: LLM) -> None:
    prompt = _prompt(picture(1), mm_processor_kwargs={"max_pixels": 100})
    with pytest.raises(InvalidParameterError, match="takes do_pan_and_scan"):
        _run(llm, prompt)
    prompt = _prompt(picture(1), mm_processor_kwargs={"do_pan_and_scan": "yes"})
    with pytest.raises(InvalidParameterError, match=r"do_pan_and_scan='yes'.*true or false"):
        _run(llm, prompt)


def _plan(path: Path, config: dict[str, Any], **options: Any) -> Any:
    (path / "config.json").write_text(json.dumps(config))
    model = str(path / "config.json")
    options = {"max_model_len": 256, **OPTIONS, **options}
    return plan_engine(EngineConfig(model=model, load_format="dummy", **options)).plan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mm_tokens_per_image": 5}, "mm_tokens_per_image"),
        ({"image_token_index": 256}, "image_token_index"),
        ({"text_config": {**GEMMA["text_config"], "use_bidirectional_attention": True}}, "use_bi"),
        ({"vision_config": None}, "vision_config"),
    ],
)
def test_configs_that_cannot_be_are_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        _plan(tmp_path, {**GEMMA, **change})


def test_a_published_config_says_little(tmp_path: Path) -> None:
    """Of google/gemma-3-4b-it: what its sections leave out is known."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    vision = {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": vision,
    }
    plan = _plan(tmp_path, config, dtype="bfloat16", kv_cache_memory="64MiB")
    assert plan.spec.num_parameters == 4_300_079_472
    assert plan.spec.vision.pool == 4 and plan.images.max_places == 256
    assert plan.images.max_per_prompt == 13, "more would not fit a message"
