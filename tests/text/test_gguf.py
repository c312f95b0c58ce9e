"""Tokenizers out of GGUF metadata: the same ids as the model's own tokenizer.json gives."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.errors import CheckpointError
from quire.text.gguf import _SPLITS, convert_tokenizer
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import resolve_model
from quire.weights.gguf.file import read_gguf

pytestmark = pytest.mark.slow

TEXTS = [
    "Hello, world!",
    "  two spaces, a\ttab\nand a newline\n\n",
    "Ünïcödé ☃ 日本語 🙂🙂",
    "",
    " leading",
    "trailing ",
    "I'm 1234567 years old; they'll say don't.",
    "def f(x):\n    return x ** 2  # code",
    "<|im_start|>user\nhi<|im_end|>",
    "e\u0301 vs \u00e9",
    "aaaaaaaaaaaa",
]


def _bpe_metadata(folder: Path, rule: str) -> dict[str, Any]:
    """What a converter would write for a byte-level tokenizer.json."""
    document = json.loads((folder / "tokenizer.json").read_text())
    added = {each["id"]: each for each in document["added_tokens"]}
    ids = document["model"]["vocab"] | {
        each["content"]: token_id for token_id, each in added.items()
    }
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    assert sorted(ids.values()) == list(range(len(tokens)))
    kinds = [
        1 if at not in added else 3 if added[at]["special"] else 4 for at in range(len(tokens))
    ]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in document["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rule, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "rule"), [("gpt2", "gpt-2"), ("qwen2.5", "qwen2")])
def test_byte_level_tokenizers_give_the_same_ids(
    name: str, rule: str, tokenizer_folder: Callable[[str], Path]
) -> None:
    folder = tokenizer_folder(name)
    own = Tokenizer((folder / "tokenizer.json").read_text())
    converted = Tokenizer(*convert_tokenizer(_bpe_metadata(folder, rule)))
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False)
        assert converted.encode(text, add_special_tokens=False) == ids, text
        assert converted.decode(ids) == own.decode(ids)


def test_deepseek_coders_ids_are_those_that_llama_cpp_publishes(
    shared: Path, vectors: Callable[[str], list[tuple[str, list[int]]]], tmp_path: Path
) -> None:
    packed = shared / "data/tokenizers/llama_cpp_vocab_gguf/ggml-vocab-deepseek-coder.gguf.xz"
    (tmp_path / "vocab.gguf").write_bytes(lzma.decompress(packed.read_bytes()))
    metadata = dict(read_gguf(tmp_path / "vocab.gguf").metadata)
    assert metadata["tokenizer.ggml.pre"] == "deepseek-coder"
    tokenizer, pairs = Tokenizer(*convert_tokenizer(metadata)), vectors("deepseek-coder")
    assert len(pairs) > 40
    for text, ids in pairs:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("deepseek-llm", "Don't stop, 2024!\n\tÉcole: 你好，世界", [
            "Don", "'", "t", " stop", ",", " ", "2", "0", "2", "4", "!", "\n", "\tÉ", "cole", ":", " ",
            "你好", "，", "世界",
        ]),
        ("deepseek-v3", "Don't stop, 12345!\n\tÉcole: 你好，世界", [
            "Don", "'t", " stop", ",", " ", "123", "45", "!\n", "\tÉcole", ":", " ", "你好", "，",
            "世界",
        ]),
        ("tekken", "HTTPServer's 12 naïveÉcole /\n\n x", [
            "HTTPServer", "'s", " ", "1", "2", " naïve", "École", " /\n\n", " x",
        ]),
    ],
)  # fmt: skip
def test_the_rules_of_deepseek_and_mistral_cut_as_published(
    rule: str, text: str, pieces: list[str]
) -> None:
    kinds = {"Split": tokenizers.pre_tokenizers.Split, "Digits": tokenizers.pre_tokenizers.Digits}
    steps = [
        kinds["Digits"](individual_digits=True)
        if step["type"] == "Digits"
        else kinds["Split"](tokenizers.Regex(step["pattern"]["Regex"]), behavior="isolated")
        for step in _SPLITS[rule]
    ]
    cut = tokenizers.pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


def test_the_rule_of_gpt_oss_cuts_as_its_own_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    regex = pytest.importorskip("regex")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {})
    pattern = public.o200k_base()["pat_str"]
    [step] = _SPLITS["gpt-4o"]
    split = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(step["pattern"]["Regex"]), behavior="isolated"
    )
    for text in [*TEXTS, "HTTPServer's IsReady/\n\nDON'T naïveÉcole 12345", "a/b//c\r\n x"]:
        found = [piece for piece, _ in split.pre_tokenize_str(text)]
        assert found == regex.findall(pattern, text), text


def test_the_vocabulary_with_scores_gives_the_same_ids(
    shared: Path, load: Callable[[str], Tokenizer], tmp_path: Path
) -> None:
    packed = shared / "data/tokenizers/llama_cpp_vocab_gguf/ggml-vocab-phi-3.gguf.xz"
    (tmp_path / "vocab.gguf").write_bytes(lzma.decompress(packed.read_bytes()))
    metadata = dict(read_gguf(tmp_path / "vocab.gguf").metadata)
    document, config = convert_tokenizer(metadata)
    assert (
        config.named_tokens["bos_token"] == "<s>"
        and config.add_bos_token
        and "default" in config.chat_templates
    )
    converted = Tokenizer(document, config)
    own = load("phi-3-mini")
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False)
        assert converted.encode(text, add_special_tokens=False) == ids, text
        assert converted.decode(ids) == own.decode(ids)
    assert converted.encode("a")[0] == 1


def _tiny(**changes: Any) -> dict[str, Any]:
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab"],
        "merges": ["a b"],
        "token_type": [1, 1, 1],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (base | changes).items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "bert"},
            (
                r"tokenizer\.ggml\.model='bert'; supported: gpt2, llama; put the model's "
                r"tokenizer\.json beside"
            ),
        ),
        ({"pre": "viking"}, r"tokenizer\.ggml\.pre='viking'; supported: deepseek-coder, deepseek"),
        ({"tokens": None}, r"no list of texts under tokenizer\.ggml\.tokens"),
        ({"tokens": ["a", "a", "b"]}, "names 1 tokens twice"),
        ({"token_type": [1]}, "token_type does not fit"),
        ({"merges": ["a b c"]}, "merges are not pairs"),
        ({"model": "llama"}, "scores do not fit"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    assert Tokenizer(*convert_tokenizer(_tiny())).encode("ab") == [2]
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(*convert_tokenizer(_tiny(**changes)))


def test_the_shipped_model_has_a_rule_of_its_own_that_is_not_guessed() -> None:
    metadata = _bpe_metadata(resolve_model("quire-storyteller"), "default")
    with pytest.raises(CheckpointError, match="pre='default'"):
        convert_tokenizer(metadata)
