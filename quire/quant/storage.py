"""How a quantized checkpoint keeps its projections: the strict reading of `quantization_config`,
torch-free.

Owns the public formats' vocabulary (GPTQ, AWQ, compressed-tensors, FP8, MXFP4) and turns it into
one record per projection, which says what tensors are stored for it and how it will be held in
memory.
A value that is not implemented is refused by the name of its key. `quire.quant.unpacking` has the
arithmetic.

Weights of GPTQ, AWQ and compressed-tensors W4A16 keep the activations as they are, since their
integers were chosen for that; W8A8 quantizes the activations token by token, as its config says.
Asking for quantization="int4" (or "int8", whichever has the bits of the checkpoint) quantizes the
activations of the former kind, too, which is faster.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast

from quire.common.numbers import ceil_div
from quire.errors import ConfigError
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec, LinearSpec, StackedPlace
from quire.quant.formats import IntegerFormat, WeightFormats
from quire.weights.checkpoint import ExpectedTensor, Layout

Activations = Literal["int8", "float"]
_INT32 = frozenset({"I32"})
_BYTES = frozenset({"U8"})
_MAX_PATTERN_LEN = 500
_MAX_REPETITIONS = 4
_ESCAPED = re.compile(r"\\.|\[[^\]]*\]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_BACK_REFERENCE = re.compile(r"\\[1-9]|\(\?[^:]")


class LinearStorage(Protocol):
    """How one projection is stored."""

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        """Return what is stored in place of its weight. Raises ConfigError where the sizes cannot
        be."""
        ...

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        """Return the form that it will have in memory, at most; None for floating point."""
        ...


@dataclass(frozen=True, slots=True)
class GptqStorage:
    """Integers packed along the inputs, zero points along the outputs,
    one scale per group and output."""

    bits: Literal[4, 8]
    group_size: int | None
    zero_shift: int
    """Added to stored zero points: 1 in the usual format, 0 in "gptq_v2"."""
    is_ordered: bool
    """Groups may be scattered over the inputs (desc_act)."""
    activations: Activations = "float"

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        module, num_outputs, num_inputs = linear.name, _stored_outputs(linear), linear.num_inputs
        groups = num_inputs // _group_size(self.group_size, linear)
        per_word = 32 // self.bits
        _divide(linear, per_word, num_inputs, num_outputs)
        has_no_bias = linear.bias is None
        return (
            ExpectedTensor(f"{module}.qweight", ((num_inputs // per_word, num_outputs),), _INT32),
            ExpectedTensor(f"{module}.qzeros", ((groups, num_outputs // per_word),), _INT32),
            ExpectedTensor(f"{module}.scales", ((groups, num_outputs),)),
            ExpectedTensor(
                f"{module}.g_idx", ((num_inputs,),), _INT32, is_optional=not self.is_ordered
            ),
            *(
                [ExpectedTensor(f"{module}.bias", ((num_outputs,),), is_optional=True)]
                * has_no_bias
            ),
        )

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        size = _group_size(self.group_size, linear)
        return IntegerFormat(
            8 if self.is_ordered else self.bits,
            size,
            self.activations,
            has_offsets=not self.is_ordered,
        )


@dataclass(frozen=True, slots=True)
class AwqStorage:
    """4-bit integers packed along the outputs in the order of AWQ's GEMM kernel."""

    group_size: int | None
    activations: Activations = "float"
    bits: Literal[4, 8] = 4

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        module, num_outputs, num_inputs = linear.name, _stored_outputs(linear), linear.num_inputs
        groups = num_inputs // _group_size(self.group_size, linear)
        _divide(linear, 8, num_outputs)
        return (
            ExpectedTensor(f"{module}.qweight", ((num_inputs, num_outputs // 8),), _INT32),
            ExpectedTensor(f"{module}.qzeros", ((groups, num_outputs // 8),), _INT32),
            ExpectedTensor(f"{module}.scales", ((groups, num_outputs),)),
        )

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        return IntegerFormat(
            4, _group_size(self.group_size, linear), self.activations, has_offsets=True
        )


@dataclass(frozen=True, slots=True)
class CompressedStorage:
    """compressed-tensors integers: "int-quantized" (a byte each)
    or "pack-quantized" (packed along the inputs)."""

    bits: Literal[4, 8]
    group_size: int | None
    """None: one scale per output."""
    is_packed: bool
    is_symmetric: bool
    activations: Activations

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        module, num_outputs, num_inputs = linear.name, _stored_outputs(linear), linear.num_inputs
        groups = num_inputs // _group_size(self.group_size, linear)
        scale_shapes = ((num_outputs, groups), *(((num_outputs,), (1,), ()) if groups == 1 else ()))
        scale = ExpectedTensor(f"{module}.weight_scale", scale_shapes)
        zero = f"{module}.weight_zero_point"
        if not self.is_packed:
            zeros = (
                ()
                if self.is_symmetric
                else (ExpectedTensor(zero, scale_shapes, frozenset({"I8", "I32"})),)
            )
            return (
                ExpectedTensor(f"{module}.weight", ((num_outputs, num_inputs),), frozenset({"I8"})),
                scale,
                *zeros,
            )
        _divide(linear, 32 // self.bits, num_inputs)
        packed_zeros = ExpectedTensor(
            zero, ((ceil_div(num_outputs * self.bits, 32), groups),), _INT32
        )
        return (
            ExpectedTensor(
                f"{module}.weight_packed", ((num_outputs, num_inputs * self.bits // 32),), _INT32
            ),
            scale,
            ExpectedTensor(
                f"{module}.weight_shape", ((2,),), frozenset({"I64", "I32"}), is_optional=True
            ),
            *(() if self.is_symmetric else (packed_zeros,)),
        )

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        size = _group_size(self.group_size, linear)
        return IntegerFormat(self.bits, size, self.activations, has_offsets=not self.is_symmetric)


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """Floating point of 8 bits (e4m3) with scales per tensor, output or block.
    Only some back ends have kernels for it."""

    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: one scale per tensor or per output."""
    scale_name: str
    activations: Literal["fp8", "float"] = "fp8"
    """What inputs are multiplied as where the weights stay e4m3."""
    is_kept: bool = False
    """Weights stay e4m3, unless requantized, or their blocks are ragged along the inputs."""
    requantized: IntegerFormat | None = None
    """What it is turned into; None: the compute dtype. A group size of 0 means all inputs."""

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        module, num_outputs, num_inputs = linear.name, _stored_outputs(linear), linear.num_inputs
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (num_outputs, 1), (num_outputs,))
        if self.block is not None:
            shapes = ((ceil_div(num_outputs, self.block[0]), ceil_div(num_inputs, self.block[1])),)
        return (
            ExpectedTensor(
                f"{module}.weight", ((num_outputs, num_inputs),), frozenset({"F8_E4M3"})
            ),
            ExpectedTensor(f"{module}.{self.scale_name}", shapes),
            ExpectedTensor(f"{module}.input_scale", ((), (1,)), is_optional=True),
        )

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        size = linear.num_inputs if self.block is None else self.block[1]
        if self.requantized is None and self.is_kept and linear.num_inputs % size == 0:
            return IntegerFormat(8, size, self.activations, is_fp8=True)
        return self.requantized


MXFP4_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Mxfp4Storage:
    """Blocks of 32 e2m1 numbers along the inputs, two to a byte, with a scale of a byte (e8m0), of
    matrices that lie in one tensor: `*_blocks` [E, N, K / 32, 16] and `*_scales` [E, N, K / 32] in
    place of [E, K, N]."""

    scale_bytes: int = 1
    """Of a scale in memory: as stored, but where a back end has another form."""

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        place, num_outputs = linear.weight.other_place, _stored_outputs(linear)
        assert place is not None and linear.weight.is_transposed
        num_blocks = linear.num_inputs // _group_size(MXFP4_BLOCK, linear)
        count, first = place.shape[0], place.first_row // linear.num_inputs * num_outputs
        rows, stacked = (num_outputs, num_blocks), (count, num_outputs, num_blocks)
        return (
            ExpectedTensor(
                f"{linear.name}.blocks", ((*rows, MXFP4_BLOCK // 2),), _BYTES,
                place=StackedPlace(
                    f"{place.name}_blocks", (*stacked, MXFP4_BLOCK // 2), first * num_blocks
                ),
            ),
            ExpectedTensor(
                f"{linear.name}.scales", (rows,), _BYTES,
                place=StackedPlace(f"{place.name}_scales", stacked, first),
            ),
        )  # fmt: skip

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        return IntegerFormat(4, MXFP4_BLOCK, "float", is_mxfp4=True, scale_bytes=self.scale_bytes)


class FormSupport(NamedTuple):
    """What forms kernels hold weights in where the model runs; by default on a CPU."""

    keeps_fp8: bool = False
    """Whether there are kernels for e4m3."""
    mxfp4_scale_bytes: int = 1


GPU_MXFP4_SCALE_BYTES = 4
"""Scales are float32 there."""


@dataclass(frozen=True, slots=True)
class CheckpointStorage:
    """Every projection of a checkpoint that is not stored as plain floating point,
    by the name of its weight."""

    name: str
    """As people call the format."""
    by_name: Mapping[str, LinearStorage]
    linears: Mapping[str, LinearSpec]

    @property
    def layout(self) -> Layout:
        """For `SafetensorsCheckpoint`."""
        return {name: storage.tensors(self.linears[name]) for name, storage in self.by_name.items()}

    @property
    def formats(self) -> WeightFormats:
        """For the plan."""
        held = {
            name: storage.held(self.linears[name])
            for name, storage in self.by_name.items()
            if self.linears[name].is_quantizable
        }
        integers = {name: each for name, each in held.items() if each is not None}
        sizes = {
            (
                "fp8" if each.is_fp8 else "mxfp4" if each.is_mxfp4 else f"{each.bits}-bit",
                each.activations,
            )
            for each in integers.values()
        }
        kinds = sorted(f"{size} weights, activations {activations}" for size, activations in sizes)
        return WeightFormats(
            integers, f"{self.name}: {'; '.join(kinds) or 'turned into the compute dtype'}"
        )


def read_storage(
    config: Mapping[str, object],
    spec: DecoderSpec,
    method: str | None,
    back_end: FormSupport | None = None,
) -> CheckpointStorage | None:
    """Return what the `quantization_config` of a parsed `config.json` says; None where there is
    none.

    `method` is the user's wish ("int4", "int8" or None) for the activations. Raises
    UnsupportedModelError for what is not implemented, ConfigError for a wish that the checkpoint
    cannot meet.
    """
    values = config.get("quantization_config")
    if values is None:
        return None
    root = ConfigReader({"quantization_config": values}, spec.architecture)
    reader = root.section("quantization_config")
    assert reader is not None
    read = reader.choice("quant_method", _METHODS)
    name, assign = read(reader)
    root.finish()
    linears = {
        part.weight.name: part.stored if part.holds_floats else part
        for parts in spec.projections
        for part in parts
    }
    found = {
        key: storage
        for key, linear in linears.items()
        if not linear.keeps_floats and (storage := assign(linear.name, linear)) is not None
    }
    if spec.is_tied and spec.head is not None:
        found.pop(spec.head.weight.name, None)
    found = {key: _on(back_end or FormSupport(), storage) for key, storage in found.items()}
    wished = (
        found
        if method is None
        else {key: _with_wish(storage, linears[key], method) for key, storage in found.items()}
    )
    if (
        method is not None
        and found
        and all(wished[key] is storage for key, storage in found.items())
    ):
        raise ConfigError(
            f"quantization={method!r}, but the checkpoint ({name}) is quantized otherwise "
            "already; leave it out (the same bits say that the activations are to be quantized, "
            "too, but not of MXFP4; FP8 can become int8)"
        )
    return CheckpointStorage(name, wished, linears)


def _on(back_end: FormSupport, storage: LinearStorage) -> LinearStorage:
    """Return the storage with what depends on where the model runs."""
    if isinstance(storage, Fp8Storage):
        return dataclasses.replace(storage, is_kept=back_end.keeps_fp8)
    if isinstance(storage, Mxfp4Storage):
        return dataclasses.replace(storage, scale_bytes=back_end.mxfp4_scale_bytes)
    return storage


def _with_wish(storage: LinearStorage, linear: LinearSpec, method: str) -> LinearStorage:
    """Return the storage with activations (and, for FP8, integers) as the user chooses them;
    itself where it has other bits."""
    if isinstance(storage, Fp8Storage):
        requantized = IntegerFormat(8, linear.num_inputs, "int8")
        return (
            dataclasses.replace(storage, requantized=requantized) if method == "int8" else storage
        )
    if isinstance(storage, Mxfp4Storage):
        return storage
    assert isinstance(storage, GptqStorage | AwqStorage | CompressedStorage)
    return (
        dataclasses.replace(storage, activations="int8")
        if method == f"int{storage.bits}"
        else storage
    )


Assign = Callable[[str, LinearSpec], LinearStorage | None]
"""From a module's name to how it is stored."""


def _read_gptq(config: ConfigReader) -> tuple[str, Assign]:
    bits = config.integer("bits")
    if bits not in (4, 8):
        raise config.refuse("bits", "4 or 8")
    config.flag("sym", True)  # either way the zero points are stored
    is_ordered = config.flag("desc_act", False)
    version = config.choice("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, "gptq")
    config.choice("pack_dtype", {"int32": None}, "int32")
    config.require("is_marlin_format", False)
    has_head = config.flag("lm_head", False)
    chosen = _names_in_blocks(config, "modules_in_block_to_quantize")
    config.ignore(
        "damp_percent", "damp_auto_increment", "static_groups", "true_sequential",
        "model_name_or_path", "meta", "dataset", "model_file_base_name", "tokenizer", "batch_size",
        "block_name_to_quantize", "cache_block_outputs", "use_exllama", "disable_exllama",
        "exllama_config", "max_input_length", "model_seqlen", "module_name_preceding_first_block",
        "pad_token_id", "use_cuda_fp16", "backend", "mse", "hyb_act", "offload_to_disk",
        "act_group_aware", "quant_method",
    )  # fmt: skip
    storage = GptqStorage(8 if bits == 8 else 4, _read_group_size(config), version, is_ordered)

    def assign(module: str, linear: LinearSpec) -> LinearStorage | None:
        if _is_head(module):
            return storage if has_head else None
        return (
            storage if not chosen or any(module.endswith(f".{name}") for name in chosen) else None
        )

    return f"GPTQ, {bits} bits", assign


def _read_awq(config: ConfigReader) -> tuple[str, Assign]:
    if config.integer("bits") != 4:
        raise config.refuse("bits", "4")
    if not config.flag("zero_point", True):
        raise config.refuse("zero_point", "true")
    version = config.text("version", "gemm")
    if version.lower() != "gemm":
        raise config.refuse("version", "gemm")
    excluded = config.texts("modules_to_not_convert")
    config.ignore("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
    storage = AwqStorage(_read_group_size(config))

    def assign(module: str, linear: LinearSpec) -> LinearStorage | None:
        is_excluded = _is_head(module) or any(name in module for name in excluded)
        return None if is_excluded else storage

    return "AWQ, 4 bits", assign


def _read_fp8(config: ConfigReader) -> tuple[str, Assign]:
    config.choice("fmt", {"e4m3": None, "float8_e4m3fn": None}, "e4m3")
    config.choice("activation_scheme", {"dynamic": None, "static": None}, "dynamic")
    config.choice("scale_fmt", {"float": None}, "float")
    excluded = (*config.texts("modules_to_not_convert"), *config.texts("ignored_layers"))
    block = (
        tuple(int(size) for size in config.numbers("weight_block_size", 2))
        if config.has("weight_block_size")
        else None
    )
    if block is not None and min(block) < 1:
        raise config.refuse("weight_block_size", "two sizes above zero")
    storage = Fp8Storage(
        cast("tuple[int, int] | None", block),
        "weight_scale" if block is None else "weight_scale_inv",
    )

    def assign(module: str, linear: LinearSpec) -> LinearStorage | None:
        is_excluded = _is_head(module) or any(_is_within(module, name) for name in excluded)
        return None if is_excluded else storage

    return "FP8", assign


def _read_mxfp4(config: ConfigReader) -> tuple[str, Assign]:
    """Only matrices that lie in one tensor are stored so, however many others are excluded."""
    excluded = config.texts("modules_to_not_convert")
    config.ignore("dequantize")  # transformers' own way to compute
    storage = Mxfp4Storage()

    def assign(module: str, linear: LinearSpec) -> LinearStorage | None:
        is_excluded = any(_is_within_pattern(module, name) for name in excluded)
        return None if is_excluded or linear.weight.other_place is None else storage

    return "MXFP4", assign


def _read_compressed(config: ConfigReader) -> tuple[str, Assign]:
    layouts = {
        name: name
        for name in (
            "int-quantized",
            "pack-quantized",
            "float-quantized",
            "naive-quantized",
            "mixed-precision",
        )
    }
    layout = config.choice("format", layouts)
    config.choice("quantization_status", {"compressed": None, "frozen": None}, "compressed")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if section := config.section(key):
            section.finish()
    ignored = tuple(_ModulePattern(config, "ignore", text) for text in config.texts("ignore"))
    config.ignore("global_compression_ratio", "version")
    groups = [_read_group(group, layout) for group in config.sections("config_groups")]
    if not groups:
        raise config.refuse("config_groups", "at least one group")

    def assign(module: str, linear: LinearSpec) -> LinearStorage | None:
        if any(target.matches(module) for target in ignored):
            return None
        by_name = [
            storage
            for targets, storage in groups
            if any(target.matches(module) for target in targets)
        ]
        by_type = [
            storage
            for targets, storage in groups
            if any(target.text == "Linear" for target in targets)
        ]
        return next(iter([*by_name, *by_type]), None)

    return f"compressed-tensors, {layout}", assign


def _is_plain_pattern(text: str) -> bool:
    """Return whether matching takes bounded time: few repetitions, none of a group, and nothing
    that refers back.

    `(.+)+x` takes a second for each character of a name by which that second doubles.
    """
    plain = _ESCAPED.sub("x", text)
    has_groups_repeated = _REPEATED_GROUP.search(plain) is not None
    return (
        len(text) <= _MAX_PATTERN_LEN
        and not has_groups_repeated
        and sum(map(plain.count, "*+{")) <= _MAX_REPETITIONS
        and _BACK_REFERENCE.search(text) is None
    )


class _ModulePattern:
    """A module's name, or with "re:" a pattern that a name must begin with."""

    def __init__(self, config: ConfigReader, key: str, text: str) -> None:
        self.text = text
        self._pattern = None
        if text.startswith("re:"):
            if not _is_plain_pattern(text[3:]):
                raise config.refuse(
                    key, "names, and after re: regular expressions that repeat no group"
                )
            try:
                self._pattern = re.compile(text[3:])
            except (re.error, RecursionError, OverflowError):
                raise config.refuse(key, "names, and regular expressions after re:") from None

    def matches(self, module: str) -> bool:
        return (
            module == self.text
            if self._pattern is None
            else self._pattern.match(module) is not None
        )


def _read_group(
    group: ConfigReader, layout: str
) -> tuple[tuple[_ModulePattern, ...], LinearStorage]:
    """Read one entry of `config_groups`."""
    targets = tuple(_ModulePattern(group, "targets", text) for text in group.texts("targets"))
    weights = group.section("weights")
    if weights is None:
        raise group.refuse("weights", "an object")
    layout = group.text("format", layout)
    inputs = group.section("input_activations")
    activations = _read_activations(inputs)
    if weights.choice("type", {"int": "int", "float": "float"}, "int") == "float":
        floats = _read_float_weights(weights)
        return targets, floats if inputs is not None else dataclasses.replace(
            floats, activations="float"
        )
    bits = weights.integer("num_bits")
    if bits not in (4, 8):
        raise weights.refuse("num_bits", "4 or 8")
    if layout not in ("int-quantized", "pack-quantized"):
        raise group.refuse("format", "int-quantized or pack-quantized for integers")
    has_groups = weights.choice(
        "strategy", {"channel": False, "tensor": False, "group": True}, "tensor"
    )
    group_size = _read_group_size(weights) if has_groups else None
    weights.require("group_size", group_size if has_groups else -1)
    weights.choice("actorder", {"weight": None, "static": None, "none": None}, "none")
    _ignore_calibration(weights)
    is_symmetric = weights.flag("symmetric", True)
    storage = CompressedStorage(
        8 if bits == 8 else 4,
        group_size,
        layout == "pack-quantized",
        is_symmetric,
        activations=activations,
    )
    return targets, storage


def _read_float_weights(weights: ConfigReader) -> Fp8Storage:
    if weights.integer("num_bits") != 8:
        raise weights.refuse("num_bits", "8 for floating point")
    if not weights.flag("symmetric", True):
        raise weights.refuse("symmetric", "true for floating point")
    has_blocks = weights.choice(
        "strategy", {"channel": False, "tensor": False, "block": True}, "tensor"
    )
    block = (
        tuple(int(size) for size in weights.numbers("block_structure", 2)) if has_blocks else None
    )
    weights.ignore("group_size", "block_structure")
    _ignore_calibration(weights)
    return Fp8Storage(cast("tuple[int, int] | None", block), "weight_scale")


def _read_activations(section: ConfigReader | None) -> Activations:
    """Return the integer format of `input_activations`: none, or 8 bits token by token."""
    if section is None:
        return "float"
    is_integer = section.choice("type", {"int": True, "float": False}, "int")
    if section.integer("num_bits") != 8:
        raise section.refuse("num_bits", "8")
    if is_integer:
        section.choice("strategy", {"token": None}, "token")
        if not section.flag("dynamic", False):
            raise section.refuse("dynamic", "true")
        if not section.flag("symmetric", True):
            raise section.refuse("symmetric", "true")
    section.ignore("strategy", "dynamic", "symmetric", "group_size", "block_structure", "actorder")
    _ignore_calibration(section)
    return "int8" if is_integer else "float"


def _ignore_calibration(section: ConfigReader) -> None:
    section.ignore(
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "zp_dtype",
        "dynamic",
        "block_structure",
        "actorder",
    )


_METHODS: dict[str, Callable[[ConfigReader], tuple[str, Assign]]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "mxfp4": _read_mxfp4,
}


def _read_group_size(config: ConfigReader) -> int | None:
    """Return a group size; None for -1, which means one scale per output."""
    size = config.integer("group_size", 128, minimum=-1)
    if size == 0:
        raise config.refuse("group_size", "-1, or a size above zero")
    return None if size == -1 else size


def _names_in_blocks(config: ConfigReader, key: str) -> tuple[str, ...]:
    """Return a list of lists of module names, flat."""
    if not config.has(key):
        config.ignore(key)
        return ()
    value = config.raw(key)
    lists = value if isinstance(value, list) else [None]
    flat = [name for names in lists for name in (names if isinstance(names, list) else [names])]
    named = [name for name in flat if isinstance(name, str)]
    if len(named) != len(flat):
        raise config.refuse(key, "lists of module names")
    return tuple(named)


def _group_size(size: int | None, linear: LinearSpec) -> int:
    """Return the inputs that share a scale. Raises ConfigError where they do
    not divide the projection's."""
    size = linear.num_inputs if size is None else size
    if linear.num_inputs % size:
        raise ConfigError(
            f"{linear.name} has {linear.num_inputs} inputs, which groups of {size} do not divide"
        )
    return size


def _divide(linear: LinearSpec, per_word: int, *sizes: int) -> None:
    if any(size % per_word for size in sizes):
        raise ConfigError(
            f"{linear.name} has sizes that {per_word} values a word do not divide: {list(sizes)}"
        )


def _stored_outputs(linear: LinearSpec) -> int:
    return linear.weight.stored_rows or linear.num_outputs


def _is_head(module: str) -> bool:
    return module == "lm_head"


def _is_within(module: str, name: str) -> bool:
    """Return whether a module is `name` or lies inside it; `name` may leave out the beginning."""
    return f".{module}.".endswith(f".{name}.") or f".{module}.".find(f".{name}.") >= 0


def _is_within_pattern(module: str, pattern: str) -> bool:
    """As `_is_within`; a `*` stands for one part of a name."""
    parts, wanted = module.split("."), pattern.split(".")
    return any(
        all(each in ("*", part) for each, part in zip(wanted, parts[start:], strict=False))
        for start in range(len(parts) - len(wanted) + 1)
    )
