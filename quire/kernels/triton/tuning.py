"""Tile sizes and the like, for each kind of GPU: data files beside this one, chosen by the device's
name, never searched for.

What decides bits (the order of sums) is fixed by these figures and a weight's shape alone, never by
the number of rows, so that a row's result is the same in any batch. Nothing is measured at
start-up: a new GPU gets a new file in `tunings/`, which
`quire bench kernels --device cuda --tune FOLDER` writes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quire.kernels.triton.interpretation import is_interpreted

FOLDER = Path(__file__).parent / "tunings"
_WGMMA_MAJOR = 9
"""Of the capabilities whose matrix instructions take 64 rows, which Triton gives to four warps,
one below the other."""


@dataclass(frozen=True, slots=True)
class LinearTuning:
    """A tile of outputs [block_m, block_n], summed over block_k inputs at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    max_partial_rows: int
    """Up to so many rows, splits of a sum are computed side by side and added afterwards;
    the bits are the same."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of attention, (query, head) pairs, that one program computes."""

    block_m: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """Tiles of rows against block_n keys; positions are summed in splits of split_len.

    A warp computes as many rows in either tile: with the same instructions, and on capability 9 in
    the same order, so that a row's bits are the same in both. Elsewhere there are low tiles only
    (`Tuning.of_one_height`).
    """

    low: Tile
    """For decodes, whose sequences have few rows."""
    tall: Tile
    """For sequences of many rows: a key that is loaded serves more of them."""
    block_n: int
    split_len: int
    num_stages: int

    @classmethod
    def of(cls, entry: dict[str, Any]) -> AttentionTuning:
        """Make the tuning from a data file's entry."""
        return cls(**{**entry, "low": Tile(**entry["low"]), "tall": Tile(**entry["tall"])})

    def __post_init__(self) -> None:
        if self.low.block_m * self.tall.num_warps != self.tall.block_m * self.low.num_warps:
            raise ValueError(
                f"tiles of attention with unlike numbers of rows a warp: {self.low} and {self.tall}"
            )
        if self.split_len % self.block_n:
            raise ValueError(
                f"splits of {self.split_len} positions are no multiple of {self.block_n} keys"
            )


@dataclass(frozen=True, slots=True)
class Tuning:
    """All figures for one kind of device."""

    name: str
    source: str
    """Where the figures come from."""
    num_programs: int
    """Programs that keep the device busy: sums are split until there are about as many tiles."""
    min_library_rows: int | None
    """Rows from which torch's product of floats is faster than the kernels here, null for never.
    Only for engines whose results may depend on batch composition.
    """
    min_scaled_rows: int | None
    """The same of e4m3."""
    linear: LinearTuning
    wide_linear: LinearTuning
    """For float32, whose tiles take twice the room."""
    integer: LinearTuning
    attention: AttentionTuning
    wide_attention: AttentionTuning
    """For heads above 128."""
    float_attention: AttentionTuning
    """For float32, which has no matrix instructions."""

    def of_one_height(self) -> Tuning:
        """Return the tuning with small-M tiles of attention for all batches: for GPUs where the
        compiler spreads the warps of a low tile over columns, but those of a tall one over rows, so
        that a row is summed in another order.
        """
        entries = {
            name: getattr(self, name) for name in ("attention", "wide_attention", "float_attention")
        }
        return replace(
            self, **{name: replace(entry, tall=entry.low) for name, entry in entries.items()}
        )

    @classmethod
    def read(cls, path: Path) -> Tuning:
        """Return a data file; a missing or unknown key raises TypeError or KeyError."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        linear = {
            key: LinearTuning(**data.pop(key)) for key in ("linear", "wide_linear", "integer")
        }
        attention = {
            key: AttentionTuning.of(data.pop(key))
            for key in ("attention", "wide_attention", "float_attention")
        }
        return cls(name=path.stem, **data, **linear, **attention)  # type: ignore[arg-type]

    def write(self, path: Path) -> None:
        """Write a data file that `read` reads, one entry a line."""
        entries = {key: value for key, value in asdict(self).items() if key != "name"}
        lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in entries.items())
        path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def tuning_for(device: torch.device) -> Tuning:
    """Return the file that is named like the device ("nvidia_h200.json" for "NVIDIA H200"),
    else `default.json`."""
    if is_interpreted():
        return Tuning.read(FOLDER / "interpreter.json")
    path = FOLDER / file_name(torch.cuda.get_device_name(device))
    found = Tuning.read(path if path.is_file() else FOLDER / "default.json")
    return (
        found
        if torch.cuda.get_device_capability(device)[0] == _WGMMA_MAJOR
        else found.of_one_height()
    )


def file_name(device_name: str) -> str:
    """`NVIDIA A100-SXM4-80GB` gives `nvidia_a100_sxm4_80gb.json`."""
    return (
        "_".join("".join(c if c.isalnum() else " " for c in device_name.lower()).split()) + ".json"
    )
