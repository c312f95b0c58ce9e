"""Where an adapter's tensors belong in a model: its file's header against the model's declaration.

Every tensor of the file must be one half of the adapter of a projection that the model has, with
the shape that this projection wants; whatever else there is, is refused by name. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from quire.errors import CheckpointError
from quire.lora.config import MAX_RANK, AdapterConfig, read_config
from quire.models.blocks import ExpertsSpec
from quire.models.declaration import DecoderSpec
from quire.models.tensors import DTYPE_BYTES, LinearSpec
from quire.weights.checkpoint import FLOAT_DTYPES, renamed_to
from quire.weights.tensor_file import StoredTensor, TensorFile

WEIGHTS_NAME = "adapter_model.safetensors"
FILES = ("adapter_config.json", WEIGHTS_NAME)
"""All that an adapter is."""
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_MAX_SHOWN = 4
_NUM_EXPERT_WEIGHTS = 3
"""A mixture's first projections: router, all experts' gate and up, all experts' down."""


class PartLayout(NamedTuple):
    """The adapter of one part of a stacked weight."""

    module: str
    first_output: int
    """Of the stacked weight."""
    first_row: int
    """Of the stored `up`."""
    num_outputs: int
    rank: int
    scale: float
    down: StoredTensor
    """[rank, inputs]"""
    up: StoredTensor
    """[outputs, rank], or, with `first_row`, of more outputs than these"""


class WeightLayout(NamedTuple):
    """The adapters of the parts of one weight of a program."""

    number: int
    num_inputs: int
    num_outputs: int
    parts: tuple[PartLayout, ...]


def check_adapter(folder: Path, spec: DecoderSpec, max_rank: int) -> tuple[int, ...]:
    """Check that a model can be served with the adapter in a folder; returns the tokens that invoke
    it, if any do. Raises CheckpointError."""
    file = TensorFile(folder / WEIGHTS_NAME)
    try:
        layout_of(folder, file, spec, max_rank)
    finally:
        file.close()
    invocation = read_config(folder).invocation
    if any(token_id >= spec.vocab_size for token_id in invocation):
        raise CheckpointError(
            f"{folder}: alora_invocation_tokens has {max(invocation)}, and the model has "
            f"{spec.vocab_size} tokens"
        )
    return invocation


def layout_of(
    folder: Path, file: TensorFile, spec: DecoderSpec, max_rank: int
) -> tuple[WeightLayout, ...]:
    """Lay out the adapter in a folder, whose weights `file` has. Raises CheckpointError."""
    config = read_config(folder)
    found = _Halves(folder, file.tensors, spec)
    weights = tuple(_weights(found, config, spec))
    if found.unused:
        raise CheckpointError(
            f"{folder}: the adapter has tensors for what this model's adapters cannot change: "
            f"{_listed(found.unused)}; supported are the projections of attention and of MLPs "
            "that are no experts"
        )
    modules = {part.module for weight in weights for part in weight.parts}
    _check_targets(folder, config, spec, modules)
    largest = max((part.rank for weight in weights for part in weight.parts), default=0)
    if largest == 0:
        raise CheckpointError(f"{folder}: the adapter changes no module at all")
    if largest > max_rank:
        raise CheckpointError(
            f"{folder}: the adapter has rank {largest}, and max_lora_rank is {max_rank}; "
            f"raise it (at most {MAX_RANK})"
        )
    return weights


def adapter_bytes(spec: DecoderSpec, rank: int, dtype: str) -> int:
    """Return the memory of an adapter of every projection at this rank."""
    return sum(
        rank * (part.num_inputs + part.num_outputs) * DTYPE_BYTES[dtype] + rank * 4
        for parts in adaptable(spec).values()
        for part in parts
    )


def adaptable(spec: DecoderSpec) -> Mapping[int, tuple[LinearSpec, ...]]:
    """Return the weights that adapters may change, by their numbers: all but the head, the router
    and the experts of mixtures, and folded weights, whose operations take no adapters."""
    found: list[tuple[LinearSpec, ...] | None] = []
    for mixer in (mixer for block in spec.blocks for mixer in block.mixers):
        shared = mixer.projections[_NUM_EXPERT_WEIGHTS:]
        is_mixture = isinstance(mixer, ExpertsSpec)
        found += [None] * _NUM_EXPERT_WEIGHTS + list(shared) if is_mixture else mixer.projections
    return {
        number: parts
        for number, parts in enumerate(found)
        if parts is not None and not parts[0].holds_floats
    }


class _Halves:
    """The tensors of a file by module; what remains unused can be listed."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, StoredTensor], spec: DecoderSpec
    ) -> None:
        self._folder = folder
        self._found: dict[str, dict[str, StoredTensor]] = {}
        self._strange = []
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None:
                self._strange.append(name)
                continue
            module = renamed_to(match[1], spec.renamed)
            self._found.setdefault(module, {})[match[2]] = tensor
        self._used: set[str] = set()

    @property
    def unused(self) -> list[str]:
        return [*self._strange, *sorted(self._found.keys() - self._used)]

    def of(self, module: str, prefix: str) -> tuple[StoredTensor, StoredTensor] | None:
        """Return both halves of a module, whose name may lack the prefix; None where none is."""
        name = module if module in self._found else module.removeprefix(prefix)
        halves = self._found.get(name)
        if halves is None:
            return None
        self._used.add(name)
        if halves.keys() != {"A", "B"}:
            [half] = halves
            raise CheckpointError(
                f"{self._folder}: of the adapter of {module} there is lora_{half} alone"
            )
        return halves["A"], halves["B"]


def _weights(found: _Halves, config: AdapterConfig, spec: DecoderSpec) -> Iterator[WeightLayout]:
    for number, parts in adaptable(spec).items():
        layouts, first_output = [], 0
        for part in parts:
            halves = found.of(part.name, spec.optional_prefix)
            if halves is not None:
                layouts.append(_part(part, first_output, halves, config))
            first_output += part.num_outputs
        if layouts:
            yield WeightLayout(number, parts[0].num_inputs, first_output, tuple(layouts))


def _part(
    part: LinearSpec,
    first_output: int,
    halves: tuple[StoredTensor, StoredTensor],
    config: AdapterConfig,
) -> PartLayout:
    down, up = halves
    rank, weight = config.rank_of(part.name), part.weight
    expected = (rank, part.num_inputs), (weight.stored_rows or part.num_outputs, rank)
    if (down.shape, up.shape) != expected:
        raise CheckpointError(
            f"the adapter of {part.name} has lora_A {list(down.shape)} and lora_B "
            f"{list(up.shape)}; expected {list(expected[0])} and {list(expected[1])}"
        )
    for half in halves:
        if half.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"the adapter of {part.name} is stored as {half.dtype}; supported are "
                f"{', '.join(sorted(FLOAT_DTYPES))}"
            )
    scale = config.scale_of(part.name)
    return PartLayout(
        part.name, first_output, weight.first_row, part.num_outputs, rank, scale, down, up
    )


def _check_targets(
    folder: Path, config: AdapterConfig, spec: DecoderSpec, modules: set[str]
) -> None:
    """Check that every module that the config names has its tensors."""
    names = {part.name for parts in adaptable(spec).values() for part in parts}
    for target in config.targets or ():
        meant = {name for name in names if name == target or name.endswith(f".{target}")}
        if not meant:
            raise CheckpointError(
                f"{folder}: target_modules names {target!r}, which this model's adapters cannot "
                "change; supported are the projections of attention and of MLPs that are no experts"
            )
        if missing := sorted(meant - modules):
            raise CheckpointError(
                f"{folder}: target_modules names {target!r}, but there are no tensors for "
                f"{_listed(missing)}"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:100] for name in names[:_MAX_SHOWN])
    return shown + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
