"""The tensors of an adapter's file by module, and which of them were made use of. Imports no
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quire.errors import CheckpointError
from quire.lora.config import AdapterConfig
from quire.lora.fused import FusedExpert
from quire.models.declaration import DecoderSpec
from quire.weights.checkpoint import renamed_to
from quire.weights.tensor_file import StoredTensor

_NAMES = {
    "lora_A": r"lora_A(?:\.default)?\.weight",
    "lora_B": r"lora_B(?:\.default)?\.weight",
    "lora_embedding_A": r"lora_embedding_A(?:\.default)?",
    "lora_embedding_B": r"lora_embedding_B(?:\.default)?",
    "lora_B.bias": r"lora_B(?:\.default)?\.bias",
    "copy": r"(?:base_layer\.)?weight",
    "base_layer.bias": r"(?:base_layer\.)?bias",
}
"""Of the tensors of a module, behind its name."""
_NAME = re.compile(
    r"base_model\.model\.(.+?)\.(?:" + "|".join(f"({pattern})" for pattern in _NAMES.values()) + ")"
)
_INNER = ".base_layer"
"""Where two tensors of a module are changed, one of them is changed in the module inside."""


class ModuleTensors(NamedTuple):
    """What a file has for one projection: at least one of these."""

    down: StoredTensor | None
    up: StoredTensor | None
    """Both or neither."""
    bias: StoredTensor | None
    base_bias: StoredTensor | None


class Halves:
    """The tensors of a file by module; what remains unused can be listed."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, StoredTensor],
        spec: DecoderSpec,
        config: AdapterConfig,
    ) -> None:
        self._folder, self._prefix, self._config = folder, spec.optional_prefix, config
        self._found: dict[str, dict[str, StoredTensor]] = {}
        self._strange = []
        self.used: set[str] = set()
        """Names of modules, and of tensors of experts, that have an adapter."""
        self._taken: set[tuple[str, str]] = set()
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None or match.lastindex is None:
                self._strange.append(name)
                continue
            kind = list(_NAMES)[match.lastindex - 2]
            module = renamed_to(match[1], spec.renamed)
            self._found.setdefault(module, {})[kind] = tensor

    @property
    def unused(self) -> list[str]:
        """The tensors that belong to no module."""
        left = [
            f"{module}.{'weight' if kind == 'copy' else kind}"
            for module, kinds in self._found.items()
            for kind in kinds
            if (module, kind) not in self._taken
        ]
        return [*self._strange, *sorted(left)]

    def of(self, module: str) -> ModuleTensors | None:
        """Take the tensors of a projection, whose name may lack the prefix; None where there are
        none."""
        name = self._stored_name(module)
        kinds = ["lora_A", "lora_B"]
        kinds += ["lora_B.bias"] if self._config.has_own_biases else []
        kinds += ["base_layer.bias"] if self._config.has_base_biases else []
        down, up, *others = (self._take(name, kind) for kind in kinds)
        self._require_both(module, down, up, "lora_")
        bias = others.pop(0) if self._config.has_own_biases else None
        found = ModuleTensors(down, up, bias, others[0] if others else None)
        if bias is not None and down is None:
            raise CheckpointError(
                f"{self._folder}: of the adapter of {module} there is a bias alone"
            )
        if down is not None:
            self.used.add(module)
        return found if any(each is not None for each in found) else None

    def of_embedding(self, module: str) -> tuple[StoredTensor, StoredTensor] | None:
        """Take both halves of an embedding; None where there are none."""
        name = self._stored_name(module)
        down, up = (self._take(name, f"lora_embedding_{half}") for half in "AB")
        self._require_both(module, down, up, "lora_embedding_")
        if down is None or up is None:
            return None
        self.used.add(module)
        return down, up

    def of_experts(self, expert: FusedExpert) -> tuple[StoredTensor, StoredTensor] | None:
        """Take the factors of a tensor that stacks experts; None where there are none."""
        module = self._stored_name(expert.name.rpartition(".")[0])
        for name in (module, module + _INNER):
            kinds = self._found.get(name, {})
            if "lora_A" not in kinds or "lora_B" not in kinds:
                continue
            halves = kinds["lora_A"], kinds["lora_B"]
            if expert.fits(halves):
                expert.require_plain(is_recent=self._config.is_recent)
                self._taken |= {(name, "lora_A"), (name, "lora_B")}
                self.used.add(expert.name)
                return halves
        return None

    def copy_of(self, module: str) -> StoredTensor | None:
        """Take a copy of the model's own weight."""
        return self._take(self._stored_name(module), "copy")

    def _stored_name(self, module: str) -> str:
        return module if module in self._found else module.removeprefix(self._prefix)

    def _take(self, name: str, kind: str) -> StoredTensor | None:
        found = self._found.get(name, {}).get(kind)
        if found is not None:
            self._taken.add((name, kind))
        return found

    def _require_both(
        self, module: str, down: StoredTensor | None, up: StoredTensor | None, prefix: str
    ) -> None:
        if (down is None) != (up is None):
            half = "A" if up is None else "B"
            raise CheckpointError(
                f"{self._folder}: of the adapter of {module} there is {prefix}{half} alone"
            )
