"""A step for a GPU, without one: shapes, dtypes and devices of every torch operation, with tensors
that hold nothing.

Those of the device "meta" refuse most operations with the host's memory, as a GPU would; torch's
fake tensors of "cuda" refuse all, where torch is built for one. Kernels are not run, and what would
move arrays to the device gives tensors there; nothing is read back.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from replayed import ComputedGraphs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from triton.runtime import interpreter

from quire.core.plan import ONE_SAMPLE, NewRow, RowSampling, RowWork, StepPlan
from quire.grammar.rows import RowMatchers
from quire.grammar.table import GrammarTable
from quire.kernels.triton.kernels import TritonKernels
from quire.kernels.triton.sampling import TritonSampling
from quire.kernels.triton.tuning import FOLDER, Tuning
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.sampling import Sampler
from quire.weights.dummy import DummyWeights
from quire.worker.graphs import GraphSettings
from quire.worker.last_tokens import Arrival
from quire.worker.memory import KVMemory, PoolShape
from quire.worker.outlets import outlets_for
from quire.worker.rows import RowTable
from quire.worker.staging import Staging, packed_len, unpack
from quire.worker.worker import Worker

SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SIZES,
    "Qwen2ForCausalLM": SIZES,
    "Qwen3ForCausalLM": SIZES,
    "Gemma2ForCausalLM": {**SIZES, "query_pre_attn_scalar": 64, "sliding_window": 64},
    "Olmo2ForCausalLM": SIZES,  # operation by operation
    "GPT2LMHeadModel": {
        "n_embd": 512,
        "n_layer": 2,
        "n_head": 8,
        "n_positions": 4096,
        "vocab_size": 300,
    },
}
SAMPLINGS = (
    RowSampling(temperature=0.0),
    RowSampling(seed=5),
    RowSampling(seed=6, temperature=0.7, top_k=9, top_p=0.8, min_p=0.01),
)


class FakeStaging(Staging):
    """Gives tensors on the device in place of the arrays."""

    def __call__(self, arrays: Sequence[Any]) -> list[Tensor]:
        return unpack(
            arrays, torch.empty(packed_len(arrays), dtype=torch.uint8, device=self.device)
        )

    def into(self, arrays: Sequence[Any], place: Tensor) -> list[Tensor]:
        return unpack(arrays, place)


@pytest.fixture(params=["meta", "cuda"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """Of tensors without memory; kernels are not run, memory needs no pinning."""
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **options: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    if request.param == "meta":
        yield torch.device("meta")
    elif torch.version.cuda is None:
        pytest.skip("torch is built without CUDA, whose tensors it cannot even pretend to slice")
    else:
        monkeypatch.setattr(
            torch.Tensor,
            "__int__",
            lambda self: 2 if self.device.type == "cpu" else pytest.fail("it is read"),
        )
        # whose values are not known on the host, either: two tokens are wanted
        with FakeTensorMode():
            yield torch.device("cuda")


def make_worker(device: torch.device, family: str, kv_format: str) -> Worker:
    spec = declare({"architectures": [family], **FAMILIES[family]})
    kernels = TritonKernels(device, Tuning.read(FOLDER / "default.json"))
    model = build_decoder(spec, DummyWeights(), kernels, dtype="bfloat16", max_model_len=4096)
    memory = KVMemory(spec.kv_layers, PoolShape(40, 16, kv_format), device)
    sampler = Sampler(
        TritonSampling(), matchers=RowMatchers(GrammarTable(lambda: pytest.fail("no grammars")))
    )
    rows = RowTable(4, 16)
    outlets = outlets_for(model, rows, sampler)
    worker = Worker(model, memory, rows, outlets)
    worker._stage = outlets[0]._stage = FakeStaging(device)  # type: ignore[attr-defined]
    worker.read_late(never_read)
    return worker


def never_read(tensors: Sequence[Tensor]) -> Arrival:
    assert all(tensor.device.type != "cpu" for tensor in tensors)
    return lambda: pytest.fail("nothing is read")


def plans() -> Iterator[StepPlan]:
    """Prompts, whose last tokens alone are wanted, then decodes;
    one row's prompt goes on meanwhile."""
    lengths = (20, 33, 7)
    new = tuple(
        NewRow(
            row, str(row), tuple(range(count)), count, tuple(range(row * 8, row * 8 + 8)), sampling
        )
        for row, (count, sampling) in enumerate(zip(lengths, SAMPLINGS, strict=True))
    )
    first = (RowWork(0, 0, 20, ONE_SAMPLE), RowWork(1, 0, 16), RowWork(2, 0, 7, ONE_SAMPLE))
    yield StepPlan(1, first, new_rows=new)
    yield StepPlan(
        2,
        (
            RowWork(0, 20, 1, ONE_SAMPLE),
            RowWork(1, 16, 17, ONE_SAMPLE),
            RowWork(2, 7, 1, ONE_SAMPLE),
        ),
    )
    yield StepPlan(
        3, tuple(RowWork(row, start, 1, ONE_SAMPLE) for row, start in ((0, 21), (1, 33), (2, 8)))
    )
    yield StepPlan(4, (RowWork(0, 22, 1, ONE_SAMPLE),))


@pytest.mark.slow_combinations
@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize(
    ("family", "kv_format"),
    [*((family, "bfloat16") for family in FAMILIES), ("Qwen3ForCausalLM", "fp8")],
)
def test_no_operation_of_a_step_mixes_devices(
    device: torch.device, family: str, kv_format: str, is_replayed: bool
) -> None:
    worker, backend = make_worker(device, family, kv_format), ComputedGraphs()
    if is_replayed:
        worker.use_graphs(backend, GraphSettings(64, 4096, 1 << 30, paying_uses=1))
    for plan in plans():
        worker.rows.apply(plan)
        worker._launch(plan.work)  # which raises, where `launch` would compute each row alone
    assert worker.rows.tokens(0).tolist()[-2:] == [-1, -1]
    assert (backend.num_replays >= 2) == is_replayed


def test_the_check_notices_what_a_gpu_would_refuse(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(device, "LlamaForCausalLM", "bfloat16")
    assert worker.last_tokens is not None
    fill_in = worker.last_tokens.fill_in
    of_the_host = torch.zeros(60, dtype=torch.int64, device="cpu")
    monkeypatch.setattr(
        worker.last_tokens, "fill_in", lambda ids: fill_in(ids) + of_the_host[: len(ids)]
    )
    plan = next(plans())
    worker.rows.apply(plan)
    with pytest.raises(RuntimeError, match="device"):
        worker._launch(plan.work)
