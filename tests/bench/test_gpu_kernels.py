"""The benchmark of GPU kernels as far as it goes without a GPU: shares, the table, and refusals."""

from __future__ import annotations

import pytest
import torch

from quire.bench import gpu_kernels
from quire.bench.gpu_kernels import Case, GpuLimits, measure, render
from quire.cli.main import main

LIMITS = GpuLimits("NVIDIA X", 1e12, 100e12)


@pytest.mark.parametrize(
    ("num_bytes", "num_ops", "share"), [(10**9, 0, 0.5), (10**6, 10**11, 0.5), (0, 0, 0.0)]
)
def test_the_nearer_limit_decides(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, num_ops: int, share: float
) -> None:
    monkeypatch.setattr(gpu_kernels, "median_s", lambda call, device: 0.002)
    time = measure(Case("copy", lambda: None, num_bytes, num_ops), LIMITS, torch.device("cuda"))
    assert time.seconds == 0.002 and time.bytes_per_s == num_bytes / 0.002
    assert time.roofline_share == pytest.approx(share)
    *_, last = render(LIMITS, [time])
    assert last.startswith("| copy | 2000.0 |  |") and last.endswith(f"| {share:.0%} |")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cuda"]) != 0
    assert "device='cuda' cannot be used" in capsys.readouterr().err


def test_torchs_time_stands_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gpu_kernels, "median_s", lambda call, device: call() or 0.001 * len(calls))
    case = Case("sum", lambda: calls.append("ours"), 10**9, 0, lambda: calls.append("torch's"))
    time = measure(case, LIMITS, torch.device("cuda"))
    assert calls == ["ours", "torch's"] and (time.seconds, time.torch_seconds) == (0.001, 0.002)
    *_, last = render(LIMITS, [time])
    assert last.startswith("| sum | 1000.0 | 2000.0 |")


def test_options_of_the_cpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cuda", "--isa", "avx2"]) != 0
    assert "--isa applies to the CPU's kernels only" in capsys.readouterr().err
    assert main(["bench", "kernels", "--tune", "."]) != 0
    assert "--tune applies to --device cuda only" in capsys.readouterr().err
