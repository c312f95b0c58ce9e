"""From the adapter that a program names with a request to the version that the request gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.core.adapters import Adapter
from quire.engine.plan.adapters import AdapterPlan
from quire.errors import CheckpointError, InvalidParameterError
from quire.lora.request import LoRARequest
from quire.models.declaration import DecoderSpec

if TYPE_CHECKING:
    from quire.lora.store import AdapterStore

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one for each; None is the model itself."""


class ChosenAdapter(NamedTuple):
    """What a request is answered with besides the model."""

    request: LoRARequest
    """As the program named it."""
    version: Adapter


class RequestedAdapters:
    """The adapters that programs name with their requests. Safe in any thread."""

    def __init__(self, spec: DecoderSpec, plan: AdapterPlan | None) -> None:
        self._store: AdapterStore | None = None
        if plan is not None:
            from quire.lora.store import AdapterStore

            self._store = AdapterStore(spec, plan.limits)

    def chosen(self, request: LoRARequest | None) -> ChosenAdapter | None:
        """Return the adapter that a request gets. Raises InvalidParameterError where there is none.

        Reads the adapter's files where they are not those of the last time.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise InvalidParameterError(
                f"lora_request is a {type(request).__name__}; give a LoRARequest",
                param="lora_request",
            )
        if self._store is None:
            raise InvalidParameterError(
                "lora_request needs an engine that serves adapters; build it with enable_lora=True",
                param="lora_request",
            )
        try:
            version = self._store.version_of(Path(request.lora_path).expanduser())
        except CheckpointError as error:
            raise InvalidParameterError(str(error), param="lora_request") from None
        return ChosenAdapter(request, version)

    def one_each(self, requests: LoRARequests, num_prompts: int) -> list[ChosenAdapter | None]:
        """Return the same for each of so many prompts."""
        if not isinstance(requests, list | tuple):
            return [self.chosen(requests)] * num_prompts  # type: ignore[arg-type]
        if len(requests) != num_prompts:
            raise InvalidParameterError(
                f"{len(requests)} lora_requests for {num_prompts} prompts; give one for all or one "
                "for each",
                param="lora_request",
            )
        distinct = {id(each): self.chosen(each) for each in requests}
        return [distinct[id(each)] for each in requests]

    def close(self) -> None:
        """Delete the copies of all versions. Idempotent."""
        if self._store is not None:
            self._store.close()
