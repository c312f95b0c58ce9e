"""The record: what the commands write keeps to the schema, and the check notices what does not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench import limits, record
from quire.cli.main import main


@pytest.fixture(scope="module", autouse=True)
def quick_limits() -> Iterator[None]:
    """Limits are sampled for real, but briefly."""
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, "_READ_BYTES", 16 << 20)
    patch.setattr(limits, "_SHAPES", ((64, 256, 256),))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def good(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("record") / "record.json"
    lengths = ["--num-requests", "4", "--input-len", "4:9", "--output-len", "2:5"]
    fast = [
        "--num-threads",
        "1",
        "--kv-cache-memory",
        "4MiB",
        "--repetitions",
        "2",
        "--warmups",
        "0",
        "--profile",
    ]
    assert main(["bench", "throughput", tiny, "--json", str(path), *lengths, *fast]) == 0
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def test_a_real_record_keeps_to_the_schema(good: dict[str, Any]) -> None:
    assert record.problems(good) == []
    assert good["kind"] == "throughput" and good["num_repetitions"] == len(good["repetitions"]) == 2
    assert good["workload"]["totals"]["num_requests"] == 4
    assert good["engine"]["decisions"]["num_threads"] == "1"
    assert good["median"]["roofline"]["roofline_share"] > 0
    assert set(good["peaks"]["gemm_flops_per_s"]) == set(good["peaks"]["products"]) > {"int8"}
    counts = [each["roofline"]["num_samples"] for each in good["repetitions"]]
    # around each repetition at least
    assert min(counts) >= 2 and sum(counts) == good["peaks"]["num_samples"]


def test_what_is_missing_unknown_or_wrong_is_named(good: dict[str, Any]) -> None:
    bad = copy.deepcopy(good)
    del bad["machine"]["cpu"]
    bad["median"]["ttft_s"]["p50"] = "fast"
    bad["surprise"] = 1
    del bad["repetitions"][1]["wall_s"]
    bad["schema"] = "other"
    found = record.problems(bad)
    for part in (
        "machine.cpu is missing",
        "median.ttft_s.p50 is str",
        "surprise is not",
        "repetitions[1].wall_s is missing",
    ):
        assert any(part in problem for problem in found), (part, found)
    assert len(found) == 5
    assert record.problems(17) == ["record is int, not an object"]


def test_every_key_of_the_schema_is_documented(repo_root: Path) -> None:
    text = (repo_root / "docs" / "benchmarks" / "records.md").read_text()
    keys = {*record.SHAPE, *record.RESULT_SHAPE, *record.RESULT_SHAPE["roofline"]}
    keys |= {*record.SERVE_SHAPE, *record.SERVE_RESULT_SHAPE, *record.SERVE_RESULT_SHAPE["client"]}
    keys |= {
        *record.SERVE_SHAPE["server"],
        *record.SERVE_SHAPE["configuration"],
        *record.SERVE_SHAPE["series"],
    }
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_latency_to_standard_output(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    sizes = ["--input-len", "6", "--output-len", "1", "--batch-size", "2"]
    fast = [
        "--num-threads",
        "1",
        "--kv-cache-memory",
        "4MiB",
        "--repetitions",
        "1",
        "--warmups",
        "0",
    ]
    assert main(["bench", "latency", tiny, "--json", "-", *sizes, *fast]) == 0
    captured = capsys.readouterr()
    written = json.loads(captured.out)
    assert record.problems(written) == []
    assert written["median"]["tpot_s"] is None and written["profile_s"] is None
    assert "first token" in captured.err and "of the limits sampled meanwhile" in captured.err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--input-len", "9:4"], "not a range of lengths"),
        (["--num-requests", "0"], "must be at least 1"),
        (["--dataset", "prefix"], "--input-len is one number"),
        (["--input-len", "600"], "the context holds 512"),
        (["--trace", "missing.csv"], "missing.csv cannot be read"),
        (["--repetitions", "0"], "--repetitions must be at least 1"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
    ],
)
def test_bad_options_are_refused(
    capsys: pytest.CaptureFixture[str], tiny: str, options: list[str], part: str
) -> None:
    assert main(["bench", "throughput", tiny, *options]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and part in err
