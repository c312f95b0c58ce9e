"""`quire doctor`: findings, exit code, and a broken check that does not take the others down."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from quire.cli import doctor
from quire.cli.main import main
from quire.engine.plan import gpu
from quire.engine.plan.machine import Machine


def test_exit_code_says_whether_a_check_failed(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    failed = [each["name"] for each in report["findings"] if each["status"] == "failure"]
    assert (code, report["healthy"]) == ((1, False) if failed else (0, True))
    names = {each["name"] for each in report["findings"]}
    assert {
        "quire",
        "python",
        "torch",
        "cpu",
        "cores",
        "memory",
        "memory nodes",
        "OpenMP",
        "quire-storyteller",
        "model cache",
    } <= names


def test_missing_package_is_a_failure_with_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", ("torch", "surely-not-installed"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  surely-not-installed" in out and "pip install surely-not-installed" in out
    assert "cannot run here" in out


def test_a_broken_check_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _check_nothing() -> Iterator[doctor.Finding]:
        raise RuntimeError("oh")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (_check_nothing,))
    (finding,) = doctor.examine()
    assert finding.status == "failure" and "RuntimeError: oh" in finding.detail


def test_cache_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/proc/nowhere")
    (finding,) = doctor._check_cache()
    assert finding.status == "warning" and "cannot be written" in finding.detail


def test_cores_on_several_nodes_are_a_warning() -> None:
    finding = doctor._nodes(Machine(1 << 30, 1 << 30, 8, "Some CPU", num_nodes=2))
    assert finding.status == "warning" and "2 NUMA nodes" in finding.detail


def test_openmp_pools_are_found() -> None:
    import torch

    assert torch.get_num_threads() >= 1
    assert len(doctor.openmp_pools()) == 1


def test_a_gpu_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu.Gpu("NVIDIA X", (9, 0), 80 << 30, 70 << 30, "13.0")
    monkeypatch.setattr(gpu, "inspect_gpu", lambda: found)
    for reasons, status in (([], "ok"), (["torch is built without CUDA"], "warning")):
        monkeypatch.setattr(gpu, "reasons_against", lambda _, reasons=reasons: reasons)
        (finding,) = doctor._check_gpu()
        assert finding.status == status and finding.detail.startswith(
            "NVIDIA X (compute capability 9.0), 70.0 GiB free"
        )
        assert all(reason in finding.detail for reason in reasons)


def test_an_instruction_set_that_is_there_and_unused_is_told() -> None:
    flags = {"avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}
    assert doctor.unused_isas(
        flags, ("portable", "avx2", "avx512", "avx512vnni", "avx512bf16")
    ) == ["amx"]
    assert doctor.unused_isas(flags - {"amx_int8"}, ("portable", "avx2")) == [
        "avx512vnni",
        "avx512bf16",
    ]
    assert doctor.unused_isas({"avx2"}, ("portable",)) == []
    assert doctor.unused_isas({"asimd", "asimddp", "i8mm"}, ("portable", "neon", "neondot")) == [
        "neoni8mm"
    ]
    sets = ("portable", "neon", "neondot", "neoni8mm")
    assert doctor.unused_isas({"asimd", "asimddp", "i8mm", "bf16"}, sets) == ["neonbf16"]
    assert "tiles" in doctor._advice(["amx"]) and "tiles" not in doctor._advice(["avx512bf16"])


def test_unused_instruction_sets_are_one_finding_whatever_the_dtypes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.kernels.cpu.reasons_against", lambda device, dtype: [])
    monkeypatch.setattr("quire.kernels.cpu.isa", lambda: "avx2")
    monkeypatch.setattr("quire.kernels.cpu.supported_isas", lambda: ("portable", "avx2"))
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"avx2", "fma", "avx512_vnni"})
    (finding,) = [each for each in doctor._check_kernels() if each.name == "instructions"]
    assert (
        finding.status == "warning"
        and "avx512vnni" in finding.detail
        and "compiler" in finding.detail
    )
