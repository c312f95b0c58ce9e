"""The benchmark of projections: what it counts, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench import kernels as bench
from quire.bench.kernels import KINDS, Limits, LinearTime, measure_linear, render
from quire.cli.main import main
from quire.errors import ConfigError
from quire.kernels import cpu

LIMITS = Limits("avx9", 2, 100e9, 200e9, 400e9, 500e9, 10e9)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny weights, few tries."""
    if cpu.IMPORT_ERROR is not None:
        pytest.skip(f"no native kernels: {cpu.IMPORT_ERROR}")
    monkeypatch.setattr(bench, "_READ_BYTES", 1 << 16)
    monkeypatch.setattr(bench, "_PROBE_ROUNDS", 100)
    monkeypatch.setattr(bench, "_BUDGET_S", 0.001)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_shares_follow_from_the_time(kind: str) -> None:
    (time,) = measure_linear(kind, (32, 256), [3], LIMITS)
    float_peak = LIMITS.bf16_ops_per_s if kind == "bf16" else LIMITS.float_ops_per_s
    integer_peak = LIMITS.half_byte_ops_per_s if KINDS[kind].bits == 4 else LIMITS.integer_ops_per_s
    peak = integer_peak if KINDS[kind].has_int8_inputs else float_peak
    size = KINDS[kind].group_size or 256
    num_bytes = 32 * 256 * KINDS[kind].bits // 8 + (
        32 * 4 * (256 // size) if KINDS[kind].bits < 16 else 0
    )
    assert time.ops_share == pytest.approx(2 * 3 * 32 * 256 / time.seconds / peak)
    assert time.bytes_share == pytest.approx(num_bytes / time.seconds / LIMITS.read_bytes_per_s)
    assert time.roofline_share == max(time.ops_share, time.bytes_share)


@pytest.mark.usefixtures("quick")
def test_unknown_kinds_and_groups_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="no weights called 'int5'"):
        next(measure_linear("int5", (32, 64), [1], LIMITS))
    with pytest.raises(ConfigError, match="groups of 128 do not divide 64 inputs"):
        next(measure_linear("int4-g128", (32, 64), [1], LIMITS))


def test_the_table() -> None:
    lines = list(render(LIMITS, [LinearTime("bf16", 4, 1e-3, 20e9, 5e9, 0.2, 0.5)]))
    assert lines[0] == (
        "avx9, 2 threads: 100 GFLOP/s in float32, 200 in bfloat16, 400 Gop/s in int8, "
        "500 with weights of four bits, reads 10.0 GB/s"
    )
    assert lines[-1] == "| bf16 | 4 | 1000 | 20 | 20% | 5.00 | 50% | 50% |"


@pytest.mark.usefixtures("quick")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, before = tmp_path / "kernels.json", (cpu.isa(), cpu.num_threads())
    options = [
        "--shape",
        "32x128",
        "--rows",
        "1,3",
        "--num-threads",
        "1",
        "--isa",
        "portable",
        "--json",
        str(path),
    ]
    assert main(["bench", "kernels", "--weights", "bf16,int4-g128", *options]) == 0
    assert "| int4-g128 | 3 |" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert figures["limits"]["isa"] == "portable"
    assert [(each["kind"], each["num_rows"]) for each in figures["linear"]] == [
        ("bf16", 1), ("bf16", 3), ("int4-g128", 1), ("int4-g128", 3),
    ]  # fmt: skip
    assert all(each["seconds"] > 0 for each in figures["linear"])
    assert (cpu.isa(), cpu.num_threads()) == before, "the process has what it had"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "int5"], "'int5' is not one of f32"),
        (["--shape", "32"], "is not a shape"),
        (["--rows", "1,0"], "is not a list of counts"),
        (["--num-threads", "0"], "at least 1"),
        (["--isa", "sse9"], "'sse9' is not one of portable"),
        (["--shape", "32x100", "--weights", "int4-g32"], "groups of 32"),
    ],
)
def test_wrong_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *options]) == 2
    assert message in capsys.readouterr().err
