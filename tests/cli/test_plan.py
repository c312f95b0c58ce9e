"""`quire plan`: decisions with reasons, memory that adds up, no weights needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main


def test_plan_as_json(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert (
        main(["plan", tiny, "--json", "--max-model-len", "256", "--kv-cache-memory", "1MiB"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    decisions = {each["name"]: each for each in plan["decisions"]}
    assert decisions["max_model_len"] == {
        "name": "max_model_len",
        "value": "256",
        "reason": "given",
    }
    assert decisions["block_size"]["reason"] != "given"
    memory = plan["memory"]
    assert (
        memory["total_bytes"]
        == memory["weight_bytes"] + memory["kv_bytes"] + memory["workspace_bytes"]
    )
    assert (
        memory["kv_bytes"]
        == plan["capacity"]["num_tokens"] * memory["kv_bytes_per_token"]
        <= 1 << 20
    )
    assert plan["num_parameters"] == 260_032
    # Two operations per weight and token: 5 layers of q, k, v, o and a gated MLP, then the head.
    assert plan["flops_per_token"]["layers"] == 2 * 5 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 172)
    assert plan["flops_per_token"]["head"] == 2 * 512 * 64


def test_plan_as_text_of_a_config_alone(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    with open(f"{tiny}/config.json") as file:
        config.write_text(file.read())
    assert main(["plan", str(config), "--load-format", "dummy", "--kernels", "reference"]) == 0
    out = capsys.readouterr().out
    for part in (
        "LlamaForCausalLM, 260,032 parameters",
        "Decisions",
        "Memory",
        "KV cache",
        "Kernels",
        "reference",
    ):
        assert part in out


def test_weights_that_cannot_be_read_are_refused(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path
) -> None:
    for path in Path(tiny).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    options = ["--kernels", "reference", "--kv-cache-memory", "1MiB"]
    assert main(["plan", str(tmp_path), *options]) == 0, "a config alone can be planned"
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    capsys.readouterr()
    assert main(["plan", str(tmp_path), *options]) != 0
    said = capsys.readouterr()
    assert not said.out and "model.safetensors" in said.err
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["plan", str(tmp_path), *options]) != 0
    assert "model-00001.safetensors is missing" in capsys.readouterr().err


def test_weights_of_a_draft_model_that_cannot_be_read_are_refused(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path
) -> None:
    for path in Path(tiny).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    drafting = json.dumps({"model": str(tmp_path), "num_speculative_tokens": 2})
    options = ["--kernels", "reference", "--kv-cache-memory", "1MiB"]
    command = ["plan", tiny, *options, "--speculative-config", drafting]
    assert main(command) == 0, "a config alone can be planned"
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    capsys.readouterr()
    assert main(command) != 0
    said = capsys.readouterr()
    assert not said.out and "the draft model:" in said.err and "model.safetensors" in said.err


def test_plan_says_why_better_kernels_are_not_chosen(
    capsys: pytest.CaptureFixture[str], tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels import cpu

    monkeypatch.setattr(cpu, "reasons_against", lambda device, dtype: ["no compiler was found"])
    assert main(["plan", tiny]) == 0
    out = capsys.readouterr().out
    assert "reference" in out and "cpu: no compiler was found" in out
