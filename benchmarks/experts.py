"""Experts of which only some are in memory: hits and tokens/s by their share, for one request and
for many.

    python -m benchmarks.experts --layers 4 --rounds 3

The model is OLMoE-1B-7B cut to some layers, with random weights and a router that has favourites:
row r of each layer's router, in an order drawn for the layer, is multiplied by (r + 1) ** -skew.
The larger a row, the more its logits vary, and the more often they are among the largest: with a
skew of 0.5 half of the experts get 78 % of the choices, with 1 they get 92 %. Tokens are sampled at
temperature 1 from seeds, so that no text repeats itself. Prints a JSON line for each share and
number of requests: tokens/s (medians of rounds), what is left of those with all experts in memory,
the hit rate, what was read a token and how long steps waited for it. With `--cold` the file is
dropped from the system's cache before each round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.models import write_random_model
from quire import LLM, SamplingParams
from quire.engine.front.prompts import Prompt
from quire.engine.loop.counters import EngineCounters, count
from quire.engine.plan.experts import expert_bytes
from quire.models.registry import declare
from quire.quant.formats import WeightFormats, formats_at_load

OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "torch_dtype": "bfloat16",
}
_PROMPT_LEN = 32


def write_model(folder: Path, num_layers: int, skew: float) -> dict[str, Any]:
    """Write the model, unless it is there, and return its config."""
    config = {**OLMOE, "num_hidden_layers": num_layers}
    if (folder / "model.safetensors").exists():
        return config
    write_random_model(config, folder)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(path)
    for name in sorted(tensors):
        if name.endswith("mlp.gate.weight"):
            rows = torch.randperm(len(tensors[name]), generator=generator)
            scales = (rows + 1.0) ** -skew
            tensors[name] = (tensors[name].float() * scales[:, None]).to(torch.bfloat16)
    save_file(tensors, path, {"format": "pt"})
    return config


def generate(llm: LLM, num_requests: int, num_tokens: int, seed: int) -> float:
    """Output tokens/s of requests that begin together, without their prompts' step."""
    rng = random.Random(seed)
    prompts: list[Prompt] = [
        {"prompt_token_ids": [rng.randrange(50000) for _ in range(_PROMPT_LEN)]}
        for _ in range(num_requests)
    ]

    def run(max_tokens: int) -> None:
        params = [
            SamplingParams(max_tokens=max_tokens, seed=seed + i, ignore_eos=True)
            for i in range(num_requests)
        ]
        llm.generate(prompts, params, use_tqdm=False)

    run(1)  # prompts are in the prefix cache now
    began = time.perf_counter()
    run(num_tokens)
    return num_requests * num_tokens / (time.perf_counter() - began)


def drop_from_cache(folder: Path) -> None:
    """Have the system forget the experts' file."""
    for path in folder.glob("*.experts.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(llm: LLM, num_requests: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds of one engine and number of requests."""
    generate(llm, num_requests, args.tokens, 1000)  # the pool learns
    rates, before = [], count(llm.engine.scheduler)
    for seed in range(args.rounds):
        if args.cold:
            drop_from_cache(folder)
        rates.append(generate(llm, num_requests, args.tokens, 2000 + 100 * seed))
    use = _difference(before, count(llm.engine.scheduler))
    num_tokens = args.rounds * num_requests * (args.tokens + 1)
    return {
        "tokens_per_s": round(statistics.median(rates), 2),
        "hit_rate": round(use["hits"] / max(1, use["hits"] + use["misses"]), 3),
        "mib_read_per_token": round(use["bytes"] / num_tokens / 2**20, 2),
        "wait_ms_per_token": round(1e3 * use["wait_s"] / num_tokens, 2),
    }


def _difference(before: EngineCounters, after: EngineCounters) -> dict[str, float]:
    return {
        "hits": after.num_expert_hits - before.num_expert_hits,
        "misses": after.num_expert_misses - before.num_expert_misses,
        "bytes": after.expert_bytes_read - before.expert_bytes_read,
        "wait_s": after.expert_wait_s - before.expert_wait_s,
    }


def run(folder: Path, args: argparse.Namespace) -> None:
    """Measure and print every combination; the first of each number is all experts in memory."""
    model = folder / f"olmoe-{args.layers}-{args.skew:g}"
    config = write_model(model, args.layers, args.skew)
    spec, quantization = declare(config), args.quantization
    formats = WeightFormats() if quantization is None else formats_at_load(spec, quantization)
    whole, resident = expert_bytes(spec, formats, "bfloat16"), dict[int, float]()
    options = {
        "skip_tokenizer_init": True, "kv_cache_memory": "1GiB", "quantization": quantization,
        "num_threads": args.threads,
    }  # fmt: skip
    for share in (None, *args.shares):
        paged = {} if share is None else {
            "expert_memory": int(whole * share) + 1, "weights_cache": str(folder / "cache"),
        }  # fmt: skip
        llm = LLM(str(model), **options, **paged)
        for num_requests in args.requests:
            found = measure(llm, num_requests, args, folder / "cache")
            base = resident.setdefault(num_requests, found["tokens_per_s"])
            line = {
                "share": "all, not paged" if share is None else share, "requests": num_requests,
                **found, "of_resident": round(found["tokens_per_s"] / base, 3),
            }  # fmt: skip
            print(json.dumps(line), flush=True)
        del llm
        gc.collect()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--skew", type=float, default=1.0, help="of routers; 0: no favourites")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64, help="of each request and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--cold", action="store_true", help="files are not in the system's cache")
    parser.add_argument("--folder", type=Path, help="for the model and its files; kept")
    args = parser.parse_args()
    if args.folder is not None:
        run(args.folder, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args)


if __name__ == "__main__":
    main()
