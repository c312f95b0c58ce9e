"""Figures show every engine of a record, in both themes, and are the same files each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot, tables
from quire.bench.workload import WORKLOADS, totals

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096,
    "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> Path:
    names = ("W3", "B1", "B4")
    result = {"cpu_s": 1.0, "peak_rss_bytes": 1, "token_s": None}
    measured: dict[str, Any] = {
        "model": "small",
        "config": CONFIG,
        "first_requests": None,
        "workloads": {name: totals(WORKLOADS[name].requests(0, 4096)) for name in names},
        "variants": {
            name: {"ready_s": 1.0}
            for name in ("quire:bfloat16", "vllm:w8a8", "transformers:float32:way=paged")
        },
        "peaks": [
            {
                "read_bytes_per_s": 1e9,
                "gemm_flops_per_s": {"float32": 1e11, "bfloat16": 5e10, "int8": 4e11},
            }
        ],
    }
    measured["measurements"] = [
        {"variant": variant, "workload": name, "wall_s": 2.0 + number, **result}
        for number, variant in enumerate(measured["variants"])
        for name in names
    ]
    measured["summary"] = tables.summarize(measured)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(measured))
    return path


@pytest.mark.parametrize("figure", ["batch", "roofline"])
def test_figures(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], figure: str
) -> None:
    arguments = [str(record), "--figure", figure, "--out", str(tmp_path)]
    assert plot.main(arguments) == 0
    light, dark = (tmp_path / f"{figure}-{theme}.svg" for theme in ("light", "dark"))
    assert capsys.readouterr().out.split() == [str(light), str(dark)]
    for path, theme in ((light, "light"), (dark, "dark")):
        text = path.read_text()
        assert plot.THEMES[theme]["ink"] in text
        assert ("8 and 4-bit weights" in text) == (figure == "batch")
        assert all(
            colour in text
            for colour in (
                plot.COLOURS["quire"],
                plot.COLOURS["vllm"],
                plot.COLOURS["transformers"],
            )
        )
    assert light.stat().st_size < 150_000
    first = light.read_bytes()
    plot.main(arguments)
    assert light.read_bytes() == first


def test_labels_are_for_people() -> None:
    assert plot.label_of("quire:bfloat16") == "Quire bfloat16"
    assert plot.label_of("transformers:float32:way=paged") == "Transformers float32 (paged)"
    assert plot.label_of("llamacpp:q8_0") == "llama.cpp q8_0"
