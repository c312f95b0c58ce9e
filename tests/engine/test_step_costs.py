"""Step costs of a model on a machine: what is estimated, and what one run leaves to the next."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.core.plan import RowWork
from quire.core.scheduler.pace import StepPace
from quire.core.step_cost import StepCostModel, UnitCosts, work_of
from quire.engine.assembly.builder import pace_of
from quire.engine.assembly.preparation import plan_engine
from quire.engine.plan.machine import Machine
from quire.engine.plan.step_costs import StepCostFile

_AVX2 = Machine(1 << 34, 1 << 33, 2, "a processor", instruction_sets="x86_64+avx2+f16c+fma")
_AMX = replace(
    _AVX2, instruction_sets="x86_64+amx_bf16+amx_int8+amx_tile+avx2+avx512f+avx512_vnni+avx512_bf16"
)
_COSTS = UnitCosts(0.03, 0.01, 0.005, 0.002, 3e-6, 2e-6)


def _costs(folder: Path, machine: Machine, **options: object) -> UnitCosts:
    config = EngineConfig(model=str(folder), load_format="dummy", **options)  # type: ignore[arg-type]
    return plan_engine(config, machine).plan.step_costs


def _learned(path: Path) -> StepCostModel:
    model = StepCostModel(_COSTS)
    for _ in range(20):
        model.observe(work_of([RowWork(0, 0, 64)]), 1.0)
    StepCostFile(path, "a processor", model).save()
    return model


def test_estimates_follow_the_model_and_the_processor(tiny_config: Path) -> None:
    slow, fast = _costs(tiny_config, _AVX2), _costs(tiny_config, _AMX)
    assert slow.token_s > 5 * fast.token_s and slow.context_s == fast.context_s
    assert _costs(tiny_config, _AVX2, num_threads=1).token_s == pytest.approx(2 * slow.token_s)
    narrow = _costs(tiny_config, _AVX2, quantization="int8", kv_cache_dtype="int8")
    assert (
        narrow.token_s < slow.token_s
        and narrow.head_s < slow.head_s
        and narrow.context_s < slow.context_s
    )


def test_an_unknown_processor_counts_as_a_slow_one(tiny_config: Path) -> None:
    unknown = _costs(tiny_config, replace(_AVX2, instruction_sets=""))
    assert unknown.token_s > _costs(tiny_config, _AVX2).token_s


def test_the_next_run_begins_with_what_the_last_one_learned(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "model.steps.json"
    model, later = _learned(path), StepCostModel(_COSTS)
    assert StepCostFile(path, "a processor", later).restore()
    assert later.units() == model.units() != _COSTS


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"cpu": "a processor"}', b"null"]
)
def test_damaged_files_are_not_used(content: bytes, tmp_path: Path) -> None:
    path, model = tmp_path / "model.steps.json", StepCostModel(_COSTS)
    path.write_bytes(content)
    assert not StepCostFile(path, "a processor", model).restore()
    assert model.units() == _COSTS


def test_another_processors_costs_are_not_used(tmp_path: Path) -> None:
    path, model = tmp_path / "model.steps.json", StepCostModel(_COSTS)
    _learned(path)
    assert not StepCostFile(path, "another processor", model).restore()


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    model = StepCostModel(_COSTS)
    file = StepCostFile(tmp_path / "file" / "model.steps.json", "a processor", model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.observe(work_of([RowWork(0, 0, 64)]), 1.0)
            file.save()
    assert len(caplog.records) == 1


def test_nothing_is_written_before_anything_was_learned(tmp_path: Path) -> None:
    StepCostFile(tmp_path / "model.steps.json", "a processor", StepCostModel(_COSTS)).save()
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_the_same_finds_its_costs_beside_its_packed_weights(
    tiny_config: Path, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(tiny_config), load_format="dummy", weights_cache=str(tmp_path))
    pace, file = pace_of(plan_engine(config))
    assert isinstance(pace, StepPace) and file is not None
    pace.model.observe(work_of([RowWork(0, 0, 64)]), 1.0)
    file.save()
    (written,) = tmp_path.iterdir()
    assert (
        written.name.endswith(".steps.json")
        and json.loads(written.read_text())["num_observed"] == 1
    )
    again, _ = pace_of(plan_engine(config))
    assert again is not None and again.model.units() == pace.model.units()


def test_steps_without_a_target_keep_no_pace(tiny_config: Path) -> None:
    config = EngineConfig(model=str(tiny_config), load_format="dummy", target_step_ms=0)
    assert pace_of(plan_engine(config)) == (None, None)
