"""Weights packed in the background: the same bytes as packed in the open,
whatever they are stored as."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.kernels import cpu
from quire.models.declaration import DecoderSpec
from quire.models.registry import declare
from quire.models.tensors import LinearSpec
from quire.weights.checkpoint import SafetensorsCheckpoint

if cpu.IMPORT_ERROR is not None:
    pytest.skip(f"no native kernels: {cpu.IMPORT_ERROR}", allow_module_level=True)

from quire.kernels.cpu.linear import CpuLinear, pack_linear
from quire.weights.head_start import HeadStart, Wanted

QWEN2: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 40,
    "intermediate_size": 51,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "vocab_size": 77,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
GPT2: dict[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 32,
    "vocab_size": 11,
}


def _wanted(spec: DecoderSpec) -> Wanted:
    return Wanted(spec.projections, [spec.embedding])


def _head(spec: DecoderSpec) -> LinearSpec:
    assert spec.head is not None
    return spec.head


def _save(folder: Path, spec: DecoderSpec, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor in spec.tensors:
        # All magnitudes that float16 knows, subnormal ones and infinity among them.
        powers = torch.randint(-26, 17, tensor.stored_shape, generator=generator)
        values = torch.randn(tensor.stored_shape, generator=generator) * 2.0**powers
        values.view(-1)[:2] = torch.tensor([torch.inf, -torch.inf])
        tensors[tensor.name] = values.to(dtype)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_those_of_packing_tensors(
    tmp_path: Path, stored: torch.dtype, dtype: str
) -> None:
    """Odd widths, stacks whose parts do not end with a panel, biases of some parts."""
    spec = declare(QWEN2)
    _save(tmp_path, spec, stored)
    checkpoint = SafetensorsCheckpoint(tmp_path, spec)
    with HeadStart(SafetensorsCheckpoint(tmp_path, spec), _wanted(spec), dtype, 2) as weights:
        for parts in spec.projections:
            packed = weights.packed(parts)
            stacked = torch.zeros(
                sum(part.num_outputs for part in parts),
                parts[0].num_inputs,
                dtype=getattr(torch, dtype),
            )
            bias = (
                torch.zeros(stacked.shape[0], dtype=stacked.dtype)
                if any(part.bias for part in parts)
                else None
            )
            first = 0
            for part in parts:
                rows = slice(first, first + part.num_outputs)
                checkpoint.fill(stacked[rows], part.weight)
                if part.bias is not None and bias is not None:
                    checkpoint.fill(bias[rows], part.bias)
                first = rows.stop
            expected = pack_linear(stacked, bias)
            assert isinstance(packed, CpuLinear)
            assert torch.equal(packed.data, expected.data)
            assert (packed.bias is None) == (expected.bias is None)
            if packed.bias is not None and expected.bias is not None:
                assert torch.equal(packed.bias.view(torch.int32), expected.bias.view(torch.int32))
        expected_table = torch.empty(spec.embedding.shape, dtype=getattr(torch, dtype))
        checkpoint.fill(expected_table, spec.embedding)
        table = weights.table(spec.embedding)
        assert (
            table is not None
            and table.dtype == expected_table.dtype
            and torch.equal(table, expected_table)
        )
    checkpoint.close()


def test_what_outlives_the_loading(tmp_path: Path) -> None:
    """A packed weight keeps its memory; the files are closed."""
    spec = declare(QWEN2)
    _save(tmp_path, spec, torch.float32)
    with HeadStart(SafetensorsCheckpoint(tmp_path, spec), _wanted(spec), "float32", 1) as weights:
        packed = weights.packed([_head(spec)])
    del weights
    assert isinstance(packed, CpuLinear)
    table = torch.empty(spec.embedding.shape)
    SafetensorsCheckpoint(tmp_path, spec).fill(table, spec.embedding)
    assert torch.equal(packed.data, pack_linear(table).data)


def test_transposed_weights_are_left_to_the_checkpoint(tmp_path: Path) -> None:
    spec = declare(GPT2)
    _save(tmp_path, spec, torch.float32)
    with HeadStart(SafetensorsCheckpoint(tmp_path, spec), _wanted(spec), "float32", 1) as weights:
        assert weights.packed(spec.projections[0]) is None
        assert weights.packed([_head(spec)]) is not None


def test_a_file_that_is_cut_short_meanwhile_is_refused(tmp_path: Path) -> None:
    spec = declare(QWEN2)
    _save(tmp_path, spec, torch.float32)
    checkpoint = SafetensorsCheckpoint(tmp_path, spec)
    os.truncate(tmp_path / "model.safetensors", 4000)
    weights = HeadStart(checkpoint, _wanted(spec), "float32", 1)
    with weights, pytest.raises(CheckpointError, match="shorter than its header says"):
        weights.packed([_head(spec)])


def test_a_file_that_is_written_to_meanwhile_is_refused(tmp_path: Path) -> None:
    spec = declare(QWEN2)
    _save(tmp_path, spec, torch.float32)
    with HeadStart(SafetensorsCheckpoint(tmp_path, spec), _wanted(spec), "float32", 1) as weights:
        os.utime(tmp_path / "model.safetensors", ns=(1, 1))
        with pytest.raises(CheckpointError, match=r"model\.safetensors has changed"):
            weights.packed([_head(spec)])


def test_giving_up_is_quick_and_safe(tmp_path: Path) -> None:
    spec = declare({**QWEN2, "vocab_size": 200_000})
    _save(tmp_path, spec, torch.float32)
    for _ in range(5):
        HeadStart(SafetensorsCheckpoint(tmp_path, spec), _wanted(spec), "float32", 1)
        with HeadStart(SafetensorsCheckpoint(tmp_path, spec), _wanted(spec), "float32", 1):
            pass


def test_torch_is_not_imported_for_it() -> None:
    script = (
        "import sys, quire.weights.head_start, quire.engine.assembly.builder; sys.exit('torch' in "
        "sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
