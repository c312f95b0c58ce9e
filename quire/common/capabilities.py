"""What NVIDIA calls compute capabilities: from which one on a GPU has what these kernels need.
Facts only."""

from __future__ import annotations

MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 matrix instructions."""
FP8_CAPABILITY = (8, 9)
"""Ada: the first with matrix instructions for e4m3."""
