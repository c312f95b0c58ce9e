"""What adapters cost: a batch that uses eight of those in memory, and one request with one, beside
the model.

    python -m benchmarks.adapters --model qwen3-0.6b --loaded 64 --rounds 3

Rounds are interleaved: the model without `enable_lora`, then with it and without adapters, then
with them. All that are loaded have answered a request before. Weights are random. Prints one JSON
line: output tokens/s, and the share of those of the model alone that is left, round by round;
medians of both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.models import CONFIGS, write_random_model
from quire import LLM, LoRARequest, SamplingParams, TokensPrompt
from quire.engine.front.prompts import Prompt
from quire.lora.layout import adaptable
from quire.models.declaration import DecoderSpec
from quire.models.registry import declare

Adapters = Sequence[LoRARequest | None]


def write_adapter(folder: Path, spec: DecoderSpec, rank: int, seed: int) -> Path:
    """An adapter of every projection, random in both halves."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for part in (part for parts in adaptable(spec).values() for part in parts):
        name = f"base_model.model.{part.name}"
        down = torch.randn(rank, part.num_inputs, generator=generator) / part.num_inputs**0.5
        up = torch.randn(part.num_outputs, rank, generator=generator) * 0.1 / rank**0.5
        tensors[f"{name}.lora_A.weight"] = down.bfloat16()
        tensors[f"{name}.lora_B.weight"] = up.bfloat16()
    folder.mkdir(parents=True)
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Load:
    """Requests of mixed lengths: prompts of 16 to 256 tokens, outputs of 16 to `longest`."""

    def __init__(self, num_requests: int, vocab_size: int, longest: int) -> None:
        rng = random.Random(0)
        self.prompts: list[Prompt] = [
            {
                "prompt_token_ids": [
                    rng.randrange(10, vocab_size) for _ in range(rng.randint(16, 256))
                ]
            }
            for _ in range(num_requests)
        ]
        self.params = [
            SamplingParams(temperature=0.0, max_tokens=rng.randint(16, longest), ignore_eos=True)
            for _ in range(num_requests)
        ]

    def tokens_per_s(self, llm: LLM, adapters: Adapters) -> float:
        """Output tokens/s, adapters taking turns."""
        llm.reset_prefix_cache()
        of_prompts = [adapters[place % len(adapters)] for place in range(len(self.prompts))]
        began = time.perf_counter()
        outputs = llm.generate(self.prompts, self.params, use_tqdm=False, lora_request=of_prompts)
        elapsed = time.perf_counter() - began
        return sum(len(each.outputs[0].token_ids) for each in outputs) / elapsed


def single_stream(llm: LLM, adapters: Adapters, num_tokens: int) -> float:
    """Tokens/s of one request's decode, without its prompt's step."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = TokensPrompt(prompt_token_ids=list(range(10, 74)))
    llm.reset_prefix_cache()
    llm.generate(prompt, params, use_tqdm=False, lora_request=list(adapters))
    params.max_tokens = num_tokens
    began = time.perf_counter()
    llm.generate(prompt, params, use_tqdm=False, lora_request=list(adapters))
    return num_tokens / (time.perf_counter() - began)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """All rounds; medians."""
    config = CONFIGS[args.model]
    write_random_model(config, folder / "model")
    spec = declare(config)
    adapters = [
        LoRARequest(f"{n}", n + 1, str(write_adapter(folder / f"{n}", spec, args.rank, n)))
        for n in range(max(args.adapters, args.loaded))
    ]
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "kv_cache_memory": "1GiB",
        "max_num_seqs": 64,
    }
    if args.quantization:
        options["quantization"] = args.quantization
    model = str(folder / "model")
    model_alone = LLM(model, **options)
    lora = LLM(
        model,
        **options,
        enable_lora=True,
        max_loras=args.adapters,
        max_cpu_loras=len(adapters),
        max_lora_rank=args.rank,
    )
    used = adapters[: args.adapters]
    load = Load(args.requests, spec.vocab_size, args.longest)
    variants: dict[str, Callable[[], float]] = {
        "base": lambda: load.tokens_per_s(model_alone, [None]),
        "enabled": lambda: load.tokens_per_s(lora, [None]),
        "adapters": lambda: load.tokens_per_s(lora, used),
        "base_single": lambda: single_stream(model_alone, [None], args.single),
        "enabled_single": lambda: single_stream(lora, [None], args.single),
        "adapter_single": lambda: single_stream(lora, used[:1], args.single),
    }
    for each in (model_alone, lora):
        single_stream(each, [None], 4)
    for adapter in reversed(adapters):
        single_stream(lora, [adapter], 1)
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.rounds):
        for name, run in variants.items():
            found[name].append(run())
    medians = {name: statistics.median(each) for name, each in found.items()}
    pairs = {
        "enabled": "base",
        "adapters": "base",
        "enabled_single": "base_single",
        "adapter_single": "base_single",
    }
    shares = {
        f"{name}_share": statistics.median(
            mine / theirs for mine, theirs in zip(found[name], found[base_name], strict=True)
        )
        for name, base_name in pairs.items()
    }
    return {name: round(value, 3) for name, value in {**medians, **shares}.items()}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-0.6b")
    parser.add_argument("--adapters", type=int, default=8, help="that are used at once")
    parser.add_argument("--loaded", type=int, default=64, help="adapters in memory")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=96, help="most output tokens of a request")
    parser.add_argument("--single", type=int, default=160, help="tokens of the single request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args)
    given = {"model": args.model, "rank": args.rank, "num_adapters": args.adapters}
    given["num_loaded"] = max(args.adapters, args.loaded)
    print(json.dumps({**given, **found}))


if __name__ == "__main__":
    main()
