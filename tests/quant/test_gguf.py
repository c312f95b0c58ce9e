"""GGUF's encodings, against the format's own package,
and whole models against their floating-point twins."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import BLOCKS, VOCAB, TinyModel, random_blocks, write_gguf
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import plan_engine
from quire.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedModelError
from quire.quant.gguf import decode
from quire.quant.integers import dequantize
from quire.weights.gguf.file import ENCODINGS, GgufTensor, read_gguf

PROMPT = [5, 77, 12, 99, 3, 41, 8, 120, 64, 33, 2, 19, 7, 7, 101, 66]


def logprobs(model: Path, **options: Any) -> Tensor:
    """[prompt, vocabulary]"""
    options = {
        "dtype": "float32",
        "kv_cache_memory": "2MiB",
        "max_logprobs": -1,
        "num_threads": 1,
    } | options
    with LLM(str(model), skip_tokenizer_init=True, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=VOCAB)
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor(
        [
            [row[token].logprob for token in range(VOCAB)]
            for row in output.prompt_logprobs
            if row is not None
        ]
    )


@pytest.mark.parametrize("encoding", BLOCKS)
def test_blocks_stand_for_what_the_format_says(encoding: str) -> None:
    data, wanted = random_blocks(encoding, (24, 512), np.random.default_rng(3))
    stored = GgufTensor("x", (24, 512), ENCODINGS[BLOCKS[encoding][0]], 0)
    assert stored.num_bytes == len(data)
    weight = decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), stored, "float")
    found = dequantize(weight).numpy()
    if encoding in ("Q4_1", "Q4_K"):
        np.testing.assert_allclose(
            found,
            wanted,
            rtol=0,
            atol=2e-7 * np.abs(weight.offsets.numpy()).max(),  # type: ignore[union-attr]
        )
    else:
        assert (found == wanted).all()
    assert weight.bits == (4 if "4" in encoding else 8)
    least = -12 if weight.is_mxfp4 else -8 if weight.bits == 4 else -128
    assert weight.is_mxfp4 == (encoding == "MXFP4") and int(weight.values.min()) >= least


def test_a_scale_of_mxfp4_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    file, _ = TinyModel(**MODELS["qwen3moe MXFP4"]).write(tmp_path)
    data = bytearray(file.read_bytes())
    place = read_gguf(file).tensors["blk.1.ffn_down_exps.weight"].offset
    data[place] = 255
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down_exps.* has scales that are not"):
        logprobs(file)


MODELS: dict[str, dict[str, Any]] = {
    "llama Q4_K_M": {
        "family": "llama",
        "encodings": {
            "attn_v": "Q6_K",
            "ffn_down": "Q6_K",
            "attn": "Q4_K",
            "ffn": "Q4_K",
            "output.": "Q6_K",
            "token_embd": "Q4_K",
        },
    },
    "llama tied Q4_0": {
        "family": "llama",
        "encodings": {"attn": "Q4_0", "ffn": "Q4_0", "token_embd": "Q6_K"},
        "is_tied": True,
    },
    "llama F16": {
        "family": "llama",
        "encodings": {
            "attn_norm": "F32",
            "attn_": "F16",
            "ffn_g": "F16",
            "output.": "F16",
            "ffn_u": "BF16",
            "ffn_d": "F32",
        },
    },
    "qwen2 Q5_K": {
        "family": "qwen2",
        "encodings": {"attn": "Q5_K", "ffn_down": "Q5_0", "ffn": "Q5_1"},
    },
    "qwen3 Q4_1": {
        "family": "qwen3",
        "encodings": {"attn_q.": "Q4_1", "attn_k.": "Q8_0", "ffn": "Q4_1"},
    },
    "gemma2 Q8_0": {"family": "gemma2", "encodings": {}, "is_tied": True},
    "gemma3 Q4_K": {
        "family": "gemma3",
        "encodings": {"ffn_g": "Q4_K", "ffn_u": "Q4_K"},
        "is_tied": True,
    },
    "mixtral Q4_K": {
        "family": "mixtral",
        "encodings": {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K"},
    },
    "olmoe Q8_0": {"family": "olmoe", "encodings": {}},
    "qwen2moe Q5_0": {"family": "qwen2moe", "encodings": {"ffn_down_exps": "Q5_0"}},
    "qwen3moe Q4_0": {"family": "qwen3moe", "encodings": {"ffn_up_exps": "Q4_0", "attn": "Q5_0"}},
    "qwen3moe MXFP4": {
        "family": "qwen3moe",
        "encodings": {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4"},
    },
    "phi3 Q4_K": {"family": "phi3", "encodings": {"attn_qkv": "Q4_K", "ffn_up": "Q4_K"}},
}


@pytest.mark.slow_except("*Q4_K_M", "*Q8_0", "*Q5_0", "*MXFP4", "phi3*")
@pytest.mark.parametrize("case", MODELS)
def test_a_file_computes_what_its_twin_computes(case: str, tmp_path: Path) -> None:
    file, twin = TinyModel(**MODELS[case]).write(tmp_path)
    wanted = logprobs(twin)
    assert wanted.std() > 0.5
    torch.testing.assert_close(logprobs(file), wanted, atol=1e-3, rtol=0)


def test_activations_are_quantized_when_the_user_says_so(tmp_path: Path) -> None:
    file, twin = TinyModel(**MODELS["llama Q4_K_M"]).write(tmp_path)
    error = (logprobs(file, quantization="int8") - logprobs(twin)).square().mean().sqrt()
    assert 1e-3 < error < 0.3


def test_a_folder_with_one_file_is_enough(tmp_path: Path) -> None:
    model = TinyModel("llama", {})
    file, twin = model.write(tmp_path)
    assert (
        plan_engine(EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)).files.gguf
        is not None
    )
    (tmp_path / "config.json").write_text((twin / "config.json").read_text())
    assert plan_engine(EngineConfig(model=str(tmp_path), load_format="gguf")).files.gguf is not None
    write_gguf(tmp_path / "second.gguf", model.metadata, model.stored)
    with pytest.raises(
        ModelNotFoundError, match=r"2 GGUF files; name one of them: model\.gguf, second\.gguf"
    ):
        plan_engine(EngineConfig(model=str(tmp_path), load_format="gguf"))
    with pytest.raises(ConfigError, match="a GGUF file has its own"):
        plan_engine(EngineConfig(model=str(file), load_format="dummy"))
    with pytest.raises(ModelNotFoundError, match="no such GGUF file"):
        plan_engine(EngineConfig(model="quire-storyteller", load_format="gguf"))


def test_the_plan_counts_what_is_held(tmp_path: Path) -> None:
    file, _ = TinyModel(**MODELS["llama Q4_K_M"]).write(tmp_path)
    plan = plan_engine(EngineConfig(model=str(file))).plan
    [decision] = [each for each in plan.decisions if each.name == "quantization"]
    assert "GGUF: projections 10 Q4_K, 5 Q6_K; activations float" in decision.reason
    held = plan.formats.of(plan.spec.projections[0])
    assert held is not None and (held.bits, held.group_size, held.has_offsets) == (8, 16, True), (
        "Q4_K and Q6_K in one product"
    )


def test_frequencies_that_are_baked_in_are_applied(tmp_path: Path) -> None:
    model = TinyModel("llama", {})
    factors = np.linspace(1, 8, 16).astype(np.float32)
    model.stored["rope_freqs.weight"] = ((16,), 0, factors.tobytes())
    file, twin = model.write(tmp_path)
    plain = logprobs(twin)
    config = (twin / "config.json").read_text()
    scaling = (
        f'"rope_scaling": {{"rope_type": "longrope", "short_factor": {factors.tolist()}, '
        f'"long_factor": {factors.tolist()}, '
        '"attention_factor": 1.0, "factor": 1.0, "original_max_position_embeddings": 128}'
    )
    (twin / "config.json").write_text(config[:-1] + ", " + scaling + "}")
    wanted = logprobs(twin)
    assert (wanted - plain).abs().max() > 0.01
    torch.testing.assert_close(logprobs(file), wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"general.architecture": "mamba"},
            UnsupportedModelError,
            "general.architecture='mamba'; supported: deepseek2, gemma2",
        ),
        (
            {"llama.attention.head_count": [8, 8]},
            UnsupportedModelError,
            "llama.attention.head_count=.*; supported: one whole",
        ),
        (
            {"llama.rope.scaling.type": "mystery"},
            UnsupportedModelError,
            "llama.rope.scaling.type='mystery'",
        ),
        (
            {"llama.rope.dimension_count": 16},
            UnsupportedModelError,
            "llama.rope.dimension_count=16",
        ),
        (
            {"llama.feed_forward_length": 512},
            CheckpointError,
            r"ffn_gate.weight \[256, 256\], its metadata implies \[512, 256\]",
        ),
        ({"llama.block_count": 3}, CheckpointError, r"lacks blk\.2\.attn_norm\.weight"),
        (
            {"llama.block_count": 1},
            CheckpointError,
            r"has blk\.1\.\S+, which LlamaForCausalLM does not use",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    file, _ = TinyModel("llama", {}).write(tmp_path, **changes)
    with pytest.raises(error, match=message):
        plan_engine(EngineConfig(model=str(file)))


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = TinyModel("llama", {})
    shape, number, data = model.stored["blk.1.ffn_up.weight"]
    model.stored["blk.1.ffn_up.weight"] = (
        shape,
        number,
        data[:34] + struct.pack("<e", float("inf")) + data[36:],
    )
    file, _ = model.write(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"blk\.1\.ffn_up\.weight has scales that are not finite"
    ):
        logprobs(file)
