"""Bounds that GPU kernels keep and plans count:
what they take of memory beside the tensors of a step."""

from __future__ import annotations

MAX_PARTIAL_BYTES = 128 << 20
"""Attention keeps sums of splits that are computed side by side only up to so many bytes."""
