"""An image tower that runs: an image's pixels in, rows for its places in the prompt out.

Each image is computed by itself, so its rows depend on nothing else. The tower is divided into a
few stages, which can be run one at a time between steps; where they end changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.interface import AttentionBatch, ForwardPass, Kernels, Weights
from quire.kernels.placed import PlacedRows
from quire.models.declaration import TOWER_STAGES, RowsSpec, TensorSpec, VisionSpec
from quire.models.image_processing import ImageProcessing
from quire.models.lowering import lower_rows
from quire.models.tiling import Tiling
from quire.quant.linears import FloatLinears


class VisionModel:
    """A tower and its projector, in memory."""

    def __init__(self, spec: VisionSpec, processing: ImageProcessing, floats: FloatLinears) -> None:
        """Load every weight. Raises ConfigError for what the kernels cannot run."""
        self.spec = spec
        self._processing, self._dtype = processing, floats.dtype
        self._device = floats.kernels.device
        parts = stages_of(spec.tower, TOWER_STAGES)
        self._stages = [_Stage(part, floats, spec.num_patches + spec.num_leading) for part in parts]
        self._projector = _Stage(spec.projector, floats, spec.num_tokens)
        self._newline = None if spec.newline is None else _filled(spec.newline, floats)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(stage.num_bytes for stage in (*self._stages, self._projector))

    @torch.inference_mode()
    def encode(
        self, pixels: NDArray[np.uint8], tiling: tuple[int, ...] = ()
    ) -> Iterator[Tensor | None]:
        """Compute the rows of pixels [height, width, 3], a stage at a time: yields None while more
        is to be done, and last the rows [places, H]. Those of an image in tiles are its own, then
        the grid's (`Image.tiling`)."""
        found, edge = list[Tensor](), self.spec.image_size if tiling else len(pixels)
        for first in range(0, len(pixels), edge):
            for rows in self._encode_tile(pixels[first : first + edge]):
                if rows is None:
                    yield None
                else:
                    found.append(rows)
        yield self._arranged(found, Tiling(*tiling)) if tiling else found[0]

    def _arranged(self, tiles: list[Tensor], tiling: Tiling) -> Tensor:
        """Put the tiles' patches row by row, without what surrounds the image, each row ended."""
        assert self._newline is not None
        whole, *others = tiles
        side = self.spec.image_size // self.spec.patch_size
        grid = torch.stack(others).view(tiling.rows, tiling.columns, side, side, -1)
        grid = grid.transpose(1, 2).reshape(tiling.rows * side, tiling.columns * side, -1)
        bottom, right = tiling.top + tiling.height, tiling.left + tiling.width
        kept = grid[tiling.top : bottom, tiling.left : right]
        ends = self._newline.expand(tiling.height, 1, -1)
        return torch.cat([whole, torch.cat([kept, ends], dim=1).flatten(0, 1)])

    def _encode_tile(self, pixels: NDArray[np.uint8]) -> Iterator[Tensor | None]:
        spec = self.spec
        patches = patches_of(pixels, self._processing, spec.patch_size)
        rows = torch.from_numpy(patches).to(device=self._device, dtype=self._dtype)
        first, count = spec.num_leading, len(rows) + spec.num_leading
        for stage in self._stages:
            rows = stage.run(rows, first, count)
            first = 0
            yield None
        if spec.drops_leading:
            rows = rows[spec.num_leading :].contiguous()
        yield self._projector.run(rows, 0, len(rows))


def stages_of(tower: RowsSpec, count: int) -> list[RowsSpec]:
    """Divide a tower into at most so many parts, which follow one another."""
    size = -(-len(tower.blocks) // count) or 1
    groups = [tower.blocks[i : i + size] for i in range(0, len(tower.blocks), size)] or [()]
    parts = [RowsSpec(width=tower.hidden_size, blocks=group) for group in groups]
    parts[0] = replace(tower, blocks=groups[0], final_norm=None, exit=None)
    parts[-1] = replace(parts[-1], final_norm=tower.final_norm, exit=tower.exit)
    return parts


def patches_of(
    pixels: NDArray[np.uint8], processing: ImageProcessing, size: int
) -> NDArray[np.float32]:
    """Scale pixels [height, width, 3] and cut them into patches [n, 3 * size * size], row by row of
    the image; in float32, each operation rounded, as the processors of transformers do."""
    scaled = (pixels.astype(np.float64) * processing.scale).astype(np.float32)
    mean, std = np.array(processing.mean, np.float32), np.array(processing.std, np.float32)
    image = (scaled - mean) / std
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    grid = image[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    return np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3)).reshape(rows * columns, -1)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a program wants of a batch of one text, whatever the rows are."""

    positions: Tensor
    batch: AttentionBatch


class _Stage:
    """A program over rows from outside, with its weights."""

    def __init__(self, spec: RowsSpec, floats: FloatLinears, num_rows: int) -> None:
        kernels = floats.kernels
        program, parameters = lower_rows(spec)
        if reasons := kernels.reasons_against(program):
            raise ConfigError(
                f"the {kernels.name} kernels cannot run the image tower: {'; '.join(reasons)}"
            )
        tables = tuple(_table(each, spec, floats) for each in parameters.tables)
        weights = Weights(
            linears=tuple(floats.load(parts) for parts in parameters.linears),
            tables=tables or (torch.zeros(1, 1, dtype=floats.dtype, device=kernels.device),),
            vectors=tuple(_filled(each, floats) for each in parameters.vectors),
            ropes=(),
            max_model_len=num_rows,
        )
        self._run: ForwardPass = kernels.compile(program, weights)
        self._kernels: Kernels = kernels
        self.num_bytes = sum(each.num_bytes for each in weights.linears)
        self.num_bytes += sum(each.nbytes for each in (*tables, *weights.vectors))

    def run(self, rows: Tensor, first: int, count: int) -> Tensor:
        """Compute `count` rows, of which `rows` are those from `first` on and the others zero."""
        inputs = _inputs(count, self._kernels.device)
        tokens = inputs.positions[first : first + len(rows)].contiguous()
        return self._run(
            inputs.positions, inputs.positions, inputs.batch, (), placed=PlacedRows(tokens, rows)
        )


def _inputs(count: int, device: torch.device) -> _Inputs:
    positions = torch.arange(count, dtype=torch.int64, device=device)
    ends = torch.tensor([0, count], dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    batch = AttentionBatch(
        ends, ends[1:].clone(), table, torch.zeros_like(positions), positions, count, count
    )
    return _Inputs(positions, batch)


def _table(tensor: TensorSpec, spec: RowsSpec, floats: FloatLinears) -> Tensor:
    """Return the positions' rows; the first one with what stands in its place."""
    table = _filled(tensor, floats)
    if spec.first_position is not None:
        table[0] += _filled(spec.first_position, floats)
    return table


def _filled(tensor: TensorSpec, floats: FloatLinears) -> Tensor:
    out = torch.empty(tensor.shape, dtype=floats.dtype, device=floats.kernels.device)
    floats.weights.fill(out, tensor)
    return out
