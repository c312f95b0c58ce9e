"""Rotary position embeddings as data: which variant, with which numbers, read strictly from a
config.

Owns the reading of `rope_theta` + `rope_scaling` (the old style) and of `rope_parameters` (the new
one). The table of cosines and sines is built from a `RopeSpec` by `quire.nn.rope`, which also says
what "dynamic" and "longrope" mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from quire.common.frozen_record import FrozenRecord
from quire.models.config_reader import ConfigReader


class LinearScaling(FrozenRecord):
    """Positions divided by `factor`."""

    factor: float


class DynamicScaling(FrozenRecord):
    """NTK-aware scaling of the base beyond `original_len` tokens."""

    factor: float
    original_len: int


class YarnScaling(FrozenRecord):
    """YaRN (Peng et al., arXiv:2309.00071): interpolated low frequencies, kept high ones,
    a ramp between."""

    factor: float
    original_len: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    is_truncated: bool
    score_factor: float = 1.0
    """What DeepSeek's attention multiplies scores by besides (arXiv:2405.04434, section 3.1.4)."""


class Llama3Scaling(FrozenRecord):
    """Llama 3.1's scaling by wavelength."""

    factor: float
    original_len: int
    low_freq_factor: float
    high_freq_factor: float


class LongScaling(FrozenRecord):
    """LongRoPE (Ding et al., arXiv:2402.13753): a factor per frequency,
    one list for short contexts, one for long."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_len: int
    attention_factor: float


# Smaller bases and contexts have no logarithm to divide by.
_MIN_THETA = 2.0
_MIN_LEN = 2
_MIN_FACTOR = 1e-3

RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongScaling


class RopeSpec(FrozenRecord):
    """Rotation of the leading `rotated_dim` values of every head, halves paired (i,
    i + rotated_dim / 2)."""

    rotated_dim: int
    theta: float
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()
    """Of each pair, which of a token's three positions turns it (0: in time, 1: row, 2: column), in
    a model whose images have such (arXiv:2409.12191, section 2.1); none: a token has one."""
    is_of_grid: bool = False
    """Of patches: their row turns the first half of the pairs, their column the others, each with
    the frequencies of half as many values."""

    @property
    def score_factor(self) -> float:
        """What latent attention multiplies scores by besides; other attention does not."""
        return self.scaling.score_factor if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def context_len(self) -> int:
        """The context that the scaling alone implies, whatever the config names beside it;
        0 where it implies none."""
        scaling = self.scaling
        return int(scaling.original_len * scaling.factor) if isinstance(scaling, YarnScaling) else 0

    @property
    def max_context_len(self) -> int:
        """The longest context that the scaling is meant for; 0 where it says nothing of that."""
        scaling = self.scaling
        return (
            int(scaling.original_len * scaling.factor)
            if isinstance(scaling, YarnScaling | DynamicScaling)
            else 0
        )


def read_rope(
    config: ConfigReader, head_dim: int, *, default_theta: float = 10000.0, is_partial: bool = False
) -> RopeSpec:
    """Read the one RoPE of a model: from `rope_scaling` (old) or `rope_parameters` (new),
    `rope_theta` beside either.

    `is_partial` says that the family heeds `partial_rotary_factor`; for others any value but 1 is
    refused.
    """
    old_section, new_section = config.section("rope_scaling"), config.section("rope_parameters")
    section = old_section or new_section
    # matters to scaled variants only, which read it
    config.ignore("original_max_position_embeddings")
    theta = config.number("rope_theta", default_theta, minimum=_MIN_THETA)
    rotated_dim = _read_rotated_dim(config, section, head_dim) if is_partial else head_dim
    if not is_partial:
        for reader in (config, section):
            if reader is not None:
                reader.require("partial_rotary_factor", 1.0)
    return read_rope_section(config, section, RopeSpec(rotated_dim, theta))


def read_local_and_global_rope(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """RoPE of sliding and of full layers: two objects in `rope_parameters` (new),
    or three keys of the config (old)."""
    local_rope = RopeSpec(head_dim, config.number("rope_local_base_freq", 1e4, minimum=_MIN_THETA))
    global_rope = RopeSpec(head_dim, config.number("rope_theta", 1e6, minimum=_MIN_THETA))
    old_section, both = config.section("rope_scaling"), config.section("rope_parameters")
    if both is not None:
        local_rope = read_rope_section(config, both.section("sliding_attention"), local_rope)
        global_rope = read_rope_section(config, both.section("full_attention"), global_rope)
    return local_rope, read_rope_section(config, old_section, global_rope)


def read_rope_section(
    config: ConfigReader, section: ConfigReader | None, default: RopeSpec
) -> RopeSpec:
    """Read one object of RoPE parameters; what it does not say comes from `default`."""
    if section is None:
        return default
    theta = section.number("rope_theta", default.theta, minimum=_MIN_THETA)
    key = "rope_type" if section.has("rope_type") or not section.has("type") else "type"
    section.ignore("type")
    scalings = _SCALINGS | {"mrope": _SCALINGS["default"]} if _has_axes(config) else _SCALINGS
    read = section.choice(key, scalings, "default")
    scaling = read(config, section, default.rotated_dim)
    return RopeSpec(default.rotated_dim, theta, scaling, _read_axes(section, default.rotated_dim))


def _has_axes(config: ConfigReader) -> bool:
    """Return whether the model reads more than text, whose tokens may have three positions."""
    return config.architecture.endswith("ForConditionalGeneration")


def _read_axes(section: ConfigReader, rotated_dim: int) -> tuple[int, ...]:
    """Read how many pairs each of three positions turns: one part after the other, or, interleaved,
    of three pairs one each, as long as they last, and time the rest."""
    if not _has_axes(section) or not section.has("mrope_section"):
        return ()
    sizes = section.integers("mrope_section", rotated_dim)
    if len(sizes) != 3 or 2 * sum(sizes) != rotated_dim:
        raise section.refuse("mrope_section", f"three numbers with the sum {rotated_dim // 2}")
    if not section.flag("mrope_interleaved", False):
        return tuple(axis for axis, size in enumerate(sizes) for _ in range(size))
    ends = (0, 3 * sizes[1], 3 * sizes[2])
    return tuple(pair % 3 if pair < ends[pair % 3] else 0 for pair in range(rotated_dim // 2))


def _read_rotated_dim(config: ConfigReader, section: ConfigReader | None, head_dim: int) -> int:
    partial = config.number("partial_rotary_factor", 1.0)
    if section is not None:
        partial = section.number("partial_rotary_factor", partial)
    rotated_dim = int(head_dim * partial)
    if rotated_dim % 2 or not 0 < rotated_dim <= head_dim:
        raise config.refuse(
            "partial_rotary_factor", f"fractions that rotate an even part of {head_dim} values"
        )
    return rotated_dim


def _original_len(config: ConfigReader, section: ConfigReader) -> int:
    """Return the context before scaling. Like the reference,
    a value beside the section wins over the one inside."""
    inner = section.optional_integer("original_max_position_embeddings", minimum=_MIN_LEN)
    outer = config.optional_integer("original_max_position_embeddings", minimum=_MIN_LEN)
    return outer or inner or config.integer("max_position_embeddings", minimum=_MIN_LEN)


def _read_linear(config: ConfigReader, section: ConfigReader, rotated_dim: int) -> RopeScaling:
    return LinearScaling(section.number("factor", minimum=1.0))


def _read_dynamic(config: ConfigReader, section: ConfigReader, rotated_dim: int) -> RopeScaling:
    section.ignore("original_max_position_embeddings")
    if rotated_dim < 4:
        raise config.refuse("head_dim", "at least 4 rotated values for dynamic RoPE")
    return DynamicScaling(
        section.number("factor", minimum=1.0), config.integer("max_position_embeddings")
    )


def _read_yarn(config: ConfigReader, section: ConfigReader, rotated_dim: int) -> RopeScaling:
    original_len = _original_len(config, section)
    factor = section.number(
        "factor", config.integer("max_position_embeddings") / original_len, minimum=1.0
    )
    mscale, mscale_all = (
        section.optional_number("mscale"),
        section.optional_number("mscale_all_dim"),
    )
    implied = _yarn_magnitude(factor, 1.0)
    if mscale and mscale_all:
        implied = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all)
    return YarnScaling(
        factor=factor,
        original_len=original_len,
        beta_fast=section.number("beta_fast", 32.0, minimum=_MIN_FACTOR),
        beta_slow=section.number("beta_slow", 1.0, minimum=_MIN_FACTOR),
        attention_factor=section.number("attention_factor", implied),
        is_truncated=section.flag("truncate", True),
        score_factor=_yarn_magnitude(factor, mscale_all or 0.0) ** 2,
    )


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_llama3(config: ConfigReader, section: ConfigReader, rotated_dim: int) -> RopeScaling:
    return Llama3Scaling(
        factor=section.number("factor", minimum=1.0),
        original_len=_original_len(config, section),
        low_freq_factor=section.number("low_freq_factor", minimum=_MIN_FACTOR),
        high_freq_factor=section.number("high_freq_factor", minimum=_MIN_FACTOR),
    )


def _read_long(config: ConfigReader, section: ConfigReader, rotated_dim: int) -> RopeScaling:
    original_len = _original_len(config, section)
    factor = section.number("factor", config.integer("max_position_embeddings") / original_len)
    implied = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_len))
    short_factors = section.numbers("short_factor", rotated_dim // 2)
    long_factors = section.numbers("long_factor", rotated_dim // 2)
    for key, factors in (("short_factor", short_factors), ("long_factor", long_factors)):
        if min(factors) <= 0:
            raise section.refuse(key, "factors above zero")
    return LongScaling(
        short_factors, long_factors, original_len, section.number("attention_factor", implied)
    )


_ReadScaling = Callable[[ConfigReader, ConfigReader, int], RopeScaling | None]

_SCALINGS: dict[str, _ReadScaling] = {
    "default": lambda config, section, rotated_dim: None,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "llama3": _read_llama3,
    "longrope": _read_long,
    "su": _read_long,  # the name that the first Phi-3 checkpoints used
}
