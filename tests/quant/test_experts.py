"""Mixtures of experts in the formats that weights are stored and held in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import Pack, awq, byte_integers, fp8, gptq, packed_integers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.engine.assembly.quantization import quantize_model
from quire.kernels.reference.kernels import ReferenceKernels
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.quant.formats import WeightFormats, formats_at_load
from quire.quant.linears import QuantizingLinears
from quire.quant.writer import Recipe
from quire.weights.dummy import DummyWeights
from tests.golden.cases import STORED
from tests.golden.checkpoints import CONFIGS, VOCAB, write_checkpoint

PROMPT = [(7 * i * i + 3 * i + 11) % 250 + 2 for i in range(40)]
PACKS: dict[str, Pack] = {
    "gptq": gptq(4, 32),
    "awq": awq(32),
    "pack": packed_integers(4, 32, is_symmetric=True),
    "bytes": byte_integers(),
    "fp8": fp8("weight_scale", is_per_output=True),
}


def logprobs(folder: Path, **options: Any) -> Tensor:
    """[prompt, vocabulary] of a fixed prompt."""
    options = {"dtype": "float32", "kv_cache_memory": "1MiB", "num_threads": 1} | options
    with LLM(str(folder), skip_tokenizer_init=True, max_logprobs=-1, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=VOCAB)
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    places = [place for place in output.prompt_logprobs or () if place is not None]
    return torch.tensor([[place[token].logprob for token in range(VOCAB)] for place in places])


def store(folder: Path, original: Path, pack: Pack, quantized: Mapping[str, Any]) -> list[Path]:
    """A checkpoint with its projections stored by `pack`, and its twin of the floats they mean."""
    config = json.loads((original / "config.json").read_text())
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        if "_proj" not in name or name.endswith(".bias"):
            stored[name] = floats[name] = tensor
            continue
        shape = (tensor.shape[0], tensor.shape[1])
        held, meant = pack(name.removesuffix(".weight"), shape, tensor.float().numpy())
        stored |= {key: each.contiguous() for key, each in held.items()}
        floats[name] = torch.as_tensor(meant).float().contiguous()
    paths = []
    for kind, tensors, more in (
        ("stored", stored, {"quantization_config": quantized}),
        ("floats", floats, {}),
    ):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, folder / kind / "model.safetensors")
        paths.append(folder / kind)
    return paths


@pytest.mark.parametrize("case", PACKS)
def test_stored_experts_compute_what_their_floats_compute(case: str, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", CONFIGS["qwen3 moe"])
    stored, floats = store(tmp_path, plain, PACKS[case], STORED[case][1])
    torch.testing.assert_close(logprobs(stored), logprobs(floats), atol=2e-4, rtol=0)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_written_experts_are_those_that_are_quantized_at_load(form: str, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", CONFIGS["qwen2 moe"])
    quantize_model(str(plain), Recipe(form), tmp_path / "written")
    written, held = logprobs(tmp_path / "written"), logprobs(plain, quantization=form)
    assert torch.equal(written, held)
    assert not torch.equal(held, logprobs(plain))
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    at = [f"model.layers.{layer}.mlp." for layer in (0, 2)]
    small = [f"{each}{name}" for each in at for name in ("gate", "shared_expert_gate")]
    assert config["quantization_config"]["ignore"] == small


def test_packed_experts_are_read_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_checkpoint(tmp_path / "plain", CONFIGS["qwen3 moe"])
    options: dict[str, Any] = {"quantization": "int8", "weights_cache": str(tmp_path / "cache")}
    first = logprobs(plain, **options)

    def refuse(*_: object) -> None:
        raise AssertionError("a projection was packed although the cache holds it")

    monkeypatch.setattr("quire.kernels.cpu.kernels.CpuKernels.pack_quantized", staticmethod(refuse))
    assert torch.equal(logprobs(plain, **options), first)


@pytest.mark.parametrize("method", ["int8", "int4", None])
@pytest.mark.parametrize("checkpoint", ["qwen2 moe", "deepseek v3"])
def test_the_plan_weighs_what_the_loader_makes(checkpoint: str, method: str | None) -> None:
    spec = declare(CONFIGS[checkpoint])
    formats = WeightFormats() if method is None else formats_at_load(spec, method)
    model = build_decoder(
        spec, DummyWeights(), ReferenceKernels(), dtype="bfloat16", max_model_len=8,
        quantize=lambda floats: QuantizingLinears(floats, formats, torch.float32),
    )  # fmt: skip
    rope_bytes, unpacked = 8 * 2 * 8 * 4, 0  # the reference keeps a byte for a value of four bits
    for parts in spec.projections:
        held = formats.of(parts)
        if held is not None and held.bits == 4:
            unpacked += sum(part.weight.num_elements for part in parts) // 2
    assert model.num_bytes - rope_bytes == formats.weight_bytes(spec, "bfloat16") + unpacked
    routers = [part for parts in spec.projections for part in parts if part.keeps_floats]
    assert len(routers) == (4 if checkpoint == "qwen2 moe" else 1) and not any(
        part.weight.name in formats.by_name for part in routers
    )
