"""Thread count, instruction sets and the one pool of OpenMP threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kernels import cpu, load


@pytest.mark.usefixtures("restore_threads")
def test_the_thread_count_is_kept() -> None:
    cpu.set_num_threads(3)
    assert cpu.num_threads() == 3
    with pytest.raises(ValueError, match="at least 1"):
        cpu.set_num_threads(0)


@pytest.mark.usefixtures("native")
def test_instruction_sets() -> None:
    names = cpu.supported_isas()
    assert names[0] == "portable"
    assert cpu.isa() == names[-1]
    assert not set(names) & set(cpu.emulated_isas()), "what is emulated is never chosen"
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    assert "avxvnni" not in names or "avx_vnni" in flags
    if expected := os.environ.get("QUIRE_TEST_ISAS"):  # of an emulated processor
        assert names == tuple(expected.split(","))
    if "avx512vnni" in names:
        assert cpu.emulated_isas() == ("avx512bf16emulated", "amxemulated")
    with pytest.raises(ConfigError, match="'sse9' is not one of portable"):
        cpu.set_isa("sse9")


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc")
def test_tiles_of_matrices_need_a_processor_that_has_them() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert "amx" not in cpu.supported_isas() or {
        "amx_tile",
        "amx_bf16",
        "amx_int8",
        "avx512_bf16",
    } <= set(flags)


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime_is_loaded() -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {
        line.split()[-1]
        for line in maps
        if "libgomp" in line or "libomp" in line or "libiomp" in line
    }
    assert len(runtimes) == 1, f"two pools of threads would fight over the cores: {runtimes}"


def test_a_missing_extension_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "IMPORT_ERROR", "No module named '_native'")
    reasons = cpu.reasons_against("cpu", torch.float32)
    assert len(reasons) == 1
    assert "not built" in reasons[0]
    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        load("cpu")


@pytest.mark.usefixtures("native")
def test_an_extension_of_other_sources_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an editable install has one, when the files around it have changed."""
    assert cpu.reasons_against("cpu", torch.float32) == []
    monkeypatch.delattr("quire.kernels.cpu._native.is_finite")
    cpu._differences.cache_clear()
    try:
        with pytest.raises(
            ConfigError,
            match=r"built from other sources \(no is_finite\); rebuild it with `pip install -e .`",
        ):
            load("cpu")
        llm = LLM("quire-storyteller", kv_cache_memory="4MiB")  # by the reference kernels
        (answer,) = llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 2
    finally:
        cpu._differences.cache_clear()
