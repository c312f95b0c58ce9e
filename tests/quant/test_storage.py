"""Checkpoints in the public formats: equal to their floating-point twins,
or refused by the name of the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import (
    CONFIG,
    VOCAB,
    Pack,
    awq,
    byte_integers,
    fp8,
    gptq,
    grouped_byte_integers,
    packed_integers,
    write_pair,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import plan_engine
from quire.errors import CheckpointError, ConfigError
from quire.models.registry import declare
from quire.quant.formats import FormSupport
from quire.quant.quantization_config import read_storage

PROMPT = [5, 77, 12, 99, 3, 41, 8, 120, 64, 33, 2, 19]


def gptq_config(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "desc_act": False,
        "damp_percent": 0.01,
    } | changes


AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def compressed_config(
    layout: str, activations: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    described = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": described | weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": 1.5, "sparsity_config": {},
    }  # fmt: skip


TOKENWISE = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
    "observer": None,
}
CHANNELWISE: dict[str, Any] = {
    "num_bits": 8,
    "strategy": "channel",
    "group_size": None,
    "observer": "minmax",
    "observer_kwargs": {},
}

EXACT: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq": (gptq(4, 32), gptq_config()),
    "gptq symmetric": (gptq(4, 32, is_symmetric=True), gptq_config(sym=True)),
    "gptq v2": (gptq(4, 16, version=0), gptq_config(checkpoint_format="gptq_v2", group_size=16)),
    "gptq 8 bits": (gptq(8, 32), gptq_config(bits=8)),
    "gptq identity": (gptq(4, 32, order="identity"), gptq_config(desc_act=True)),
    "gptq blocks": (gptq(4, 32, order="blocks"), gptq_config(desc_act=True)),
    "awq": (awq(32), AWQ),
    "pack": (packed_integers(4, 32, is_symmetric=True), compressed_config("pack-quantized")),
    "pack asymmetric": (
        packed_integers(4, 32, is_symmetric=False),
        compressed_config("pack-quantized", symmetric=False),
    ),
    "pack 8 bits": (
        packed_integers(8, 32, is_symmetric=True),
        compressed_config("pack-quantized", num_bits=8),
    ),
    "int groups": (
        grouped_byte_integers(4, 32),
        compressed_config("int-quantized", symmetric=False),
    ),
    "int groups 8 bits": (
        grouped_byte_integers(8, 32),
        compressed_config("int-quantized", symmetric=False, num_bits=8),
    ),
    "int weights only": (byte_integers(), compressed_config("int-quantized", None, **CHANNELWISE)),
}
CLOSE: dict[str, tuple[Pack, dict[str, Any], float]] = {
    "gptq scattered": (gptq(4, 32, order="scattered"), gptq_config(desc_act=True), 0.1),
    "int": (byte_integers(), compressed_config("int-quantized", TOKENWISE, **CHANNELWISE), 0.1),
    "int asymmetric": (
        byte_integers(is_symmetric=False),
        compressed_config("int-quantized", TOKENWISE, **CHANNELWISE, symmetric=False),
        0.1,
    ),
    "int per tensor": (
        byte_integers(is_per_tensor=True),
        compressed_config("int-quantized", TOKENWISE, **CHANNELWISE | {"strategy": "tensor"}),
        0.1,
    ),
}
FP8: dict[str, tuple[Pack, dict[str, Any]]] = {
    "fp8 blocks": (
        fp8("weight_scale_inv", block=(32, 48)),
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 48],
        },
    ),
    "fp8 per tensor": (
        fp8("weight_scale"),
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ),
    "fp8 compressed": (
        fp8("weight_scale", is_per_output=True),
        compressed_config(
            "float-quantized",
            {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "dynamic": True,
                "symmetric": True,
            },
            num_bits=8,
            type="float",
            strategy="channel",
            group_size=None,
        ),
    ),
}


def logprobs(folder: Path, **options: Any) -> Tensor:
    """[prompt, vocabulary] of a fixed prompt."""
    options = {
        "dtype": "float32",
        "kv_cache_memory": "1MiB",
        "max_logprobs": -1,
        "num_threads": 1,
    } | options
    with LLM(str(folder), skip_tokenizer_init=True, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=VOCAB)
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = [
        [place[token].logprob for token in range(VOCAB)]
        for place in output.prompt_logprobs
        if place is not None
    ]
    return torch.tensor(rows)


def write(tmp_path: Path, pack: Pack, config: dict[str, Any]) -> tuple[Path, Path]:
    return write_pair(tmp_path, pack, config)


@pytest.mark.slow_combinations
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("case", EXACT)
def test_integers_are_read_as_they_are_stored(case: str, kernels: str, tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, *EXACT[case])
    torch.testing.assert_close(
        logprobs(quantized, kernels=kernels), logprobs(plain), atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("case", CLOSE)
def test_what_is_rounded_once_more_stays_close(case: str, tmp_path: Path) -> None:
    pack, config, tolerance = CLOSE[case]
    quantized, plain = write(tmp_path, pack, config)
    found, wanted = logprobs(quantized), logprobs(plain)
    assert 1e-5 < (found - wanted).square().mean().sqrt() < tolerance


@pytest.mark.parametrize("case", FP8)
def test_fp8_becomes_the_compute_dtype_and_says_so(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = write(tmp_path, *FP8[case])
    torch.testing.assert_close(logprobs(quantized), logprobs(plain), atol=2e-4, rtol=0)
    assert caplog.text.count("turned into the compute dtype") == 1
    as_integers = logprobs(quantized, quantization="int8")
    assert 1e-5 < (as_integers - logprobs(plain)).square().mean().sqrt() < 0.05


@pytest.mark.parametrize("case", [*FP8, "without activations"])
def test_fp8_is_kept_where_there_are_kernels(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(config: Any, spec: Any, method: Any, back_end: FormSupport) -> Any:
        return read_storage(config, spec, method, FormSupport(not back_end.keeps_fp8))

    pack, config = FP8.get(case, FP8["fp8 compressed"])
    is_float = case not in FP8
    if is_float:
        group = config["config_groups"]["group_0"] | {"input_activations": None}
        config = config | {"config_groups": {"group_0": group}}
    quantized, plain = write(tmp_path, pack, config)
    monkeypatch.setattr("quire.quant.quantization_config.read_storage", kept)
    plan = plan_engine(EngineConfig(model=str(quantized), skip_tokenizer_init=True)).plan
    assert f"fp8 weights, activations {'float' if is_float else 'fp8'}" in plan.formats.summary
    error = (logprobs(quantized, kernels="reference") - logprobs(plain)).square().mean().sqrt()
    assert error < 2e-4 if is_float else 1e-4 < error < 0.1
    with pytest.raises(ValueError, match="expected int8"):
        logprobs(quantized)  # the CPU's own kernels have no e4m3


def test_scattered_groups_are_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pack, config, _ = CLOSE["gptq scattered"]
    logprobs(write(tmp_path, pack, config)[0])
    assert "act-order) are turned into 8-bit integers" in caplog.text


def test_activations_are_quantized_when_the_user_says_so(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, *EXACT["awq"])
    error = (logprobs(quantized, quantization="int4") - logprobs(plain)).square().mean().sqrt()
    assert 1e-4 < error < 0.15
    with pytest.raises(ConfigError, match=r"AWQ, 4 bits\) is quantized otherwise already"):
        logprobs(quantized, quantization="int8")


def test_the_plan_counts_integers(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, *EXACT["pack"])
    plans = [
        plan_engine(EngineConfig(model=str(path), skip_tokenizer_init=True)).plan
        for path in (quantized, plain)
    ]
    num_weights = 2 * sum(
        part.weight.num_elements for parts in plans[0].spec.blocks[0].projections for part in parts
    )
    assert plans[1].weight_bytes - plans[0].weight_bytes == num_weights * 4 - (
        num_weights // 2 + num_weights // 32 * 4
    )
    [decision] = [each for each in plans[0].decisions if each.name == "quantization"]
    assert "compressed-tensors, pack-quantized: 4-bit weights, activations float" in decision.reason


def test_zeros_of_old_writers_are_no_bias(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, *EXACT["gptq"])
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    save_file(tensors | {f"{name}.bias": torch.zeros(96)}, quantized / "model.safetensors")
    torch.testing.assert_close(logprobs(quantized), logprobs(plain), atol=2e-4, rtol=0)
    save_file(tensors | {f"{name}.bias": torch.ones(96)}, quantized / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.bias is not zero"):
        logprobs(quantized)


def _drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[f"model.layers.1.self_attn.k_proj.{name}"]

    return drop


def _put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"model.layers.1.self_attn.k_proj.{name}": tensor})


@pytest.mark.parametrize(
    ("case", "damage", "message"),
    [
        (
            "gptq",
            _drop("qzeros"),
            r"lacks 1 tensors: model\.layers\.1\.self_attn\.k_proj\.qzeros \[2, 4\]",
        ),
        (
            "gptq",
            _put("scales", torch.ones(3, 32)),
            r"k_proj\.scales is \[3, 32\], config\.json implies \[2, 32\]",
        ),
        (
            "gptq",
            _put("scales", torch.full((2, 32), torch.nan)),
            r"k_proj\.scales holds numbers that are not finite",
        ),
        (
            "gptq",
            _put("qweight", torch.ones(8, 32)),
            r"k_proj\.qweight is stored as F32, not as I32",
        ),
        (
            "gptq blocks",
            _put("g_idx", torch.full((64,), 9, dtype=torch.int32)),
            r"g_idx names groups that do not exist",
        ),
        (
            "gptq",
            _put("g_idx", torch.arange(64, dtype=torch.int32) % 2),
            r"k_proj\.g_idx scatters groups over the inputs, and .*desc_act=False",
        ),
        (
            "pack asymmetric",
            _put("weight_scale", torch.full((32, 2), 3e38)),
            r"k_proj: a scale times its zero point is not finite",
        ),
        ("pack", _put("weight_shape", torch.tensor([1, 2])), r"weight_shape is \[1, 2\]"),
        (
            "pack",
            _put("weight", torch.ones(32, 64)),
            r"1 tensors that LlamaForCausalLM does not use",
        ),
    ],
)
def test_damaged_checkpoints_are_refused(
    case: str, damage: Callable[..., None], message: str, tmp_path: Path
) -> None:
    quantized, _ = write(tmp_path, *EXACT[case])
    tensors = load_file(quantized / "model.safetensors")
    damage(tensors)
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        logprobs(quantized)


W4 = compressed_config("pack-quantized")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq_config(bits=3), "quantization_config.bits=3; supported: 4 or 8"),
        (gptq_config(group_size=0), "quantization_config.group_size=0"),
        (gptq_config(group_size=40), "64 inputs, which groups of 40 do not divide"),
        (gptq_config(dynamic={"-:.*": {}}), "quantization_config.dynamic="),
        (gptq_config(checkpoint_format="marlin"), "quantization_config.checkpoint_format='marlin'"),
        (AWQ | {"version": "gemv"}, "quantization_config.version='gemv'"),
        (AWQ | {"zero_point": False}, "quantization_config.zero_point=False"),
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method='bitsandbytes'"),
        (
            {"quant_method": "fp8", "weight_block_size": [16.5, 16]},
            "quantization_config.weight_block_size=[16.5, 16]; supported: two whole numbers",
        ),
        (
            compressed_config(
                "float-quantized",
                type="float",
                num_bits=8,
                strategy="block",
                block_structure=[0, 16],
            ),
            "weights.block_structure=[0, 16]; supported: two whole numbers",
        ),
        ({"bits": 4}, "quantization_config.quant_method"),
        ("gptq", "quantization_config='gptq'"),
        (W4 | {"format": "marlin-24"}, "quantization_config.format='marlin-24'"),
        (W4 | {"config_groups": {}}, "quantization_config.config_groups"),
        (
            W4 | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config.format='sparse-bitmask'",
        ),
        (W4 | {"ignore": ["re:("]}, "quantization_config.ignore"),
        (compressed_config("pack-quantized", actorder="group"), "weights.actorder='group'"),
        (compressed_config("pack-quantized", num_bits=2), "weights.num_bits=2"),
        (
            compressed_config("int-quantized", TOKENWISE | {"dynamic": False}),
            "input_activations.dynamic=False",
        ),
        (
            compressed_config("int-quantized", TOKENWISE | {"num_bits": 4}),
            "input_activations.num_bits=4",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        storage = read_storage({"quantization_config": config}, declare(CONFIG), None)
        assert storage is not None and storage.layout
    assert message in str(raised.value)


def test_real_configs_are_understood(shared: Path) -> None:
    folder = shared / "data/tokenizers/model_configs"
    blocks = json.loads((folder / "Qwen--Qwen3-32B-FP8.json").read_text())
    spec = declare({key: value for key, value in blocks.items() if key != "quantization_config"})
    storage = read_storage(blocks, spec, None)
    assert storage is not None and len(storage.by_name) == 7 * 64 and storage.layout
    assert "lm_head.weight" not in storage.by_name
