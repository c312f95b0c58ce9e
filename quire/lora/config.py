"""What an adapter's `adapter_config.json` says, read strictly.

Owns the keys: each is understood, known to change nothing at inference, or refused by its name, so
that no adapter is served as another one. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quire.common.small_files import read_object
from quire.errors import CheckpointError

CONFIG_NAME = "adapter_config.json"
MAX_RANK = 512
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 10_000
_MAX_SHOWN_CHARS = 80
_MAX_INVOCATION = 1024
_HARMLESS_KEYS = """
    peft_type task_type base_model_name_or_path revision inference_mode lora_dropout auto_mapping
    fan_in_fan_out peft_version megatron_core qalora_group_size runtime_config eva_config
    loftq_config layers_pattern
"""
"""Of training and bookkeeping."""
_READ_KEYS = """
    r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules bias
    layers_to_transform init_lora_weights alora_invocation_tokens lora_bias target_parameters
"""
_KNOWN = frozenset((_HARMLESS_KEYS + _READ_KEYS).split())
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva", "true", "false")
"""Ways to begin training that leave the base model's weights as they are."""
_PATTERN = re.compile(r"\^?[A-Za-z0-9_]+((\\?\.)[A-Za-z0-9_]+)*\$?", re.ASCII)
_RELEASE, _SINCE = re.compile(r"(\d{1,6})\.(\d{1,6})", re.ASCII), (0, 21)

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings that an adapter's numbers depend on."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    """The scale is alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023), else alpha / rank."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | None
    """Names that its modules end with, all of which must be there; None where the config gives a
    pattern, or leaves modules out."""
    invocation: tuple[int, ...] = ()
    """Tokens that activate it, of an activated LoRA."""
    parameters: tuple[str, ...] = ()
    """Names that tensors end with that are changed without being a module's `weight`: experts'."""
    has_base_biases: bool = False
    """The file may hold biases in place of the model's."""
    has_own_biases: bool = False
    """Its modules' `lora_B` have biases."""
    is_recent: bool = False
    """Written by a release of PEFT that keeps inputs in `lora_A` and outputs in `lora_B`, whatever
    the order of the dimensions of the tensor that they change. (Seen in 0.21.)"""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return what a module's adapter is multiplied by."""
        alpha, rank = _matching(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_config(folder: Path) -> AdapterConfig:
    """Read an adapter's settings. Raises CheckpointError, with the key, for those not supported."""
    path = folder / CONFIG_NAME
    values = read_object(path, _MAX_CONFIG_BYTES)
    return _Reader(path, values).config()


class _Reader:
    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path, self._values = path, values

    def config(self) -> AdapterConfig:
        values = self._values
        if values.get("peft_type") != "LORA":
            raise self._refusal("peft_type", '"LORA"')
        if values.get("task_type") not in (None, "CAUSAL_LM", "FEATURE_EXTRACTION"):
            raise self._refusal("task_type", '"CAUSAL_LM" and "FEATURE_EXTRACTION"')
        if values.get("bias") not in (None, "none", "all", "lora_only"):
            raise self._refusal("bias", '"none", "all" and "lora_only"')
        if values.get("init_lora_weights") not in _PLAIN_STARTS:
            raise self._refusal("init_lora_weights", "starts that leave the base model as it is")
        for key, value in values.items():
            is_off = value is None or value is False or value in ({}, [], "")
            if key not in _KNOWN and not is_off:
                raise self._refusal(key, "null, false or empty")
        return AdapterConfig(
            rank=self._rank("r", values.get("r")),
            alpha=self._alpha("lora_alpha", values.get("lora_alpha", 8)),
            is_rank_stabilized=self._flag("use_rslora"),
            rank_pattern={
                k: self._rank("rank_pattern", v) for k, v in self._pattern("rank_pattern")
            },
            alpha_pattern={
                k: self._alpha("alpha_pattern", v) for k, v in self._pattern("alpha_pattern")
            },
            targets=self._targets(),
            invocation=self._invocation(),
            parameters=self._names("target_parameters"),
            has_base_biases=values.get("bias") in ("all", "lora_only"),
            has_own_biases=self._flag("lora_bias"),
            is_recent=self._is_recent(),
        )

    def _refusal(self, key: str, supported: str) -> CheckpointError:
        shown = repr(self._values.get(key))[:_MAX_SHOWN_CHARS]
        return CheckpointError(f"{self._path} has {key}={shown}; supported: {supported}")

    def _flag(self, key: str) -> bool:
        value = self._values.get(key) or False
        if not isinstance(value, bool):
            raise self._refusal(key, "true or false")
        return value

    def _names(self, key: str) -> tuple[str, ...]:
        given = self._values.get(key) or []
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise self._refusal(key, "names of modules")
        return tuple(given)

    def _is_recent(self) -> bool:
        match = _RELEASE.match(str(self._values.get("peft_version")))
        return match is not None and (int(match[1]), int(match[2])) >= _SINCE

    def _rank(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
            raise self._refusal(key, f"ranks from 1 to {MAX_RANK}")
        return value

    def _alpha(self, key: str, value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= 1e6:  # type: ignore[arg-type]  # nor nan
            raise self._refusal(key, "ordinary numbers")
        return float(value)  # type: ignore[arg-type]

    def _pattern(self, key: str) -> list[tuple[str, object]]:
        """Read names of modules, or of their ends; regular expressions are refused."""
        given = self._values.get(key) or {}
        is_plain = isinstance(given, dict) and len(given) <= _MAX_PATTERNS
        if not is_plain or not all(_PATTERN.fullmatch(each) for each in given):
            raise self._refusal(key, "names of modules, or of their last parts")
        return list(given.items())

    def _invocation(self) -> tuple[int, ...]:
        key = "alora_invocation_tokens"
        given = self._values.get(key)
        if given is None:
            return ()
        is_read = isinstance(given, list) and 0 < len(given) <= _MAX_INVOCATION
        if not is_read or not all(type(each) is int and 0 <= each < 1 << 31 for each in given):
            raise self._refusal(key, f"1 to {_MAX_INVOCATION} token ids")
        return tuple(given)

    def _targets(self) -> tuple[str, ...] | None:
        given, values = self._values.get("target_modules"), self._values
        if (
            isinstance(given, str)
            or values.get("exclude_modules")
            or (values.get("layers_to_transform") is not None)
        ):
            return None
        if given is None and values.get("target_parameters"):
            return ()
        if not isinstance(given, list):
            raise self._refusal("target_modules", "names of modules")
        return self._names("target_modules")


def _matching(pattern: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    """Return the value of the first name that the module's is, or ends with, as PEFT does."""
    for key, value in pattern.items():
        name = key.replace("\\.", ".").removesuffix("$")
        if module == name.removeprefix("^"):
            return value
        if not name.startswith("^") and module.endswith(f".{name}"):
            return value
    return default
