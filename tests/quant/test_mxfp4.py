"""MXFP4 checkpoints of gpt-oss: parity with `transformers`, what is held, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import mxfp4, store_stacked_mxfp4
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import plan_engine
from quire.engine.assembly.quantization import quantize_model
from quire.engine.plan.gpu import Gpu
from quire.engine.plan.machine import Machine
from quire.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.kernels.reference.kernels import ReferenceKernels
from quire.models.registry import declare
from quire.quant.quantization_config import read_storage
from quire.quant.unpacking import unpacker
from quire.quant.writer import Recipe
from quire.weights.checkpoint import SafetensorsCheckpoint
from tests.golden.checkpoints import CONFIGS, VOCAB, write_checkpoint

STACKED = ("experts.gate_up_proj", "experts.down_proj")
QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
PROMPT = [(7 * i * i + 3 * i + 11) % 250 + 2 for i in range(40)]


def store(folder: Path, *, excludes: str | None = None, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint in MXFP4 as gpt-oss is published, and its twin of the floats that it means."""
    plain = write_checkpoint(folder / "plain", CONFIGS["gpt oss"])
    tensors = load_file(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"model_type": "gpt_oss"}
    chosen = tuple(
        name
        for name in tensors
        if name.endswith(STACKED) and (excludes is None or excludes not in name)
    )
    floats = dict(tensors)
    for name in chosen:
        meant = torch.from_numpy(mxfp4(tensors[name].transpose(1, 2).numpy())[2])
        floats[name] = meant.transpose(1, 2).contiguous()
    quantized = QUANTIZED | changes
    for kind, held, more in (
        ("stored", store_stacked_mxfp4(tensors, chosen), {"quantization_config": quantized}),
        ("floats", floats, {}),
    ):
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(config | more))
        save_file(held, folder / kind / "model.safetensors")
    return folder / "stored", folder / "floats"


def logprobs(folder: Path, **options: Any) -> tuple[Tensor, list[int]]:
    """[prompt, vocabulary] of a fixed prompt, and the text that follows."""
    options = {"dtype": "float32", "kv_cache_memory": "1MiB", "num_threads": 1} | options
    with LLM(str(folder), skip_tokenizer_init=True, max_logprobs=-1, **options) as llm:
        params = SamplingParams(
            max_tokens=20, temperature=0.0, prompt_logprobs=VOCAB, ignore_eos=True
        )
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    places = [place for place in output.prompt_logprobs or () if place is not None]
    found = torch.tensor([[place[token].logprob for token in range(VOCAB)] for place in places])
    return found, list(output.outputs[0].token_ids)


@pytest.mark.slow_except("cpu")
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_it_equals_transformers(tmp_path: Path, kernels: str) -> None:
    """The same numbers there, dequantized here by another program."""
    from transformers import AutoModelForCausalLM

    stored, floats = store(tmp_path)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(floats, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
        text = model.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )[0, len(PROMPT) :]  # fmt: skip
    want = torch.log_softmax(logits.float(), -1)[:-1]
    got, token_ids = logprobs(stored, kernels=kernels)
    assert logits.std() > 0.1, "the weights should matter"
    torch.testing.assert_close(got, want, atol=1e-4 * float(logits.abs().max()), rtol=0)
    assert token_ids == text.tolist()


def test_it_has_the_bits_of_its_floats(tmp_path: Path) -> None:
    """On instruction sets that multiply float32 as it is."""
    stored, floats = store(tmp_path)
    assert torch.equal(logprobs(stored)[0], logprobs(floats)[0])


def test_what_is_excluded_is_floating_point(tmp_path: Path) -> None:
    names = [*QUANTIZED["modules_to_not_convert"], "layers.1.mlp.experts"]
    stored, floats = store(tmp_path, excludes="layers.1", modules_to_not_convert=names)
    assert torch.equal(logprobs(stored)[0], logprobs(floats)[0])


def test_the_plan_counts_the_bytes_that_are_stored(tmp_path: Path) -> None:
    stored, _ = store(tmp_path)
    config = json.loads((stored / "config.json").read_text())
    quantized = config.pop("quantization_config")
    spec = declare(config)
    storage = read_storage({"quantization_config": quantized}, spec, None)
    assert storage is not None and "mxfp4 weights, activations float" in storage.formats.summary
    experts = [parts for parts in spec.projections if parts[0].share < 1]
    total = sum(storage.formats.part_bytes(parts, "bfloat16") for parts in experts)
    tensors = load_file(stored / "model.safetensors")
    assert total == sum(each.nbytes for each in tensors.values() if each.dtype == torch.uint8)


def test_the_plan_counts_the_scales_of_a_gpu(tmp_path: Path) -> None:
    stored, _ = store(tmp_path)
    machine = Machine(1 << 34, 1 << 33, 2, "a processor")
    gpu = replace(machine, gpu=Gpu("NVIDIA X", (9, 0), 80 << 30, 40 << 30, "13.0"))

    def weight_bytes(device: str, machine: Machine) -> int:
        options: dict[str, Any] = {"dtype": "bfloat16", "device": device}
        config = EngineConfig(model=str(stored), skip_tokenizer_init=True, **options)
        return plan_engine(config, machine).plan.weight_bytes

    scales = load_file(stored / "model.safetensors").items()
    num_scales = sum(each.numel() for name, each in scales if name.endswith("_scales"))
    on_cpu, on_gpu = weight_bytes("cpu", machine), weight_bytes("cuda", gpu)
    assert on_gpu - on_cpu == 3 * num_scales


@pytest.mark.slow_except("20b-*")
@pytest.mark.parametrize(
    ("name", "num_parameters", "gigabytes"),
    [("20b", 20_914_757_184, 13.8), ("120b", 116_829_156_672, 65.2)],
)
def test_published_configs_are_read(
    shared: Path, name: str, num_parameters: int, gigabytes: float
) -> None:
    folder = shared / "data/tokenizers/model_configs"
    config = json.loads((folder / f"openai--gpt-oss-{name}.json").read_text())
    quantized = {"quantization_config": config.pop("quantization_config")}
    spec = declare(config)
    assert (spec.num_parameters, spec.context_len) == (num_parameters, 131072)
    storage = read_storage(quantized, spec, None)
    assert storage is not None and all("experts" in name for name in storage.by_name)
    held = storage.formats.weight_bytes(spec, "bfloat16")
    assert held == pytest.approx(gigabytes * 1e9, rel=0.005), "the size of the published files"


def test_packed_weights_take_what_the_plan_says(tmp_path: Path) -> None:
    from quire.kernels import cpu

    if reasons := cpu.reasons_against("cpu", torch.float32):
        pytest.skip("; ".join(reasons))
    stored, _ = store(tmp_path)
    cache: dict[str, Any] = {"weights_cache": str(tmp_path / "cache"), "kernels": "cpu"}
    first = logprobs(stored, **cache)[0]
    assert torch.equal(logprobs(stored, **cache)[0], first)
    with LLM(str(stored), skip_tokenizer_init=True, kv_cache_memory="1MiB", **cache) as llm:
        executor: Any = llm.engine.executor
        model = executor.worker.model
        linears = [each for each in model.weights.linears if each.layout.format == "mxfp4"]
    assert len(linears) == 6
    for each in linears:
        padded = -(-each.num_outputs // 16) * 16
        assert each.data.nbytes == padded * each.num_inputs * 17 // 32


def test_unusual_scales(tmp_path: Path) -> None:
    stored, _ = store(tmp_path)
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name][1, 3] = torch.tensor([0, 1, 2], dtype=torch.uint8)
    save_file(tensors, stored / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    quantized = {"quantization_config": config.pop("quantization_config")}
    spec = declare(config)
    storage = read_storage(quantized, spec, None)
    assert storage is not None
    expert = spec.blocks[0].mixers[1].experts[1]  # type: ignore[union-attr]
    with SafetensorsCheckpoint(stored, spec, storage.layout) as weights:
        unpacked = unpacker(storage, weights)(expert.down)
    packed = ReferenceKernels().pack_quantized(unpacked)  # type: ignore[arg-type]
    row = ReferenceKernels().linear(torch.eye(96) * 2.0**100, packed)[:, 3]
    codes = tensors[name.replace("scales", "blocks")][1, 3]
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).view(3, 32).long()
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    meant = (
        numbers[codes & 7] * (1 - 2 * (codes >> 3)) * torch.exp2(torch.arange(3.0) - 27)[:, None]
    )
    assert torch.equal(row.view(3, 32), meant), "2^-127, 2^-126 and 2^-125 are exact"
    tensors[name][1, 3, 0] = 255
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"experts\.down_proj_scales has the byte 255 for .*\.1\."
    ):
        logprobs(stored)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    stored, _ = store(tmp_path)
    for method in ("int4", "int8"):
        with pytest.raises(ConfigError, match=r"\(MXFP4\) is quantized otherwise already"):
            logprobs(stored, quantization=method)
    with pytest.raises(ConfigError, match="is quantized already"):
        quantize_model(str(stored), Recipe("int4"), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"keeps its weights \[inputs, outputs\]"):
        quantize_model(str(tmp_path / "floats"), Recipe("int4"), tmp_path / "out")
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    save_file(tensors | {name: tensors[name][:5]}, stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_blocks is \[5, 64, 3, 16\], config.json"):
        logprobs(stored)
    del tensors[name]
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors: \S*experts\.down_proj_blocks "):
        logprobs(stored)
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["block_size"] = 16
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"quantization_config\.block_size=16"):
        logprobs(stored)
