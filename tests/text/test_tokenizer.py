"""The tokenizer gives the ids that the models were trained with,
and users' text never becomes a control token."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from timing import timed

from quire.errors import CheckpointError, InvalidParameterError, ModelNotFoundError, QuireError
from quire.text.files import TextConfig
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import read_generation_config, resolve_model

NAMES = ["gpt2", "qwen2.5", "qwen3", "phi-3-mini", "falcon", "stories260K"]
Load = Callable[[str], Tokenizer]
Vectors = Callable[[str], list[tuple[str, list[int]]]]


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [("gpt2", "gpt-2"), ("falcon", "falcon"), ("qwen2.5", "qwen2"), ("qwen3", "qwen2")],
)
def test_the_ids_are_those_that_llama_cpp_publishes(
    load: Load, vectors: Vectors, name: str, vocabulary: str
) -> None:
    tokenizer, pairs = load(name), vectors(vocabulary)
    assert len(pairs) > 40
    for text, ids in pairs:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


def test_sentencepiece_ids_are_those_that_llama_cpp_publishes(load: Load, vectors: Vectors) -> None:
    tokenizer = load("phi-3-mini")
    for text, ids in vectors("phi-3"):
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize(("name", "key"), [("gpt2", "distilgpt2"), ("falcon", "tiiuae/falcon-7b")])
def test_the_ids_are_those_of_the_published_cases(
    load: Load, shared: Path, name: str, key: str
) -> None:
    cases = json.loads(
        (shared / "data/tokenizers/swift_transformers_vectors/tokenizer_tests.json").read_text()
    )[key]
    tokenizer = load(name)
    for case in cases:
        ids = case["encoded"]["input_ids"]
        assert tokenizer.encode(case["input"], parse_special=True) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["input"]


def test_a_long_text_has_the_published_ids(load: Load, shared: Path) -> None:
    vectors = json.loads(
        (shared / "data/tokenizers/swift_transformers_vectors/gpt2_encoded_tokens.json").read_text()
    )
    assert load("gpt2").encode(vectors["text"]) == vectors["token_ids"]


@pytest.mark.slow_except("gpt2")
@pytest.mark.parametrize("name", ["gpt2", "qwen2.5", "qwen3", "falcon"])
def test_the_ids_are_those_of_transformers(
    load: Load, tokenizer_folder: Callable[[str], Path], name: str
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer_folder(name))
    tokenizer = load(name)
    for text in (
        "",
        "Hello, world!",
        "  <|im_start|>user\nhi<|im_end|>",
        "<think>déjà vu</think> 👩‍👩‍👧\r\n",
    ):
        ids = reference(text).input_ids
        assert tokenizer.encode(text, parse_special=True) == ids
        for skip in (True, False):
            decoded = reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert tokenizer.decode(ids, skip_special_tokens=skip) == decoded


@pytest.mark.parametrize("name", NAMES)
def test_text_that_spells_a_control_token_stays_text(load: Load, name: str) -> None:
    tokenizer = load(name)
    controls = {tokenizer.token_to_id(text): text for text in tokenizer.control_level}
    assert tokenizer.special_token_ids <= controls.keys()
    for text in controls.values():
        for user_text in (text, f"a {text} b", text * 3, f"\n{text}{text[:-1]}"):
            ids = tokenizer.encode(user_text, add_special_tokens=False)
            assert not controls.keys() & set(ids), (user_text, ids)
            assert tokenizer.decode(ids, skip_special_tokens=True) == user_text


@pytest.mark.parametrize("name", NAMES)
def test_parse_special_and_secret_names_give_the_tokens(load: Load, name: str) -> None:
    tokenizer = load(name)
    for text in tokenizer.control_level:
        secret = tokenizer.guard.secret_name(text)
        ids = tokenizer.encode(
            f"say  {text}\n {text}x", add_special_tokens=False, parse_special=True
        )
        token_id = tokenizer.token_to_id(text)
        assert token_id is not None
        assert ids.count(token_id) == 2
        assert tokenizer.guard.encode(f"say  {secret}\n {secret}x") == ids


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_is_the_same_with_and_without_the_guard(load: Load, name: str) -> None:
    tokenizer = load(name)
    for text in ("", " ", "Hello  world\n\n\t x", "ไทย 漢字 👩‍👩‍👧‍👦 é", "<| im_start |> </ s>"):
        assert tokenizer.encode(text) == tokenizer.encode(text, parse_special=True)


def _tokenizer_json(model: dict[str, Any], specials: dict[str, int]) -> str:
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": token_id, "content": text, **flags} for text, token_id in specials.items()
            ],
            "decoder": {"type": "Fuse"},
            "model": model,
        }
    )


def _spelling_models() -> list[dict[str, Any]]:
    pieces = ["<unk>", "<s>", "<", "s", ">", "a", "s>", "<s>a"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    bpe = {"type": "BPE", "vocab": vocab, "unk_token": "<unk>"}
    return [
        {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[piece, -1.0 if len(piece) == 1 else 0.0] for piece in pieces],
        },
        {**bpe, "merges": [["s", ">"], ["<", "s>"], ["<s>", "a"]]},
        {**bpe, "merges": [["s", ">"]], "ignore_merges": True},
    ]


@pytest.mark.parametrize(
    "model", _spelling_models(), ids=["unigram", "bpe-merges", "bpe-ignore-merges"]
)
def test_a_model_that_can_spell_a_control_token_does_not(model: dict[str, Any]) -> None:
    tokenizer = Tokenizer(_tokenizer_json(model, {"<unk>": 0, "<s>": 1}))
    assert tokenizer.encode("<s>", parse_special=True) == [1]
    for text in ("<s>", "a<s>", "<s><s>"):
        ids = tokenizer.encode(text)
        assert 1 not in ids and 0 not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.guard.encode(tokenizer.guard.secret_name("<s>") + "a") == [1, 5]
    assert tokenizer.encode("é") == [0], "unknown characters are still unknown"


def test_bos_comes_from_the_post_processor_or_else_from_the_configuration(load: Load) -> None:
    assert load("stories260K").encode("a")[0] == load("stories260K").bos_token_id == 1
    assert load("stories260K").encode("a", add_special_tokens=False)[0] != 1
    text = _tokenizer_json(
        {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1, "?": 2}, "unk_token": "?"}, {"<s>": 0}
    )
    named = {"bos_token": "<s>", "eos_token": "<s>"}
    assert Tokenizer(text, TextConfig(named, add_bos_token=True, add_eos_token=True)).encode(
        "a"
    ) == [0, 1, 0]
    assert Tokenizer(text, TextConfig(named)).encode("a") == [1]


def test_named_ids_and_sizes(load: Load) -> None:
    qwen = load("qwen3")
    assert (qwen.bos_token_id, qwen.eos_token_id, qwen.vocab_size) == (None, 151645, 151669)
    assert qwen.token_to_id("<think>") == 151667 and qwen.token_to_id("no such token") is None
    assert qwen.chat_template is not None and load("falcon").chat_template is None
    assert qwen.control_level["<|fim_prefix|>"] == 2, (
        "not marked special in the file, but no text of a user's"
    )
    assert qwen.control_level["<think>"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_token_bytes_are_what_a_token_adds_to_a_text(load: Load, name: str) -> None:
    tokenizer = load(name)
    text = "x = “naïve” 漢字 👩‍👩‍👧 \t\n  end"
    data = b"".join(
        tokenizer.token_bytes(token) for token in tokenizer.encode(text, add_special_tokens=False)
    )
    assert data.decode().removeprefix(" " if name in {"phi-3-mini", "stories260K"} else "") == text
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""


def test_token_bytes_of_single_bytes_and_added_tokens(load: Load) -> None:
    phi, qwen = load("phi-3-mini"), load("qwen3")
    assert [phi.token_bytes(3 + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert phi.token_bytes(phi.token_to_id("▁the") or 0) == b" the"
    assert qwen.token_bytes(151645) == b"<|im_end|>"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json; add it"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(QuireError, match="convert it once with transformers"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": {"type": "BPE", "vocab": {"a": 5}, "merges": ["b c"]}}']
)
def test_a_malformed_tokenizer_is_refused(content: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(content)


def test_a_post_processor_that_makes_the_library_panic_is_refused() -> None:
    content = json.loads(_spelling_json())
    piece = {"SpecialToken": {"id": "<gone>", "type_id": 0}}
    single = [piece, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {},
    }
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used"):
        Tokenizer(json.dumps(content))


def test_a_folder_without_a_tokenizer_is_told_what_options_help(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--tokenizer.*skip_tokenizer_init=True") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_a_malformed_configuration_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_text(_spelling_json())
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("target", [None, "/dev/null"])
def test_a_configuration_that_is_no_file_is_refused(tmp_path: Path, target: str | None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(_spelling_json())
    assert read_generation_config(folder) == {}
    for name in ("tokenizer_config.json", "generation_config.json"):
        if target is None:
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=r"model/tokenizer_config\.json cannot be read"):
        Tokenizer.from_folder(folder)
    with pytest.raises(CheckpointError, match=r"model/generation_config\.json cannot be read"):
        read_generation_config(folder)


def _spelling_json() -> str:
    return _tokenizer_json(_spelling_models()[0], {"<s>": 1})


def test_chat_templates_are_found_wherever_they_are_kept(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(_spelling_json())
    inline = [{"name": "default", "template": "inline"}, {"name": "rag", "template": "R"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
    assert Tokenizer.from_folder(tmp_path).config.chat_templates == {
        "default": "inline",
        "rag": "R",
    }
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("T")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_template == "file"
    assert tokenizer.config.chat_templates["tool_use"] == "T"


def test_a_lone_surrogate_is_refused(load: Load) -> None:
    with pytest.raises(InvalidParameterError, match=r"U\+D83D at position 2"):
        load("gpt2").encode("ab\ud83d")


def test_importing_the_package_loads_no_library() -> None:
    code = (
        "import sys, quire.text.tokenizer, quire.text.detokenizer, quire.text.stop, "
        "quire.text.chat; "
    )
    code += (
        "print([name for name in ('tokenizers', 'jinja2', 'torch', 'transformers') if name in "
        "sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


ADVERSARIAL = ["a", " ", " \n", "<|im_", "e\u0301", "1", "qzx"]


@timed
@pytest.mark.parametrize("unit", ADVERSARIAL)
@pytest.mark.parametrize("name", ["qwen3", "phi-3-mini"])
def test_encoding_takes_linear_time(load: Load, name: str, unit: str) -> None:
    tokenizer = load(name)
    tokenizer.encode("warm")

    def seconds(num_chars: int) -> float:
        text = (unit * num_chars)[:num_chars]
        times = []
        for _ in range(3):
            start = time.process_time()
            tokenizer.encode(text)
            times.append(time.process_time() - start)
        return min(times)

    # Eight times the text: a quadratic step would take 64 times as long, n log n about 9 times.
    assert seconds(40_000) < 20 * seconds(5_000) + 0.02


@pytest.mark.slow
@timed
@pytest.mark.parametrize("unit", ["a", " ", "ab ", "<|im_end|>"])
def test_t12_a_megabyte_takes_linear_time(unit: str) -> None:
    tokenizer = Tokenizer.from_folder(resolve_model("quire-storyteller"))

    def cost_s(num_chars: int) -> float:
        text, times = (unit * num_chars)[:num_chars], []
        for _ in range(2):
            start = time.process_time()
            tokenizer.encode(text)
            times.append(time.process_time() - start)
        return min(times)

    # Three doublings at 2.5 each; quadratic work would take 64 times as long.
    assert cost_s(1 << 20) < 15.6 * cost_s(1 << 17) + 0.02


def test_encoding_lets_other_threads_run(load: Load) -> None:
    tokenizer, done, num_turns = load("qwen3"), threading.Event(), 0
    text = "some words and 漢字 " * 20_000
    tokenizer.encode("warm")

    def watch() -> None:
        nonlocal num_turns
        while not done.wait(0.001):
            num_turns += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    tokenizer.encode(text)
    done.set()
    watcher.join()
    assert num_turns > 5, "the interpreter was held for the whole call"
