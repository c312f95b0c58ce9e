"""Writes a quantized checkpoint: safetensors and a config in the public compressed-tensors format.

What is written is what `quantization="int8"` or "int4" holds in memory, to the bit: the integers,
and scales that bfloat16 holds. int8 is "int-quantized" (W8A8), int4 "pack-quantized" (W4A8, or
W4A16 with `is_weight_only`). A head that is quantized is stored as `lm_head` of its own, also where
the model shares it with the embedding; with `keeps_head` it stays as it is, for engines that read
no quantized head. Norms, biases, embeddings and classifiers are copied in the model's dtype. One
file of at most `_SHARD_BYTES` at a time; nothing is visible under the final name before it is
complete.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import CheckpointError, ConfigError
from quire.models.declaration import DecoderSpec
from quire.models.tensors import LinearSpec, TensorSpec
from quire.quant.formats import IntegerFormat, WeightFormats, formats_at_load
from quire.quant.rounding import quantize
from quire.weights.checkpoint import INDEX_NAME, SINGLE_NAME
from quire.weights.source import WeightSource

_SHARD_BYTES = 4 << 30
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What becomes of a checkpoint."""

    method: str
    """int8 or int4"""
    is_weight_only: bool = False
    """Activations stay floating point (int4 only): the form of W4 that most engines read."""
    keeps_head: bool = False

    def __post_init__(self) -> None:
        if self.is_weight_only and self.method != "int4":
            raise ConfigError(
                "weights alone are quantized to int4 only; int8 has activations of 8 bits"
            )


def write_checkpoint(
    folder: Path, spec: DecoderSpec, weights: WeightSource, recipe: Recipe
) -> dict[str, Any]:
    """Quantize `weights` into `folder`, which must exist, tensor by tensor.

    Returns the keys of `config.json` that change, for the caller to write. Raises CheckpointError
    for weights that cannot be read or quantized, ConfigError for a model whose layout the format
    cannot express.
    """
    if any(linear.weight.is_transposed for parts in spec.projections for linear in parts):
        raise ConfigError(
            f"{spec.architecture} keeps its weights [inputs, outputs], which "
            "compressed-tensors cannot express"
        )
    formats = formats_at_load(spec, recipe.method)
    shards = _Shards(folder)
    for name, tensor in _tensors(spec, weights, formats, recipe):
        shards.add(name, tensor)
    shards.finish()
    changes: dict[str, Any] = {"quantization_config": _config(spec, formats, recipe)}
    if spec.is_tied and not recipe.keeps_head:
        changes["tie_word_embeddings"] = False
    return changes


def _tensors(
    spec: DecoderSpec, weights: WeightSource, formats: WeightFormats, recipe: Recipe
) -> Iterator[tuple[str, Tensor]]:
    """Yield everything that is stored, by name."""
    head = None if recipe.keeps_head else spec.head
    linears = {part.weight: part for part in _quantized(spec)}
    if head is not None and not spec.is_tied:
        linears[head.weight] = head
    written: set[str] = set()
    for tensor in spec.tensors:
        whole = _whole(tensor)
        if whole.name in written:
            continue  # another part of a tensor that holds several projections
        written.add(whole.name)
        dtype = torch.float32 if whole.keeps_float32 else getattr(torch, spec.dtype)
        values = torch.empty(whole.shape, dtype=dtype)
        weights.fill(values, whole)
        if tensor not in linears:
            yield whole.name, values.T if whole.is_transposed else values.view(whole.stored_shape)
            continue
        yield from _projection(whole.name, values, formats.by_name[whole.name])
    if head is not None and spec.is_tied:
        values = torch.empty(head.weight.shape, dtype=getattr(torch, spec.dtype))
        weights.fill(values, head.weight)
        yield from _projection(_HEAD, values, formats.by_name[head.weight.name])


def _quantized(spec: DecoderSpec) -> Iterator[LinearSpec]:
    """Yield every projection that becomes integers, without the head."""
    inner = (parts for parts in spec.projections if parts != (spec.head,))
    yield from (part for parts in inner for part in parts if part.is_quantizable)


def _whole(tensor: TensorSpec) -> TensorSpec:
    """Return the stored tensor that holds this one."""
    if tensor.stored_rows is None:
        return tensor
    return dataclasses.replace(
        tensor, shape=(tensor.stored_rows, *tensor.shape[1:]), first_row=0, stored_rows=None
    )


def _projection(name: str, values: Tensor, held: IntegerFormat) -> Iterator[tuple[str, Tensor]]:
    try:
        weight = quantize(values, held)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    yield f"{name}_scale", weight.scales.bfloat16()
    if held.bits == 8:
        yield name, weight.values
        return
    yield f"{name}_packed", pack_words(weight.values)
    yield f"{name}_shape", torch.tensor(values.shape)


def pack_words(values: Tensor) -> Tensor:
    """int8 [N, K] in -8 ... 7 to int32 [N, K / 8]: each plus 8, the first in the lowest bits."""
    nibbles = (values + 8).to(torch.uint8)
    pairs = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32)  # four bytes a word, little endian


def _config(spec: DecoderSpec, formats: WeightFormats, recipe: Recipe) -> dict[str, Any]:
    """`quantization_config`: a group of projections for each format that occurs,
    the exceptions by name."""
    floats = (part for parts in spec.projections for part in parts if not part.is_quantizable)
    ignored = list(dict.fromkeys(part.name for part in floats))
    if spec.classifier is not None:
        ignored += [layer.linear.name for layer in spec.classifier.layers]
    ignored += ["lm_head"] if recipe.keeps_head else []
    modules: dict[IntegerFormat, list[str]] = {}
    for part in _quantized(spec):
        held = _without_size(formats.by_name[part.weight.name])
        modules.setdefault(held, []).append(part.name)
    main, *others = sorted(modules, key=lambda held: -len(modules[held]))
    groups = [(main, ["Linear"]), *((held, list(dict.fromkeys(modules[held]))) for held in others)]
    if not recipe.keeps_head and spec.head is not None:
        head = _without_size(formats.by_name[spec.head.weight.name])
        groups.append((head, ["re:.*lm_head"]))
    layouts = {"int-quantized" if held.bits == 8 else "pack-quantized" for held, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": _group(held, targets, recipe) for i, (held, targets) in enumerate(groups)
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _group(held: IntegerFormat, targets: list[str], recipe: Recipe) -> Mapping[str, Any]:
    is_grouped = held.bits == 4
    common = {"type": "int", "symmetric": True}
    tokenwise = {"num_bits": 8, "strategy": "token", "dynamic": True, "group_size": None, **common}
    return {
        "targets": targets,
        "format": "pack-quantized" if is_grouped else "int-quantized",
        "weights": {
            "num_bits": held.bits,
            "strategy": "group" if is_grouped else "channel",
            "group_size": held.group_size if is_grouped else None,
            "dynamic": False,
            **common,
        },
        "input_activations": None if is_grouped and recipe.is_weight_only else tokenwise,
        "output_activations": None,
    }


def _without_size(held: IntegerFormat) -> IntegerFormat:
    """Return the format without its group size: one scale per output is one format, however many
    inputs there are."""
    return held if held.bits == 4 else dataclasses.replace(held, group_size=0)


class _Shards:
    """Files of limited size, and the index that names them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._num_bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._held and self._num_bytes + tensor.nbytes > _SHARD_BYTES:
            self._flush()
        self._held[name] = tensor.contiguous()
        self._num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, and give the files their names."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._part(0).rename(self._folder / SINGLE_NAME)
            return
        index: dict[str, str] = {}
        for place, names in enumerate(self._files):
            file = f"model-{place + 1:05}-of-{count:05}.safetensors"
            self._part(place).rename(self._folder / file)
            index |= dict.fromkeys(names, file)
        text = json.dumps(
            {"metadata": {"total_size": self._total_bytes}, "weight_map": index}, indent=2
        )
        (self._folder / INDEX_NAME).write_text(text)

    def _flush(self) -> None:
        save_file(self._held, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._held))
        self._total_bytes += self._num_bytes
        self._held, self._num_bytes = {}, 0

    def _part(self, place: int) -> Path:
        return self._folder / f".part-{place}"
