"""The table of results, the benchmark page and the README's plot say what the archive of
records says, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records, result, results
from quire.errors import ConfigError


def summary(**rates: float) -> dict[str, dict[str, Any]]:
    rows = {
        name: {"output_tokens_per_s": rate, "compute_share": 0.5, "num_rounds": 2, "wall_s": 1.0}
        for name, rate in rates.items()
    }
    return {"W1": {name.replace("_", ":"): row for name, row in rows.items()}}


def record(day: int, **rates: float) -> Mapping[str, Any]:
    made = summary(**rates)
    return {
        "started_at": f"2026-11-{day:02}T00:00:00Z", "model": "M2", "instruction_set": "amx",
        "commits": [f"c{day}"], "machine": {"cpu": "Intel(R) Xeon(R) Processor", "num_cores": 2},
        "versions": {"commit": "x"}, "workloads": {"W1": {}},
        "variants": {name: {} for name in made["W1"]}, "measurements": [{"round": 1, "limits": {}}],
        "summary": made,
    }  # fmt: skip


def test_every_generated_file_is_up_to_date() -> None:
    stale = [
        path.name for path, text in results.generate() if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "make them again: python -m benchmarks.results"


def test_the_newest_run_counts_and_a_ratio_is_of_one_run() -> None:
    older = record(1, quire_bfloat16=90.0, vllm_bfloat16=30.0, openvino_bfloat16=45.0)
    newer = record(2, quire_bfloat16=50.0, vllm_bfloat16=40.0)
    found = results.collect({"a": older, "b": newer})
    compared = {
        theirs.engine: (mine.value, result.factor(mine, theirs))
        for mine, theirs in result.pairs(found)
    }
    assert compared == {"vllm": ("50.0", 1.25), "openvino": ("90.0", 2.0)}
    assert {each.commit for each in found} == {"c1", "c2"}


def test_less_time_is_faster() -> None:
    fast, slow = (
        results.collect({"a": record(1, quire_int8=1.0)})[0]._replace(value=value, unit="s")
        for value in ("2", "5")
    )
    assert result.factor(fast, slow) == 2.5


def test_an_archive_has_the_same_bytes_again(tmp_path: Path) -> None:
    made = {
        records.name_of(each): each
        for each in (record(1, quire_int8=1.0), record(2, quire_int8=2.0))
    }
    first, second = tmp_path / "a.tar.xz", tmp_path / "b.tar.xz"
    records.write_archive(made, first)
    records.write_archive(dict(reversed(made.items())), second)
    assert first.read_bytes() == second.read_bytes() and records.read_archive(first) == made
    assert list(made) == ["2026-11-01T000000Z-emerald-amx-M2", "2026-11-02T000000Z-emerald-amx-M2"]


def test_a_damaged_archive_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "records.tar.xz"
    path.write_bytes(records.ARCHIVE.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"records\.tar\.xz is no archive"):
        records.read_archive(path)


def test_a_row_without_a_record_stays_and_has_a_command() -> None:
    by_hand = [each for each in results.read_table() if not each.record]
    assert by_hand and all(each.command and each.commit and each.machine for each in by_hand)
    assert set(by_hand) <= set(results.read_table())


def test_the_figures_of_the_readme_are_in_the_table() -> None:
    readme = " ".join((results.ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = results.read_table()
    said = re.findall(r"(\d\.\d\d) times as fast", readme)
    ratios = [
        f"{result.factor(mine, theirs):.2f}"
        for machine in ("Emerald Rapids, 2 cores, AVX-512 only", "Emerald Rapids, 2 cores, AMX")
        for mine, theirs in result.pairs([each for each in rows if each.machine == machine])
        if (mine.model, mine.workload, theirs.engine, theirs.format)
        == ("Qwen3-0.6B", "W1", "vllm", "bfloat16")
    ]
    assert said == ratios
    waste = next(each for each in rows if "unused slots" in each.workload)
    assert f"{waste.value} % of" in readme
