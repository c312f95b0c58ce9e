"""Where an adapter's tensors belong in a model: its file's header against the model's declaration.

Every tensor of the file must be a part of the adapter of something that the model has and adapters
can change, with the shape that this wants; whatever else there is, is refused by name. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from quire.errors import CheckpointError
from quire.lora.config import MAX_RANK, AdapterConfig, read_config
from quire.lora.finite import check_finite
from quire.lora.fused import FusedExpert, fused_expert, fused_names
from quire.lora.halves import Halves, ModuleTensors
from quire.models.blocks import ExpertsSpec
from quire.models.declaration import DecoderSpec
from quire.models.lowering import embedding_number
from quire.models.tensors import DTYPE_BYTES, LinearSpec
from quire.weights.checkpoint import FLOAT_DTYPES
from quire.weights.tensor_file import StoredTensor, TensorFile

WEIGHTS_NAME = "adapter_model.safetensors"
FILES = ("adapter_config.json", WEIGHTS_NAME)
"""All that an adapter is."""
_MAX_SHOWN = 4
_NUM_EXPERT_WEIGHTS = 3
"""A mixture's first projections: router, all experts' gate and up, all experts' down."""
_HEAD_NAME = "lm_head"
"""Of a head that is the embedding's table, which has no name of its own in a checkpoint."""
SUPPORTED = "the projections of attention, MLPs and experts, embeddings of tokens, and the head"


class AdapterLimits(NamedTuple):
    """What an engine's adapters may be."""

    max_rank: int
    has_experts: bool = False
    """They may change experts, for which there is room."""
    has_head: bool = True
    """They may change the head: texts are not scored by its logits."""


class PartLayout(NamedTuple):
    """The adapter of one part of a stacked weight."""

    module: str
    first_output: int
    """Of the stacked weight."""
    rows: slice
    """Of the stored `up`, and of biases."""
    num_outputs: int
    rank: int
    """0: it changes the bias alone."""
    scale: float
    down: StoredTensor | None = None
    """[rank, inputs]"""
    up: StoredTensor | None = None
    """[outputs, rank], or of more outputs than these"""
    bias: StoredTensor | None = None
    """Added like the products, and scaled."""
    base_bias: StoredTensor | None = None
    """In place of the model's."""
    expert: FusedExpert | None = None
    """Which one this is of all whose factors the tensors hold."""


class WeightLayout(NamedTuple):
    """The adapters of the parts of one weight of a program."""

    number: int
    num_inputs: int
    num_outputs: int
    parts: tuple[PartLayout, ...]


class AdapterLayout(NamedTuple):
    """All that an adapter changes, and what its file holds besides."""

    weights: tuple[WeightLayout, ...]
    embedding_copy: StoredTensor | None = None
    """The model's table, which PEFT stores with an adapter of it; it must be the model's own."""
    head_copy: StoredTensor | None = None


def check_adapter(folder: Path, spec: DecoderSpec, limits: AdapterLimits) -> tuple[int, ...]:
    """Check that a model can be served with the adapter in a folder; returns the tokens that invoke
    it, if any do. Raises CheckpointError."""
    file = TensorFile(folder / WEIGHTS_NAME)
    try:
        layout_of(folder, file, spec, limits)
        check_finite(folder, file)
    except OSError as error:
        raise CheckpointError(f"{folder}: the adapter cannot be read: {error}") from None
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
    folder: Path, file: TensorFile, spec: DecoderSpec, limits: AdapterLimits
) -> AdapterLayout:
    """Lay out the adapter in a folder, whose weights `file` has. Raises CheckpointError."""
    config = read_config(folder)
    found = Halves(folder, file.tensors, spec, config)
    weights = [*_weights(found, config, spec), *_embedding(found, config, spec)]
    copies = [_copy(found, name, spec) for name in (embedding_name(spec), head_name(spec))]
    layout = AdapterLayout(tuple(weights), *copies)
    if found.unused:
        raise CheckpointError(
            f"{folder}: the adapter has tensors for what this model's adapters cannot change: "
            f"{_listed(found.unused)}; supported are {SUPPORTED}"
        )
    _check_targets(folder, config, spec, found.used)
    largest = max((part.rank for weight in weights for part in weight.parts), default=0)
    if largest == 0:
        raise CheckpointError(f"{folder}: the adapter changes no module at all")
    if largest > limits.max_rank:
        raise CheckpointError(
            f"{folder}: the adapter has rank {largest}, and max_lora_rank is {limits.max_rank}; "
            f"raise it (at most {MAX_RANK})"
        )
    numbers = {weight.number for weight in weights}
    if not limits.has_head and head_number(spec) in numbers:
        raise CheckpointError(
            f"{folder}: the adapter changes {head_name(spec)}, which is not supported where texts "
            "are scored by the model's logits"
        )
    if not limits.has_experts and not expert_weights(spec).keys().isdisjoint(numbers):
        raise CheckpointError(
            f"{folder}: the adapter changes experts, for which no memory is planned; serve the "
            "model with lora_experts=True"
        )
    return layout


def adapter_bytes(spec: DecoderSpec, rank: int, dtype: str, *, has_experts: bool = False) -> int:
    """Return the memory of an adapter at this rank of everything that adapters may change."""
    weights = dict(adaptable(spec)) | (dict(expert_weights(spec)) if has_experts else {})
    shapes = [(part.num_inputs, part.num_outputs) for parts in weights.values() for part in parts]
    if spec.head is not None:
        shapes.append((spec.head.num_inputs, spec.head.num_outputs))
    if embedding_number(spec) is not None:
        shapes.append((spec.embedding.shape[0], spec.embedding.shape[1]))
    return sum(rank * sum(shape) * DTYPE_BYTES[dtype] + rank * 4 for shape in shapes)


def num_weights(spec: DecoderSpec) -> int:
    """Return how many numbers the weights have that adapters may change."""
    return len(spec.projections) + 1


def head_number(spec: DecoderSpec) -> int | None:
    """Return the number of the output projection, if there is one."""
    return None if spec.head is None else len(spec.projections) - 1


def embedding_name(spec: DecoderSpec) -> str:
    """Return the name of the embedding's module."""
    return spec.embedding.name.removesuffix(".weight")


def head_name(spec: DecoderSpec) -> str:
    """Return the name of the output projection's module."""
    return _HEAD_NAME if spec.head is None or spec.is_tied else spec.head.name


def adaptable(spec: DecoderSpec) -> Mapping[int, tuple[LinearSpec, ...]]:
    """Return the projections that adapters may change, by their numbers: all but the head, the
    experts of mixtures, and folded weights, whose operations take no adapters."""
    return {
        number: parts
        for number, (parts, is_experts) in enumerate(_projections(spec))
        if not is_experts and not parts[0].holds_floats
    }


def expert_weights(spec: DecoderSpec) -> Mapping[int, tuple[LinearSpec, ...]]:
    """Return the weights that stack experts, by their numbers."""
    found = enumerate(_projections(spec))
    return {number: parts for number, (parts, is_experts) in found if is_experts}


def _projections(spec: DecoderSpec) -> Iterator[tuple[tuple[LinearSpec, ...], bool]]:
    """Yield those of all blocks, in the order of their numbers, and whether they are experts'."""
    if spec.states is not None and spec.states.entry is not None:
        yield (spec.states.entry,), False
    for mixer in (mixer for block in spec.blocks for mixer in block.mixers):
        is_mixture = isinstance(mixer, ExpertsSpec)
        for place, parts in enumerate(mixer.projections):
            yield parts, is_mixture and 0 < place < _NUM_EXPERT_WEIGHTS


def _weights(found: Halves, config: AdapterConfig, spec: DecoderSpec) -> Iterator[WeightLayout]:
    weights = dict(adaptable(spec)) | dict(expert_weights(spec))
    number = head_number(spec)
    if number is not None and spec.head is not None:
        weights[number] = (spec.head,)
    for number, parts in sorted(weights.items()):
        layouts, first_output = [], 0
        for part in parts:
            name = head_name(spec) if part is spec.head else part.name
            tensors = found.of(name)
            if tensors is not None:
                layouts.append(_part(name, part, first_output, tensors, config))
            elif (expert := fused_expert(part)) is not None:
                fused = found.of_experts(expert)
                if fused is not None:
                    layouts.append(_fused_part(part, first_output, fused, expert, config))
            first_output += part.num_outputs
        if layouts:
            yield WeightLayout(number, parts[0].num_inputs, first_output, tuple(layouts))


def _embedding(found: Halves, config: AdapterConfig, spec: DecoderSpec) -> Iterator[WeightLayout]:
    """Yield the adapter of the tokens' embedding, if there is one."""
    number, name = embedding_number(spec), embedding_name(spec)
    halves = None if number is None else found.of_embedding(name)
    if number is None or halves is None:
        return
    down, up = halves
    num_tokens, width = spec.embedding.shape
    rank = config.rank_of(name)
    _check_shapes(name, halves, ((rank, num_tokens), (width, rank)))
    part = PartLayout(name, 0, slice(0, width), width, rank, config.scale_of(name), down, up)
    yield WeightLayout(number, num_tokens, width, (part,))


def _copy(found: Halves, name: str, spec: DecoderSpec) -> StoredTensor | None:
    """Take the copy of the embedding's table, or of the head, if there is one."""
    copy = found.copy_of(name)
    if copy is not None and copy.shape != spec.embedding.shape:
        raise CheckpointError(other_copy(name))
    return copy


def other_copy(name: str) -> str:
    """Say what is wrong with a copy of a weight that is not the model's."""
    return (
        f"the adapter holds another {name} than the model has (resized or trained on); whole "
        "weights of an adapter are not supported"
    )


def _part(
    name: str,
    part: LinearSpec,
    first_output: int,
    tensors: ModuleTensors,
    config: AdapterConfig,
) -> PartLayout:
    weight = part.weight
    stored_outputs = weight.stored_rows or part.num_outputs
    step = weight.row_step
    rows = slice(weight.first_row, weight.first_row + part.num_outputs * step, step)
    for bias in (tensors.bias, tensors.base_bias):
        if bias is not None:
            _check_bias(name, bias, stored_outputs)
    if tensors.bias is not None and tensors.base_bias is not None:
        raise CheckpointError(
            f"the adapter of {name} has a bias of its own (lora_bias) and one in place of the "
            "model's (bias); one of them is supported"
        )
    if tensors.base_bias is not None and part.bias is None:
        raise CheckpointError(f"the adapter has a bias for {name}, which has none in the model")
    found = PartLayout(
        name, first_output, rows, part.num_outputs, 0, 1.0,
        bias=tensors.bias, base_bias=tensors.base_bias,
    )  # fmt: skip
    if tensors.down is None or tensors.up is None:
        return found
    rank, halves = config.rank_of(name), (tensors.down, tensors.up)
    _check_shapes(name, halves, ((rank, part.num_inputs), (stored_outputs, rank)))
    return found._replace(rank=rank, scale=config.scale_of(name), down=halves[0], up=halves[1])


def _fused_part(
    part: LinearSpec,
    first_output: int,
    halves: tuple[StoredTensor, StoredTensor],
    expert: FusedExpert,
    config: AdapterConfig,
) -> PartLayout:
    rank, (down, up) = config.rank_of(expert.name), halves
    _check_shapes(expert.name, halves, expert.shapes(rank, halves))
    return PartLayout(
        expert.name, first_output, expert.rows, part.num_outputs, rank,
        config.scale_of(expert.name), down, up, expert=expert.placed(halves),
    )  # fmt: skip


def _check_shapes(
    name: str,
    halves: tuple[StoredTensor, StoredTensor],
    expected: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    down, up = halves
    if (down.shape, up.shape) != expected:
        raise CheckpointError(
            f"the adapter of {name} has lora_A {list(down.shape)} and lora_B "
            f"{list(up.shape)}; expected {list(expected[0])} and {list(expected[1])}"
        )
    for half in halves:
        _check_dtype(name, half)


def _check_bias(name: str, bias: StoredTensor, num_outputs: int) -> None:
    if bias.shape != (num_outputs,):
        raise CheckpointError(
            f"the adapter of {name} has a bias {list(bias.shape)}; expected [{num_outputs}]"
        )
    _check_dtype(name, bias)


def _check_dtype(name: str, tensor: StoredTensor) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"the adapter of {name} is stored as {tensor.dtype}; supported are "
            f"{', '.join(sorted(FLOAT_DTYPES))}"
        )


def _check_targets(folder: Path, config: AdapterConfig, spec: DecoderSpec, used: set[str]) -> None:
    """Check that everything that the config names has its tensors."""
    linears = {part.name for parts in adaptable(spec).values() for part in parts}
    # in newer releases of transformers, experts are no modules
    of_experts = {part.name for parts in expert_weights(spec).values() for part in parts}
    modules = linears | {head_name(spec), embedding_name(spec)}
    if not of_experts.isdisjoint(used):
        modules |= of_experts
    fused = fused_names(part for parts in expert_weights(spec).values() for part in parts)
    parameters = fused | {f"{name}.weight" for name in modules}
    used = used | {f"{name}.weight" for name in used}
    named = [("target_modules", each, modules) for each in config.targets or ()]
    named += [("target_parameters", each, parameters) for each in config.parameters]
    for key, target, names in named:
        meant = {name for name in names if name == target or name.endswith(f".{target}")}
        if not meant:
            raise CheckpointError(
                f"{folder}: {key} names {target!r}, which this model's adapters cannot "
                f"change; supported are {SUPPORTED}"
            )
        if missing := sorted(meant - used):
            raise CheckpointError(
                f"{folder}: {key} names {target!r}, but there are no tensors for {_listed(missing)}"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:100] for name in names[:_MAX_SHOWN])
    return shown + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
