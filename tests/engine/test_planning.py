"""Decisions of the planner: what they are, why,
and the one line that says why something cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.common.frozen_record import replace
from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import plan_engine
from quire.engine.plan import gpu
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.plan.gpu import Gpu, inspect_gpu
from quire.engine.plan.machine import Machine
from quire.engine.process.link import start_message
from quire.errors import CapacityError, ConfigError, ModelNotFoundError, UnsupportedModelError

GIB = 1 << 30


def _machine(available: int = 8 * GIB) -> Machine:
    return Machine(
        total_memory=2 * available, available_memory=available, num_cores=4, cpu_name="test"
    )


def _plan(path: Path, machine: Machine | None = None, **options: object) -> EnginePlan:
    config = EngineConfig(model=str(path), load_format="dummy", **options)  # type: ignore[arg-type]
    return plan_engine(config, machine or _machine()).plan


def test_every_decision_has_a_reason_and_the_sum_fits(tiny_config: Path) -> None:
    plan = _plan(tiny_config)
    assert {d.name for d in plan.decisions} >= {
        "dtype",
        "block_size",
        "num_blocks",
        "max_model_len",
        "num_threads",
    }
    assert all(decision.reason for decision in plan.decisions)
    assert plan.total_bytes <= 8 * GIB * 0.9
    assert plan.limits.max_model_len == 256 and plan.num_threads == 4
    assert plan.kv_bytes == plan.limits.num_slots * plan.kv_bytes_per_token


def test_the_plan_says_what_is_drafted_from(tiny_config: Path) -> None:
    def decided(**speculative: object) -> list[tuple[str, str]]:
        plan = _plan(tiny_config, speculative_config=speculative or None)
        return [(d.value, d.reason) for d in plan.decisions if d.name == "speculation"]

    assert decided() == []
    ((value, reason),) = decided(method="suffix", num_speculative_tokens=7)
    assert value == "suffix, 7" and "recent outputs" in reason
    ((value, reason),) = decided(method="ngram")
    assert value == "ngram, 8" and "recent outputs" not in reason


def test_limits_of_a_container_are_the_plans(tiny_config: Path, tmp_path: Path) -> None:
    """Of a machine of 32 GiB and eight CPUs: 100 MiB, of which 60 are taken,
    and the time of two CPUs."""
    files = {
        "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/status": "Cpus_allowed_list:\t0-7\n",
        "sys/fs/cgroup/memory.max": f"{100 << 20}\n",
        "sys/fs/cgroup/memory.current": f"{70 << 20}\n",
        "sys/fs/cgroup/memory.stat": f"inactive_file {10 << 20}\n",
        "sys/fs/cgroup/cpu.max": "200000 100000\n",
    }
    for name, text in files.items():
        path = tmp_path / "machine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    machine = Machine.inspect(tmp_path / "machine")
    plan = _plan(tiny_config, machine, max_num_seqs=256)
    assert plan.num_threads == 2 and plan.total_bytes <= 0.9 * (40 << 20)
    reasons = {decision.name: decision.reason for decision in plan.decisions}
    assert "the control group's quota is 2 CPUs' time" in reasons["num_threads"]
    with pytest.raises(
        CapacityError,
        match=r"of 40\.0 MiB memory that is free under the control group's limit of 100\.0 MiB",
    ):
        _plan(tiny_config, machine, kv_cache_memory="64MiB")


def test_given_values_are_obeyed(tiny_config: Path) -> None:
    plan = _plan(
        tiny_config,
        kv_cache_memory="1MiB",
        block_size=8,
        max_num_seqs=3,
        max_model_len=100,
        dtype="bfloat16",
    )
    assert plan.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert plan.limits.num_blocks == (1 << 20) // (256 * 8)
    assert (plan.limits.max_num_seqs, plan.limits.max_model_len, plan.dtype) == (3, 100, "bfloat16")


@pytest.mark.parametrize(
    ("options", "is_populated"),
    [
        ({}, False),
        ({"kv_cache_memory": "1MiB"}, True),
        ({"kv_cache_memory": "1MiB", "populate_kv_cache": "off"}, False),
        ({"populate_kv_cache": "on"}, True),
    ],
)
def test_a_kv_cache_of_a_given_size_is_resident_from_the_start(
    options: dict[str, Any], is_populated: bool, tiny_config: Path
) -> None:
    plan = _plan(tiny_config, **options)
    assert plan.is_kv_populated == is_populated
    assert start_message(plan).options["populate_kv_cache"] == ("on" if is_populated else "off")


def test_an_engine_in_a_process_of_its_own_has_no_path_that_depends_on_a_folder(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in "/": neither there nor in what it is not allowed to write is anything made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "tokenizer").symlink_to(tmp_path / "there")
    files = {name: "there/pem" for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_file")}
    config = EngineConfig(
        model=str(tiny_config), load_format="dummy", tokenizer="tokenizer", download_dir="hub",
        weights_cache="there/cache", kv_cache_dir="kv", distributed_ssl=files,
        tensor_parallel_size=2, distributed_executor_backend="sockets",
        kv_transfer_config={
            "kv_connector": "TcpConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {**files, "secret_file": "there/secret", "folder": None},
        },
    )  # fmt: skip
    plan = plan_engine(
        replace(
            config,
            tokenizer=None,
            tensor_parallel_size=1,
            distributed_ssl=None,
            distributed_executor_backend=None,
        )
    ).plan
    told = start_message(replace(plan, config=config)).options
    pem = str(tmp_path / "there" / "pem")
    assert told["tokenizer"] == str(tmp_path / "there")
    assert told["download_dir"] == str(tmp_path / "hub")
    assert told["weights_cache"] == str(tmp_path / "there" / "cache")
    assert told["kv_cache_dir"] == str(tmp_path / "kv")
    assert told["distributed_ssl"] == dict.fromkeys(files, pem)
    assert told["kv_transfer_config"]["kv_connector_extra_config"] == {
        **dict.fromkeys(files, pem), "secret_file": str(tmp_path / "there" / "secret"),
        "folder": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "chosen", "row_bytes"),
    [
        ("auto", "bfloat16", 32),
        ("float32", "float32", 64),
        ("int8", "int8", 20),
        ("fp8", "fp8", 20),
        ("fp8_e4m3", "fp8", 20),
    ],
)
def test_the_kv_cache_has_a_dtype_of_its_own(
    name: str, chosen: str, row_bytes: int, tiny_config: Path
) -> None:
    plan = _plan(tiny_config, kv_cache_memory="1MiB", dtype="bfloat16", kv_cache_dtype=name)
    assert plan.kv_format == chosen
    assert plan.kv_bytes_per_token == 2 * 2 * 2 * row_bytes
    assert plan.limits.num_blocks == (1 << 20) // (8 * row_bytes * 16)
    assert ("kv_cache_dtype", chosen) in {
        (decision.name, decision.value) for decision in plan.decisions
    }


def test_the_length_shrinks_to_what_the_cache_holds(tiny_config: Path) -> None:
    plan = _plan(tiny_config, kv_cache_memory=512 * 100)
    assert plan.limits.max_model_len == plan.limits.num_slots == 96
    assert "what the KV cache holds" in {d.reason for d in plan.decisions}


def test_too_small_a_cache_for_the_wanted_length_says_the_numbers(tiny_config: Path) -> None:
    with pytest.raises(
        CapacityError, match=r"max_model_len=200 needs 104.0 KiB .* lower max_model_len to 96"
    ):
        _plan(tiny_config, kv_cache_memory=512 * 100, max_model_len=200)


def test_too_little_memory_says_the_numbers(tiny_config: Path) -> None:
    with pytest.raises(
        CapacityError,
        match=r"weights and workspace need .* 90% of 1.0 MiB free memory is 921.6 KiB"
        r".* a lower max_num_seqs",
    ):
        _plan(tiny_config, _machine(1 << 20))
    with pytest.raises(CapacityError, match=r"kv_cache_memory='20GiB' does not fit"):
        _plan(tiny_config, kv_cache_memory="20GiB")
    with pytest.raises(CapacityError, match="holds no sequence at all"):
        _plan(tiny_config, kv_cache_memory=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"block_size": 0}, "block_size=0"),
        ({"memory_utilization": 1.5}, "memory_utilization=1.5"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory='much'"),
        ({"kv_cache_memory": 0}, "kv_cache_memory=0"),
        (
            {"quantization": "awq"},
            "quantization='awq', but the checkpoint is of plain floating point",
        ),
        ({"quantization": "int5"}, "quantization='int5' is not available; choose 'int8' or 'int4'"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        (
            {"max_num_batched_tokens": 4, "max_num_seqs": 8},
            "max_num_batched_tokens=4 is below max_num_seqs=8",
        ),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching='yes'"),
    ],
)
def test_bad_options_are_refused_by_name(
    options: dict[str, Any], message: str, tiny_config: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        _plan(tiny_config, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        ConfigError, match="unknown option 'max_model_length'; did you mean 'max_model_len'"
    ):
        EngineConfig.from_options("x", {"max_model_length": 3})


def test_a_missing_model_and_an_unsupported_one(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-folder"):
        plan_engine(EngineConfig(model=str(tmp_path / "no-such-folder")), _machine())
    (tmp_path / "config.json").write_text('{"architectures": ["MysteryModel"]}')
    with pytest.raises(UnsupportedModelError, match="MysteryModel"):
        plan_engine(EngineConfig(model=str(tmp_path)), _machine())


def test_the_machine_has_memory_and_cores() -> None:
    machine = Machine.inspect()
    assert machine.num_cores >= 1
    assert 0 < machine.available_memory <= machine.total_memory


def test_few_tokens_in_a_step_bound_the_sequences_where_the_user_says_nothing(
    tiny_config: Path,
) -> None:
    assert _plan(tiny_config, max_num_batched_tokens=64).limits.max_num_seqs == 64


def test_without_chunks_a_step_holds_the_longest_prompt_and_the_workspace_counts_it(
    tiny_config: Path,
) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    chunked, whole = (
        _plan(tiny_config, **options),
        _plan(tiny_config, enable_chunked_prefill=False, **options),
    )
    assert (chunked.limits.max_num_batched_tokens, whole.limits.max_num_batched_tokens) == (32, 256)
    assert whole.workspace_bytes > 4 * chunked.workspace_bytes
    assert {d.value for d in whole.decisions if d.name == "max_num_batched_tokens"} == {"256"}


def test_a_length_beyond_the_models_context_needs_to_be_allowed(tiny_config: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"max_model_len=257 is beyond the 256 tokens .*allow-long-context"
    ):
        _plan(tiny_config, max_model_len=257)
    assert _plan(tiny_config, max_model_len=256).limits.max_model_len == 256
    plan = _plan(tiny_config, max_model_len=300, allow_long_context=True)
    [decision] = [d for d in plan.decisions if d.name == "max_model_len"]
    assert "made for 256" in decision.reason and plan.limits.max_model_len == 300


@pytest.mark.parametrize(
    ("scaling", "default", "longest"),
    [
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, 512, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 256, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 256, 512),
        ({"rope_type": "linear", "factor": 2.0}, 256, 256),
    ],
)
def test_a_scaled_rope_says_how_long_a_context_may_be(
    scaling: dict[str, Any], default: int, longest: int, tiny_config: Path
) -> None:
    overrides: dict[str, Any] = {"hf_overrides": {"rope_parameters": scaling}}
    assert _plan(tiny_config, **overrides).limits.max_model_len == default
    assert _plan(tiny_config, max_model_len=longest, **overrides).limits.max_model_len == longest
    with pytest.raises(ConfigError, match=f"beyond the {longest} tokens"):
        _plan(tiny_config, max_model_len=longest + 1, **overrides)


def test_half_precision_is_computed_in_bfloat16_and_said(
    tiny_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_engine(
        EngineConfig.from_options(str(tiny_config), {"dtype": "half", "load_format": "dummy"}),
        _machine(),
    ).plan
    assert plan.dtype == "bfloat16"
    assert (
        "computing in bfloat16: given was float16, which the kernels do not compute in"
        in caplog.text
    )
    caplog.clear()
    assert (
        _plan(tiny_config, dtype="float32", hf_overrides={"torch_dtype": "float16"}).dtype
        == "float32"
    )
    assert not caplog.text
    assert _plan(tiny_config, hf_overrides={"torch_dtype": "float16"}).dtype == "bfloat16"
    assert "the checkpoint is float16" in caplog.text


def test_a_gpu_that_is_not_there_is_refused_before_the_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_driver(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(gpu, "inspect_gpu", lambda load: inspect_gpu(no_driver))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="device='cuda' cannot be used: there is no NVIDIA driver"
    ):
        plan_engine(EngineConfig(model="no-such-model", device="cuda"))


def test_on_a_gpu_its_memory_counts(tiny_config: Path) -> None:
    machine = replace(_machine(1 << 20), gpu=Gpu("NVIDIA X", (9, 0), 80 * GIB, 40 * GIB, "13.0"))
    plan = _plan(tiny_config, machine, device="cuda", max_num_seqs=4)
    assert plan.device == "cuda"
    assert ("device", "cuda", "given; NVIDIA X, 40.0 GiB free") in plan.decisions
    assert plan.kv_bytes == plan.kv_bytes_per_token * 256 * 4  # what four sequences need
    assert plan.attention_module is None and "attention_backend" in {
        each.name for each in plan.decisions
    }
    with pytest.raises(ConfigError, match="flashinfer' cannot be used: not installed"):
        _plan(tiny_config, machine, device="cuda", attention_backend="flashinfer")
    with pytest.raises(ConfigError, match="is for GPUs"):
        _plan(tiny_config, attention_backend="flashinfer")
    free = _plan(tiny_config, machine, device="cuda", batch_invariant=False)
    assert ("batch_invariant", "False") in {each[:2] for each in free.decisions}
    assert _plan(tiny_config, machine, device="cuda", kv_cache_dtype="fp8_e4m3").kv_format == "fp8"
    with pytest.raises(CapacityError, match="free GPU memory"):
        _plan(tiny_config, machine, device="cuda", kv_cache_memory="50GiB")
    assert _plan(tiny_config, replace(machine, available_memory=8 * GIB)).device == "cpu"


def test_recorded_steps_are_counted_before_the_cache_is(tiny_config: Path) -> None:
    machine = replace(_machine(1 << 20), gpu=Gpu("NVIDIA X", (9, 0), 80 * GIB, 40 * GIB, "13.0"))
    plan, eager = (
        _plan(tiny_config, machine, device="cuda", enforce_eager=each) for each in (False, True)
    )
    assert plan.graphs is not None and eager.graphs is None and _plan(tiny_config).graphs is None
    scratch_bytes = plan.kv_bytes_per_token * plan.limits.block_size
    counted = plan.graphs.max_bytes + plan.graphs.input_bytes + scratch_bytes
    assert plan.workspace_bytes - eager.workspace_bytes == counted
    assert plan.graphs.max_num_tokens == 1024 and plan.total_bytes <= 40 * GIB * 0.9
    small = _plan(tiny_config, machine, device="cuda", max_num_batched_tokens=32, max_num_seqs=8)
    assert small.graphs is not None and small.graphs.max_num_tokens == 32
    assert {"graphs", "overlap"} <= {decision.name for decision in plan.decisions}


def test_a_large_gpu_takes_more_sequences_and_records_their_steps(tiny_config: Path) -> None:
    chosen = {}
    for total in (40 * GIB, 141 * GIB):
        machine = replace(_machine(1 << 20), gpu=Gpu("NVIDIA X", (9, 0), total, 40 * GIB, "13.0"))
        plan = _plan(tiny_config, machine, device="cuda")
        assert plan.graphs is not None
        chosen[total] = (plan.limits.max_num_seqs, plan.graphs.max_num_tokens)
        few = _plan(tiny_config, machine, device="cuda", max_num_batched_tokens=100)
        assert (
            few.limits.max_num_seqs == 100
            and few.graphs is not None
            and few.graphs.max_num_tokens == 128
        )
    assert chosen == {40 * GIB: (256, 256), 141 * GIB: (1024, 1024)}


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [("auto", False, True), ("on", True, True), ("off", False, False)],
)
def test_steps_overlap_on_a_gpu_unless_told_otherwise(
    given: str, on_cpu: bool, on_gpu: bool, tiny_config: Path
) -> None:
    machine = replace(_machine(1 << 20), gpu=Gpu("NVIDIA X", (9, 0), 80 * GIB, 40 * GIB, "13.0"))
    assert _plan(tiny_config, overlap=given).is_overlapped is on_cpu
    assert _plan(tiny_config, machine, device="cuda", overlap=given).is_overlapped is on_gpu


def test_steps_have_a_target_on_a_cpu(tiny_config: Path) -> None:
    plan = _plan(tiny_config)
    assert plan.target_step_s == 0.2 and plan.limits.max_num_partial_prefills == 4
    assert _plan(tiny_config, target_step_ms=50).target_step_s == 0.05
    assert _plan(tiny_config, target_step_ms=0).target_step_s is None
    unchunked = _plan(tiny_config, enable_chunked_prefill=False)
    assert unchunked.target_step_s is None and unchunked.limits.max_num_partial_prefills == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_step_ms": -1}, "target_step_ms=-1 must be a number of milliseconds"),
        ({"target_step_ms": float("nan")}, "target_step_ms=nan must be a number"),
        ({"target_step_ms": 100, "enable_chunked_prefill": False}, "needs chunked prefill"),
        (
            {"max_num_partial_prefills": 0},
            "max_num_partial_prefills=0 must be an integer of at least 1",
        ),
        ({"max_num_partial_prefills": 1, "max_long_partial_prefills": 2}, "lower the first"),
        ({"long_prefill_token_threshold": -1}, "must be an integer of at least 0"),
    ],
)
def test_impossible_bounds_of_steps_are_refused(
    options: dict[str, Any], words: str, tiny_config: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        _plan(tiny_config, **options)


EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}


def test_memory_counts_all_experts_and_a_decoded_token_the_chosen_ones(tiny_config: Path) -> None:
    """Twice the experts take twice their memory, and no more time or operations, routers aside."""
    plans = [
        _plan(tiny_config, hf_overrides=EXPERTS | {"num_experts": count}) for count in (16, 32)
    ]
    expert, router = 3 * 64 * 32, 64
    added = 2 * 16 * (expert + router)
    assert plans[1].weight_bytes - plans[0].weight_bytes == 4 * added
    flops = [plan.spec.flops_per_token().layers for plan in plans]
    assert flops[1] - flops[0] == 2 * 2 * 16 * router
    costs = [plan.step_costs.step_s for plan in plans]
    assert 0 < costs[1] - costs[0] < 1e-3 * costs[0]
    attention = 64 * (6 + 2 * 2) * 16 + 6 * 16 * 64
    assert flops[0] == 2 * 2 * (attention + 16 * router + 4 * expert)


def test_too_little_memory_for_experts_says_the_numbers(tiny_config: Path) -> None:
    with pytest.raises(CapacityError, match=r"weights and workspace need 7.1 MiB, and 90% of"):
        _plan(tiny_config, _machine(2 << 20), hf_overrides=EXPERTS)


def test_integer_experts_on_a_gpu_take_less_memory(tiny_config: Path) -> None:
    machine = replace(_machine(1 << 20), gpu=Gpu("NVIDIA X", (9, 0), 80 * GIB, 40 * GIB, "13.0"))
    options: dict[str, Any] = {"device": "cuda", "hf_overrides": EXPERTS}
    plans = [_plan(tiny_config, machine, quantization=each, **options) for each in (None, "int8")]
    assert plans[0].device == plans[1].device == "cuda"
    assert plans[1].weight_bytes < plans[0].weight_bytes
