"""The comparison's pieces, and one whole run on a very small model with every engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def compare(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo_root))
    from benchmarks import compare

    return compare


def test_workloads_are_those_that_were_published(compare: ModuleType) -> None:
    from quire.bench.workload import totals

    counts = {name: totals(workload.requests(0, 1000)) for name, workload in compare.WORKLOADS.items()}
    assert (counts["W1"]["num_prompt_tokens"], counts["W1"]["num_output_tokens"]) == (9_936, 4_385)
    assert (counts["W2"]["num_prompt_tokens"], counts["W2"]["num_output_tokens"]) == (64 * 544, 64 * 32)
    assert (counts["W3"]["num_prompt_tokens"], counts["W3"]["num_output_tokens"]) == (128, 128)
    assert (counts["W4"]["num_sequences"], counts["W4"]["num_output_tokens"]) == (64, 4_096)
    assert (counts["W5"]["num_prompt_tokens"], counts["W5"]["num_output_tokens"]) == (4_096, 1)


def test_configurations_have_the_sizes_of_their_models(compare: ModuleType) -> None:
    from benchmarks.models import CONFIGS
    from quire.models.registry import declare

    assert declare(CONFIGS["smollm2-135m"]).num_parameters == 134_515_008
    assert declare(CONFIGS["qwen3-0.6b"]).num_parameters == 596_049_920


def test_random_models_compute_ordinary_numbers(compare: ModuleType, tmp_path: Path) -> None:
    from benchmarks.models import write_random_model
    from quire import LLM, SamplingParams

    write_random_model(CONFIG, tmp_path)
    options = {"num_threads": 1, "kv_cache_memory": "4MiB", "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **options) as llm:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    completion = output.outputs[0]
    assert len(set(completion.token_ids)) > 2
    assert -80 < (completion.cumulative_logprob or 0) < -1  # neither certain nor at random


@pytest.mark.parametrize("text", ["quire", "quire:int8", "generate:float32", "paged:float32:4", "vllm:float32"])
def test_wrong_variants_are_refused(compare: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="is not quire:DTYPE"):
        compare.Variant.parse(text)


def test_variants_keep_their_names(compare: ModuleType) -> None:
    for text in (*compare.VARIANTS, "generate:bfloat16:8"):
        assert compare.Variant.parse(text).name == text


def test_summary_takes_medians_and_compares_with_the_best_peer(compare: ModuleType) -> None:
    measurements = [
        {"variant": name, "ready_s": 1.0, "peak_rss_bytes": 2**30, "runs": {"W3": {"wall_s": wall, "cpu_s": wall / 2}}}
        for name, walls in {"quire:float32": (1.0, 2.0, 4.0), "generate:float32:16": (8.0, 4.0, 4.0)}.items()
        for wall in walls
    ]
    record: dict[str, Any] = {
        "model": "m",
        "num_threads": 1,
        "started_at": "now",
        "machine": {"cpu": "c"},
        "versions": {"quire": "0", "commit": None, "transformers": "0", "torch": "0"},
        "workloads": {"W3": {"num_sequences": 1, "num_prompt_tokens": 128, "num_output_tokens": 128}},
        "measurements": measurements,
    }
    record["summary"] = compare.summarize(record)
    assert record["summary"][0]["workloads"]["W3"]["output_tokens_per_s"] == 64.0
    table = compare.render(record)
    assert "| quire:float32 | 64.0 (32.0-128.0) | 2.00x | 128.0 | 2.00x | 1.0 | 1.00 |" in table
    assert "| generate:float32:16 | 32.0 (16.0-32.0) | 1.00x | 64.0 | 1.00x | 1.0 | 1.00 |" in table


@pytest.mark.parametrize("text", ["quire:float32", "generate:float32:2", "paged:float32"])
def test_every_engine_makes_the_tokens_asked_for(compare: ModuleType, tmp_path: Path, text: str) -> None:
    pytest.importorskip("transformers")
    from benchmarks.models import write_random_model
    from benchmarks.peers import Variant, open_peer
    from quire.bench.workload import parallel_workload, random_workload

    write_random_model(CONFIG, tmp_path)
    peer = open_peer(tmp_path, Variant.parse(text), 1)
    try:
        requests = random_workload(3, (4, 9), (2, 5)).requests(0, 128)
        assert sorted(peer.run(requests)) == sorted(each.num_output for each in requests)
        assert peer.run(parallel_workload(1, 5, 2, 3, name="p").requests(0, 128)) == [3, 3]
    finally:
        peer.close()


def test_a_whole_comparison(repo_root: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.compare", "--model", str(tmp_path / "config.json"), "--json", str(out)]
    command += ["--variants", "quire:float32", "--first-requests", "2", "--rounds", "1", "--threads", "1"]
    done = subprocess.run([*command, "--workloads", "W1,W4"], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert [each["variant"] for each in record["summary"]] == ["quire:float32"]
    assert set(record["summary"][0]["workloads"]) == {"W1", "W4"}
    assert record["workloads"]["W4"]["num_sequences"] == 16
    assert "| quire:float32 |" in done.stdout
