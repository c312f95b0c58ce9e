"""What a folder says of late interaction: which tokens' vectors count, and how queries are filled
up.

sentence-transformers has a module MultiVectorMask and keys of the Transformer's file for it;
PyLate, whose folders came first, has keys of `config_sentence_transformers.json`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.common.small_files import is_file, read_object
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.pooling import LateInteraction, QueryExpansion

TOKEN_MODULES = frozenset({"MultiVectorMask"})
"""Modules that only models with a vector for each token have."""
_MAX_BYTES = 4 << 20
_MAX_LENGTH = 1 << 20
_MAX_WORDS = 1 << 16


def read_late_interaction(folder: Path, mask: Mapping[str, Any] | None) -> LateInteraction:
    """Read it; `mask` is the configuration of the module, None where there is none. Raises a
    QuireError."""
    sizes = _optional(folder / "sentence_bert_config.json")
    config = _optional(folder / "config_sentence_transformers.json")
    name = str(config.get("similarity_fn_name") or "maxsim").lower()
    if name not in ("maxsim", "meanmaxsim", "cosine"):
        raise UnsupportedModelError(
            f"{folder}: similarity_fn_name={name[:80]!r} is not supported for vectors of tokens; "
            "supported: maxsim and meanmaxsim"
        )
    words, tasks = config.get("skiplist_words") or [], ["document"]
    if mask is not None:
        if mask.get("keep_only_token_ids"):
            raise UnsupportedModelError(
                f"{folder}: keep_only_token_ids of MultiVectorMask is not supported"
            )
        words, tasks = mask.get("skiplist_words") or [], mask.get("skiplist_tasks") or tasks
    if not isinstance(words, list) or not all(isinstance(each, str) for each in words[:_MAX_WORDS]):
        raise CheckpointError(f"{folder}: skiplist_words must be a list of words")
    length = sizes.get("query_length", config.get("query_length"))
    return LateInteraction(
        skip_words=tuple(words[:_MAX_WORDS]) if "document" in tasks else (),
        skips_queries="query" in tasks,
        expansion=_expansion(folder, sizes, config, is_older=mask is None),
        query_len=None if length is None else _length(folder, "query_length", length),
        is_mean=name == "meanmaxsim",
    )


def _expansion(
    folder: Path, sizes: Mapping[str, Any], config: Mapping[str, Any], *, is_older: bool
) -> QueryExpansion | None:
    found = sizes.get("query_expansion")
    if isinstance(found, Mapping):
        token = found.get("token")
        return QueryExpansion(
            _length(folder, "query_expansion.length", found.get("length")),
            None if token is None else str(token),
            found.get("attend") is True,
            found.get("strategy") == "fixed",
        )
    if not is_older or config.get("do_query_expansion", True) is not True:
        return None
    length = _length(folder, "query_length", config.get("query_length", 32))
    return QueryExpansion(length, None, config.get("attend_to_expansion_tokens") is True, True)


def _length(folder: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MAX_LENGTH:
        raise CheckpointError(f"{folder}: {name} must be a number of tokens")
    return value


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path, _MAX_BYTES) if is_file(path) else {}
