"""What the user wishes of speculation: `speculative_config`, with the keys that vLLM has.

Owns the names, their defaults and their bounds. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from quire.errors import ConfigError, NotAvailableError

NAME = "speculative_config"
METHODS = ("auto", "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
HEADS = ("eagle", "eagle3", "mtp")
"""Methods whose drafts come of the target's hidden states."""
_OTHER_METHODS = (
    "medusa", "mlp_speculator", "ngram_gpu", "dflash",
    "custom_class", "extract_hidden_states",
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (1,),
    "code_revision": (),
    "enforce_eager": (True, False),
    "disable_padded_drafter_batch": (True, False),
    "parallel_drafting": (False,),
    "rejection_sample_method": ("standard", "strict"),
    "draft_sample_method": ("greedy", "probabilistic"),
    "use_heterogeneous_vocab": (True, False),
}
"""Keys of vLLM's that have nothing to choose here, and the values that ask for what is done."""
_OLD_NAMES = {"deepseek_mtp": "mtp", "[ngram]": "ngram"}
_NGRAM = ("ngram", "[ngram]")  # also as the name of a model, in vLLM's older configurations
_NO_MODELS = (*_NGRAM, "suffix")
"""What `model` says where none is meant."""
_WITH_FILES = ("draft_model", "eagle", "eagle3")
"""Methods that read a model of their own."""
_MAY_HAVE_FILES = (*_WITH_FILES, "auto")
_OF_METHODS: Mapping[str, tuple[str, ...]] = {
    "prompt_lookup_": ("ngram",), "suffix_decoding_": ("suffix", "auto"), "model_method": ("auto",),
    "model": _MAY_HAVE_FILES, "revision": _MAY_HAVE_FILES, "quantization": _MAY_HAVE_FILES,
    "max_model_len": (*_MAY_HAVE_FILES, "mtp"),
}  # fmt: skip
"""How the keys begin that some methods alone read."""
MAX_NUM_TOKENS = 63
_NUM_NGRAM_TOKENS, _NUM_SUFFIX_TOKENS, _NUM_MODEL_TOKENS = 8, 24, 5
_NGRAM_SIZE = 5
_MAX_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How tokens are drafted. Names and meanings are vLLM's; answers do not depend on any of it.

    Raises ConfigError, or NotAvailableError for a method that this version does not have.
    """

    method: str
    num_speculative_tokens: int | None = None
    """At most so many of a request in one step; how many pay is measured."""
    prompt_lookup_max: int | None = None
    """Of `ngram`: the longest n-gram that is looked up."""
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    """Of `suffix`: also bounds the tokens drafted."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Outputs that are remembered of a tenant; 0: a request is drafted from its own text alone."""
    suffix_decoding_max_spec_factor: float | None = None
    """So many times the match's length are drafted at most; by default what pays."""
    suffix_decoding_min_token_prob: float = 0.1
    """Tokens of a smaller chance are not drafted."""
    model: str | None = None
    """Of `draft_model`, `eagle` and `eagle3`, and of `auto` if it is to have one: a folder, hub
    name or GGUF file, as the engine's own `model`."""
    model_method: str | None = None
    """Of `auto`: what drafts beside texts, `draft_model` (where `model` is given), `eagle`,
    `eagle3` or `mtp`."""
    revision: str | None = None
    quantization: str | None = None
    """Of its weights, as the engine's own `quantization`."""
    max_model_len: int | None = None
    """Longer sequences are not drafted; by default those beyond the draft model's context."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From a dict or a decoded JSON object. None leaves a key out."""
        given = {name: value for name, value in values.items() if value is not None}
        known = [item.name for item in fields(cls)]
        if isinstance(given.get("model"), os.PathLike):
            given["model"] = os.fspath(given["model"])
        if "method" not in given and "prompt_lookup_max" in given:
            given["method"] = "ngram"  # as vLLM's older configurations have it
        method = given.get("method", given.get("model") if given.get("model") in _NGRAM else None)
        if isinstance(method, str):
            given["method"] = _OLD_NAMES.get(method, method)
        if given.get("model") in _NO_MODELS and given.get("method") != "draft_model":
            del given["model"]
        elif "model" in given:
            given.setdefault("method", "draft_model")
        _check_method(given.get("method"))
        for name in [name for name in given if name not in known]:
            if name not in _NEUTRAL:
                raise ConfigError(
                    f"{NAME}: unknown key {str(name)[:64]!r}; known are {', '.join(known)}"
                )
            if not any(given[name] == each for each in _NEUTRAL[name]):
                raise NotAvailableError(
                    f"{NAME}: {name}={given[name]!r} is not available; leave it out"
                )
            del given[name]
        return cls(**given)

    def __post_init__(self) -> None:
        _check_method(self.method)
        self._check_effects()
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_NUM_TOKENS)
        _check_integer("prompt_lookup_max", self.prompt_lookup_max, 1, _MAX_SIZE)
        _check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, _MAX_SIZE)
        _check_integer(
            "suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1, 1 << 16
        )
        _check_integer(
            "suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0,
            1 << 31,
        )  # fmt: skip
        _check_integer("max_model_len", self.max_model_len, 1, 1 << 31)
        kinds = (None, *_WITH_FILES, "mtp")
        if self.model_method not in kinds:
            raise ConfigError(
                f"{NAME}: model_method={self.model_method!r}; choose {_listed(kinds[1:])}"
            )
        if self._kind == "mtp" and self.model is not None:
            raise ConfigError(
                f"{NAME}: model={self.model!r} has no effect with 'mtp'; leave it out"
            )
        if self._kind in _WITH_FILES and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(f"{NAME}: model={self.model!r} must name the model that drafts")
        for name in ("revision", "quantization"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{NAME}: {name}={value!r} must be a string")
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 1e6)
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 1.0)
        least, most = self.ngram_sizes
        if least > most:
            raise ConfigError(
                f"{NAME}: prompt_lookup_min={least} is above prompt_lookup_max={most}"
            )

    def _check_effects(self) -> None:
        """Refuse what another method alone reads."""
        for item in fields(self):
            value = getattr(self, item.name)
            for start, methods in _OF_METHODS.items():
                is_read = self.method in methods or not item.name.startswith(start)
                if not is_read and value != item.default:
                    raise ConfigError(
                        f"{NAME}: {item.name}={value!r} has no effect with method "
                        f"{self.method!r}; leave it out, or choose {methods[0]!r}"
                    )

    @property
    def _kind(self) -> str:
        """The method by which a model drafts, if one does."""
        if self.method != "auto":
            return self.method
        return self.model_method or ("auto" if self.model is None else "draft_model")

    @property
    def is_modelled(self) -> bool:
        """Whether a model drafts, or a head."""
        return self.head is not None or self._kind == "draft_model"

    @property
    def is_lookup_free(self) -> bool:
        """Whether no settings of `suffix` apply."""
        return self.method not in _OF_METHODS["suffix_decoding_"]

    @property
    def head(self) -> str | None:
        """The kind of the head that drafts, if one does."""
        return self._kind if self._kind in HEADS else None

    @property
    def ngram_sizes(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest n-gram: either stands for both."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or _NGRAM_SIZE, most or least or _NGRAM_SIZE

    @property
    def max_tokens(self) -> int:
        """Tokens drafted at most of a request in one step."""
        if self.method == "ngram":
            return self.num_speculative_tokens or _NUM_NGRAM_TOKENS
        if self.is_modelled and self.is_lookup_free:
            return self.max_modelled_tokens
        depth = min(self.suffix_decoding_max_tree_depth, MAX_NUM_TOKENS)
        return min(self.num_speculative_tokens or _NUM_SUFFIX_TOKENS, depth)

    @property
    def max_modelled_tokens(self) -> int:
        """The same of those that a model drafts."""
        return self.num_speculative_tokens or _NUM_MODEL_TOKENS


def _listed(names: Iterable[object]) -> str:
    *most, last = map(repr, names)
    return ", ".join(most) + f" or {last}"


def _check_method(method: object) -> None:
    choices = _listed(METHODS)
    if method is None:
        raise ConfigError(f"{NAME}: method is missing; choose {choices}")
    if method in _OTHER_METHODS:
        raise NotAvailableError(
            f"{NAME}: method {method!r} is not available in this version; use {choices}"
        )
    if method not in METHODS:
        raise ConfigError(f"{NAME}: unknown method {method!r}; choose {choices}")


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{NAME}: {name}={value!r} must be an integer from {least} to {most}")


def _check_number(name: str, value: object, most: float) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise ConfigError(f"{NAME}: {name}={value!r} must be a number from 0 to {most:g}")
