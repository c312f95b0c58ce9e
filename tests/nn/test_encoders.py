"""Encoders equal `transformers` on random weights, text by text, whatever else is in the batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, Kernels
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.nn.context import StepContext
from quire.nn.decoder import DecoderModel
from quire.weights.checkpoint import SafetensorsCheckpoint
from quire.weights.folder import read_model_config

_BERT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 99,
    "max_position_embeddings": 160,
}
_ROBERTA = _BERT | {"max_position_embeddings": 162, "pad_token_id": 1, "type_vocab_size": 1}
_DISTILBERT = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 96,
    "vocab_size": 99,
    "max_position_embeddings": 160,
}
_MODERNBERT = _BERT | {
    "num_hidden_layers": 4,
    "local_attention": 16,
    **{f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "cls", "sep")},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT),
    "roberta": ("roberta", _ROBERTA),
    "xlm-roberta": ("xlm-roberta", _ROBERTA),
    "distilbert": ("distilbert", _DISTILBERT),
    "mpnet": ("mpnet", _BERT | {"max_position_embeddings": 162, "pad_token_id": 1}),
    "modernbert": ("modernbert", _MODERNBERT),
    "nomic_bert": ("nomic_bert", _BERT),
}
LENGTHS = (1, 5, 70, 150)


def reference_encoder(family: str) -> Any:
    """The family's model of `transformers`, with random weights, norms and biases included."""
    from transformers import AutoConfig, AutoModel

    model_type, values = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **values)
    auto: Any = AutoModel
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            std = 0.2 if parameter.ndim == 1 else 0.1
            parameter.copy_((parameter if parameter.ndim == 1 else 0) + std * noise)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The reference and the folder with its weights."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    reference = reference_encoder(request.param)
    reference.save_pretrained(folder)
    return reference, folder


def build(folder: Path, kernels: Kernels, dtype: str = "float32") -> DecoderModel:
    spec = declare(read_model_config(folder))
    with SafetensorsCheckpoint(folder, spec) as weights:
        return build_decoder(spec, weights, kernels, dtype=dtype, max_model_len=160)


def states_of(model: DecoderModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Hidden states of texts that are computed together."""
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    batch = AttentionBatch(
        query_start=starts,
        context_len=lengths,
        block_tables=torch.zeros(len(texts), 1, dtype=torch.int32),
        slots=torch.zeros_like(positions),
        positions=positions,
        max_query_len=int(lengths.max()),
        max_context_len=int(lengths.max()),
    )
    ids = torch.tensor([token for text in texts for token in text])
    with torch.inference_mode():
        hidden = model.forward(ids, positions, StepContext(batch, []))
        return list(torch.split(model.normed(hidden), lengths.tolist()))


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 99, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.slow_combinations
def test_hidden_states_equal_those_of_transformers(
    encoder: Any, kernels: Kernels, texts: list[list[int]]
) -> None:
    reference, folder = encoder
    model = build(folder, kernels)
    for text, found in zip(texts, states_of(model, texts), strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_texts_bits_do_not_depend_on_its_company(
    encoder: Any, native: Kernels, texts: list[list[int]], dtype: str
) -> None:
    model = build(encoder[1], native, dtype)
    together = states_of(model, texts)
    for text, found in zip(texts, together, strict=True):
        assert torch.equal(states_of(model, [text])[0], found)
    assert all(map(torch.equal, states_of(model, texts[::-1])[::-1], together))


def test_the_authors_own_config_of_nomic_bert_declares_the_same(tmp_path: Path) -> None:
    reference = reference_encoder("nomic_bert")
    reference.save_pretrained(tmp_path)
    original = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": 64, "n_head": 4,
        "n_layer": 2, "n_inner": 96, "n_positions": 160, "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False, "prenorm": False, "qkv_proj_bias": False,
        "type_vocab_size": 2, "vocab_size": 99, "causal": False, "torch_dtype": "float32",
    }  # fmt: skip
    new = json.loads((tmp_path / "config.json").read_text())
    assert declare(original) == declare(new | {"max_position_embeddings": 160})


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_positions_beyond_the_learned_ones_are_refused(
    family: str, tmp_path: Path, native: Kernels
) -> None:
    from quire.errors import ConfigError

    reference_encoder(family).save_pretrained(tmp_path)
    spec = declare(read_model_config(tmp_path))
    with (
        SafetensorsCheckpoint(tmp_path, spec) as weights,
        pytest.raises(ConfigError, match="max_model_len=161 exceeds the 160 positions"),
    ):
        build_decoder(spec, weights, native, dtype="float32", max_model_len=161)
