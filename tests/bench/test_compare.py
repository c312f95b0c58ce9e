"""The comparison's pieces, and one whole run on a very small model with every engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from stopped import state_of

from benchmarks import compare, tables, variants
from benchmarks.models import CONFIGS, main, write_random_model
from quire.bench.bound import ideal_steps
from quire.bench.limits import LimitSample, typical
from quire.bench.workload import WORKLOADS, parallel_workload, random_workload, totals
from quire.models.registry import declare

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_configurations_have_the_sizes_of_their_models() -> None:

    assert declare(CONFIGS["smollm2-135m"]).num_parameters == 134_515_008
    assert declare(CONFIGS["qwen3-0.6b"]).num_parameters == 596_049_920


def test_random_models_compute_ordinary_numbers(tmp_path: Path) -> None:
    from quire import LLM, SamplingParams

    write_random_model(CONFIG, tmp_path)
    options = {"num_threads": 1, "kv_cache_memory": "4MiB", "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **options) as llm:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    completion = output.outputs[0]
    assert len(set(completion.token_ids)) > 2
    assert -80 < (completion.cumulative_logprob or 0) < -1  # neither certain nor at random


def test_shards_hold_what_one_file_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    write_random_model(CONFIG, tmp_path / "one")
    monkeypatch.setattr("benchmarks.models._SHARD_BYTES", 1 << 12)
    write_random_model(CONFIG, tmp_path / "many")
    whole = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / "many" / name) for name in index["weight_map"].values()}
    assert len(files) > 1 and set(index["weight_map"]) == set(whole)
    for name, file in index["weight_map"].items():
        assert torch.equal(files[file][name], whole[name])


def test_eight_bit_checkpoints_say_what_the_weights_were(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_random_model(CONFIG, tmp_path / "m")
    assert main(["--w8a8", str(tmp_path / "m"), str(tmp_path / "m8")]) == 0
    before, after = (
        load_file(tmp_path / "m" / "model.safetensors"),
        load_file(tmp_path / "m8" / "model.safetensors"),
    )
    name = "model.layers.0.mlp.down_proj.weight"
    restored = after[name].float() * after[f"{name}_scale"].float()
    assert after[name].dtype == torch.int8 and after[f"{name}_scale"].shape == (32, 1)
    # Half a step of rounding, and the scale's own rounding to bfloat16.
    assert (restored - before[name].float()).abs().max() < before[name].float().abs().max() * (
        0.5 / 127 + 2**-8
    )
    assert after["model.embed_tokens.weight"].equal(before["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "m8" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 8


@pytest.mark.parametrize(
    "text", ["quire", "quire:", "sglang:bfloat16", "quire:bfloat16:fast", "quire:int3"]
)
def test_wrong_variants_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not ENGINE:FORM"):
        variants.Variant.parse(text)


def test_variants_keep_their_names() -> None:
    for text in ("quire:int4", "transformers:float32:way=paged", "vllm:w8a8:eager=1:kv_gib=2"):
        assert variants.Variant.parse(text).name == text


def test_engines_with_a_format_of_their_own_find_it_beside_the_model(tmp_path: Path) -> None:
    model = tmp_path / "M"
    for name in ("M", "M-openvino-int8"):
        (tmp_path / name).mkdir()
    (tmp_path / "M-llamacpp-q8_0.gguf").write_bytes(b"")
    found = {
        text: variants.Variant.parse(text).files(model).name
        for text in ("openvino:int8", "llamacpp:q8_0", "quire:int8")
    }
    assert found == {
        "openvino:int8": "M-openvino-int8",
        "llamacpp:q8_0": "M-llamacpp-q8_0.gguf",
        "quire:int8": "M",
    }


def _record(walls: dict[str, tuple[float, ...]], workload: str) -> dict[str, Any]:
    """One with rates at which the numbers can be checked by hand."""
    counts = totals(WORKLOADS[workload].requests(0, CONFIG["vocab_size"]))
    runs: list[dict[str, Any]] = [
        {
            "variant": name,
            "workload": workload,
            "wall_s": wall,
            "cpu_s": 2 * wall,
            "peak_rss_bytes": 2**30,
            "token_s": None,
        }
        for name, each in walls.items()
        for wall in each
    ]
    if workload == "W3":
        for run in runs:
            run["token_s"] = [(i + 1) * run["wall_s"] / 128 for i in range(128)]
    return {
        "model": "m",
        "config": CONFIG,
        "num_threads": 1,
        "first_requests": None,
        "started_at": "now",
        "machine": {"cpu": "c"},
        "versions": {"quire": "0", "commit": None, "torch": "0"},
        "workloads": {workload: counts},
        "variants": {name: {"ready_s": 1.0} for name in walls},
        "peaks": [
            {
                "read_bytes_per_s": 1e9,
                "gemm_flops_per_s": {"float32": 1e9, "bfloat16": 5e8, "int8": 4e9},
            }
        ],
        "measurements": runs,
        "failures": {},
        "commits": ["a"],
    }


def test_summary_takes_medians_and_shares() -> None:
    record = _record(
        {"quire:bfloat16": (16.0, 8.0, 4.0), "quire:int8": (4.0,), "vllm:float32": (16.0,)}, "W1"
    )
    summary = record["summary"] = tables.summarize(record)
    rows = summary["W1"]
    row = rows["quire:bfloat16"]
    assert (row["wall_s"], row["output_tokens_per_s"], row["highest"]) == (8.0, 4385 / 8, 4385 / 4)
    linear = sum(
        step.linear_flops
        for step in ideal_steps(declare(CONFIG), WORKLOADS["W1"].requests(0, 128), 2)
    )
    attention = row["compute_share"] * 8.0 - linear / 1e9
    assert 0 < attention < linear / 1e9
    # 8-bit products are held against the rate of 8-bit products, attention always against that of
    # floats.
    assert rows["quire:int8"]["compute_share"] * 4.0 == pytest.approx(linear / 4e9 + attention)
    assert (
        tables.factor(rows, "vllm:float32") == "2.00x" and tables.factor(rows, "quire:int8") == ""
    )
    text = tables.render(record)
    assert "| vllm:float32 | 274.1 (274.1-274.1) | 2.00x | 16.00 |" in text
    assert (
        f"| vllm:float32 | 274.1 tok/s, {rows['vllm:float32']['compute_share']:.0%} of compute |"
        in text
    )


def test_each_run_is_held_against_its_own_limits() -> None:
    record = _record({"quire:bfloat16": (2.0, 4.0, 4.0), "quire:int8": (1.0,)}, "W1")
    old = tables.summarize(record)["W1"]
    for run, speed in zip(record["measurements"], (4, 2, 1, 1), strict=True):
        gemms = {"bfloat16": speed * 1e9, "int8": speed * 4e9}
        run["limits"] = {
            "read_bytes_per_s": speed * 1e9,
            "gemm_flops_per_s": gemms,
            "products": {},
            "num_samples": 3,
        }
    del record["peaks"]
    rows = record["summary"] = tables.summarize(record)["W1"]
    # The same work took 8, 8 and 4 times what the first record's limits allow in a second: the
    # median counts.
    assert rows["quire:bfloat16"]["compute_share"] == pytest.approx(
        old["quire:bfloat16"]["compute_share"] * 4 / 8
    )
    assert rows["quire:bfloat16"]["roofline_share"] == pytest.approx(
        old["quire:bfloat16"]["roofline_share"] * 4 / 8
    )
    assert rows["quire:int8"]["compute_share"] == pytest.approx(old["quire:int8"]["compute_share"])
    text = tables.render({**record, "summary": {"W1": rows}})
    assert (
        "1 to 4 GFLOP/s in floating point, 4 to 16 Gop/s in the best of any type, 1.0 to 4.0 GB/s"
        in text
    )
    assert "Limits measured" not in text


def test_a_single_sequence_is_held_against_the_bandwidth() -> None:
    record = _record({"quire:bfloat16": (1.28,), "quire:int8": (0.64,)}, "W3")
    rows = tables.summarize(record)["W3"]
    spec = declare(CONFIG)
    weights = (spec.flops_per_token().layers + spec.flops_per_token().head) / 2
    cached = sum(layer.bytes_per_token("bfloat16") for layer in spec.kv_layers)
    # contexts of 129 to 255 tokens with the new one, and its writing
    token_bytes = weights * 2 + cached * (128 + 64 + 1)
    assert rows["quire:bfloat16"]["token_s"] == pytest.approx(0.01)
    assert rows["quire:bfloat16"]["token_bandwidth_share"] == pytest.approx(
        token_bytes / 1e9 / 0.01
    )
    assert rows["quire:int8"]["token_bandwidth_share"] == pytest.approx(
        (token_bytes - weights) / 1e9 / 0.005
    )


def test_a_lock_is_held_while_engines_are_timed(tmp_path: Path) -> None:
    with compare._Hold(f"flock {tmp_path / 'lock'}") as hold:
        assert not hold.is_held
        hold.renew()
        assert hold.is_held
        taken = subprocess.run(["flock", "-n", str(tmp_path / "lock"), "true"])
        assert taken.returncode == 1
    assert subprocess.run(["flock", "-n", str(tmp_path / "lock"), "true"]).returncode == 0
    with pytest.raises(compare.HoldError, match="exit code 1"), compare._Hold("false") as hold:
        hold.renew()


def test_an_engine_makes_the_tokens_asked_for(tmp_path: Path) -> None:
    write_random_model(CONFIG, tmp_path)
    process = variants.PeerProcess(
        variants.Variant.parse("quire:float32"), variants.Seat(tmp_path, 128, 1, {}, {})
    )
    try:
        assert process.description["ready_s"] > 0
        result = process.run(random_workload(3, (4, 9), (2, 5)).requests(0, 128))
        assert result["token_s"] is None and result["wall_s"] > 0 and result["peak_rss_bytes"] > 1e7
        process.run(parallel_workload(1, 5, 2, 3, name="p").requests(0, 128))
        token_s = process.run(random_workload(1, (4, 4), (6, 6)).requests(0, 128))["token_s"]
        assert len(token_s) == 6 and token_s[0] > 0 and token_s == sorted(token_s)
    finally:
        process.close()


@pytest.mark.parametrize("extra", [{"way": "generate", "batch": "2"}, {"way": "paged"}])
def test_transformers_makes_the_tokens_asked_for(tmp_path: Path, extra: dict[str, str]) -> None:
    """In this process: another one would import the library once more,
    which takes longer than all the rest."""
    pytest.importorskip("transformers")
    from benchmarks.peers.runner import Options
    from benchmarks.peers.transformers import open_peer

    write_random_model(CONFIG, tmp_path)
    engine = open_peer(Options(tmp_path, "float32", 1, "", extra))
    try:
        requests = random_workload(3, (4, 9), (2, 5)).requests(0, 128)
        assert sorted(engine.run(requests)) == sorted(each.num_output for each in requests)
        assert engine.run(parallel_workload(1, 5, 2, 3, name="p").requests(0, 128)) == [3, 3]
        token_s = engine.stream(random_workload(1, (4, 4), (6, 6)).requests(0, 128)[0])
        assert len(token_s) == 6 and token_s == sorted(token_s)
    finally:
        engine.close()


def test_an_engine_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"(?s)quire:float32 failed with exit code 1.*config\.json"
    ):
        variants.PeerProcess(
            variants.Variant.parse("quire:float32"), variants.Seat(tmp_path, 128, 1, {}, {})
        )


LIMITS = LimitSample(1e9, {"float32": {"f": 1e9}, "int8": {"i": 4e9}})


class FakeReferee:
    """Knows the limits without measuring them, and sees that nobody computes meanwhile."""

    samples: ClassVar[list[list[int]]] = []

    def __init__(self, num_threads: int) -> None:
        assert num_threads == 1
        self.samples.clear()

    def sample(self, stopped: list[int]) -> LimitSample:
        assert stopped and all(state_of(pid) == "T" for pid in stopped)
        self.samples.append(stopped)
        return LIMITS

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling the machine's limits takes longer than all the rest; it has tests of its own."""
    monkeypatch.setattr(compare, "Referee", FakeReferee)


@pytest.mark.usefixtures("limits")
def test_a_whole_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "result.json"
    command = [
        "--model",
        str(tmp_path / "config.json"),
        "--json",
        str(out),
        "--variants",
        "quire:float32",
    ]
    assert (
        compare.main(
            [
                *command,
                "--first-requests",
                "2",
                "--rounds",
                "2",
                "--threads",
                "1",
                "--workloads",
                "W4",
            ]
        )
        == 0
    )
    record = json.loads(out.read_text())
    assert list(record["variants"]) == ["quire:float32"]
    assert set(record["summary"]) == {"W4"} and len(record["measurements"]) == 2
    limits = record["measurements"][0]["limits"]
    assert (
        limits["num_samples"] >= 2 and limits == typical([LIMITS] * limits["num_samples"])._asdict()
    )
    assert record["workloads"]["W4"]["num_sequences"] == 16
    assert "| quire:float32 |" in capsys.readouterr().out


FAKE = f"""#!{sys.executable} -IS
import json, os, sys, time
name = sys.argv[sys.argv.index("--form") + 1]
with open(os.environ["FAKE_LOG"], "a") as log:
    print("open", name, file=log)
    print(json.dumps({{"ready_s": 2.0, "version": "9", "settings": {{}}}}), flush=True)
    for line in sys.stdin:
        if os.path.exists(os.environ["FAKE_LOG"] + ".broken") and name == "w8a8":
            sys.exit("out of memory")
        num_requests = len(json.loads(line))
        print("run", name, num_requests, file=log, flush=True)
        answer = {{"started_s": time.perf_counter(), "wall_s": num_requests * 1e3}}
        answer |= {{"cpu_s": 1.0, "token_s": None, "peak_rss_bytes": 1}}
        print(json.dumps(answer), flush=True)
    print("close", name, file=log)
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine that only speaks the protocol, and what its processes did."""
    (tmp_path / "M").mkdir()
    (tmp_path / "M" / "config.json").write_text(json.dumps(CONFIG))
    program = tmp_path / "python"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return tmp_path


def compare_fakes(folder: Path, *options: str) -> int:
    command = [
        "--model",
        str(folder / "M"),
        "--variants",
        "vllm:bfloat16,vllm:w8a8",
        "--peer",
        f"vllm={folder / 'python'}",
    ]
    return compare.main(
        [
            *command,
            "--json",
            str(folder / "{model}.json"),
            "--threads",
            "1",
            "--rounds",
            "2",
            *options,
        ]
    )


@pytest.mark.usefixtures("limits")
def test_engines_come_one_after_another_and_another_begins_each_round(fakes: Path) -> None:
    assert compare_fakes(fakes, "--workloads", "W1,W4") == 0
    runs = [
        f"{do} {name}{rest}"
        for name in ("bfloat16", "w8a8", "w8a8", "bfloat16")
        for do, rest in (("open", ""), ("run", " 64"), ("run", " 8"), ("close", ""))
    ]
    # In the second round, the engine that is open already goes on.
    del runs[7:9]
    assert (fakes / "log").read_text().split("\n")[:-1] == runs
    record = json.loads((fakes / "M.json").read_text())
    assert (
        record["summary"]["W4"]["vllm:w8a8"]["wall_s"] == 8e3 and len(record["measurements"]) == 8
    )


@pytest.mark.usefixtures("limits")
def test_resident_engines_take_turns_within_a_workload(fakes: Path) -> None:
    assert compare_fakes(fakes, "--workloads", "W1,W4", "--resident") == 0
    runs = [line for line in (fakes / "log").read_text().split("\n") if line.startswith("run")]
    first = ["run bfloat16 64", "run w8a8 64", "run bfloat16 8", "run w8a8 8"]
    assert runs == [*first, first[1], first[0], first[3], first[2]]


@pytest.mark.usefixtures("limits")
def test_an_engine_that_fails_costs_nobody_else_and_is_tried_again(
    fakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = fakes / "log.broken"
    broken.touch()
    assert compare_fakes(fakes, "--workloads", "W4") == 1
    assert "vllm:w8a8 failed: out of memory" in capsys.readouterr().out
    record = json.loads((fakes / "M.json").read_text())
    assert list(record["summary"]["W4"]) == ["vllm:bfloat16"] and list(record["failures"]) == [
        "vllm:w8a8"
    ]
    broken.unlink()
    assert compare_fakes(fakes, "--workloads", "W4") == 0
    record = json.loads((fakes / "M.json").read_text())
    assert len(record["measurements"]) == 4 and not record["failures"]
    assert (fakes / "log").read_text().count("run bfloat16") == 2


@pytest.mark.usefixtures("limits")
def test_a_budget_ends_a_comparison_and_it_goes_on(
    fakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The fakes say that W1 took 64,000 s and W4 8,000, so that after the first round only W4 fits.
    assert compare_fakes(fakes, "--workloads", "W1,W4", "--budget", "20000") == 3
    assert "2 runs are left" in capsys.readouterr().err
    assert (fakes / "log").read_text().count("run") == 6
    assert compare_fakes(fakes, "--workloads", "W1,W4", "--budget", "20000") == 1
    assert "the shortest takes about 6400" in capsys.readouterr().err
    assert compare_fakes(fakes, "--workloads", "W1,W4") == 0
    assert (fakes / "log").read_text().count("run") == 8
    tables_again = tables.render(tables.read_record(fakes / "M.jsonl"))
    assert tables_again == tables.render(json.loads((fakes / "M.json").read_text()))
    assert "Peers: vllm 9" in tables_again


@pytest.mark.usefixtures("limits")
def test_an_interrupted_comparison_leaves_nobody_stopped(
    fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: FakeReferee, stopped: list[int]) -> LimitSample:
        FakeReferee.samples.append(stopped)
        signal.raise_signal(signal.SIGINT)
        return LIMITS

    monkeypatch.setattr(FakeReferee, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare_fakes(fakes, "--workloads", "W4")
    assert len(FakeReferee.samples) == 1
    # it went on, and saw its input end
    assert (fakes / "log").read_text() == "open bfloat16\nclose bfloat16\n"
    assert json.loads((fakes / "M.json").read_text())["measurements"] == []


@pytest.mark.usefixtures("limits")
def test_the_files_of_others_are_left_alone(
    fakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_fakes(fakes, "--workloads", "W4") == 0
    assert compare_fakes(fakes, "--workloads", "W4", "--first-requests", "2") == 1
    assert "was begun with another first_requests" in capsys.readouterr().err


def test_everything_that_is_installed_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        variants, "find_spec", lambda name: object() if name == "transformers" else None
    )
    for name in ("M", "M-openvino-int8", "M-vllm-w8a8"):
        (tmp_path / name).mkdir()
    found, missing = variants.installed(
        variants.Seat(tmp_path / "M", 128, 1, {"openvino": "python"}, {})
    )
    quire = ["quire:bfloat16", "quire:int8", "quire:int4"]
    assert [each.name for each in found] == [
        *quire,
        "openvino:int8",
        "transformers:float32:batch=32",
    ]
    assert [each.split(":")[0] for each in missing] == ["vllm", "openvino", "openvino", "llamacpp"]
    assert missing[1] == "openvino:bfloat16: no M-openvino-bfloat16 beside the model"


@pytest.mark.parametrize(
    "options",
    [
        ["--workloads", "W9"],
        ["--peer", "sglang=x"],
        ["--rounds", "0"],
        ["--model", "a,b", "--json", "c.json"],
        ["--peer", "vllm"],
    ],
)
def test_wrong_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare.parse(options)
    assert stopped.value.code == 2 and "error" in capsys.readouterr().err
