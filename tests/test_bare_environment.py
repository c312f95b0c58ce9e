"""Offline use needs torch, numpy, safetensors, tokenizers, jinja2 and tqdm alone: no server,
no hub, no compiled extension."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CODE = """
import sys
SERVING = {"starlette", "uvicorn", "httptools", "h11", "msgspec", "prometheus_client", "multipart"}
BANNED = SERVING | {"huggingface_hub", "transformers"}

class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BANNED or name == "quire.kernels.cpu._native":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Ban())
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, kv_cache_memory="1MiB", max_num_seqs=2)
params = [SamplingParams(temperature=t, max_tokens=3, ignore_eos=True, detokenize=False) for t in (0.0, 1.0)]
print([len(out.outputs[0].token_ids) for out in llm.generate([[3, 4, 5], [6]], params, use_tqdm=False)])
from quire.cli.main import main
sys.exit(main(["plan", sys.argv[1], "--load-format", "dummy"]))
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def test_it_generates_without_server_hub_and_extension(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parent.parent
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("[3, 3]\n")
    assert "reference" in done.stdout
