"""Images in prompts: the answers of transformers, a cache that spares the tower, and its limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision_models import (
    LLAVA,
    NEXT,
    NUM_TOKENS,
    PLACEHOLDER,
    PROCESSOR,
    SIGLIP,
    VISION,
    picture,
    siglip_config,
    write_llava,
    write_llava_next,
)

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.assembly.builder import build_engine
from quire.engine.assembly.preparation import plan_engine
from quire.errors import CheckpointError, ConfigError, InvalidParameterError, NotAvailableError
from quire.errors import UnsupportedModelError as Unsupported
from quire.worker.images import ImageTable

torch = pytest.importorskip("torch")
pillow = pytest.importorskip("PIL.Image")

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "kv_cache_memory": "4MiB",
    "num_threads": 1,
    "max_num_seqs": 8,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, "logprobs": 3}


def _prompt(*images: Any, salt: int = 0) -> Any:
    """A prompt with a place for each image between other tokens."""
    token_ids = [1, 5 + salt]
    for number in range(len(images)):
        token_ids += [PLACEHOLDER, 9 + number]
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": list(images)}}


def _run(llm: LLM, *prompts: Any, **params: Any) -> list[Any]:
    return llm.generate(list(prompts), SamplingParams(**{**GREEDY, **params}), use_tqdm=False)


def _table(llm: LLM) -> ImageTable:
    executor: Any = llm.engine.executor
    [table] = [each for each in executor.worker.companions._all if isinstance(each, ImageTable)]
    return table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llava")
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return write_llava(folder)


@pytest.fixture(scope="module")
def llm(folder: Path, theirs: Any) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as found:
        yield found


def _logits(theirs: Any, token_ids: list[int], images: list[Any]) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    pixels = CLIPImageProcessorPil(**PROCESSOR)(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return theirs(input_ids=torch.tensor([token_ids]), pixel_values=pixels).logits[0]


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
    assert len(prompt) == 2 + len(sizes) * (NUM_TOKENS + 1)
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


def test_the_image_decides_the_answer(llm: LLM) -> None:
    outputs = _run(llm, *(_prompt(picture(seed)) for seed in range(6)))
    assert len({tuple(each.outputs[0].token_ids) for each in outputs}) > 3


@pytest.mark.parametrize(
    "overrides",
    [
        {"vision_feature_layer": -1},
        {"vision_feature_layer": 0},
        {"vision_feature_select_strategy": "full"},
        {"multimodal_projector_bias": False, "projector_hidden_act": "gelu_pytorch_tanh"},
    ],
    ids=str,
)
def test_other_towers_are_those_of_transformers(overrides: dict[str, Any], tmp_path: Path) -> None:
    theirs = write_llava(tmp_path, **overrides)
    image = pillow.fromarray(picture(1))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        [output] = _run(llm, _prompt(image))
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    logits = _logits(theirs, prompt + answer, [image])
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("layer", [-1, -2])
def test_siglips_tower_is_that_of_transformers(layer: int, tmp_path: Path) -> None:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    theirs = write_llava(
        tmp_path,
        processor=SIGLIP,
        vision_config=siglip_config(),
        vision_feature_layer=layer,
        vision_feature_select_strategy="full",
    )
    images = [pillow.fromarray(picture(n, *size)) for n, size in enumerate([(40, 31), (30, 77)])]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        [output] = _run(llm, _prompt(*images))
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    pixels = SiglipImageProcessorPil(**SIGLIP)(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        ids = torch.tensor([prompt + answer])
        logits = theirs(input_ids=ids, pixel_values=pixels).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer
    expected, scale = torch.log_softmax(logits, -1), float(logits.abs().max())
    for place, entry in enumerate(output.outputs[0].logprobs):
        for token_id, found in entry.items():
            assert abs(found.logprob - float(expected[place, token_id])) < 1e-4 * scale


@pytest.mark.parametrize(
    "sizes",
    [[(40, 40)], [(20, 90)], [(90, 20)], [(28, 28)], [(57, 56), (13, 17)], [(30, 61), (200, 90)]],
)
def test_tiles_are_those_of_transformers(
    sizes: list[tuple[int, int]], next_llm: LLM, next_theirs: Any
) -> None:
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    images = [pillow.fromarray(picture(n, *size)) for n, size in enumerate(sizes)]
    [output] = _run(next_llm, _prompt(*images))
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    inputs = LlavaNextImageProcessorPil(**NEXT)(images, return_tensors="pt")
    with torch.no_grad():
        ids = torch.tensor([prompt + answer])
        logits = next_theirs(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer
    expected, scale = torch.log_softmax(logits, -1), float(logits.abs().max())
    for place, entry in enumerate(output.outputs[0].logprobs):
        for token_id, found in entry.items():
            assert abs(found.logprob - float(expected[place, token_id])) < 1e-4 * scale


@pytest.fixture(scope="module")
def next_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("next")
    return path


@pytest.fixture(scope="module")
def next_theirs(next_folder: Path) -> Any:
    return write_llava_next(next_folder)


@pytest.fixture(scope="module")
def next_llm(next_folder: Path, next_theirs: Any) -> Iterator[LLM]:
    with LLM(str(next_folder), **OPTIONS) as found:
        yield found


def test_tiles_keep_their_bits_in_chunks_and_out_of_the_cache(
    next_folder: Path, next_llm: LLM
) -> None:
    prompts = [_prompt(picture(1, 40, 40)), _prompt(picture(2, 20, 90), picture(1, 40, 40))]
    expected = [_run(next_llm, each)[0].outputs[0].logprobs for each in prompts]
    options = OPTIONS | {"max_num_batched_tokens": 8}
    with LLM(str(next_folder), **options) as llm:
        for _ in range(2):
            found = _run(llm, *prompts)
            assert [each.outputs[0].logprobs for each in found] == expected
        assert found[0].num_cached_tokens > NUM_TOKENS


def test_tiles_are_counted_where_images_are_limited(next_folder: Path, next_llm: LLM) -> None:
    """Eight rows of nine places beside the whole image's sixteen."""
    [output] = _run(next_llm, _prompt(picture(1, 40, 40)))
    assert len(output.prompt_token_ids) == 3 + 16 + 8 * 9
    with LLM(str(next_folder), **OPTIONS, image_cache_memory=100 * 64 * 4) as llm:
        with pytest.raises(InvalidParameterError, match=r"176 places.*at most 100"):
            _run(llm, _prompt(picture(1, 40, 40), picture(2, 40, 40)))
        assert _run(llm, _prompt(picture(1, 40, 40)))[0].error is None


def test_older_names_of_weights_are_known(folder: Path, theirs: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): weight
        for name, weight in weights.items()
    }
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    with LLM(str(folder), **OPTIONS) as one, LLM(str(tmp_path), **OPTIONS) as other:
        [ours], [same] = _run(one, _prompt(picture(1))), _run(other, _prompt(picture(1)))
    assert ours.outputs[0].logprobs == same.outputs[0].logprobs


def test_a_repeated_image_costs_no_encoder_time(folder: Path, theirs: Any) -> None:
    with LLM(str(folder), **OPTIONS, enable_prefix_caching=False) as llm:
        _run(llm, _prompt(picture(1), picture(2)))
        assert _table(llm).num_encoded == 2
        _run(llm, _prompt(picture(2), picture(1), picture(1), salt=3), _prompt(picture(2)))
        assert _table(llm).num_encoded == 2
        _run(llm, _prompt(picture(1, 41, 30)))
        assert _table(llm).num_encoded == 3


def test_prefixes_are_shared_where_images_are_the_same(folder: Path, theirs: Any) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        first, same, other = (
            _run(llm, _prompt(picture(seed), picture(5)))[0] for seed in (1, 1, 2)
        )
        assert first.num_cached_tokens == 0
        assert same.num_cached_tokens == len(same.prompt_token_ids) - 1
        assert other.num_cached_tokens == 2, "what stands before the image"
        assert same.outputs[0].logprobs == first.outputs[0].logprobs
        assert other.outputs[0].logprobs != first.outputs[0].logprobs


def test_little_memory_delays_and_changes_nothing(folder: Path, theirs: Any) -> None:
    """Two images fit: requests take their turns, and the table never holds more."""
    row_bytes = 64 * 4
    prompts = [_prompt(picture(n), picture(n + 1), salt=n) for n in range(6)]
    prompts.append({"prompt_token_ids": [3, 4, 5]})
    with LLM(str(folder), **OPTIONS, enable_prefix_caching=False) as roomy:
        expected = _run(roomy, *prompts)
    with LLM(
        str(folder),
        **OPTIONS,
        enable_prefix_caching=False,
        image_cache_memory=2 * NUM_TOKENS * row_bytes,
    ) as llm:
        found = _run(llm, *prompts)
        assert _table(llm).num_bytes <= 2 * NUM_TOKENS * row_bytes
        assert _table(llm).num_encoded == 7, "neighbours share an image"
        _run(llm, prompts[0])
        assert _table(llm).num_encoded == 9, "both were forgotten"
        for ours, want in zip(found, expected, strict=True):
            assert ours.outputs[0].logprobs == want.outputs[0].logprobs
        with pytest.raises(InvalidParameterError, match=r"3 images.*at most 2"):
            _run(llm, _prompt(picture(1), picture(2), picture(3)))


def test_samples_of_one_prompt_share_its_images(llm: LLM) -> None:
    [many] = _run(llm, _prompt(picture(8)), n=3, temperature=1.0, seed=4)
    [again] = _run(llm, _prompt(picture(8)), n=3, temperature=1.0, seed=4)
    assert [each.token_ids for each in many.outputs] == [each.token_ids for each in again.outputs]
    assert len({tuple(each.token_ids) for each in many.outputs}) == 3


def test_beams_see_the_image(llm: LLM) -> None:
    from quire import BeamSearchParams

    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    one, other = (
        llm.beam_search(_prompt(picture(seed)), params)[0].sequences[0].tokens for seed in (1, 2)
    )
    assert one != other


def test_an_image_that_fails_ends_its_request_alone(
    folder: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        encode = _table(llm)._model.encode

        def broken(pixels: Any, tiling: Any) -> Any:
            yield None
            if pixels[0, 0, 0] == 255:
                raise ValueError("broken")
            yield from encode(pixels, tiling)

        monkeypatch.setattr(_table(llm)._model, "encode", broken)
        bad = np.full((28, 28, 3), 255, np.uint8)
        failed, fine = _run(llm, _prompt(bad), _prompt(picture(1)))
        assert failed.outputs[0].finish_reason == "error" and "image" in str(failed.error)
        assert fine.error is None
        [again] = _run(llm, _prompt(picture(1)))
        assert again.outputs[0].token_ids == fine.outputs[0].token_ids


def test_a_tower_that_cannot_begin_ends_its_requests_alone(
    folder: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        monkeypatch.setattr(_table(llm)._model, "encode", None)
        failed, fine = _run(llm, _prompt(picture(1)), {"prompt_token_ids": [3, 4]})
        assert failed.outputs[0].finish_reason == "error" and fine.error is None


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt_token_ids": [1, PLACEHOLDER]}, "1 places.*0 images"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": picture(1)}}, "0 places.*1 image"),
        (_prompt("http://example.com/x.png"), "not fetched from"),
        (_prompt(b"nothing"), "no image of a supported format"),
        (_prompt(3), "PIL"),
        (_prompt(*[picture(1)] * 17), "at most 16"),
        ({"prompt_token_ids": [1], "multi_modal_data": [picture(1)]}, "must be a dict"),
    ],
)
def test_what_is_no_prompt_with_images_is_refused(prompt: Any, says: str, llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=says):
        _run(llm, prompt)


def test_an_image_is_found_again_by_its_uuid(folder: Path, theirs: Any) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        asked = {**_prompt(picture(1), picture(2)), "multi_modal_uuids": {"image": ["a", None]}}
        [first] = _run(llm, asked)
        again = {**asked, "multi_modal_data": {"image": [None, picture(2)]}}
        assert _run(llm, again)[0].outputs[0].logprobs == first.outputs[0].logprobs
        alone = {"prompt_token_ids": [1, PLACEHOLDER], "multi_modal_uuids": {"image": "a"}}
        assert _run(llm, alone)[0].error is None
        for wrong, says in (
            ({**alone, "multi_modal_uuids": {"image": "b"}}, "no image is known by the uuid 'b'"),
            ({**alone, "cache_salt": "s"}, "no image is known"),
            ({**asked, "multi_modal_uuids": {"image": ["a"]}}, "has 1 for 2 images"),
            ({**alone, "multi_modal_uuids": "a"}, "must be a dict"),
            ({**alone, "multi_modal_uuids": {"image": [3]}}, "text of 1 to 256"),
        ):
            with pytest.raises(InvalidParameterError, match=says):
                _run(llm, wrong)


def test_what_is_not_available_is_said_by_name(llm: LLM) -> None:
    with pytest.raises(NotAvailableError, match="'video'"):
        _run(llm, {"prompt_token_ids": [1], "multi_modal_data": {"video": [1]}})
    with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens"):
        _run(llm, _prompt(picture(1)), truncate_prompt_tokens=4)


def test_images_of_one_size_take_no_other(llm: LLM) -> None:
    prompt = {**_prompt(picture(1)), "mm_processor_kwargs": {"max_pixels": 100}}
    with pytest.raises(InvalidParameterError, match="takes nothing"):
        _run(llm, prompt)


def test_a_model_of_texts_takes_no_images() -> None:
    with LLM("quire-storyteller", kv_cache_memory="8MiB", max_model_len=128) as llm:
        prompt: Any = {"prompt": "Once", "multi_modal_data": {"image": picture(1)}}
        with pytest.raises(InvalidParameterError, match="reads text alone"):
            llm.generate(prompt, use_tqdm=False)


def _plan(path: Path, config: dict[str, Any], **options: Any) -> Any:
    (path / "config.json").write_text(json.dumps(config))
    model = str(path / "config.json")
    return plan_engine(
        EngineConfig(model=model, load_format="dummy", **{**OPTIONS, **options})
    ).plan


def test_the_plan_counts_tower_and_cache(tmp_path: Path) -> None:
    plan = _plan(tmp_path, LLAVA, limit_mm_per_prompt={"image": 2})
    text = _plan(tmp_path, LLAVA["text_config"] | {"architectures": ["LlamaForCausalLM"]})
    images = plan.images
    assert images is not None and images.max_per_prompt == 2
    assert images.num_bytes == 64 << 20 and plan.image_bytes == images.num_bytes
    assert plan.weight_bytes > text.weight_bytes + 32 * 3 * 7 * 7 * 4
    assert plan.total_bytes - text.total_bytes > images.num_bytes
    assert plan.workspace_bytes > text.workspace_bytes
    assert any(each.name == "image_cache_memory" for each in plan.decisions)
    real = LLAVA | {
        "image_token_index": 32000,
        "text_config": {"model_type": "llama", "vocab_size": 32064},
        "vision_config": {"model_type": "clip_vision_model"},
    }
    large = _plan(tmp_path, real, dtype="bfloat16", max_model_len=64, kv_cache_memory="64MiB",
                  memory_utilization=1.0) if _has_memory() else None  # fmt: skip
    assert large is None or large.spec.num_parameters == 7_063_427_072 - _ABOVE_LAYER_23


_ABOVE_LAYER_23 = 12_596_224 + 2_048
"""Of the tower, its last block and norm, which nothing reads."""


def _has_memory() -> bool:
    from quire.engine.plan.machine import Machine

    return Machine.inspect().available_memory > 20 << 30


@pytest.mark.parametrize(
    ("config", "options", "error", "says"),
    [
        ({"vision_feature_layer": [-2, -3]}, {}, Unsupported, "vision_feature_layer"),
        ({"vision_config": VISION | {"model_type": "x"}}, {}, Unsupported, "siglip_vision_model"),
        (
            {"vision_config": VISION | {"model_type": "siglip_vision_model"}},
            {},
            Unsupported,
            "no class token",
        ),
        ({"image_token_index": 256}, {}, Unsupported, "image_token_index"),
        (
            {
                "architectures": ["LlavaNextForConditionalGeneration"],
                "image_grid_pinpoints": [[28, 30]],
            },
            {},
            Unsupported,
            "multiples of image_size=28",
        ),
        (
            {
                "architectures": ["LlavaNextForConditionalGeneration"],
                "image_grid_pinpoints": [[28, 56]],
            },
            {},
            ConfigError,
            "must be the same",
        ),
        ({}, {"image_cache_memory": 64}, ConfigError, "holds no image"),
        ({}, {"limit_mm_per_prompt": {"image": -1}}, ConfigError, "limit_mm_per_prompt"),
        ({}, {"limit_mm_per_prompt": {"image": 99999}}, ConfigError, "more than a request"),
        ({}, {"allowed_media_domains": "x"}, ConfigError, "allowed_media_domains"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    config: dict[str, Any], options: Any, error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        _plan(tmp_path, LLAVA | config, **options)


def test_a_folder_without_a_processor_is_refused(folder: Path, theirs: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="preprocessor_config"):
        plan_engine(EngineConfig(model=str(tmp_path), **OPTIONS))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 32, "crop_size": 32}))
    with pytest.raises(ConfigError, match=r"\(32, 32\).*\(28, 28\)"):
        plan_engine(EngineConfig(model=str(tmp_path), **OPTIONS))


def test_a_control_plane_that_starts_over_finds_its_images(folder: Path, theirs: Any) -> None:
    engine = build_engine(EngineConfig(model=str(folder), **OPTIONS))
    try:
        params = SamplingParams(**GREEDY)
        engine.add_request("a", _prompt(picture(1)), params)
        while not engine.scheduler.running:
            engine.step()
        engine.rewind()
        outputs = []
        while engine.scheduler.has_work:
            outputs += engine.step()
        assert {each.request_id for each in outputs} == {"a"}
    finally:
        engine.close()
