"""Streamed text equals the whole decode, for every tokenizer, every split,
and every end of the prompt."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence

import pytest
from timing import timed

from quire.errors import UnsupportedModelError
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer

NAMES = ["gpt2", "qwen2.5", "qwen3", "phi-3-mini", "falcon", "stories260K"]
TEXTS = [
    "Hello, world!  Two spaces,\n\ttab.",
    " leading space",
    "naïve café — “quotes”",
    "漢字かな交じり文、한국어 문장.",
    "ภาษาไทยไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 family, 👍🏽 skin, 🇨🇭 flag, 🏳️‍🌈",
    "ᚠᛇᚻ 𒀀𒀁 🦙.cpp ½ \u200d\ufe0f\u0301",
    "a\ufffdb \ufffd",
]
Load = Callable[[str], Tokenizer]


def _stream(detokenizer: Detokenizer, ids: Sequence[int], step: int = 1) -> str:
    pieces = [detokenizer.append(ids[start : start + step]) for start in range(0, len(ids), step)]
    return "".join(pieces) + detokenizer.flush()


def _reference(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """The output's text for a well-formed whole:
    what follows the complete characters of the prompt."""
    complete = len(prompt)
    while complete and tokenizer.decode(prompt[:complete]).endswith("\ufffd"):
        complete -= 1
    full, before = tokenizer.decode(prompt + output), tokenizer.decode(prompt[:complete])
    tail = b"".join(tokenizer.token_bytes(token) for token in prompt[complete:])
    before += tail.decode(errors="ignore")
    assert full.startswith(before)
    return full.removeprefix(before)


@pytest.mark.slow_except("*-gpt2", "*-stories260K")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS[:-1])
def test_every_split_into_prompt_and_output(load: Load, name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    for split in range(len(ids)):
        prompt, output = ids[:split], ids[split:]
        expected = _reference(tokenizer, prompt, output)
        for step in (1, 2, 3, len(ids)):
            assert _stream(Detokenizer(tokenizer, prompt), output, step) == expected, (split, step)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_no_transient_replacement_and_every_end(load: Load, name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text)
    detokenizer, shown = Detokenizer(tokenizer, ()), ""
    whole = tokenizer.decode(ids)
    for length, token in enumerate(ids, start=1):
        shown += detokenizer.append([token])
        assert whole.startswith(shown), "every piece shown is final"
        assert shown + detokenizer.copy().flush() == tokenizer.decode(ids[:length])
    assert shown + detokenizer.flush() == whole


@pytest.mark.parametrize("name", NAMES)
def test_arbitrary_ids_decode_as_the_library_decodes_them(load: Load, name: str) -> None:
    tokenizer, rng = load(name), random.Random(name)
    spaces = [
        each for text in ("▁", "Ġ", "▁▁") if (each := tokenizer.token_to_id(text)) is not None
    ]
    for _ in range(1500):
        pools = [
            range(260),
            range(tokenizer.vocab_size + 20),
            spaces,
            sorted(tokenizer.special_token_ids),
        ]
        ids = [rng.choice(rng.choice(pools)) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            assert _stream(Detokenizer(tokenizer, (), skip_special_tokens=skip), ids) == whole
            split = rng.randrange(len(ids) + 1)
            detokenizer = Detokenizer(tokenizer, ids[:split], skip_special_tokens=skip)
            shown = _stream(detokenizer, ids[split:], rng.randrange(1, 4))
            assert whole.endswith(shown)
            assert shown == _suffix_by_replay(tokenizer, ids, split, skip), (ids, split)


def _suffix_by_replay(tokenizer: Tokenizer, ids: list[int], split: int, skip: bool) -> str:
    """The output's text with the whole prompt streamed first:
    equal to entering the prompt from its two ends."""
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=skip)
    detokenizer.append(ids[:split])
    detokenizer._num_prompt_bytes = len(detokenizer._pending) or len(detokenizer._run)
    return detokenizer.append(ids[split:]) + detokenizer.flush()


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (b"ab\xe2\x98", b"\x83!", "☃!"),  # the output completes the character
        (b"ab\xe2\x98", b"!", "!"),  # what the prompt left incomplete is not the output's
        (b"ab\xe2", b"\xe2\x98\x83", "☃"),
        (b"ab\xef\xbf", b"\xbd", "\ufffd"),  # a genuine replacement character
        (b"ab\xf0", b"\x9f", "\ufffd"),  # incomplete to the end
        (b"ab\xf0\x9f", b"", ""),
        (b"\x80\x80\x80", b"a", "a"),
    ],
)
def test_a_prompt_that_ends_within_a_character(
    load: Load, prompt: bytes, output: bytes, expected: str
) -> None:
    tokenizer = load("gpt2")
    token_of = {tokenizer.token_bytes(token): token for token in range(256)}
    prompt_ids, output_ids = (
        [token_of[bytes([byte])] for byte in data] for data in (prompt, output)
    )
    assert _stream(Detokenizer(tokenizer, prompt_ids), output_ids) == expected


def test_a_broken_run_of_byte_tokens_is_replaced_byte_by_byte(load: Load) -> None:
    tokenizer = load("phi-3-mini")
    run = [3 + byte for byte in "☃".encode() + b"\xf0\x9f"]
    assert tokenizer.decode(run) == "\ufffd" * 5
    assert _stream(Detokenizer(tokenizer, ()), run) == "\ufffd" * 5
    assert _stream(Detokenizer(tokenizer, run[:3]), run[3:]) == "\ufffd" * 2, (
        "the prompt's bytes are not repeated"
    )
    assert _stream(Detokenizer(tokenizer, run[:2]), run[2:3]) == "☃"


@pytest.mark.parametrize("name", ["phi-3-mini", "stories260K"])
def test_the_space_at_the_start_is_stripped_only_at_the_start(load: Load, name: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode("the end", add_special_tokens=False)
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert _stream(Detokenizer(tokenizer, ()), ids) == "the end"
    assert _stream(Detokenizer(tokenizer, [bos]), ids) == "the end"
    assert _stream(Detokenizer(tokenizer, [*ids]), ids) == " the end"
    assert _stream(Detokenizer(tokenizer, [bos], skip_special_tokens=False), ids) == " the end"


def test_special_tokens_are_left_out_or_shown(load: Load) -> None:
    tokenizer = load("qwen3")
    ids = tokenizer.encode("<think>\nhi</think>done<|im_end|>", parse_special=True)
    assert _stream(Detokenizer(tokenizer, ()), ids) == "<think>\nhi</think>done"
    shown = _stream(Detokenizer(tokenizer, (), skip_special_tokens=False), ids)
    assert shown == "<think>\nhi</think>done<|im_end|>"


@pytest.mark.parametrize("name", NAMES)
def test_forks_are_independent(load: Load, name: str) -> None:
    tokenizer = load(name)
    first, left, right = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("a 🦙", "𒀀 one", "ไทย two")
    )
    for cut in range(len(first) + 1):
        detokenizer = Detokenizer(tokenizer, ())
        shown = detokenizer.append(first[:cut])
        fork = detokenizer.copy()
        assert shown + _stream(detokenizer, left) == tokenizer.decode(first[:cut] + left)
        assert shown + _stream(fork, right) == tokenizer.decode(first[:cut] + right)


def _word_tokenizer(decoder: dict[str, object] | None) -> Tokenizer:
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    vocab = {"?": 0, "▁a": 1, "b": 2, "▁": 3, "<x>": 4, "<y>": 5}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": vocab[text], "content": text, **special} for text in ("<x>", "<y>")
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": decoder,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"},
    }
    return Tokenizer(json.dumps(content))


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
        {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}],
        },
    ],
)
def test_other_decoders_equal_the_library(decoder: dict[str, object] | None) -> None:
    tokenizer, rng = _word_tokenizer(decoder), random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(7) for _ in range(rng.randrange(8))]
        for skip in (True, False):
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            for split in range(len(ids) + 1):
                before = tokenizer.decode(ids[:split], skip_special_tokens=skip)
                detokenizer = Detokenizer(tokenizer, ids[:split], skip_special_tokens=skip)
                assert before + _stream(detokenizer, ids[split:]) == whole


def test_added_tokens_can_be_set_without_spaces() -> None:
    tokenizer = _word_tokenizer(None)
    tight = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert _stream(Detokenizer(tokenizer, (), **tight), [2, 4, 5, 2]) == "b <x><y> b"
    assert _stream(Detokenizer(tokenizer, [2, 4], **tight), [5, 2]) == "<y> b"
    assert _stream(Detokenizer(tokenizer, (), skip_special_tokens=False), [2, 4, 5]) == "b <x> <y>"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 0, "stop": 1},
            ],
        },
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "},
    ],
)
def test_a_decoder_that_cannot_be_followed_is_refused(decoder: dict[str, object]) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be followed token by token.*skip_tokenizer_init"
    ):
        Detokenizer(_word_tokenizer(decoder), ())


@timed
@pytest.mark.parametrize("name", ["gpt2", "phi-3-mini"])
def test_the_cost_of_a_token_does_not_grow(load: Load, name: str) -> None:
    tokenizer = load(name)
    unit = tokenizer.encode(" word 🦙🦙", add_special_tokens=False) + [3] * 50

    def seconds(num_units: int) -> float:
        times = []
        for _ in range(3):
            start, detokenizer = time.process_time(), Detokenizer(tokenizer, unit * num_units)
            for token in unit * num_units:
                detokenizer.append([token])
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(800) < 20 * seconds(100) + 0.02
