"""Vectors of texts beside other engines, in turns: `python -m benchmarks.embeddings`.

    python -m benchmarks.embeddings --peer torch=VENV/bin/python --peer onnx=VENV/bin/python \
        --peer openvino=VENV/bin/python --peer infinity=OTHER/bin/python

Shapes of BGE-small, BGE-M3 and Qwen3-Embedding-0.6B with random weights and a small vocabulary,
which costs nothing but memory. Every engine is a process that stays loaded
(`benchmarks/peers/embedding.py`); in each round each embeds the same texts, new ones each time,
while the others are stopped. Medians of the rounds are compared within one precision. Texts go in
as texts, so tokenization counts. The share of time that Quire spends outside its compiled program
is printed beside.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

VOCAB_SIZE = 8192
ROOT = Path(__file__).parent.parent
PEER = Path(__file__).parent / "peers" / "embedding.py"
_SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")

_QWEN3 = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bge-small": (
        "bert",
        "BertModel",
        {
            "hidden_size": 384,
            "num_attention_heads": 12,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "max_position_embeddings": 512,
        },
    ),
    "bge-m3": (
        "xlm-roberta",
        "XLMRobertaModel",
        {
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "layer_norm_eps": 1e-5,
        },
    ),
    "qwen3-0.6b": ("qwen3", "Qwen3Model", _QWEN3),
}
"""Model type, architecture and sizes."""


class Case(NamedTuple):
    """So many texts of so many tokens, given at once."""

    num_texts: int
    num_tokens: int


class Row(NamedTuple):
    """Median seconds of one engine in one case."""

    shape: str
    form: str
    case: Case
    engine: str
    seconds: float
    cpu_s: float
    """Of all its threads: on a disturbed machine, with one thread, what the clock would say."""
    model_s: float
    num_rounds: int


class Engine:
    """A process that makes vectors, stopped unless it is its turn."""

    def __init__(self, name: str, python: str, folder: Path, form: str, threads: int) -> None:
        self.name = name
        command = [python, str(PEER), name, str(folder), form, str(threads)]
        log = (folder / f"{name}-{form}.log").open("w")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = ""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
            env=environment,
        )
        self.error = self._answer().get("error")
        if self.error is None:
            self._signal(signal.SIGSTOP)

    def embed(self, texts: Sequence[str]) -> tuple[float, float, float]:
        """Embed texts; seconds of the clock, of processors, and in the model where the engine says
        so."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(list(texts)) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        self._signal(signal.SIGSTOP)
        return found["s"], found["cpu_s"], found["model_s"]

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._process.kill()
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"error": f"{self.name} ended: {self._process.wait()}"}
        found: dict[str, Any] = json.loads(line)
        return found


def main() -> None:
    """Measure and print a table."""
    args = _arguments()
    peers = {"quire": sys.executable, **dict(each.split("=", 1) for each in args.peer)}
    cases = [Case(1, length) for length in args.lengths]
    cases += [
        Case(count, length) for count, length in zip(args.bulk, args.lengths, strict=True) if count
    ]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for shape in args.shapes:
            folder = Path(args.models or temporary) / shape
            if not (folder / "model.safetensors").exists():
                write_model(folder, shape, args.layers)
            for form in args.forms:
                rows += measure(shape, folder, form, peers, cases, args)
    if args.json:
        Path(args.json).write_text(json.dumps([each._asdict() for each in rows], indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--forms", nargs="+", choices=["float32", "int8"], default=["float32"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 128, 512])
    parser.add_argument(
        "--bulk", nargs="+", type=int, default=[512, 512, 512], help="texts of each length at once"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="so many layers in place of the model's")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--models", help="a folder that keeps the models that are made")
    parser.add_argument("--json", help="a file for the medians")
    return parser.parse_args()


def measure(
    shape: str,
    folder: Path,
    form: str,
    peers: dict[str, str],
    cases: Sequence[Case],
    args: argparse.Namespace,
) -> list[Row]:
    """All cases of one shape in one precision, printed as they come."""
    rows: list[Row] = []
    with ExitStack() as stack:
        engines = []
        for name, python in peers.items():
            engine = Engine(name, python, folder, form, args.threads)
            stack.callback(engine.close)
            if engine.error is None:
                engines.append(engine)
            else:
                print(f"{shape} {form}: without {name}: {engine.error}", flush=True)
        for case in cases:
            found = _in_turns(engines, case, shape, args.rounds)
            made = [Row(shape, form, case, *each, args.rounds) for each in found]
            _show(made)
            rows += made
    return rows


def _in_turns(
    engines: Sequence[Engine], case: Case, shape: str, num_rounds: int
) -> Iterator[tuple[str, float, float, float]]:
    """Median seconds of each engine: of the clock, of processors, and in the model; the first
    round warms up, and does with fewer texts."""
    found: dict[str, list[tuple[float, float, float]]] = {each.name: [] for each in engines}
    for number in range(num_rounds + 1):
        count = case.num_texts if number else min(case.num_texts, 2)
        texts = texts_of(case._replace(num_texts=count), shape, number)
        order = [*engines[number % len(engines) :], *engines[: number % len(engines)]]
        for engine in order:
            seconds = engine.embed(texts)
            if number:
                found[engine.name].append(seconds)
    for name, times in found.items():
        whole, cpu, inside = map(statistics.median, zip(*times, strict=True))
        yield name, whole, cpu, inside


def _show(rows: Sequence[Row]) -> None:
    first, best = rows[0], min((each.seconds for each in rows[1:]), default=float("nan"))
    least = min((each.cpu_s for each in rows[1:]), default=float("nan"))
    others = ", ".join(
        f"{each.engine} {1e3 * each.seconds:.1f} ({1e3 * each.cpu_s:.1f})" for each in rows[1:]
    )
    outside = 1 - first.model_s / first.seconds
    print(
        f"{first.shape:<11} {first.form:<8} {first.case.num_texts:>4} x {first.case.num_tokens:<4}"
        f" quire {1e3 * first.seconds:.1f} ms ({1e3 * first.cpu_s:.1f} of processors,"
        f" {100 * outside:.1f} % outside the model); {others}; best / quire"
        f" {best / first.seconds:.2f} ({least / first.cpu_s:.2f})",
        flush=True,
    )


def texts_of(case: Case, shape: str, seed: int) -> list[str]:
    """Texts of so many tokens, those that the tokenizer adds included."""
    rng = random.Random(f"{shape} {case} {seed}")
    num_words = case.num_tokens - (1 if SHAPES[shape][0] == "qwen3" else 2)
    words = range(VOCAB_SIZE - len(_SPECIAL))
    return [
        " ".join(f"w{word}" for word in rng.choices(words, k=num_words))
        for _ in range(case.num_texts)
    ]


def write_model(folder: Path, shape: str, num_layers: int | None = None) -> None:
    """Save a model of random weights as sentence-transformers does, with a tokenizer of words."""
    import torch
    import transformers

    model_type, architecture, sizes = SHAPES[shape]
    sizes = sizes | {"vocab_size": VOCAB_SIZE}
    sizes |= {"num_hidden_layers": num_layers} if num_layers else {}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(0)
    options = {} if model_type == "qwen3" else {"add_pooling_layer": False}
    model: Any = getattr(transformers, architecture)(config, **options)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(folder, is_decoder=model_type == "qwen3")
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    mode = "pooling_mode_lasttoken" if model_type == "qwen3" else "pooling_mode_cls_token"
    pooling = {"word_embedding_dimension": sizes["hidden_size"], "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, mode: True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))


def _write_tokenizer(folder: Path, *, is_decoder: bool) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [*_SPECIAL, *(f"w{n}" for n in range(VOCAB_SIZE - len(_SPECIAL)))]
    ids = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = "$A [SEP]" if is_decoder else "[CLS] $A [SEP]"
    special = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 512,
        "padding_side": "left" if is_decoder else "right",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
