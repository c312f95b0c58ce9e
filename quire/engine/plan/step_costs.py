"""What steps of a model cost on this machine: estimated for a plan, and kept in a file from one run
to the next.

The estimate divides the model's operations and bytes by what processors of this class reach; the
first measured steps correct it (`quire.core.step_cost`). Owns the file: JSON beside the packed
weights, of numbers alone, checked when it is read; one that is foreign, damaged or of another
machine is not used.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import NamedTuple

from quire.common.small_files import write_whole
from quire.core.step_cost import StepCostModel, UnitCosts
from quire.engine.plan.machine import Machine
from quire.models.declaration import DecoderSpec
from quire.quant.formats import WeightFormats

logger = logging.getLogger(__name__)

SUFFIX = ".steps.json"
_MAX_FILE_BYTES = 1 << 16
_SAVE_AFTER = 256
"""Steps from one writing of the file to the next, where an engine is idle now and then."""
_OVERHEAD_S = 0.0005
"""Of a step, beside its kernels."""
_OUTPUT_OVERHEAD_S = 20e-6
"""Of a sampled row."""
_ATTENTION_SHARE = 0.5
"""Attention's rate of operations, relative to large GEMMs'."""


class _Rates(NamedTuple):
    """What one core reaches: operations per second in large GEMMs of floating
    point and of 8-bit integers."""

    flag: str
    """The CPU flag that brings them; "" for any processor."""
    float_flops: float
    int8_ops: float


# Two thirds of what was measured on two cores each: Emerald Rapids (AMX), Cascade Lake (AVX-512
# with VNNI), Zen 3 (AVX2).
_CPU_RATES = (
    _Rates("amx_tile", 700e9, 1300e9),
    _Rates("avx512_bf16", 200e9, 300e9),
    _Rates("avx512_vnni", 60e9, 200e9),
    _Rates("avx512f", 60e9, 80e9),
    _Rates("avx_vnni", 60e9, 200e9),
    _Rates("avx2", 60e9, 80e9),
    _Rates("i8mm", 60e9, 150e9),
    _Rates("", 10e9, 10e9),
)
_CPU_BYTES_PER_CORE, _CPU_BYTES = 12e9, 60e9
"""Bytes per second that one core reads, and all together."""
_GPU_FLOPS, _GPU_BYTES = 100e12, 1e12
"""Of any GPU: only a start, none was measured."""


def estimate(
    spec: DecoderSpec, formats: WeightFormats, dtype: str, kv_format: str, machine: Machine
) -> UnitCosts:
    """Return seconds for each unit of work, before anything was measured;
    `machine.num_cores` are those that compute."""
    flops, ops, bandwidth = _rates(formats, machine)
    ends = () if spec.head is None else (spec.head,)
    head = formats.of(ends) if ends else None
    head_bytes = formats.part_bytes(ends, dtype) if ends else 0
    layer_bytes = formats.token_bytes(spec, dtype) - head_bytes
    per_token = spec.flops_per_token()
    return UnitCosts(
        step_s=_OVERHEAD_S + layer_bytes / bandwidth,
        head_s=max(head_bytes, 1) / bandwidth,
        token_s=per_token.layers / ops,
        output_s=_OUTPUT_OVERHEAD_S + per_token.head / (flops if head is None else ops),
        context_s=max(sum(layer.bytes_per_token(kv_format) for layer in spec.kv_layers), 1)
        / bandwidth,
        pair_s=spec.attention_flops(1) / (_ATTENTION_SHARE * flops),
    )


def _rates(formats: WeightFormats, machine: Machine) -> tuple[float, float, float]:
    """Floating-point operations, operations of the projections, and bytes read, per second."""
    if machine.gpu is not None:
        return _GPU_FLOPS, _GPU_FLOPS, _GPU_BYTES
    flags = machine.instruction_sets.split("+")
    rates = next(each for each in _CPU_RATES if not each.flag or each.flag in flags)
    ops = rates.int8_ops if formats.has_integers else rates.float_flops
    bandwidth = min(_CPU_BYTES, machine.num_cores * _CPU_BYTES_PER_CORE)
    return machine.num_cores * rates.float_flops, machine.num_cores * ops, bandwidth


class StepCostFile:
    """Where a model's step costs are kept; a folder that cannot be written costs one warning."""

    def __init__(self, path: Path, cpu_name: str, model: StepCostModel) -> None:
        self._path, self._cpu_name, self._model = path, cpu_name, model
        self._num_saved = 0
        self._has_failed = False

    def restore(self) -> bool:
        """Let the model begin with what an earlier run learned on this processor;
        False where there is nothing to use."""
        try:
            with self._path.open("rb") as file:
                record = json.loads(file.read(_MAX_FILE_BYTES))
        except FileNotFoundError:
            return False
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("step costs in %s are not used: %s", self._path, error)
            return False
        is_ours = isinstance(record, dict) and record.get("cpu") == self._cpu_name
        return is_ours and self._model.restore(record)

    def save_if_due(self) -> None:
        """Write the file where enough was learned since it was last written."""
        if self._model.num_observed - self._num_saved >= _SAVE_AFTER:
            self.save()

    def save(self) -> None:
        """Write the file, if anything was learned."""
        if self._has_failed or self._model.num_observed == self._num_saved:
            return
        self._num_saved = self._model.num_observed
        record = json.dumps({"cpu": self._cpu_name, **self._model.saved()})
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._path, record)
        except OSError as error:
            self._has_failed = True
            logger.warning("step costs could not be kept in %s: %s", self._path, error)
