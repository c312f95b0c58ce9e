"""Sampling: from logits to tokens and log-probabilities.

Owns the order of a request's edits and filters; knows no request and no text. `Sampler` takes one
of the back ends of `quire.kernels.sampling` and `SampledRow`s, and gives the plan's `WorkResult`s.
"""

from quire.sampling.processors import ProcessorTable
from quire.sampling.rows import SampledRow
from quire.sampling.sampler import Sampler
from quire.sampling.selection import select_sampling

__all__ = ["ProcessorTable", "SampledRow", "Sampler", "select_sampling"]
