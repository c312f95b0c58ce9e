"""Vectors of texts beside transformers: `python -m benchmarks.embeddings`.

Shapes of BGE-small and Qwen3-Embedding-0.6B with random weights, float32 on both sides. Each round
runs both engines one after the other, so that a machine that is shared treats them alike; the best
round counts. transformers gets its texts sorted by length already (all have the same), so it pads
nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire import LLM
from quire.engine.front.prompts import Prompt

_BERT = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
_QWEN3 = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bge-small": ("bert", "BertModel", _BERT | {"num_hidden_layers": 12, "vocab_size": 30522}),
    "qwen3-0.6b": ("qwen3", "Qwen3Model", _QWEN3 | {"num_hidden_layers": 28, "vocab_size": 8192}),
}
"""Model type, architecture and sizes. The vocabulary costs nothing but memory, so Qwen3's is small.
"""


class Case(NamedTuple):
    """So many texts of so many tokens, computed together."""

    num_texts: int
    num_tokens: int


class Row(NamedTuple):
    """Seconds of the best round."""

    shape: str
    case: Case
    ours_s: float
    theirs_s: float


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 128, 512])
    parser.add_argument("--bulk", type=int, default=64, help="texts of a bulk run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="so many layers in place of the model's")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = [Case(count, length) for length in args.lengths for count in (1, args.bulk)]
    print(
        f"{'shape':<12} {'texts':>6} {'tokens':>6} {'quire ms':>10} {'torch ms':>10} {'ratio':>6}"
    )
    for name in args.shapes:
        for row in measure(name, cases, args):
            ratio = row.theirs_s / row.ours_s
            print(
                f"{row.shape:<12} {row.case.num_texts:>6} {row.case.num_tokens:>6} "
                f"{1e3 * row.ours_s:>10.1f} {1e3 * row.theirs_s:>10.1f} {ratio:>6.2f}",
                flush=True,
            )


def measure(name: str, cases: list[Case], args: argparse.Namespace) -> list[Row]:
    """All cases of one shape."""
    model_type, architecture, sizes = SHAPES[name]
    sizes = sizes | ({"num_hidden_layers": args.layers} if args.layers else {})
    theirs = _transformers(model_type, architecture, sizes)
    rows = []
    with closing(_quire(model_type, architecture, sizes, args.threads)) as llm:
        for case in cases:
            ours_s, theirs_s = float("inf"), float("inf")
            for round_ in range(args.rounds + 1):
                texts = _texts(case, sizes["vocab_size"], round_)
                ours, other = _timed(partial(_embed, llm, texts)), _timed(partial(theirs, texts))
                if round_:  # the first one warms up
                    ours_s, theirs_s = min(ours_s, ours), min(theirs_s, other)
            rows.append(Row(name, case, ours_s, theirs_s))
    return rows


def _quire(model_type: str, architecture: str, sizes: dict[str, Any], threads: int) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": [architecture], "model_type": model_type, **sizes}
        config |= {"torch_dtype": "float32"}
        config |= {"max_position_embeddings": sizes.get("max_position_embeddings", 512)}
        config |= {"type_vocab_size": 2} if model_type == "bert" else {}
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return LLM(
            str(path),
            load_format="dummy",
            runner="pooling",
            max_model_len=512,
            skip_tokenizer_init=True,
            num_threads=threads,
            pooler_config={"pooling_type": "CLS" if model_type == "bert" else "LAST"},
        )


def _transformers(
    model_type: str, architecture: str, sizes: dict[str, Any]
) -> Callable[[list[list[int]]], Any]:
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **sizes)
    kind: Any = getattr(transformers, architecture)
    options = {"add_pooling_layer": False} if model_type == "bert" else {}
    with torch.device("meta"):
        model = kind(config, **options)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        for buffer in model.buffers():
            buffer.zero_()

    def run(texts: list[list[int]], at_once: int = 8) -> None:
        with torch.inference_mode():
            for first in range(0, len(texts), at_once):
                ids = torch.tensor(texts[first : first + at_once])
                states = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
                torch.nn.functional.normalize(states[:, 0 if model_type == "bert" else -1], dim=-1)

    return run


def _texts(case: Case, vocab_size: int, seed: int) -> list[list[int]]:
    """New ones in every round, so that nothing comes from a cache."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.num_texts, case.num_tokens)
    return torch.randint(5, vocab_size, shape, generator=generator).tolist()


def _embed(llm: LLM, texts: list[list[int]]) -> None:
    prompts: list[Prompt] = [{"prompt_token_ids": each} for each in texts]
    llm.embed(prompts, use_tqdm=False)


def _timed(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
