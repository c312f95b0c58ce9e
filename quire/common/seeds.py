"""Seeds: how one request's seed becomes an independent key for each of its sequences.

The sampler draws from a counter-based generator keyed by (seed, position, token), so a seed is all
the random state a sequence has. Nothing here holds state.
"""

from __future__ import annotations

_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """Scramble a 64-bit integer (the finaliser of SplitMix64; Steele, Lea and Flood,
    OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of a request's sequence number `index` (0 keeps the request's own seed).

    A separate request with `seed=derive_seed(s, i)` therefore gives the same tokens as sequence `i`
    of a request with `seed=s` and `n > i`.
    """
    seed &= _MASK64
    return seed if index == 0 else mix64(seed ^ mix64(index))
