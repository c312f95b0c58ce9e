"""Adapters of models that read images: the decoder's projections change, the tower's do not, and
nothing about the company changes a bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import merged, write_adapter
from optional_packages import require
from safetensors.torch import load_file, save_file
from vision_models import LLAVA, PLACEHOLDER, picture, write_llava

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.lora.request import LoRARequest
from quire.models.registry import declare

pytest.importorskip("PIL.Image")
require("transformers")

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "kv_cache_memory": "4MiB",
    "num_threads": 1,
    "max_num_seqs": 8,
}
PROMPTS = [
    {"prompt_token_ids": [1, PLACEHOLDER, 9], "multi_modal_data": {"image": picture(1)}},
    {"prompt_token_ids": [1, 4, PLACEHOLDER, 9, PLACEHOLDER, 3],
     "multi_modal_data": {"image": [picture(2), picture(1)]}},
    {"prompt_token_ids": list(range(3, 20))},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llava")
    write_llava(path)
    return path


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Named as PEFT does for this model: by the modules of the whole."""
    found = []
    for number in range(2):
        path = tmp_path_factory.mktemp("adapters") / str(number)
        write_adapter(path, declare(LLAVA), seed=number)
        _rename(path, "model.layers.", "model.language_model.layers.")
        found.append(LoRARequest(f"adapter-{number}", number + 1, str(path)))
    return found


def _rename(folder: Path, ours: str, theirs: str) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name.replace(ours, theirs): each for name, each in load_file(path).items()}, path)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS, enable_lora=True, enable_prefix_caching=False) as found:
        yield found


def _run(llm: LLM, prompts: list[Any], chosen: list[Any]) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=4)
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
    assert [each.error for each in outputs] == [None] * len(prompts)
    return [each.outputs[0] for each in outputs]


@pytest.mark.slow
def test_answers_are_those_of_merged_weights(
    llm: LLM, adapters: list[LoRARequest], folder: Path, tmp_path: Path
) -> None:
    old, new = "language_model.model.", "model.language_model."
    stored = load_file(folder / "model.safetensors")
    weights = {name.replace(old, new): weight for name, weight in stored.items()}
    weights = merged(weights, Path(adapters[0].lora_path))
    save_file(weights, tmp_path / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    found = _run(llm, PROMPTS, [adapters[0]] * 3)
    plain = _run(llm, PROMPTS, [None] * 3)
    with LLM(str(tmp_path), **OPTIONS) as other:
        expected = _run(other, PROMPTS, [None] * 3)
    for ours, want, base in zip(found, expected, plain, strict=True):
        assert ours.token_ids == want.token_ids != base.token_ids
        for mine, theirs in zip(ours.logprobs, want.logprobs, strict=True):
            for token_id in mine.keys() & theirs.keys():
                assert mine[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8},
        # one adapter and the images of one request at a time
        {"max_loras": 1, "image_cache_memory": 2 * 16 * 64 * 4},
    ],
    ids=str,
)
def test_company_changes_no_bit(
    options: dict[str, Any], llm: LLM, adapters: list[LoRARequest], folder: Path
) -> None:
    chosen = [None, *adapters]
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in chosen]
    expected = [_run(llm, [prompt], [adapter])[0].logprobs for prompt, adapter in asked]
    with LLM(str(folder), **OPTIONS, **options, enable_lora=True) as other:
        for _ in range(2):  # the second time out of the cache
            prompts, wanted = [each for each, _ in asked], [each for _, each in asked]
            found = [each.logprobs for each in _run(other, prompts, wanted)]
            assert found == expected


def test_adapters_of_the_tower_are_refused_by_name(
    llm: LLM, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    write_adapter(tmp_path, declare(LLAVA))
    _rename(tmp_path, "model.layers.0.self_attn", "model.vision_tower.encoder.layers.0.self_attn")
    with pytest.raises(QuireError, match=r"vision_tower\.encoder\.layers\.0"):
        _run(llm, PROMPTS[:1], [LoRARequest("tower", 9, str(tmp_path))])
