"""The weights of one adapter: from its files to what back ends pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.core.adapters import AdapterOrder
from quire.errors import CheckpointError
from quire.kernels.interface import Kernels
from quire.kernels.lora import LoraPart, LoraWeight, PackedAdapter
from quire.lora.cutting import cut_outputs
from quire.lora.identity import content_digest
from quire.lora.layout import WEIGHTS_NAME, PartLayout, WeightLayout, layout_of
from quire.models.declaration import DecoderSpec
from quire.weights.checkpoint import read_stored
from quire.weights.tensor_file import StoredTensor, TensorFile


class AdapterLoader:
    """Loads adapters of one model for one back end."""

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: Kernels,
        dtype: str,
        max_rank: int,
        outputs: Mapping[int, Sequence[range]] | None = None,
    ) -> None:
        """`outputs` are those that this process has of some weights; of others it has all."""
        self._outputs = outputs or {}
        self._spec, self._kernels, self._max_rank = spec, kernels, max_rank
        self._dtype: torch.dtype = getattr(torch, dtype)

    def load(self, order: AdapterOrder) -> PackedAdapter:
        """Read, convert and pack. CheckpointError for files that are not what the digest says."""
        assert order.folder is not None
        try:
            return self._load(Path(order.folder), order.digest)
        except CheckpointError as error:  # where the files lie is nothing for a client
            text = str(error).replace(order.folder, f"adapter {order.digest[:12]}")
            raise CheckpointError(text) from None

    def _load(self, folder: Path, digest: str) -> PackedAdapter:
        file = TensorFile(folder / WEIGHTS_NAME)
        try:
            layout = layout_of(folder, file, self._spec, self._max_rank)
            weights = {each.number: self._held(each, file) for each in layout}
            if content_digest(folder) != digest or file.has_changed():
                raise CheckpointError(f"{folder}: the adapter's files are no longer what they were")
        except OSError as error:
            raise CheckpointError(f"{folder}: the adapter cannot be read: {error}") from None
        finally:
            file.close()
        return self._kernels.pack_adapter(weights, len(self._spec.projections))

    def _held(self, layout: WeightLayout, file: TensorFile) -> LoraWeight:
        whole, ranges = self._weight(layout, file), self._outputs.get(layout.number)
        return whole if ranges is None else cut_outputs(whole, ranges)

    def _weight(self, layout: WeightLayout, file: TensorFile) -> LoraWeight:
        """Stack the parts; those that were one module in training share its `down`."""
        downs: dict[StoredTensor, int] = {}
        first_rank, scales, parts = 0, list[float](), list[LoraPart]()
        for part in layout.parts:
            if part.down not in downs:
                downs[part.down] = first_rank
                first_rank += part.rank
                scales += [part.scale] * part.rank
            parts.append(LoraPart(part.first_output, downs[part.down], self._up(part, file)))
        stacked = torch.cat([self._read(file, down) for down in downs])
        return LoraWeight(stacked, torch.tensor(scales), tuple(parts), layout.num_outputs)

    def _up(self, part: PartLayout, file: TensorFile) -> Tensor:
        rows = self._read(file, part.up)
        return rows[part.first_row : part.first_row + part.num_outputs]

    def _read(self, file: TensorFile, stored: StoredTensor) -> Tensor:
        return read_stored(file, stored).to(self._dtype)
