"""An image tower that runs: an image's pixels in, rows for its places in the prompt out.

Each image is computed by itself, so its rows depend on nothing else. The tower is divided into a
few stages, which can be run one at a time between steps; where they end changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.common.frozen_record import replace
from quire.errors import ConfigError
from quire.kernels.interface import AttentionBatch, ForwardPass, Kernels, Weights
from quire.kernels.placed import PlacedRows, Rotations, StepContent
from quire.models.blocks import AttentionSpec
from quire.models.declaration import RowsSpec, VisionSpec
from quire.models.image_places import bounds_of, is_whole, tower_stages
from quire.models.image_processing import ImageProcessing
from quire.models.lowering import lower_rows
from quire.models.tensors import TensorSpec
from quire.models.tiling import Tiling
from quire.nn.rope import grid_rotations
from quire.quant.linears import FloatLinears


class VisionModel:
    """A tower and its projector, in memory."""

    def __init__(self, spec: VisionSpec, processing: ImageProcessing, floats: FloatLinears) -> None:
        """Load every weight. Raises ConfigError for what the kernels cannot run."""
        self.spec = spec
        self._processing, self._dtype = processing, floats.dtype
        self._device = floats.kernels.device
        bounds, stages = bounds_of(spec, processing), tower_stages(spec)
        parts = parts_of(spec.tower, stages)
        self._stages = [_Stage(part, floats, bounds.max_rows) for part in parts]
        self._are_whole = [not stage or is_whole(spec, stage[0]) for stage in stages]
        self._projector = _Stage(spec.projector, floats, bounds.max_places)
        early = {block: _Stage(part, floats, bounds.max_places) for block, part in spec.early}
        self._early = [early.get(stage.stop - 1) if stage else None for stage in stages]
        self._grid = None if spec.grid is None else _filled(spec.grid, floats)
        self._newline = None if spec.newline is None else _filled(spec.newline, floats)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        early = (each for each in self._early if each is not None)
        stages = (*self._stages, self._projector, *early)
        return sum(each.num_bytes for each in stages) + (
            0 if self._grid is None else self._grid.nbytes
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the weights."""
        early = (each for each in self._early if each is not None)
        stages = (*self._stages, self._projector, *early)
        return [tensor for stage in stages for tensor in stage.tensors]

    @torch.inference_mode()
    def encode(
        self, pixels: NDArray[np.uint8], tiling: tuple[int, ...] = ()
    ) -> Iterator[Tensor | None]:
        """Compute the rows of pixels [height, width, 3], a stage at a time: yields None while more
        is to be done, and last the rows [places, H]. Those of an image in tiles are its own, then
        the grid's (`Image.tiling`)."""
        found, edge = list[Tensor](), self.spec.image_size if tiling else len(pixels)
        assert edge is not None
        for first in range(0, len(pixels), edge):
            for rows in self._encode_tile(pixels[first : first + edge]):
                if rows is None:
                    yield None
                else:
                    found.append(rows)
        yield self._arranged(found, Tiling(*tiling)) if tiling else found[0]

    def _arranged(self, tiles: list[Tensor], tiling: Tiling) -> Tensor:
        """Put the tiles' patches row by row, without what surrounds the image, each row ended."""
        assert self._newline is not None and self.spec.image_size is not None
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
        grid = PatchGrid.of(spec, *pixels.shape[:2])
        patches = patches_of(pixels, self._processing, spec.patch_size, spec.num_frames)
        ordered = torch.from_numpy(patches)[grid.patches]
        rows = ordered.to(device=self._device, dtype=self._dtype)
        first, count = spec.num_leading, len(rows) + spec.num_leading
        whole, rotations = torch.tensor([0, count], dtype=torch.int32), grid.rotations(spec.tower)
        added = list[Tensor]()
        for number, stage in enumerate(self._stages):
            ends = whole if self._are_whole[number] else grid.window_ends
            rows, first = stage.run(rows, first, ends, rotations), 0
            if number == 0 and self._grid is not None:
                rows += grid.resampled(self._grid).to(self._dtype)
            early = self._early[number]
            if early is not None:
                added.append(self._projected(early, rows))
            yield None
        if spec.drops_leading:
            rows = rows[spec.num_leading :].contiguous()
        if spec.pool > 1:
            yield self._projected(self._projector, pooled(rows, grid.num_columns, spec.pool))
            return
        found = [self._projected(self._projector, rows), *added]
        yield torch.cat(found, dim=1)[grid.places]

    def _projected(self, projector: _Stage, rows: Tensor) -> Tensor:
        """Make of the rows of each place's patches one of the decoder's width."""
        merged = rows.view(-1, self.spec.merge**2 * rows.shape[1])
        return projector.run(merged, 0, torch.tensor([0, len(merged)], dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """In which order a tower has the patches of an image: those of a place next to one another,
    and places window by window."""

    num_columns: int
    """Of patches."""
    patches: Tensor
    """int64 [N]: of each patch in the tower's order, its place in the image, row by row."""
    places: Tensor
    """int64: of each place in the image, row by row, where the tower has it."""
    window_ends: Tensor
    """int32, from 0 on: where windows begin and end in the tower's order."""

    @classmethod
    def of(cls, spec: VisionSpec, height: int, width: int) -> PatchGrid:
        """Return the order for an image of this size."""
        merge = spec.merge
        rows, columns = height // spec.patch_size // merge, width // spec.patch_size // merge
        patches = torch.arange(rows * columns * merge**2).view(rows, merge, columns, merge)
        edge = spec.window or max(rows, columns, 1)
        down, across = -(-rows // edge), -(-columns // edge)
        place = torch.arange(rows * columns)
        window = place // columns // edge * across + place % columns // edge
        order = torch.argsort(window, stable=True)
        sizes = torch.bincount(window, minlength=down * across).cumsum(0) * merge**2
        ends = torch.nn.functional.pad(sizes, (1, 0)).to(torch.int32)
        by_place = patches.transpose(1, 2).reshape(rows * columns, merge**2)
        return cls(columns * merge, by_place[order].flatten(), torch.argsort(order), ends)

    def resampled(self, table: Tensor) -> Tensor:
        """float32 [N, width]: of learned positions [side * side, width] those of the patches,
        between the nearest four; the corners of both grids lie on one another."""
        side, num_rows = math.isqrt(len(table)), len(self.patches) // self.num_columns
        down, lower = _between(self.patches // self.num_columns, num_rows, side)
        across, right = _between(self.patches % self.num_columns, self.num_columns, side)
        places = down[:, :, None] * side + across[:, None, :]
        weights = lower[:, :, None] * right[:, None, :]
        return (table[places.flatten(1)] * weights.flatten(1)[:, :, None]).sum(1)

    def rotations(self, tower: RowsSpec) -> Rotations | None:
        """Return what turns the patches' heads; None where nothing does."""
        ropes = {
            mixer.rope
            for block in tower.blocks
            for mixer in block.mixers
            if isinstance(mixer, AttentionSpec) and mixer.rope is not None
        }
        if not ropes:
            return None
        [rope] = ropes
        rows, columns = self.patches // self.num_columns, self.patches % self.num_columns
        return Rotations(torch.arange(len(rows)), grid_rotations(rope, rows, columns))


def pooled(rows: Tensor, num_columns: int, edge: int) -> Tensor:
    """Return the means of squares of `edge` x `edge` rows, those of a grid [N, H] row by row; what
    fills no square is left out. Sums are float32, one row after the other."""
    height, width = len(rows) // num_columns // edge, num_columns // edge
    grid = rows.view(-1, num_columns, rows.shape[1])[: height * edge, : width * edge].float()
    squares = grid.view(height, edge, width, edge, -1).transpose(1, 2).flatten(2, 3)
    total = squares[:, :, 0]
    for place in range(1, edge * edge):
        total = total + squares[:, :, place]
    return (total / (edge * edge)).flatten(0, 1).to(rows.dtype)


def _between(index: Tensor, count: int, side: int) -> tuple[Tensor, Tensor]:
    """Return of places among `count` the two neighbours among `side`, [N, 2], and how much each
    counts."""
    at = index.float() * (side - 1) / max(count - 1, 1)
    first = at.floor()
    share = at - first
    places = torch.stack([first, first + 1], dim=1).long().clamp(0, side - 1)
    return places, torch.stack([1 - share, share], dim=1)


def parts_of(tower: RowsSpec, stages: Sequence[range]) -> list[RowsSpec]:
    """Divide a tower into parts, which follow one another."""
    groups = [tuple(tower.blocks[block] for block in stage) for stage in stages]
    parts = [RowsSpec(width=tower.hidden_size, blocks=group) for group in groups]
    parts[0] = replace(tower, blocks=groups[0], final_norm=None, exit=None)
    parts[-1] = replace(parts[-1], final_norm=tower.final_norm, exit=tower.exit)
    return parts


def patches_of(
    pixels: NDArray[np.uint8], processing: ImageProcessing, size: int, num_frames: int = 1
) -> NDArray[np.float32]:
    """Scale pixels [height, width, 3] and cut them into patches [n, 3 * frames * size * size], row
    by row of the image; in float32, each operation rounded, as transformers' processors do."""
    scaled = (pixels.astype(np.float64) * processing.scale).astype(np.float32)
    mean, std = np.array(processing.mean, np.float32), np.array(processing.std, np.float32)
    image = (scaled - mean) / std
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    grid = image[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    patches = grid.transpose(0, 2, 4, 1, 3).reshape(rows * columns, 3, 1, size * size)
    return np.repeat(patches, num_frames, axis=2).reshape(rows * columns, -1)


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
        self.tensors = weights.tensors
        self.num_bytes = sum(each.num_bytes for each in weights.linears)
        self.num_bytes += sum(each.nbytes for each in (*tables, *weights.vectors))

    def run(
        self, rows: Tensor, first: int, ends: Tensor, rotations: Rotations | None = None
    ) -> Tensor:
        """Compute rows, of which `rows` are those from `first` on and the others zero. They attend
        to those between the same two of `ends`, int32, from 0 on."""
        inputs = _inputs(ends, self._kernels.device)
        tokens = inputs.positions[first : first + len(rows)].contiguous()
        content = StepContent(PlacedRows(tokens, rows), rotations)
        return self._run(inputs.positions, inputs.positions, inputs.batch, (), content=content)


def _inputs(ends: Tensor, device: torch.device) -> _Inputs:
    positions = torch.arange(int(ends[-1]), dtype=torch.int64, device=device)
    counts, longest = ends.diff(), int(ends.diff().max())
    table = torch.zeros(len(counts), 1, dtype=torch.int32, device=device)
    batch = AttentionBatch(
        ends.to(device), counts.to(device), table, torch.zeros_like(positions), positions, longest,
        longest,
    )  # fmt: skip
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
