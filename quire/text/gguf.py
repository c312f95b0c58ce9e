"""The tokenizer inside a GGUF file, as the `tokenizer.json` and the config that `Tokenizer` reads.

Owns the two kinds that GGUF knows of Quire's families: byte-level BPE ("gpt2": a vocabulary,
merges, and the name of a splitting rule) and SentencePiece ("llama": a vocabulary with scores, from
which the merges follow). Takes plain metadata and knows nothing of the file. A splitting rule that
is not known is refused by name, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire.errors import CheckpointError
from quire.text.files import TextConfig

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_ROLES: Final = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}
_MAX_PIECE_LEN: Final = 256
"""Characters of the longest token that merges are derived for;
SentencePiece's own limit is far below."""

_MAX_VOCABULARY_CHARS: Final = 16 << 20
"""Characters of all of them; a vocabulary of 256,000 tokens has less than two million."""

_GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_SPLIT: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATION: Final = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_V3_SPLIT: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS: Final = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_SPLITS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "deepseek-coder": [
        *map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK)),
        _DIGITS,
    ],
    "deepseek-llm": [  # of V2, too; cased letters are listed one by one in what was published
        *map(
            _split, (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", rf"\s?{_PUNCTUATION}", r"\s+$", _CJK)
        ),
        _DIGITS,
    ],
    "deepseek-v3": [
        *map(_split, (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK_V3_SPLIT))
    ],
    "gpt-2": [_split(_GPT2_SPLIT)],
    "gpt-4o": [_split(_CASED_SPLIT)],
    "llama-bpe": [_split(_MODERN_SPLIT % "{1,3}")],
    "qwen2": [_split(_MODERN_SPLIT % "")],
    "smollm": [_DIGITS, _split(_GPT2_SPLIT)],
    "tekken": [_split(_TEKKEN_SPLIT)],
}
"""The rule's name (`tokenizer.ggml.pre`) to the steps that cut a text before BPE."""


_WHOLE_TOKENS_FIRST: Final = frozenset({"llama-bpe", "tekken"})
"""Rules of vocabularies in which a piece that is a token is not merged anew."""


def convert_tokenizer(metadata: Mapping[str, object]) -> tuple[str, TextConfig]:
    """Return the text of a `tokenizer.json`, and what goes with it.
    Raises CheckpointError for what is missing or not known."""
    kind = metadata.get("tokenizer.ggml.model")
    vocabulary = _GgufVocabulary(metadata)
    if kind == "gpt2":
        parts = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        parts = _sentence_piece(metadata, vocabulary)
    else:
        raise CheckpointError(
            f"the GGUF file has tokenizer.ggml.model={kind!r}; supported: gpt2, llama; {_ADVICE}"
        )
    document = {
        "version": "1.0",
        "added_tokens": vocabulary.added(),
        "post_processor": None,
        **parts,
    }
    template = metadata.get("tokenizer.chat_template")
    return json.dumps(document), TextConfig(
        named_tokens=vocabulary.named(metadata),
        add_bos_token=metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") is True,
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token") is True,
        chat_templates={"default": template} if isinstance(template, str) else {},
    )


_ADVICE: Final = (
    "put the model's tokenizer.json beside the file, or name a folder that has one with "
    "tokenizer (--tokenizer); LLM takes token ids alone with skip_tokenizer_init=True"
)


class _GgufVocabulary:
    """Tokens by id, and their kinds."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.tokens = _strings(metadata, "tokens")
        kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(self.tokens))
        if not isinstance(kinds, Sequence) or len(kinds) != len(self.tokens):
            raise CheckpointError(
                "the GGUF file's tokenizer.ggml.token_type does not fit its tokens"
            )
        self.kinds: Sequence[Any] = kinds
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise CheckpointError(
                f"the GGUF file's vocabulary names {len(self.tokens) - len(self.ids)} tokens twice"
            )

    def added(self) -> list[dict[str, Any]]:
        """Control tokens and those that a user defined,
        which are cut out of a text before anything else."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": token_id, "content": token, "special": kind == _CONTROL, **plain}
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]

    def named(self, metadata: Mapping[str, object]) -> dict[str, str]:
        """Roles to tokens."""
        ids = {
            role: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, role in _ROLES.items()
        }
        return {
            role: self.tokens[at]
            for role, at in ids.items()
            if isinstance(at, int) and 0 <= at < len(self.tokens)
        }


def _byte_level(metadata: Mapping[str, object], vocabulary: _GgufVocabulary) -> dict[str, Any]:
    rule = metadata.get("tokenizer.ggml.pre")
    if not isinstance(rule, str) or rule not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise CheckpointError(
            f"the GGUF file has tokenizer.ggml.pre={rule!r}; supported: {known}; {_ADVICE}"
        )
    merges = [merge.split(" ") for merge in _strings(metadata, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise CheckpointError("the GGUF file's tokenizer.ggml.merges are not pairs")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_SPLITS[rule], byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": vocabulary.ids,
            "merges": merges,
            "ignore_merges": rule in _WHOLE_TOKENS_FIRST,
        },
    }


def _sentence_piece(metadata: Mapping[str, object], vocabulary: _GgufVocabulary) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, Sequence)
        or len(scores) != len(vocabulary.tokens)
        or not all(isinstance(score, int | float) for score in scores)
    ):
        raise CheckpointError("the GGUF file's tokenizer.ggml.scores do not fit its tokens")
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    prefix, strip = (
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    )
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if has_prefix else [])]
    unknown = vocabulary.named(metadata).get("unk_token")
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([prefix] if has_prefix else []), spaces],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": vocabulary.ids,
            "merges": _merges(vocabulary, scores),
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": unknown,
        },
    }


def _merges(vocabulary: _GgufVocabulary, scores: Sequence[Any]) -> list[list[str]]:
    """Return every pair of tokens that makes up a third, the best score of the third first,
    as SentencePiece joins them."""
    num_chars = sum(len(token) for token in vocabulary.tokens if len(token) <= _MAX_PIECE_LEN)
    if num_chars > _MAX_VOCABULARY_CHARS:
        raise CheckpointError(
            f"the GGUF file's tokens have {num_chars} characters; merges are derived of at "
            f"most {_MAX_VOCABULARY_CHARS}"
        )
    found = []
    for token_id, token in enumerate(vocabulary.tokens):
        if vocabulary.kinds[token_id] == _NORMAL and len(token) <= _MAX_PIECE_LEN:
            for cut in range(1, len(token)):
                left, right = vocabulary.ids.get(token[:cut]), vocabulary.ids.get(token[cut:])
                if left is not None and right is not None:
                    found.append((-scores[token_id], token_id, left, right))
    return [
        [vocabulary.tokens[left], vocabulary.tokens[right]] for _, _, left, right in sorted(found)
    ]


def _strings(metadata: Mapping[str, object], name: str) -> Sequence[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(
            f"the GGUF file has no list of texts under tokenizer.ggml.{name}; {_ADVICE}"
        )
    return values
