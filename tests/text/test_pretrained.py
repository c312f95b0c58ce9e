"""The tokenizer that programs get gives what transformers' gives, for every model that is here."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.text.pretrained import PretrainedTokenizer
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import resolve_model

SHARED = ["stories260K", "gpt2", "phi-3-mini", "qwen2.5"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SHARED[1:]]
TEXTS = [
    "Once upon a time, there was a fox.",
    "  two  spaces\n\tand a tab",
    "Zażółć gęślą jaźń, 你好, 🦊!",
    "<|im_start|>user\nhello<|im_end|>\n</s><s>",
    "x",
    "",
]
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello! <|im_end|>"},
    {"role": "user", "content": "Tell me a story."},
]
Pair = tuple[PretrainedTokenizer, Any]


@pytest.fixture(scope="module", params=["quire-storyteller", SHARED[0], *SLOW])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Ours and transformers', of the same folder."""
    transformers = pytest.importorskip("transformers")
    name = request.param
    folder = (
        request.getfixturevalue("tokenizer_folder")(name) if name in SHARED else resolve_model(name)
    )
    # The class that takes tokenizer.json as it is; others build a tokenizer of their own from its
    # vocabulary.
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    return PretrainedTokenizer(Tokenizer.from_folder(folder), str(folder)), theirs


def test_the_vocabulary_is_the_same(pair: Pair) -> None:
    ours, theirs = pair
    assert len(ours) == len(theirs) and ours.vocab_size == theirs.vocab_size
    assert (
        ours.get_vocab() == theirs.get_vocab()
        and ours.get_added_vocab() == theirs.get_added_vocab()
    )
    for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"):
        for attribute in (f"{name}_token", f"{name}_token_id"):
            assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert (
        ours.is_fast
        and ours.padding_side == theirs.padding_side
        and ours.truncation_side == theirs.truncation_side
    )
    assert ours.model_max_length == theirs.model_max_length
    assert ours.num_special_tokens_to_add() == theirs.num_special_tokens_to_add()


@pytest.mark.parametrize("text", TEXTS)
def test_texts_and_ids_are_the_same_both_ways(text: str, pair: Pair) -> None:
    ours, theirs = pair
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(
        text, add_special_tokens=False
    )
    assert dict(ours(text)) == {
        name: value for name, value in theirs(text).items() if name != "token_type_ids"
    }
    for skips in (False, True):
        assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(
            ids, skip_special_tokens=skips
        )
    assert ours.tokenize(text) == theirs.tokenize(text)
    tokens = theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids) == tokens
    assert ours.convert_ids_to_tokens(
        ids, skip_special_tokens=True
    ) == theirs.convert_ids_to_tokens(ids, skip_special_tokens=True)
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)


def test_single_tokens_and_unknown_ones_are_the_same(pair: Pair) -> None:
    ours, theirs = pair
    [first, *_] = theirs.encode("fox")
    assert ours.convert_ids_to_tokens(first) == theirs.convert_ids_to_tokens(first)
    assert ours.decode(first) == theirs.decode(first)
    token = theirs.convert_ids_to_tokens(first)
    assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token)
    missing = "no such token, surely"
    assert ours.convert_tokens_to_ids(missing) == theirs.convert_tokens_to_ids(missing)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"truncation": True, "max_length": 4},
    {"truncation": True, "max_length": 4, "add_special_tokens": False},
    {"padding": True},
    {"padding": "max_length", "max_length": 40},
    {"padding": "max_length", "truncation": True, "max_length": 6},
    {"padding": True, "pad_to_multiple_of": 8},
    {"padding": True, "padding_side": "left"},
    {"return_attention_mask": False},
    {"return_special_tokens_mask": True, "return_offsets_mapping": True, "return_length": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_batches_are_padded_and_cut_the_same_way(options: dict[str, Any], pair: Pair) -> None:
    ours, theirs = pair
    if "padding" in options and theirs.pad_token is None:
        with pytest.raises(InvalidParameterError, match="padding needs a pad token"):
            ours(TEXTS[:3], **options)
        return
    expected = dict(theirs(TEXTS[:3], **options, return_token_type_ids=False))
    assert dict(ours(TEXTS[:3], **options)) == expected


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_tensors_are_the_same(kind: str, pair: Pair) -> None:
    ours, theirs = pair
    for text in ("A fox", ["A fox"]):
        made, expected = ours(text, return_tensors=kind), theirs(text, return_tensors=kind)
        if isinstance(text, list):
            assert made.input_ids.tolist() == expected["input_ids"].tolist()
            assert type(made["attention_mask"]) is type(expected["attention_mask"])
        elif kind == "pt":
            assert made.input_ids.shape == expected["input_ids"].shape
    ids = expected["input_ids"]
    assert ours.batch_decode(ids) == theirs.batch_decode(ids) and ours.decode(
        ids[0]
    ) == theirs.decode(ids[0])


def test_rows_are_padded_together_and_texts_are_joined_in_pairs(pair: Pair) -> None:
    ours, theirs = pair
    if theirs.pad_token is not None:
        rows = {"input_ids": [[5, 6, 7], [8]]}
        assert dict(ours.pad(rows)) == dict(theirs.pad(rows))
    assert ours.encode("A fox", "A hen", add_special_tokens=False) == theirs.encode(
        "A fox", "A hen", add_special_tokens=False
    )


@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"tokenize": False},
        {"tokenize": False, "add_generation_prompt": True},
        {"tokenize": False, "continue_final_message": True},
        {"return_dict": False},
        {"return_dict": False, "return_tensors": "pt"},
        {"chat_template": "{% for m in messages %}{{ m.content }}|{% endfor %}", "tokenize": False},
        {"tokenize": False, "enable_thinking": False},
    ],
    ids=str,
)
def test_chats_are_rendered_the_same_way(options: dict[str, Any], pair: Pair) -> None:
    ours, theirs = pair
    if theirs.chat_template is None and "chat_template" not in options:
        with pytest.raises(InvalidParameterError, match="no chat template"):
            ours.apply_chat_template(CHAT, **options)
        return
    for chat in (CHAT, [CHAT, CHAT]):
        made, expected = (
            ours.apply_chat_template(chat, **options),
            theirs.apply_chat_template(chat, **options),
        )
        if hasattr(expected, "tolist"):
            made, expected = made.tolist(), expected.tolist()
        if isinstance(expected, str | list):
            assert made == expected
        else:
            assert dict(made) == {
                name: value for name, value in expected.items() if name != "token_type_ids"
            }


def test_the_answer_is_a_dict_whose_names_are_attributes() -> None:
    tokenizer = PretrainedTokenizer(
        Tokenizer.from_folder(resolve_model("quire-storyteller")), "quire-storyteller"
    )
    encoded = tokenizer("A fox")
    assert encoded.input_ids == encoded["input_ids"] == tokenizer.encode("A fox")
    assert not hasattr(encoded, "labels") and "quire-storyteller" in repr(tokenizer)
    assert not hasattr(tokenizer, "image_token")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t(3), "a text must be str, not int"),
        (
            lambda t: t(["a", "a fox and a hen"], return_tensors="pt"),
            "make no tensor; set padding=True",
        ),
        (lambda t: t("a", return_tensors="tf"), "return_tensors='tf' is not available"),
        (lambda t: t("a", stride=4), "the tokenizer has no option stride=4"),
        (lambda t: t("\ud800"), "not valid Unicode"),
        (lambda t: t(["a"], ["b", "c"]), "2 text_pairs for 1 texts"),
        (
            lambda t: t.apply_chat_template(
                CHAT, continue_final_message=True, add_generation_prompt=True
            ),
            "contradict each other",
        ),
    ],
)
def test_bad_calls_are_refused_in_one_line(call: Any, message: str) -> None:
    tokenizer = PretrainedTokenizer(Tokenizer.from_folder(resolve_model("quire-storyteller")))
    with pytest.raises(InvalidParameterError) as raised:
        call(tokenizer)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_threads_may_share_it() -> None:
    tokenizer = PretrainedTokenizer(Tokenizer.from_folder(resolve_model("quire-storyteller")))
    expected = [
        tokenizer([text, "A fox"], padding=True, truncation=True, max_length=9) for text in TEXTS
    ]
    made: dict[int, Any] = {}

    def work(number: int) -> None:
        made[number] = [
            tokenizer([text, "A fox"], padding=True, truncation=True, max_length=9)
            for text in TEXTS
        ]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [made[number] for number in range(4)] == [expected] * 4
