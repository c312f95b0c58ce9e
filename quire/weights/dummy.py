"""Random weights (`load_format="dummy"`): deterministic from a seed, no files, fast.

For sizing, benchmarks and tests. Values are small and centred where the declaration says (norm
weights around one), so that logits stay finite and sane at any depth. The same name and seed give
the same values whatever the layout.
"""

from __future__ import annotations

import functools
import zlib

import torch
from torch import Tensor

from quire.common.seeds import mix64
from quire.models.cutting import rows_within
from quire.models.tensors import TensorSpec
from quire.weights.source import WeightSource

_STD = 0.02
# A random strip is repeated to fill a tensor: filling from memory is some ten times as fast as
# drawing every number. Its length is a prime, so that rows of any usual width differ.
_STRIP_LEN = 1_048_583


class DummyWeights(WeightSource):
    """A `WeightSource` that makes up every tensor."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        strip = _drawn_strip(seed)
        self._strips = {strip.device: strip}
        """The same on each requested device,
        whose memory is filled from there rather than through the host's."""

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """See `WeightSource.fill`."""
        if tensor.cut_from is not None:
            whole = torch.empty(tensor.cut_from.shape, dtype=out.dtype, device=out.device)
            self.fill(whole, tensor.cut_from)
            out.copy_(whole[rows_within(tensor)])
            return
        key = zlib.crc32(f"{tensor.name}:{tensor.first_row}".encode())
        strip = self._strip(out.device)
        flat = out.view(-1)
        done, offset = 0, -mix64(key ^ self._seed) % _STRIP_LEN
        while done < flat.numel():  # touches no more of the strip than the tensor holds
            part = strip[offset : offset + flat.numel() - done]
            centred = part + tensor.centre if tensor.centre else part
            flat[done : done + part.numel()].copy_(centred)
            done, offset = done + part.numel(), 0

    def _strip(self, device: torch.device) -> Tensor:
        if device not in self._strips:
            self._strips[device] = self._strips[torch.device("cpu")].to(device)
        return self._strips[device]


@functools.lru_cache(maxsize=1)  # 4 MiB; engines made one after another mostly share a seed
def _drawn_strip(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(mix64(seed) >> 1)
    return torch.randn(_STRIP_LEN, generator=generator).clamp_(-3, 3).mul_(_STD)
