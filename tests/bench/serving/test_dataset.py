"""What is asked: lengths, shared prefixes, traces with theirs, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.serving.dataset import (
    Dataset,
    PromptWriter,
    Sizes,
    check_endpoint,
    file_dataset,
    prefix_dataset,
    random_dataset,
    trace_dataset,
)
from quire.errors import ConfigError

SIZES = Sizes(6, (5, 9), (2, 4))


def ids(dataset: Dataset) -> list[list[int]]:
    prompts = [each.prompt for each in dataset.requests]
    assert all(isinstance(prompt, list) for prompt in prompts)
    return [prompt for prompt in prompts if isinstance(prompt, list)]


def num_shared(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    return next(n for n in range(len(first) + 1) if first[: n + 1] != second[: n + 1])


def test_made_up_prompts_have_the_lengths_asked_for_in_ids_and_in_words() -> None:
    numbers, words = (
        random_dataset(SIZES, PromptWriter(1000), 3),
        random_dataset(SIZES, PromptWriter(None), 3),
    )
    assert all(
        5 <= len(prompt) <= 9 and all(16 <= each < 984 for each in prompt)
        for prompt in ids(numbers)
    )
    assert [len(str(each.prompt).split()) for each in words.requests] == [
        len(prompt) for prompt in ids(numbers)
    ]
    assert (
        numbers
        == random_dataset(SIZES, PromptWriter(1000), 3)
        != random_dataset(SIZES, PromptWriter(1000), 4)
    )
    assert {each.num_output for each in numbers.requests} <= {2, 3, 4}


def test_prefixes_are_shared_in_turn_and_nothing_else_is() -> None:
    prompts = ids(prefix_dataset(SIZES, PromptWriter(50_000), 0, prefix_len=20, num_prefixes=2))
    for first in range(6):
        for second in range(first):
            shared = num_shared(prompts[first], prompts[second])
            assert shared == (20 if first % 2 == second % 2 else 0)


def test_a_trace_keeps_arrivals_lengths_and_prefixes(tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 5, "prompt_tokens": 40, "output_tokens": 3, "block_hashes": [1, 2, 3]},
        {"arrival_s": 6, "prompt_tokens": 900, "output_tokens": 3, "block_hashes": list(range(57))},
        {"arrival_s": 8, "prompt_tokens": 36, "output_tokens": 4, "block_hashes": [1, 2, 9]},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    dataset = trace_dataset(path, PromptWriter(50_000), num_requests=5, max_total_len=100)
    first, second = ids(dataset)
    assert (len(first), len(second), dataset.arrival_s) == (40, 36, [5.0, 8.0])
    assert num_shared(first, second) == 32
    with pytest.raises(ConfigError, match="no request of"):
        trace_dataset(path, PromptWriter(None), num_requests=5, max_total_len=10)


def test_real_traces_share_what_their_hashes_say(shared: Path) -> None:
    path = shared / "data" / "traces" / "mooncake_conversation.jsonl.gz"
    dataset = trace_dataset(path, PromptWriter(50_000), num_requests=3, max_total_len=8000)
    assert len(dataset.requests) == 3 and dataset.arrival_s == sorted(dataset.arrival_s or [])


def test_files_of_every_kind(tmp_path: Path) -> None:
    plain, rich = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("\ufeffone\u2028more\n\ntwo\n", encoding="utf-8")
    asked = file_dataset(plain, output_len=(7, 7), num_requests=3, seed=0)
    assert [(each.prompt, each.num_output) for each in asked.requests] == [
        ("one\u2028more", 7),
        ("two", 7),
        ("one\u2028more", 7),
    ]
    rich.write_text(
        '"a"\n{"prompt": "b", "max_tokens": 2}\n{"turns": ["c", "d"]}\n{"messages": '
        '[{"role": "user"}]}\n'
    )
    requests = file_dataset(rich, output_len=(7, 7), num_requests=4, seed=0).requests
    assert [each.prompt for each in requests[:3]] == ["a", "b", "c"] and requests[1].num_output == 2
    assert requests[3].messages == [{"role": "user"}]
    check_endpoint(requests, is_chat=True)
    with pytest.raises(ConfigError, match="--endpoint chat"):
        check_endpoint(requests, is_chat=False)
    with pytest.raises(ConfigError, match="in words"):
        check_endpoint(random_dataset(SIZES, PromptWriter(1000), 0).requests, is_chat=True)


@pytest.mark.parametrize(
    "text", ["{", "{}", "3", '{"prompt": 3}', '{"turns": []}', '{"prompt_token_ids": ["a"]}']
)
def test_lines_that_ask_nothing_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.jsonl:1"):
        file_dataset(path, output_len=(1, 1), num_requests=1, seed=0)


def test_files_that_are_none(tmp_path: Path) -> None:
    for content in (b"", b"\xff\xfe"):
        path = tmp_path / "f.txt"
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            file_dataset(path, output_len=(1, 1), num_requests=1, seed=0)
    with pytest.raises(ConfigError, match="cannot be read"):
        file_dataset(tmp_path / "missing", output_len=(1, 1), num_requests=1, seed=0)
    with pytest.raises(ConfigError, match="vocab_size=20"):
        PromptWriter(20)
