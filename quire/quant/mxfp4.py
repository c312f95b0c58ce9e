"""What the bits of MXFP4 mean (OCP Microscaling Formats, version 1.0), in checkpoints and GGUF
files alike: numbers of four bits, and scales of a byte."""

from __future__ import annotations

import torch

E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the number that four bits stand for."""
MAX_EXPONENT = 252
"""The largest byte of a scale with which all numbers are finite."""
E8M0_HALVES = torch.tensor(
    [1 << 21, 1 << 22, *(place << 23 for place in range(1, MAX_EXPONENT))], dtype=torch.int32
).view(torch.float32)
"""Half of what the byte of a scale means. The first two are below the normal numbers of float32."""
