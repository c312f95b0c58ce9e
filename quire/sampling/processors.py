"""Per-request logits processors: callables registered under a name, because only names may travel
in a plan.

Owns the table, the calling conventions and the containment of what a processor does wrong. Which
request uses which processor is written in its `RowSampling`; the engine registers when the request
arrives and unregisters when it ends.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import InvalidParameterError, QuireError
from quire.sampling.rows import RowError, SampledRow

Processor = Callable[..., Any]


class ProcessorTable:
    """Names to callables `([prompt_token_ids,] output_token_ids, logits) -> logits`.

    The token ids are lists of int, `logits` is float32 [V] and belongs to the processor: it may be
    written and returned.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Processor, bool]] = {}
        self._numbers = itertools.count(1)

    def register(self, processor: Processor) -> str:
        """Enter a processor; the name is unique in this table.
        The same callable may be entered many times."""
        if not callable(processor):
            raise InvalidParameterError(
                f"a logits processor must be callable, not {type(processor).__name__}",
                param="logits_processors",
            )
        label = getattr(processor, "__name__", type(processor).__name__)
        name = f"{label}#{next(self._numbers)}"
        self._entries[name] = (processor, _wants_prompt(processor))
        return name

    def unregister(self, name: str) -> None:
        """Forget a processor; an unknown name is a bug of the caller's."""
        del self._entries[name]

    def __len__(self) -> int:
        return len(self._entries)

    def apply(self, name: str, row: SampledRow, logits: Tensor) -> Tensor:
        """Return what processor `name` makes of one row's logits (float32 [V], left alone);
        RowError for any mishap of its."""
        entry = self._entries.get(name)
        if entry is None:
            raise RowError(f"logits processor {name!r} is not registered with this executor")
        processor, wants_prompt = entry
        ids = [_to_list(row.prompt_token_ids)] if wants_prompt else []
        try:
            result = processor(*ids, _to_list(row.output_token_ids), logits.clone())
        except Exception as error:
            # another's text may hold anything
            reason = f": {error}" if isinstance(error, QuireError) else ""
            raise RowError(
                f"logits processor {name!r} raised {type(error).__name__}{reason}"
            ) from error
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            shape = (
                f"a tensor of shape {tuple(result.shape)}"
                if isinstance(result, Tensor)
                else type(result).__name__
            )
            raise RowError(
                f"logits processor {name!r} returned {shape} instead of a tensor of "
                f"{logits.numel()} logits"
            )
        return result.detach().to(device=logits.device, dtype=torch.float32)


def _wants_prompt(processor: Processor) -> bool:
    """Return whether a callable takes three arguments;
    one whose signature cannot be read is taken to want two."""
    try:
        return len(inspect.signature(processor).parameters) == 3
    except (TypeError, ValueError):
        return False


def _to_list(token_ids: object) -> list[int]:
    ids: list[int] = np.asarray(token_ids, dtype=np.int64).tolist()
    return ids
