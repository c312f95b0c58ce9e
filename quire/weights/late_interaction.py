"""What a folder says of late interaction: which tokens' vectors count, and how queries are filled
up.

sentence-transformers has a module MultiVectorMask and keys of the Transformer's file for it;
PyLate, whose folders came first, has keys of `config_sentence_transformers.json`, and ColBERT's own
folders have `artifact.metadata`. Imports no torch.
"""

from __future__ import annotations

import string
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
PYLATE_PROMPTS = {"query": "[Q] ", "document": "[D] "}
"""Where a folder of PyLate's does not name them; and so the two below."""
PYLATE_DOCUMENT_LEN = 180
PYLATE_QUERY_LEN = 32
METADATA = "artifact.metadata"
"""Of ColBERT's own folders (architecture HF_ColBERT)."""


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
    words: Any = config.get("skiplist_words")
    words = list(string.punctuation) if words is None else words
    tasks: Any = ["document"]
    if mask is not None:
        if mask.get("keep_only_token_ids"):
            raise UnsupportedModelError(
                f"{folder}: keep_only_token_ids of MultiVectorMask is not supported"
            )
        words, given = mask.get("skiplist_words") or [], mask.get("skiplist_tasks")
        tasks = tasks if given is None else given
    if not isinstance(tasks, list):
        raise CheckpointError(f"{folder}: skiplist_tasks must be a list of tasks")
    if not isinstance(words, list) or len(words) > _MAX_WORDS:
        raise CheckpointError(
            f"{folder}: skiplist_words must be a list of at most {_MAX_WORDS} words"
        )
    if not all(isinstance(each, str) for each in words):
        raise CheckpointError(f"{folder}: skiplist_words must be words")
    length = sizes.get("query_length", config.get("query_length"))
    if length is None and mask is None:
        length = PYLATE_QUERY_LEN
    return LateInteraction(
        skip_words=tuple(words) if "document" in tasks else (),
        skips_queries="query" in tasks,
        expansion=_expansion(folder, sizes, config, is_older=mask is None),
        query_len=None if length is None else _length(folder, "query_length", length),
        is_mean=name == "meanmaxsim",
        is_marked=mask is None,
    )


def read_metadata(folder: Path) -> tuple[LateInteraction, dict[str, str], int, int]:
    """Read what a folder of ColBERT's own says: late interaction, prompts, the longest document,
    and elements of a vector; defaults are ColBERT's. Raises CheckpointError."""
    found = _optional(folder / METADATA)
    names = {"query": ("query_token_id", "[unused0]"), "document": ("doc_token_id", "[unused1]")}
    prompts = {role: found.get(key) or default for role, (key, default) in names.items()}
    if not all(isinstance(each, str) for each in prompts.values()):
        raise CheckpointError(f"{folder / METADATA}: query_token_id and doc_token_id must be texts")
    if found.get("similarity") not in (None, "cosine"):
        raise UnsupportedModelError(
            f"{folder / METADATA}: similarity={str(found['similarity'])[:80]!r} is not supported; "
            "supported: cosine"
        )
    query_len, document_len, width = (
        _length(folder, key, found.get(key) or default)
        for key, default in (
            ("query_maxlen", 32),
            ("doc_maxlen", PYLATE_DOCUMENT_LEN),
            ("dim", 128),
        )
    )
    is_attended = found.get("attend_to_mask_tokens") is True
    late = LateInteraction(
        skip_words=tuple(string.punctuation) if found.get("mask_punctuation", True) else (),
        expansion=QueryExpansion(query_len, None, is_attended, is_fixed=True),
        query_len=query_len,
        is_marked=True,
    )
    return late, prompts, document_len, width


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
    length = _length(folder, "query_length", config.get("query_length") or PYLATE_QUERY_LEN)
    return QueryExpansion(length, None, config.get("attend_to_expansion_tokens") is True, True)


def _length(folder: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MAX_LENGTH:
        raise CheckpointError(f"{folder}: {name} must be a number of tokens")
    return value


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path, _MAX_BYTES) if is_file(path) else {}
