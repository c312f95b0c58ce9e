"""Quantized models that read images: decoders of integers, towers as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optional_packages import require
from vision_models import (
    GEMMA_FRAME,
    PLACEHOLDER,
    picture,
    write_gemma3,
    write_llava,
    write_qwen,
)

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import QuireError

torch = pytest.importorskip("torch")
pytest.importorskip("PIL.Image")
require("transformers")
quantized = pytest.importorskip("quantized_checkpoints")

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "kv_cache_memory": "4MiB",
    "num_threads": 1,
    "max_num_seqs": 4,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=5)
WRITE: dict[str, Callable[[Path], Any]] = {
    "llava": write_llava,
    "qwen2.5-vl": lambda folder: write_qwen(folder, "Qwen2_5_VL"),
    "qwen3-vl": lambda folder: write_qwen(folder, "Qwen3VL"),
    "gemma3": write_gemma3,
}
TOWERS = ("vision_tower", "visual")
HEADS = {"llava": "language_model.lm_head"}
"""What older checkpoints call the head; others have one name."""


def _prompts(family: str) -> list[Any]:
    frame = GEMMA_FRAME if family == "gemma3" else (7, 8)
    ids = [1, 5, frame[0], PLACEHOLDER, frame[1], *range(20, 40)]
    images = [picture(1, 40, 30), picture(2, 33, 60)]
    return [
        {"prompt_token_ids": ids, "multi_modal_data": {"image": images[0]}},
        {"prompt_token_ids": ids + ids[1:], "multi_modal_data": {"image": images}},
        {"prompt_token_ids": ids[:2] + ids[5:]},
    ]


def _answers(folder: Path, family: str, **options: Any) -> list[Any]:
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        prompts = _prompts(family)
        together = llm.generate(prompts, PARAMS, use_tqdm=False)
        alone = [llm.generate(each, PARAMS, use_tqdm=False)[0] for each in prompts]
    found = [each.outputs[0].logprobs for each in together]
    assert found == [each.outputs[0].logprobs for each in alone], "whoever else is there"
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in together]


def _assert_near(found: list[Any], wanted: list[Any], atol: float) -> None:
    for (ids, records), (expected_ids, expected) in zip(found, wanted, strict=True):
        assert ids == expected_ids
        for record, other in zip(records, expected, strict=True):
            for token_id in record.keys() & other.keys():
                assert abs(record[token_id].logprob - other[token_id].logprob) < atol


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            WRITE[family](made[family])
        return made[family]

    return folder_of


def _pair(
    original: Path, folder: Path, pack: Any, config: dict[str, Any], *, with_tower: bool = False
) -> tuple[Path, Path]:
    """A checkpoint whose decoder's projections are stored by `pack`, and one of the floats that
    these stand for."""
    from safetensors.torch import load_file, save_file

    stored, plain = folder / "stored", folder / "plain"
    tensors: dict[str, Any] = {}
    floats: dict[str, Any] = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        is_tower = any(part in name for part in TOWERS)
        if "_proj." in name and name.endswith("weight") and (with_tower or not is_tower):
            module, shape = name.removesuffix(".weight"), tuple(tensor.shape)
            packed, weights = pack(module, shape, tensor.float().numpy())
            tensors |= {key: value.contiguous() for key, value in packed.items()}
            floats[name] = torch.from_numpy(np.ascontiguousarray(weights, np.float32))
        else:
            tensors[name] = floats[name] = tensor
    for path, values, extra in (
        (stored, tensors, {"quantization_config": config}),
        (plain, floats, {}),
    ):
        path.mkdir(parents=True)
        for each in original.glob("*.json"):
            (path / each.name).write_bytes(each.read_bytes())
        given = json.loads((original / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**given, **extra}))
        save_file(values, path / "model.safetensors")
    return stored, plain


def _gptq(family: str) -> tuple[Any, dict[str, Any]]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    return quantized.gptq(4, 32), config


def _awq(family: str) -> tuple[Any, dict[str, Any]]:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
              "version": "gemm", "modules_to_not_convert": [*TOWERS]}  # fmt: skip
    return quantized.awq(32), config


def _compressed(family: str) -> tuple[Any, dict[str, Any]]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config = quantized.compressed_tensors("pack-quantized", **weights, symmetric=False)
    config["ignore"] = [HEADS.get(family, "lm_head"), "re:vision_tower.*", "re:.*visual.*"]
    return quantized.packed_integers(4, 32, is_symmetric=False), config


def _fp8(family: str) -> tuple[Any, dict[str, Any]]:
    """A scale for each block, and the modules that stay floats by name."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
              "weight_block_size": [32, 32],
              "modules_to_not_convert": ["lm_head", "multi_modal_projector", *TOWERS]}  # fmt: skip
    return quantized.fp8("weight_scale_inv", block=(32, 32)), config


def _compressed_fp8(family: str) -> tuple[Any, dict[str, Any]]:
    """A scale for each output, and inputs rounded token by token where that is computed."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    config = quantized.compressed_tensors("float-quantized", inputs, **weights)
    config["ignore"] = [HEADS.get(family, "lm_head"), "re:.*vision_tower.*", "re:.*visual.*",
                        "re:.*multi_modal_projector.*"]  # fmt: skip
    return quantized.fp8("weight_scale", is_per_output=True), config


@pytest.mark.slow_combinations
@pytest.mark.parametrize(
    "form",
    [_gptq, _awq, _compressed, _fp8, _compressed_fp8],
    ids=["gptq", "awq", "compressed", "fp8", "compressed-fp8"],
)
@pytest.mark.parametrize("family", WRITE)
def test_decoders_of_public_formats_answer_as_the_floats_that_they_stand_for(
    family: str, form: Any, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    stored, plain = _pair(folder_of(family), tmp_path, *form(family))
    _assert_near(_answers(stored, family), _answers(plain, family), 2e-3)


@pytest.mark.slow_combinations
@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("family", WRITE)
def test_a_decoder_is_quantized_when_it_is_loaded_and_the_tower_is_not(
    family: str, method: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    floats, found = _answers(folder, family), _answers(folder, family, quantization=method)
    assert found != floats
    towers = []
    for quantization in (None, method):
        with LLM(str(folder), **OPTIONS, quantization=quantization) as llm:
            table = llm.engine.executor.worker.companions.of("images")  # type: ignore[attr-defined]
            towers.append([tensor.clone() for tensor in table._model.tensors])
    assert len(towers[0]) > 3
    for plain, kept in zip(*towers, strict=True):
        assert torch.equal(plain, kept)


def test_a_quantized_tower_is_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    stored, _ = _pair(folder_of("llava"), tmp_path, *_gptq("llava"), with_tower=True)
    with pytest.raises(QuireError, match=r"vision_tower.* 20 of them are stored as packed"):
        _answers(stored, "llava")


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("family", WRITE)
def test_a_written_checkpoint_computes_what_quantizing_at_load_computes(
    family: str, form: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    written = tmp_path / form
    assert main(["quantize", str(folder_of(family)), "--to", form, "-o", str(written)]) == 0
    own: dict[str, Any] = {"dtype": "auto"}  # which what is written is in
    wanted = _answers(folder_of(family), family, quantization=form, **own)
    assert _answers(written, family, **own) == wanted
