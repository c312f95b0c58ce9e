"""One engine that makes vectors of texts, in a process of its own: lines of JSON in and out.

    PYTHON benchmarks/peers/embedding.py ENGINE FOLDER FORM THREADS

PYTHON has the engine installed and need not have Quire. Each line that comes is a list of texts;
each answer says how long they took, of the clock and of processors. Libraries print to the errors.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Embed = Callable[[Sequence[str]], Any]
MAX_LEN = 512
BATCH = 8
"""Texts that peers compute at once: 32, sentence-transformers' default, is slower on two cores."""

_model_s = 0.0


def open_quire(folder: Path, form: str, threads: int) -> Embed:
    """This engine; what its compiled program takes is counted by itself."""
    from quire import LLM
    from quire.kernels.cpu.program import NativeProgram

    def timed(self: Any, *args: Any, **more: Any) -> Any:
        global _model_s
        started = time.perf_counter()
        try:
            return plain(self, *args, **more)
        finally:
            _model_s += time.perf_counter() - started

    plain = NativeProgram.__call__
    NativeProgram.__call__ = timed  # type: ignore[method-assign]
    options: dict[str, Any] = {"quantization": "int8"} if form == "int8" else {}
    llm = LLM(
        str(folder),
        runner="pooling",
        dtype="float32",
        max_model_len=MAX_LEN,
        num_threads=threads,
        enable_prefix_caching=False,
        kv_cache_memory="256MiB",
        **options,
    )
    return lambda texts: [each.outputs.embedding for each in llm.embed(list(texts), use_tqdm=False)]


def open_torch(folder: Path, form: str, threads: int) -> Embed:
    """sentence-transformers on torch; int8 is torch's dynamic quantization of linear layers."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu")
    if form == "int8":
        linear = {torch.nn.Linear}
        quantize: Any = torch.ao.quantization.quantize_dynamic
        model[0].auto_model = quantize(model[0].auto_model, linear, dtype=torch.qint8)
    return lambda texts: model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)


def _exported(folder: Path, backend: str) -> Path:
    """A copy of the model in a back end's format, made the first time."""
    from sentence_transformers import SentenceTransformer

    own = folder.parent / f"{folder.name}-{backend}"
    if not own.exists():
        made = own.with_suffix(".part")
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(folder, made)
        SentenceTransformer(str(folder), device="cpu", backend=backend).save_pretrained(str(made))
        made.rename(own)
    return own


def open_onnx(folder: Path, form: str, threads: int) -> Embed:
    """sentence-transformers on ONNX Runtime; int8 is its dynamic quantization for AVX2."""
    import onnxruntime
    from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    own = _exported(folder, "onnx")

    def load(**chosen: Any) -> Any:
        more = {"provider": "CPUExecutionProvider", "session_options": options, **chosen}
        return SentenceTransformer(str(own), device="cpu", backend="onnx", model_kwargs=more)

    if form == "int8":
        if not list(own.glob("onnx/*int8_avx2.onnx")):
            export_dynamic_quantized_onnx_model(load(), "avx2", str(own))
        model = load(file_name=next(own.glob("onnx/*int8_avx2.onnx")).name)
    else:
        model = load(file_name="model.onnx")
    return lambda texts: model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)


def open_openvino(folder: Path, form: str, threads: int) -> Embed:
    """sentence-transformers on OpenVINO; int8 is of weights."""
    from sentence_transformers import SentenceTransformer

    config = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    more: dict[str, Any] = {"ov_config": config}
    if form == "int8":
        own, more["load_in_8bit"], more["export"] = folder, True, True
    else:
        own = _exported(folder, "openvino")
    model = SentenceTransformer(str(own), device="cpu", backend="openvino", model_kwargs=more)
    return lambda texts: model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)


def open_infinity(folder: Path, form: str, threads: int) -> Embed:
    """infinity-emb's engine on torch."""
    import asyncio

    import torch
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    torch.set_num_threads(threads)
    given = EngineArgs(
        model_name_or_path=str(folder),
        engine="torch",
        device="cpu",
        dtype={"float32": "float32", "int8": "int8"}[form],
        batch_size=BATCH,
        bettertransformer=False,
        model_warmup=False,
    )
    engine = AsyncEmbeddingEngine.from_args(given)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.astart())
    return lambda texts: loop.run_until_complete(engine.embed(sentences=list(texts)))


def open_vllm(folder: Path, form: str, threads: int) -> Embed:
    """vLLM's library."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if form != "float32":
        raise ValueError("vLLM is measured in float32 alone")
    from vllm import LLM

    llm: Any = LLM(str(folder), runner="pooling", dtype="float32", max_model_len=MAX_LEN)
    return lambda texts: llm.embed(list(texts), use_tqdm=False)


ENGINES: dict[str, Callable[[Path, str, int], Embed]] = {
    "quire": open_quire,
    "torch": open_torch,
    "onnx": open_onnx,
    "openvino": open_openvino,
    "infinity": open_infinity,
    "vllm": open_vllm,
}


def main() -> None:
    """Open the engine, say so, and embed what comes until the input ends."""
    name, folder, form, threads = sys.argv[1:]
    del sys.path[0]  # whose modules are called as packages of engines are
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = threads
    try:
        embed = ENGINES[name](Path(folder), form, int(threads))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), file=answers)
        raise
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        texts, before = json.loads(line), _model_s
        started, cpu = time.perf_counter(), time.process_time()
        embed(texts)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        found = {"s": seconds, "cpu_s": cpu_s, "model_s": _model_s - before}
        print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
