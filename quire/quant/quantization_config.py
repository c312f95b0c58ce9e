"""The strict reading of a checkpoint's `quantization_config`, torch-free.

Owns the public formats' vocabulary, and turns it into one record of `quire.quant.storage` per
projection. A value that is not implemented is refused by the name of its key.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

from quire.errors import ConfigError
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.tensors import LinearSpec
from quire.quant.formats import FormSupport, IntegerFormat
from quire.quant.storage import (
    Activations,
    AwqStorage,
    CheckpointStorage,
    CompressedStorage,
    Fp8Storage,
    GptqStorage,
    LinearStorage,
    Mxfp4Storage,
)

_MAX_PATTERN_LEN = 500
_MAX_REPETITIONS = 4
_ESCAPED = re.compile(r"\\.|\[[^\]]*\]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_BACK_REFERENCE = re.compile(r"\\[1-9]|\(\?[^:]")


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
        if not linear.keeps_floats
        and (storage := assign(_spellings(linear.name, spec.renamed), linear)) is not None
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


Names = tuple[str, ...]
"""One module's, as the declaration and as checkpoints spell it."""
Assign = Callable[[Names, LinearSpec], LinearStorage | None]
"""From a module's names to how it is stored."""


def _spellings(name: str, renamed: Iterable[tuple[str, str]]) -> Names:
    """Return a module's name, and those that checkpoints have for it (`DecoderSpec.renamed`): a
    list of exceptions is written in the names of its checkpoint."""
    module = f"{name}."
    others = [stored + module.removeprefix(ours) for stored, ours in renamed
              if module.startswith(ours)]  # fmt: skip
    return (name, *(each.removesuffix(".") for each in others))


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

    def assign(names: Names, linear: LinearSpec) -> LinearStorage | None:
        if _is_head(names):
            return storage if has_head else None
        is_chosen = any(names[0].endswith(f".{each}") for each in chosen)
        return storage if is_chosen or not chosen else None

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

    def assign(names: Names, linear: LinearSpec) -> LinearStorage | None:
        is_excluded = any(each in name for each in excluded for name in names)
        is_excluded = is_excluded or _is_head(names)
        return None if is_excluded else storage

    return "AWQ, 4 bits", assign


def _read_fp8(config: ConfigReader) -> tuple[str, Assign]:
    config.choice("fmt", {"e4m3": None, "float8_e4m3fn": None}, "e4m3")
    config.choice("activation_scheme", {"dynamic": None, "static": None}, "dynamic")
    config.choice("scale_fmt", {"float": None}, "float")
    excluded = (*config.texts("modules_to_not_convert"), *config.texts("ignored_layers"))
    key = "weight_block_size"
    block = _read_block(config, key) if config.has(key) else None
    storage = Fp8Storage(block, "weight_scale" if block is None else "weight_scale_inv")

    def assign(names: Names, linear: LinearSpec) -> LinearStorage | None:
        is_excluded = any(_is_within(name, each) for each in excluded for name in names)
        is_excluded = is_excluded or _is_head(names)
        return None if is_excluded else storage

    return "FP8", assign


def _read_mxfp4(config: ConfigReader) -> tuple[str, Assign]:
    """Only matrices that lie in one tensor are stored so, however many others are excluded."""
    excluded = config.texts("modules_to_not_convert")
    config.ignore("dequantize")  # transformers' own way to compute
    storage = Mxfp4Storage()

    def assign(names: Names, linear: LinearSpec) -> LinearStorage | None:
        is_excluded = any(_is_within_pattern(name, each) for each in excluded for name in names)
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

    def assign(names: Names, linear: LinearSpec) -> LinearStorage | None:
        if any(target.matches(names) for target in ignored):
            return None
        by_name = [
            storage
            for targets, storage in groups
            if any(target.matches(names) for target in targets)
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

    def matches(self, names: Names) -> bool:
        if self._pattern is None:
            return self.text in names
        return any(self._pattern.match(name) is not None for name in names)


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
    block = _read_block(weights, "block_structure") if has_blocks else None
    weights.ignore("group_size", "block_structure")
    _ignore_calibration(weights)
    return Fp8Storage(block, "weight_scale")


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


def _read_block(config: ConfigReader, key: str) -> tuple[int, int]:
    """Return the outputs and inputs that share a scale."""
    sizes = config.numbers(key, 2)
    if not all(size.is_integer() and size >= 1 for size in sizes):
        raise config.refuse(key, "two whole numbers above zero")
    return int(sizes[0]), int(sizes[1])


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


def _is_head(names: Names) -> bool:
    return names[0] == "lm_head"


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
