"""What a folder in the layout of sentence-transformers says of pooling: `modules.json` and its
neighbours.

Read strictly: a module that is not known, or a key of it that would change vectors, is refused.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.common.small_files import is_file, read_bytes, read_object
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.declaration import DenseActivation, DenseSpec, PoolingKind
from quire.models.pooling import LateInteraction
from quire.models.tensors import linear
from quire.weights.folder import MODULES_NAME
from quire.weights.late_interaction import (
    METADATA,
    PYLATE_DOCUMENT_LEN,
    PYLATE_PROMPTS,
    TOKEN_MODULES,
    read_late_interaction,
    read_metadata,
)

_MAX_BYTES = 4 << 20
_MAX_MODULES = 32
_PREFIXES = {"query": "query_prefix", "document": "document_prefix"}
"""PyLate's names of prompts."""
_KINDS: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, PoolingKind] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
_ACTIVATIONS: dict[str, DenseActivation] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


class StoredTexts(NamedTuple):
    """How texts are to be put."""

    max_len: int | None = None
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None


class StoredPooling(NamedTuple):
    """What the folder says; None and empty where it says nothing."""

    kind: PoolingKind
    counts_prompt: bool
    layers: tuple[DenseSpec, ...]
    is_normalized: bool
    kind_source: str
    """The file that names the kind."""
    token_names: tuple[str | int, ...] = ()
    """Of a reranker that compares the logits of two tokens: the one for no, the one for yes."""
    late: LateInteraction | None = None
    """Where each token has a vector; `kind` is then of no use."""
    texts: StoredTexts | None = None
    """Where they are put otherwise than `read_texts` says."""


def read_modules(folder: Path) -> StoredPooling | None:
    """The modules behind the transformer; None where there is no pooling among them. Raises a
    QuireError.
    """
    kind: PoolingKind | None = None
    counts_prompt, is_normalized, source = True, False, ""
    layers: list[DenseSpec] = []
    modules = _modules(folder)
    if any(name in TOKEN_MODULES for name, _ in modules) or (
        [name for name, _ in modules[:2]] == ["Transformer", "Dense"]
    ):
        return _read_token_modules(folder, modules)
    for number, (name, path) in enumerate(modules):
        at = folder / path
        if number == 0:
            if name != "Transformer":
                raise _refused(folder, f"begins with a {name}", "a Transformer")
        elif name == "Pooling" and kind is None:
            kind, counts_prompt = _read_kind(at / "config.json")
            source = f"{path}/config.json"
        elif name == "Dense" and kind is not None:
            layers.append(_read_dense(at / "config.json", path))
        elif name == "Normalize" and kind is not None:
            is_normalized = True
        elif name not in ("Dropout",):
            known = "Transformer, Pooling, Dense, Normalize and Dropout, in this order"
            raise _refused(folder, f"has a {name} as module {number}", known)
    if kind is None:
        return None
    return StoredPooling(kind, counts_prompt, tuple(layers), is_normalized, source)


def _read_token_modules(folder: Path, modules: Sequence[tuple[str, str]]) -> StoredPooling:
    """Modules of a model that makes a vector of each token, by sentence-transformers or PyLate."""
    layers, masks, is_normalized = [], [], False
    for number, (name, path) in enumerate(modules):
        if name == "Dense":
            layers.append(_read_dense(folder / path / "config.json", path))
        elif name in TOKEN_MODULES:
            masks.append(read_object(folder / path / "config.json", _MAX_BYTES))
        elif name == "Normalize":
            is_normalized = True
        elif (name, number) != ("Transformer", 0):
            known = "Transformer, Dense, MultiVectorMask and Normalize"
            raise _refused(folder, f"has a {name} as module {number}", known)
    late = read_late_interaction(folder, masks[0] if masks else None)
    if masks:
        return StoredPooling("cls", True, tuple(layers), is_normalized, "modules.json", late=late)
    # PyLate has no module for normalisation, and normalises always; it writes empty prompts of
    # these names beside its own keys
    found, config = read_texts(folder), _optional(folder / "config_sentence_transformers.json")
    own = {role: config.get(key) for role, key in _PREFIXES.items()}
    marks = {role: PYLATE_PROMPTS[role] if own[role] is None else str(own[role]) for role in own}
    texts = found._replace(
        max_len=found.max_len or PYLATE_DOCUMENT_LEN, prompts={**found.prompts, **marks}
    )
    return StoredPooling("cls", True, tuple(layers), True, "modules.json", late=late, texts=texts)


def read_colbert(folder: Path, hidden_size: int) -> StoredPooling:
    """What a folder of ColBERT's own says, whose checkpoint has the projection beside an encoder.
    Raises a QuireError."""
    late, prompts, max_len, width = read_metadata(folder)
    layer = DenseSpec(linear("linear", hidden_size, width))
    texts = StoredTexts(max_len, prompts)
    return StoredPooling("cls", True, (layer,), True, METADATA, late=late, texts=texts)


def read_texts(folder: Path) -> StoredTexts:
    """Maximum length and prompts. Raises CheckpointError."""
    sizes = _optional(folder / "sentence_bert_config.json")
    config = _optional(folder / "config_sentence_transformers.json")
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        raise CheckpointError(
            f"{folder / 'config_sentence_transformers.json'}: prompts must be an object of texts"
        )
    length = sizes.get("document_length", config.get("document_length"))
    length = sizes.get("max_seq_length") if length is None else length
    prompts = {
        **{role: config[key] for role, key in _PREFIXES.items() if config.get(key) is not None},
        **prompts,
    }
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{folder / 'config_sentence_transformers.json'}: default_prompt_name={default!r} is "
            f"none of the prompts {', '.join(prompts)}"
        )
    is_length = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return StoredTexts(length if is_length else None, prompts, default)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order."""
    path = folder / MODULES_NAME
    try:
        listed = json.loads(read_bytes(path, _MAX_BYTES))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not valid JSON") from None
    if not isinstance(listed, list) or not 0 < len(listed) <= _MAX_MODULES:
        raise CheckpointError(f"{path} must hold a list of 1 to {_MAX_MODULES} modules")
    found = []
    for each in listed:
        kind, at = (each.get("type"), each.get("path")) if isinstance(each, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(at, str) or not _is_plain_name(at):
            raise CheckpointError(
                f"{path}: {str(each)[:120]} needs a type, and a plain folder as path"
            )
        found.append((kind.rpartition(".")[2], at))
    return found


def _is_plain_name(at: str) -> bool:
    """Whether a path leads to the folder itself or into one of its folders."""
    return not at or (Path(at).name == at and at not in ("..", ".") and "\0" not in at)


def _read_kind(path: Path) -> tuple[PoolingKind, bool]:
    config = read_object(path, _MAX_BYTES)
    modes = [kind for key, kind in _KINDS.items() if config.get(key) is True]
    named = config.get("pooling_mode")
    if named is not None:
        if not isinstance(named, str) or named not in _NAMES:
            raise UnsupportedModelError(
                f"{path}: pooling_mode={str(named)[:80]!r} is not supported; supported: "
                f"{', '.join(_NAMES)}"
            )
        modes = [_NAMES[named]]
    if len(modes) != 1:
        shown = " and ".join(modes) or "none"
        raise UnsupportedModelError(
            f"{path} asks for {shown} of the ways to pool; exactly one is supported"
        )
    counts_prompt = config.get("include_prompt", True)
    if not isinstance(counts_prompt, bool):
        raise CheckpointError(f"{path}: include_prompt must be true or false")
    return modes[0], counts_prompt


def _read_dense(path: Path, folder: str) -> DenseSpec:
    config = read_object(path, _MAX_BYTES)
    num_inputs, num_outputs = config.get("in_features"), config.get("out_features")
    if not _is_size(num_inputs) or not _is_size(num_outputs):
        raise CheckpointError(f"{path}: in_features and out_features must be numbers")
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{path}: activation_function={str(name)[:80]!r} is not supported; supported: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    has_bias = config.get("bias", True) is True
    spec = linear("linear", int(num_inputs or 0), int(num_outputs or 0), has_bias=has_bias)
    return DenseSpec(spec, _ACTIVATIONS[name], folder=folder)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and 0 < value < 1 << 20


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path, _MAX_BYTES) if is_file(path) else {}


def _refused(folder: Path, what: str, known: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{folder / 'modules.json'} {what}; supported: {known}")
