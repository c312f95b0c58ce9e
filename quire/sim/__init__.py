"""Deterministic simulation: the real scheduler and KV manager, a null executor, a seed, and all
that can go wrong.

A program like the server or the benchmark, so it may put the two planes together as the engine
does. Whatever it finds is reproduced by its seed.
"""
