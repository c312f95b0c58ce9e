"""Quantization: which projections are held as integers, and how they come to be so,
from floats or from a checkpoint."""
