"""The weights of one adapter: from its files to what back ends pack."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.core.adapters import AdapterOrder
from quire.errors import CheckpointError
from quire.kernels.elsewhere import ElsewhereLinear
from quire.kernels.interface import EmbeddingTable, Kernels, Weights
from quire.kernels.lora import LoraPart, LoraWeight, PackedAdapter
from quire.lora.cutting import cut_outputs
from quire.lora.identity import content_digest
from quire.lora.layout import (
    WEIGHTS_NAME,
    AdapterLayout,
    AdapterLimits,
    PartLayout,
    WeightLayout,
    embedding_name,
    head_name,
    head_number,
    layout_of,
    num_weights,
    other_copy,
)
from quire.models.declaration import DecoderSpec
from quire.models.lowering import embedding_number
from quire.weights.checkpoint import read_stored, read_stored_rows
from quire.weights.tensor_file import StoredTensor, TensorFile

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 4096
"""Of a table that is compared with the model's: the whole, a gigabyte of some models, has no place
in the memory that is planned."""


class AdapterLoader:
    """Loads adapters of one model for one back end."""

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: Kernels,
        dtype: str,
        limits: AdapterLimits,
        outputs: Mapping[int, Sequence[range]] | None = None,
        tokens: range | None = None,
    ) -> None:
        """`outputs` are those that this process has of some weights; of others it has all.
        `tokens` are those whose rows it has of the embedding and the head; None: all."""
        self._outputs = outputs or {}
        self._tokens = range(spec.embedding.shape[0]) if tokens is None else tokens
        self._spec, self._kernels, self._limits = spec, kernels, limits
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.model: Weights | None = None
        """The model's weights in memory, once they are there, before anything is loaded."""

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
            layout = layout_of(folder, file, self._spec, self._limits)
            self._check_copies(folder, layout, file)
            weights = {
                each.number: held
                for each in layout.weights
                if self._is_here(each.number) and (held := self._held(each, file)) is not None
            }
            if content_digest(folder) != digest or file.has_changed():
                raise CheckpointError(f"{folder}: the adapter's files are no longer what they were")
        except OSError as error:
            raise CheckpointError(f"{folder}: the adapter cannot be read: {error}") from None
        finally:
            file.close()
        return self._kernels.pack_adapter(weights, num_weights(self._spec))

    def _check_copies(self, folder: Path, layout: AdapterLayout, file: TensorFile) -> None:
        """PEFT stores the table and the head that it adapts: those of another model would make
        another adapter. The process that has the first tokens compares its rows, before the others
        load anything."""
        if self.model is None or not self.model.tables[0].shape[0] or self._tokens.start:
            return
        table = self.model.tables[0]
        if layout.embedding_copy is not None:
            self._check_copy(folder, embedding_name(self._spec), layout.embedding_copy, file, table)
        number = head_number(self._spec)
        if layout.head_copy is None or number is None:
            return
        head = self._kernels.table_of(self.model.linears[number])
        head = table if head is None and self._spec.is_tied else head
        if head is None:
            logger.warning(
                "%s holds a copy of the head, which cannot be compared with the quantized one",
                folder,
            )
        else:
            self._check_copy(folder, head_name(self._spec), layout.head_copy, file, head)

    def _check_copy(
        self, folder: Path, name: str, stored: StoredTensor, file: TensorFile, own: EmbeddingTable
    ) -> None:
        for first in self._tokens[::_ROWS_AT_ONCE]:
            rows = range(first, min(first + _ROWS_AT_ONCE, self._tokens.stop))
            copy = read_stored_rows(file, stored, rows).to(self._dtype)
            ids = torch.arange(rows.start, rows.stop)
            if not torch.equal(copy, self._kernels.embedding(ids, own)):
                raise CheckpointError(f"{folder}: {other_copy(name)}")

    def _is_here(self, number: int) -> bool:
        """Whether this process computes with a weight, and not another stage."""
        if self.model is None:
            return True
        if number == embedding_number(self._spec):
            return self.model.tables[0].shape[0] > 0
        linears = self.model.linears
        return number < len(linears) and not isinstance(linears[number], ElsewhereLinear)

    def _held(self, layout: WeightLayout, file: TensorFile) -> LoraWeight | None:
        """Return what it adds to the outputs that are here; None where it adds to none of them."""
        whole, ranges = self._weight(layout, file), self._outputs.get(layout.number)
        held = whole if ranges is None else cut_outputs(whole, ranges)
        if held is None or all(part.replaced is None for part in held.parts):
            return held
        assert self.model is not None
        return _replacing(held, getattr(self.model.linears[layout.number], "bias", None))

    def _weight(self, layout: WeightLayout, file: TensorFile) -> LoraWeight:
        """Stack the parts; those that were one module in training share its `down`."""
        reader = _Reader(lambda stored: self._read(file, stored))
        first_ranks = dict[tuple[StoredTensor | None, int], int]()
        downs, scales, parts = list[Tensor](), list[float](), list[LoraPart]()
        for part in layout.parts:
            # the parts of what was one module in training share its `down`
            place = part.first_output if part.expert is None else part.expert.place
            key = (part.down, place if part.down is None or part.expert is not None else 0)
            if key not in first_ranks:
                first_ranks[key] = len(scales)
                downs.append(reader.down(part, layout.num_inputs, self._dtype))
                scales += [part.scale] * len(downs[-1])
            up, bias = reader.up(part, self._dtype), reader.bias(part)
            replaced = bias if part.base_bias is not None else None  # until the model's is known
            parts.append(LoraPart(part.first_output, first_ranks[key], up, bias, replaced))
        return LoraWeight(
            torch.cat(downs), torch.tensor(scales), tuple(parts), layout.num_outputs,
            is_embedding=layout.number == embedding_number(self._spec),
        )  # fmt: skip

    def _read(self, file: TensorFile, stored: StoredTensor) -> Tensor:
        return read_stored(file, stored).to(self._dtype)


def _replacing(weight: LoraWeight, bias: Tensor | None) -> LoraWeight:
    """Return an adapter whose biases take the place of those of the model's weight, float32 [N]."""
    if bias is None:
        raise CheckpointError("the adapter has biases for a weight that has none in memory")
    bias = bias.float()
    parts = [
        part
        if part.replaced is None
        else part._replace(replaced=bias[part.first_output : part.first_output + len(part.up)])
        for part in weight.parts
    ]
    return weight._replace(parts=tuple(parts))


class _Reader:
    """Reads the factors of one weight's parts, each stored tensor once."""

    def __init__(self, read: Callable[[StoredTensor], Tensor]) -> None:
        self._read = read
        self._found: dict[StoredTensor, Tensor] = {}

    def down(self, part: PartLayout, num_inputs: int, dtype: torch.dtype) -> Tensor:
        """[rank, inputs]; one of zeros where a bias alone is changed."""
        if part.down is None or part.up is None:
            return torch.zeros(1, num_inputs, dtype=dtype)
        expert = part.expert
        if expert is None:
            return self._tensor(part.down)
        if expert.is_exchanged:
            return self._of_expert(part).t().contiguous()
        first = expert.place * part.rank
        return self._tensor(part.down)[first : first + part.rank]

    def up(self, part: PartLayout, dtype: torch.dtype) -> Tensor:
        """[outputs, rank]"""
        if part.down is None or part.up is None:
            return torch.zeros(part.num_outputs, 1, dtype=dtype)
        expert = part.expert
        if expert is None:
            return self._tensor(part.up)[part.rows]
        if expert.is_exchanged:
            first = expert.place * part.rank
            return self._tensor(part.down)[first : first + part.rank].t()[part.rows].contiguous()
        return self._of_expert(part)[part.rows].contiguous()

    def bias(self, part: PartLayout) -> Tensor | None:
        """float32 [outputs], scaled where it is the adapter's own."""
        stored = part.bias or part.base_bias
        if stored is None:
            return None
        scale = part.scale if part.base_bias is None else 1.0
        return self._tensor(stored)[part.rows].float() * scale

    def _of_expert(self, part: PartLayout) -> Tensor:
        """An expert's columns of `lora_B`, [outputs or inputs, rank]."""
        assert part.expert is not None and part.up is not None
        return self._tensor(part.up)[:, part.expert.place :: part.expert.num_experts]

    def _tensor(self, stored: StoredTensor) -> Tensor:
        if stored not in self._found:
            self._found[stored] = self._read(stored)
        return self._found[stored]
