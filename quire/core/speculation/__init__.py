"""Speculation in the control plane: drafters, and how many draft tokens each step verifies."""
