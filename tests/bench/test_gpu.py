"""The figures of a GPU as far as they go without one: arithmetic, verdicts,
and the parts on a CPU and a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import (
    Decodes,
    Figure,
    Subject,
    decode_step,
    device_record,
    idle_shares,
    open_engine,
    requests_of,
    some_batches,
)
from quire.bench.workload import random_workload

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_pauses_count_once_whatever_overlaps() -> None:
    busy = [(0.0, 1.0), (0.5, 0.6), (1.000004, 2.0), (2.1, 3.0), (2.2, 2.9)]
    idle, by_host = idle_shares(busy)
    assert idle == pytest.approx(0.100004 / 3) and by_host == pytest.approx(0.1 / 3)
    with pytest.raises(RuntimeError, match="saw nothing"):
        idle_shares([])


@pytest.mark.parametrize(
    ("figure", "is_reached"),
    [
        (Figure("a", 0.8, "", 0.8), True),
        (Figure("a", 0.79, "", 0.8), False),
        (Figure("a", 15.1, "s", 15.0, is_more_better=False), False),
        (Figure("a", 3.0, "ms"), None),
    ],
)
def test_a_figure_reaches_its_goal_or_not(figure: Figure, is_reached: bool | None) -> None:
    assert figure.is_reached is is_reached


def test_fewer_requests_are_whole_batches_of_all() -> None:
    requests = random_workload(20, (1, 9), (1, 99)).requests(0, 100)
    ordered = sorted(requests, key=lambda each: (each.num_output, len(each.token_ids)))
    assert some_batches(requests, 4, 9) == ordered[4:8] + ordered[12:16]
    assert some_batches(requests, 4, 1) == ordered[8:12]
    assert some_batches(requests, 4, 99) == ordered


def test_no_request_of_another_repetition_is_found_in_the_cache(config: Path) -> None:
    config.rename(config.parent / "config.json")
    subject = Subject(config.parent, "tiny", "cpu", None, 20, None)
    first, second = (requests_of(subject, repetition) for repetition in (-1, 0))
    lengths = [
        [(len(each.token_ids), each.num_output) for each in requests]
        for requests in (first, second)
    ]
    assert lengths[0] == lengths[1]
    assert all(a.token_ids != b.token_ids for a, b in zip(first, second, strict=True))


def test_what_is_missed_or_fails_shows_in_the_exit_code(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def part(subject: Subject) -> Iterator[Figure]:
        yield Figure(f"{subject.name} speed", 2.0, "x", 1.0)
        yield Figure("gap", 0.02, "", 0.03, is_more_better=False)

    def broken(subject: Subject) -> Iterator[Figure]:
        yield Figure("before", 1.0, "s")
        raise ValueError("no such tile")

    def slow(subject: Subject) -> Iterator[Figure]:
        yield Figure("start", 20.0, "s", 15.0, is_more_better=False)

    for name, function in (("kernels", part), ("steps", broken), ("start", slow)):
        monkeypatch.setitem(gpu_parts.PARTS, name, function)
    lines = tmp_path / "figures.jsonl"
    options = ["--model", str(config), "--json", str(lines), "--device", "cpu"]
    assert gpu.main(["kernels", *options]) == 0
    assert gpu.main(["start", "kernels", *options]) == 1
    assert gpu.main(["steps", "kernels", *options]) == 3
    told = capsys.readouterr()
    assert (
        "| tiny speed | 2 x | at least 1 | reached |" in told.out
        and "| gap | 0.02  | at most 0.03 | reached |" in told.out
    )
    assert "steps failed: ValueError: no such tile" in told.err
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    names = ["tiny speed", "gap", "start", "tiny speed", "gap", "before", "tiny speed", "gap"]
    assert [each["name"] for each in written] == names
    assert {"at", "torch", "commit", "device"} <= set(written[0]) and written[2][
        "is_reached"
    ] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["steps", "--model", str(config)]) == 3
    assert "no NVIDIA driver" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["steps", "--model", "no-such.json"], ["peers", "--requests", "0"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(arguments)


class FakeProfile:
    """A profiler that saw a kernel on the device and an operation on the host."""

    def __init__(self, activities: list[Any]) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]

    def __enter__(self) -> FakeProfile:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def events(self) -> list[SimpleNamespace]:
        kinds, seen = torch.autograd.DeviceType, SimpleNamespace(start=2.0, end=5.0)  # type: ignore[attr-defined]
        return [
            SimpleNamespace(device_type=kind, time_range=seen) for kind in (kinds.CPU, kinds.CUDA)
        ]


@pytest.mark.slow
def test_decode_steps_are_those_of_all_sequences(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config.parent
    config.rename(folder / "config.json")
    engine = open_engine(Subject(folder, "tiny", "cpu", None, 1, None))
    try:
        decodes = Decodes.of(engine, 20, 512, 64, 0)
        assert decodes.num_ahead == 5 and len(decodes.requests) == 20
        assert {(len(each.token_ids), each.num_output) for each in decodes.requests} == {
            (512 - 69 // 2, 69)
        }
        seconds, num_bytes = decode_step(engine, 20, 512)
        per_position = 2 * 16 * 2  # keys and values of one head of 16, in two bytes
        assert (
            0 < seconds < 1
            and 20 * 400 * per_position < num_bytes < 20 * 520 * per_position + 200_000
        )
        monkeypatch.setattr("torch.profiler.profile", FakeProfile)
        assert device_record(engine, 2, 300) == [(2e-6, 5e-6)]
        assert not engine.has_work
    finally:
        engine.close()


@pytest.mark.slow
def test_the_time_to_a_first_token_is_that_of_a_process(config: Path) -> None:
    config.rename(config.parent / "config.json")
    first, second = gpu_parts.start(Subject(config.parent, "tiny", "cpu", None, 1, None))
    assert 0.1 < second.value < 60 and first.goal is None and second.goal == 15.0
