"""Safetensors folders: what is read, and that every malformed one is
refused with names and shapes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.declaration import DecoderSpec
from quire.models.registry import declare
from quire.models.tensors import TensorSpec
from quire.weights.checkpoint import INDEX_NAME, SafetensorsCheckpoint

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 32,
}
GPT2: dict[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 32,
    "vocab_size": 11,
}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}


def _tensors(spec: DecoderSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {tensor.name: tensor.stored_shape for tensor in spec.tensors}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def _shards(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write two shards; the weight map."""
    names = sorted(tensors)
    weight_map = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in names if weight_map[name] == file}, folder / file
        )
    return weight_map


def _read(
    checkpoint: SafetensorsCheckpoint, tensor: TensorSpec, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.full(tensor.shape, torch.nan, dtype=dtype)
    checkpoint.fill(out, tensor)
    return out


def _refusal(folder: Path, spec: DecoderSpec) -> str:
    with pytest.raises(CheckpointError) as refusal:
        SafetensorsCheckpoint(folder, spec)
    return str(refusal.value)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("config", [LLAMA, GPT2, PHI3])
def test_every_tensor_is_read_as_stored(
    tmp_path: Path, config: dict[str, object], is_sharded: bool
) -> None:
    spec = declare(config)
    tensors = _tensors(spec)
    if is_sharded:
        (tmp_path / INDEX_NAME).write_text(
            json.dumps({"metadata": {}, "weight_map": _shards(tmp_path, tensors)})
        )
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path, spec) as checkpoint:
        for tensor in spec.tensors:
            stored = tensors[tensor.name].T if tensor.is_transposed else tensors[tensor.name]
            expected = stored[tensor.first_row : tensor.first_row + tensor.shape[0]]
            assert torch.equal(_read(checkpoint, tensor), expected), tensor


def test_memory_of_a_device_is_not_written_to_as_if_it_were_the_hosts(tmp_path: Path) -> None:
    """A tensor without memory stands for one whose address means nothing here."""
    spec = declare(LLAMA)
    save_file(_tensors(spec), tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path, spec) as checkpoint:
        for tensor in spec.tensors:
            checkpoint.fill(torch.empty(tensor.shape, device="meta"), tensor)


def test_float16_is_read_in_the_dtype_that_is_wanted(tmp_path: Path) -> None:
    spec = declare(LLAMA)
    tensors = _tensors(spec, torch.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path, spec) as checkpoint:
        read = _read(checkpoint, spec.embedding, torch.bfloat16)
    assert torch.equal(read, tensors[spec.embedding.name].to(torch.bfloat16))


def test_names_may_lack_the_prefix(tmp_path: Path) -> None:
    """GPT-2's own files do."""
    spec = declare(GPT2)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in _tensors(spec).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path, spec) as checkpoint:
        assert torch.equal(_read(checkpoint, spec.embedding), tensors["wte.weight"])


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    spec = declare({**LLAMA, "tie_word_embeddings": True})
    extras = [
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "h.0.attn.masked_bias",
    ]
    tensors = (
        _tensors(spec)
        | {name: torch.zeros(4) for name in extras}
        | {"lm_head.weight": torch.zeros(11, 8)}
    )
    save_file(tensors, tmp_path / "model.safetensors")
    SafetensorsCheckpoint(tmp_path, spec).close()


def test_symlinked_shards_are_read(tmp_path: Path) -> None:
    """The hub's cache is a folder of links into its store."""
    spec = declare(LLAMA)
    store, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    snapshot.mkdir()
    save_file(_tensors(spec), store / "c0ffee")
    (snapshot / "model.safetensors").symlink_to(store / "c0ffee")
    SafetensorsCheckpoint(snapshot, spec).close()


def test_a_single_file_of_another_name_is_read(tmp_path: Path) -> None:
    spec = declare(LLAMA)
    save_file(_tensors(spec), tmp_path / "weights.safetensors")
    SafetensorsCheckpoint(tmp_path, spec).close()


def test_missing_tensors_are_named_with_shapes(tmp_path: Path) -> None:
    spec = declare(LLAMA)
    tensors = _tensors(spec)
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lacks 2 tensors: model.norm.weight [8], lm_head.weight [11, 8]" in _refusal(
        tmp_path, spec
    )


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    spec = declare(LLAMA)
    save_file(
        _tensors(spec) | {"model.layers.1.input_layernorm.weight": torch.ones(8)},
        tmp_path / "model.safetensors",
    )
    message = _refusal(tmp_path, spec)
    assert (
        "1 tensors that LlamaForCausalLM does not use: model.layers.1.input_layernorm.weight"
        in message
    )


def test_wrong_shapes_are_named_with_both_shapes(tmp_path: Path) -> None:
    spec = declare(LLAMA)
    save_file(_tensors(spec) | {"model.norm.weight": torch.ones(9)}, tmp_path / "model.safetensors")
    assert "model.norm.weight is [9], config.json implies [8]" in _refusal(tmp_path, spec)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    spec = declare(LLAMA)
    quantised = torch.zeros(8, 8).to(dtype)
    save_file(
        _tensors(spec) | {"model.layers.0.self_attn.q_proj.weight": quantised},
        tmp_path / "model.safetensors",
    )
    assert "model.layers.0.self_attn.q_proj.weight is stored as" in _refusal(tmp_path, spec)


@pytest.mark.parametrize("names", [["pytorch_model.bin"], ["model.pt", "optimizer.pth"]])
def test_pickled_weights_are_refused_unread(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"cos\nsystem\n")
    message = _refusal(tmp_path, declare(LLAMA))
    assert names[0] in message
    assert "convert them to safetensors" in message


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert "has no model.safetensors" in _refusal(tmp_path, declare(LLAMA))


def test_two_files_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    spec = declare(LLAMA)
    _shards(tmp_path, _tensors(spec))
    assert (
        "2 .safetensors files (model-00001-of-00002.safetensors, "
        f"model-00002-of-00002.safetensors) but no {INDEX_NAME}" in (_refusal(tmp_path, spec))
    )


def _truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _rewrite_header(
    change: Callable[[dict[str, dict[str, object]]], None],
) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        encoded = json.dumps(header).encode()
        return struct.pack("<Q", len(encoded)) + encoded + data[8 + length :]

    return apply


def _out_of_bounds(header: dict[str, dict[str, object]]) -> None:
    header["model.norm.weight"]["data_offsets"] = [0, 1 << 40]


def _larger_shape(header: dict[str, dict[str, object]]) -> None:
    header["model.norm.weight"]["shape"] = [1 << 40]


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        lambda data: b"",
        lambda data: data[:5],
        lambda data: struct.pack("<Q", 1 << 62) + data[8:],
        lambda data: data[:8] + b"\xff" * 64 + data[72:],
        lambda data: data + b"tail",
        _rewrite_header(_out_of_bounds),
        _rewrite_header(_larger_shape),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_damaged_files_are_refused_by_name(
    tmp_path: Path, damage: Callable[[bytes], bytes], is_sharded: bool
) -> None:
    spec = declare(LLAMA)
    if is_sharded:
        weight_map = _shards(tmp_path, _tensors(spec))
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        file = weight_map["model.norm.weight"]
    else:
        file = "model.safetensors"
        save_file(_tensors(spec), tmp_path / file)
    (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    assert f"{file} is not a readable safetensors file" in _refusal(tmp_path, spec)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must hold a JSON object, not list"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "said to be in 3"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "said to be in '../x.safetensors'"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "plain name"),
        ('{"weight_map": {"a": "sub/x.safetensors"}}', "plain name"),
        ('{"weight_map": {"a": "..\\\\x.safetensors"}}', "plain name"),
        ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "plain name"),
        ('{"weight_map": {"a": ".."}}', "plain name"),
        ('{"weight_map": {"a": "x.bin"}}', "plain name"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is missing"),
    ],
)
def test_bad_indexes_are_refused(tmp_path: Path, index: str, named: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    assert named in _refusal(tmp_path, declare(LLAMA))


def test_index_that_names_tensors_its_files_lack(tmp_path: Path) -> None:
    spec = declare(LLAMA)
    weight_map = _shards(tmp_path, _tensors(spec))
    first, second = sorted(set(weight_map.values()))
    weight_map["model.norm.weight"] = first if weight_map["model.norm.weight"] == second else second
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert "names tensors that the files lack: model.norm.weight" in _refusal(tmp_path, spec)


def test_a_file_that_changes_under_the_loader_is_refused(tmp_path: Path) -> None:
    spec = declare(LLAMA)
    save_file(_tensors(spec), tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path, spec) as checkpoint:
        (tmp_path / "model.safetensors").write_bytes(
            (tmp_path / "model.safetensors").read_bytes()[:-4]
        )
        with pytest.raises(CheckpointError, match=r"model\.safetensors has changed"):
            _read(checkpoint, spec.embedding)
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(
            CheckpointError, match="cannot be read: the file is shorter than its header says"
        ):
            _read(checkpoint, spec.embedding)


def test_a_file_that_is_replaced_under_the_loader_does_not_matter(tmp_path: Path) -> None:
    spec = declare(LLAMA)
    tensors = _tensors(spec)
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path, spec) as checkpoint:
        save_file({"model.norm.weight": torch.ones(9)}, tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / "model.safetensors")
        assert torch.equal(_read(checkpoint, spec.embedding), tensors[spec.embedding.name])


MOE = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mixtral's tensors as files keep them that name a layer's experts once."""
    at, to = "model.layers.0.block_sparse_moe.", "model.layers.0.mlp."
    found = {name: each for name, each in tensors.items() if at not in name}
    found[f"{to}gate.weight"] = tensors[f"{at}gate.weight"]
    experts = [
        [tensors[f"{at}experts.{index}.{name}.weight"] for name in ("w1", "w3", "w2")]
        for index in range(3)
    ]
    found[f"{to}experts.gate_up_proj"] = torch.stack([torch.cat(each[:2]) for each in experts])
    found[f"{to}experts.down_proj"] = torch.stack([each[2] for each in experts])
    return found


def test_experts_may_be_stacked_in_one_tensor(tmp_path: Path) -> None:
    spec = declare(MOE)
    tensors = _tensors(spec, torch.bfloat16)
    save_file(_stacked(tensors), tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path, spec) as weights:
        for tensor in spec.tensors:
            out = torch.empty(tensor.shape)
            weights.fill(out, tensor)
            assert torch.equal(out, tensors[tensor.name].float())
            located = weights.locate(tensor)
            assert (located is None) == (len(tensor.shape) != 2)


def test_stacked_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    stacked = _stacked(_tensors(declare(MOE)))
    stacked["model.layers.0.mlp.experts.down_proj"] = torch.zeros(2, 8, 12)
    save_file(stacked, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj is \[2, 8, 12\], .* \[3, 8, 12\]"):
        SafetensorsCheckpoint(tmp_path, declare(MOE))


def test_an_expert_that_an_index_lacks_is_named(tmp_path: Path) -> None:
    spec = declare(MOE)
    tensors = _tensors(spec)
    del tensors["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    weight_map = _shards(tmp_path, tensors)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    named = r"lacks 1 tensors: model.layers.0.block_sparse_moe.experts.2.w3.weight \[12, 8\]"
    with pytest.raises(CheckpointError, match=named):
        SafetensorsCheckpoint(tmp_path, spec)
