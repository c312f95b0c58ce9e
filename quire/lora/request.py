"""How a program names the adapter of a request. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from quire.errors import InvalidParameterError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter to answer with: a folder as PEFT writes them.

    What counts is the folder's content at the time of the request. The name is for people and
    metrics; the number, which other engines keep adapters by, only has to be above 0.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str] = ""
    """A `Path` is taken as well."""
    base_model_name: str | None = None
    load_inplace: bool = False
    """Has no effect: what a folder holds is looked at with every request."""

    def __post_init__(self) -> None:
        is_name = isinstance(self.lora_name, str) and self.lora_name
        if not is_name:
            raise InvalidParameterError(
                f"lora_name={self.lora_name!r} must be text", param="lora_name"
            )
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidParameterError(
                f"lora_int_id={number!r} must be an integer above 0", param="lora_int_id"
            )
        if isinstance(self.lora_path, os.PathLike):
            object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        if not isinstance(self.lora_path, str) or not self.lora_path or "\0" in self.lora_path:
            raise InvalidParameterError(
                f"lora_path={self.lora_path!r} must be the folder of an adapter", param="lora_path"
            )

    @property
    def adapter_id(self) -> int:
        """Return the number."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """Return the name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """Return the folder."""
        return os.fspath(self.lora_path)
