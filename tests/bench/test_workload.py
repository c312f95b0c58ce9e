"""Workloads: the lengths that were promised, the same each time, with fresh tokens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from quire.bench.workload import (
    WORKLOADS,
    parallel_workload,
    prefix_workload,
    random_workload,
    read_lengths,
    totals,
    trace_workload,
)
from quire.errors import ConfigError

VOCAB = 1000


def test_random_lengths_are_those_of_the_seed() -> None:
    workload = random_workload(64, (16, 256), (16, 128))
    first, second = workload.requests(0, VOCAB), workload.requests(1, VOCAB)
    # The totals of the published comparison workload: 64 requests, seed 0.
    assert (
        totals(first)["num_prompt_tokens"] == 9_936 and totals(first)["num_output_tokens"] == 4_385
    )
    assert [len(each.token_ids) for each in first] == [len(each.token_ids) for each in second]
    assert first[0].token_ids != second[0].token_ids
    assert first == workload.requests(0, VOCAB)
    assert all(0 <= token_id < VOCAB for each in first for token_id in each.token_ids)
    assert random_workload(64, (16, 256), (16, 128), seed=1).requests(0, VOCAB) != first


def test_workloads_are_those_that_were_published() -> None:
    counts = {name: totals(workload.requests(0, 1000)) for name, workload in WORKLOADS.items()}
    assert (counts["W1"]["num_prompt_tokens"], counts["W1"]["num_output_tokens"]) == (9_936, 4_385)
    assert (counts["W2"]["num_prompt_tokens"], counts["W2"]["num_output_tokens"]) == (
        64 * 544,
        64 * 32,
    )
    assert (counts["W3"]["num_prompt_tokens"], counts["W3"]["num_output_tokens"]) == (128, 128)
    assert (counts["W4"]["num_sequences"], counts["W4"]["num_output_tokens"]) == (64, 4_096)
    assert (counts["W5"]["num_prompt_tokens"], counts["W5"]["num_output_tokens"]) == (4_096, 1)
    assert (counts["W6"]["num_requests"], counts["W6"]["num_output_tokens"]) == (64, 4_096)
    assert [counts[f"B{2**i}"]["num_sequences"] for i in range(7)] == [1, 2, 4, 8, 16, 32, 64]


def test_prefix_is_shared_within_a_repetition_only() -> None:
    workload = prefix_workload(4, 32, 8, 5)
    first, second = workload.requests(0, VOCAB), workload.requests(1, VOCAB)
    assert len({tuple(each.token_ids[:32]) for each in first}) == 1
    assert len({tuple(each.token_ids[32:]) for each in first}) == 4
    assert all(len(each.token_ids) == 40 and each.num_output == 5 for each in first)
    assert first[0].token_ids[:32] != second[0].token_ids[:32]


def test_parallel_sampling_counts_every_sequence() -> None:
    requests = parallel_workload(2, 10, 8, 4, name="p").requests(0, VOCAB)
    assert totals(requests)["num_sequences"] == 16 and totals(requests)["num_output_tokens"] == 64
    assert requests[0].temperature == 1.0


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.jsonl", "t.jsonl.gz"])
def test_traces_of_all_formats(tmp_path: Path, name: str) -> None:
    pairs = [(10, 5), (0, 5), (900, 200), (20, 7), (30, 8)]
    if ".csv" in name:
        text = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f",{p},{o}\n" for p, o in pairs)
    else:
        text = "".join(
            json.dumps({"arrival_s": 0.0, "prompt_tokens": p, "output_tokens": o}) + "\n"
            for p, o in pairs
        )
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert read_lengths(path) == [(10, 5), (900, 200), (20, 7), (30, 8)]
    workload = trace_workload(path, num_requests=2, max_model_len=512)
    assert [(len(r.token_ids), r.num_output) for r in workload.requests(0, VOCAB)] == [
        (10, 5),
        (20, 7),
    ]
    assert workload.parameters["num_too_long"] == 1


def test_shared_traces_are_readable(shared: Path) -> None:
    for name in (
        "azure2023_conv.csv.gz",
        "sharegpt_8k_lengths.csv.gz",
        "sharegpt_multiturn_llama3.1_tok_blk16.jsonl.gz",
    ):
        assert trace_workload(
            shared / "data" / "traces" / name, num_requests=5, max_model_len=8192
        ).parameters["num_requests"]


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="is not a trace"):
        read_lengths(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lengths(tmp_path / "missing.csv")
    path.write_text("prompt_tokens,output_tokens\n100,100\n")
    with pytest.raises(ConfigError, match=r"no request .* fits max_model_len=64"):
        trace_workload(path, num_requests=1, max_model_len=64)
