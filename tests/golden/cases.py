"""What is recorded: engines of tiny models in every family, weight format and KV format, and what
is asked of them.

Owns the table `CASES`. A case's requests come in rounds: those of a round run together, and a later
round finds what an earlier one left in the prefix cache. Prompts are made as weights are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_models import store_gguf
from optional_packages import HAS_GRAMMARS
from quantized_checkpoints import (
    Pack,
    awq,
    byte_integers,
    compressed_tensors,
    fp8,
    gptq,
    packed_integers,
    store_gpt_oss,
    store_model,
)

from quire import LLM, BeamSearchParams, SamplingParams
from tests.golden.checkpoints import CONFIGS, VOCAB, integers, write_checkpoint

Params = SamplingParams | BeamSearchParams
Requests = Mapping[str, tuple[Sequence[int], Params]]


def prompt(name: str, length: int) -> list[int]:
    """Token ids from 3 up that `name` stands for."""
    return [3 + int(each) % (VOCAB - 3) for each in integers(f"prompt {name}", length)]


def _sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | options)


def _drawn(**options: Any) -> SamplingParams:
    return _sampling(**{"seed": 5, "temperature": 0.9, "logprobs": 1} | options)


STANDARD: Requests = {
    "greedy": (prompt("a", 70), _sampling(max_tokens=8, logprobs=2, prompt_logprobs=1)),
    "drawn": (prompt("b", 9), _drawn(top_k=40, top_p=0.95)),
    "greedy tokens": (prompt("c", 13), _sampling()),
}
"""A prompt beyond one tile of attention and the windows of all families; few rows;
and a head that keeps no logits."""


@dataclass(frozen=True)
class Case:
    """One engine and its requests."""

    checkpoint: str
    """A name of `CONFIGS`, `STORED` or `GGUF`."""
    options: Mapping[str, Any]
    """Of the engine, beside those that all have."""
    rounds: Sequence[Requests] = (STANDARD,)
    kernels: tuple[str, ...] = ("cpu",)
    """The back ends that it is recorded for."""
    needs_grammars: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether all is installed that it takes."""
        return HAS_GRAMMARS or not self.needs_grammars


_F32, _BF16 = {"dtype": "float32"}, {"dtype": "bfloat16"}

# ---- weight formats: the checkpoint that is stored in another way, and how ----


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_INT8: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
}
_GROUPS = _INT8 | {"num_bits": 4, "strategy": "group", "group_size": 32}
_FLOAT8 = _INT8 | {"type": "float"}
_DYNAMIC = {"strategy": "token", "dynamic": True}
STORED: dict[str, tuple[Pack, Mapping[str, Any]]] = {
    "gptq": (gptq(4, 32), _GPTQ),
    "gptq v2, symmetric": (
        gptq(4, 16, version=0, is_symmetric=True),
        _GPTQ | {"checkpoint_format": "gptq_v2", "group_size": 16},
    ),
    "gptq, 8 bits": (gptq(8, 32), _GPTQ | {"bits": 8}),
    "gptq, ordered": (gptq(4, 32, order="blocks"), _GPTQ | {"desc_act": True}),
    "awq": (awq(32), _AWQ),
    "pack": (
        packed_integers(4, 32, is_symmetric=True),
        compressed_tensors("pack-quantized", **_GROUPS),
    ),
    "pack, asymmetric": (
        packed_integers(4, 32, is_symmetric=False),
        compressed_tensors("pack-quantized", **_GROUPS | {"symmetric": False}),
    ),
    "pack, 8 bits": (
        packed_integers(8, 32, is_symmetric=True),
        compressed_tensors("pack-quantized", **_GROUPS | {"num_bits": 8}),
    ),
    "bytes": (byte_integers(), compressed_tensors("int-quantized", **_INT8)),
    "bytes, int8 activations": (
        byte_integers(),
        compressed_tensors("int-quantized", _INT8 | _DYNAMIC, **_INT8),
    ),
    "fp8": (
        fp8("weight_scale", is_per_output=True),
        compressed_tensors("float-quantized", _FLOAT8 | _DYNAMIC, **_FLOAT8),
    ),
}
GGUF = {
    f"gguf {encoding}": (encoding, head)
    for encoding, head in {
        "Q4_0": "Q8_0", "Q4_1": "Q8_0", "Q5_0": "Q6_K", "Q5_1": "Q6_K", "Q8_0": "Q8_0",
        "Q4_K": "Q6_K", "Q5_K": "Q6_K", "Q6_K": "Q4_K",
    }.items()
}  # fmt: skip
"""By the name: the encoding of the projections, and that of the tied head."""


STACKED_MXFP4 = "gpt oss, mxfp4"


def write(name: str, folder: Path) -> Path:
    """Write a case's checkpoint into a new folder; the path to open."""
    if name in CONFIGS:
        return write_checkpoint(folder, CONFIGS[name])
    if name == STACKED_MXFP4:
        plain = write_checkpoint(folder / "plain", CONFIGS["gpt oss"])
        return store_gpt_oss(folder / "stored", plain)
    if name in GGUF:
        return store_gguf(
            folder / "stored",
            write_checkpoint(folder / "plain", CONFIGS["llama tied"]),
            *GGUF[name],
        )
    return store_model(
        folder / "stored", write_checkpoint(folder / "plain", CONFIGS["llama"]), *STORED[name]
    )


# ---- what is asked ----

_LONG: Requests = {
    "long": (prompt("long", 1100), _sampling(logprobs=1, prompt_logprobs=0)),
    "short": (prompt("short", 40), _drawn()),
}
_SHARED = prompt("shared", 37)
_PREFIXES: Sequence[Requests] = (
    {"first": ([*_SHARED, *prompt("d", 12)], _sampling(logprobs=1))},
    {
        "hit": ([*_SHARED, *prompt("e", 9)], _sampling(logprobs=1)),
        "same": ([*_SHARED, *prompt("d", 12)], _drawn()),
    },
)
_STRATEGIES: Requests = {
    "beams": (prompt("f", 21), BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)),
    "samples": (prompt("g", 19), _drawn(n=3, min_p=0.05)),
    "hot": (prompt("h", 31), _drawn(temperature=3.0, logprobs_mode="processed_logprobs", top_k=30)),
    "penalties": (
        prompt("i", 23),
        _drawn(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
    ),
    "biased": (
        prompt("j", 5),
        _drawn(logit_bias={5: 4.0, 6: -100.0}, min_tokens=3, stop_token_ids=[5, 9]),
    ),
    "all prompt tokens": (prompt("k", 45), _sampling(max_tokens=1, prompt_logprobs=5)),
    "logits": (prompt("l", 3), _sampling(logprobs=3, logprobs_mode="raw_logits")),
    "drawn tokens": (prompt("m", 17), _drawn(logprobs=None)),
}
_GUIDED: Requests = {
    "regex": (
        prompt("n", 5),
        _sampling(
            ignore_eos=False, logprobs=1, structured_outputs={"regex": "[a-f]{3,9}(-[0-9])*"}
        ),
    ),
    "choice": (
        prompt("o", 11),
        _drawn(ignore_eos=False, structured_outputs={"choice": ["abc", "bcd"]}),
    ),
    "free": (prompt("p", 20), _sampling(logprobs=1)),
}

_FEW: Requests = {
    "greedy": (prompt("q", 27), _sampling(max_tokens=3, logprobs=1)),
    "drawn": (prompt("r", 3), _drawn(max_tokens=2, top_k=40)),
}
"""For an interpreter that takes a second for each step."""

_BOTH = {"float32": _F32, "bfloat16": _BF16}
_CPU_AND_REFERENCE = ("cpu", "reference")


def _kernels(dtype: str) -> tuple[str, ...]:
    """The reference is slow, so that one dtype of it has to do where families are not concerned."""
    return _CPU_AND_REFERENCE if dtype == "float32" else ("cpu",)


def _families() -> dict[str, Case]:
    extended = {"max_model_len": 512, "allow_long_context": True}
    return {
        f"{name}, {dtype}": Case(
            name,
            options | (extended if name == "llama dynamic" else {}),
            kernels=_CPU_AND_REFERENCE,
        )
        for name in CONFIGS
        if name not in ("llama long", "llama tied")
        for dtype, options in _BOTH.items()
    }


def _weights() -> dict[str, Case]:
    at_load = {
        f"{name}, {method} at load, {dtype}": Case(
            name, options | {"quantization": method}, kernels=_kernels(dtype)
        )
        for name in ("llama", "llama wide", "gpt2", "phi3", "qwen2 moe", "deepseek v3")
        for method in ("int8", "int4")
        for dtype, options in _BOTH.items()
    }
    as_stored = {f"{name}, bfloat16": Case(name, _BF16) for name in (*STORED, *GGUF)}
    with_int8_inputs = {
        f"{name}, int8 activations, {dtype}": Case(name, options | {"quantization": method})
        for name, method in (
            ("gptq", "int4"),
            ("awq", "int4"),
            ("gptq, 8 bits", "int8"),
            ("fp8", "int8"),
        )
        for dtype, options in _BOTH.items()
    }
    in_float32 = {
        f"{name}, float32": Case(name, _F32, kernels=_CPU_AND_REFERENCE)
        for name in ("gptq", "fp8", "gguf Q4_K")
    }
    stacked = {
        f"{STACKED_MXFP4}, {dtype}": Case(STACKED_MXFP4, options, kernels=_kernels(dtype))
        for dtype, options in _BOTH.items()
    }
    return at_load | as_stored | with_int8_inputs | in_float32 | stacked


def _caches() -> dict[str, Case]:
    return {
        f"{name}, KV in {kv}, {dtype}": Case(
            name, options | {"kv_cache_dtype": kv}, kernels=_kernels(dtype)
        )
        for name in ("llama", "gemma3", "deepseek v3")
        for kv in ("float32", "bfloat16", "int8", "fp8")
        for dtype, options in _BOTH.items()
        if kv != dtype
    }


def _features() -> dict[str, Case]:
    small = {"max_num_batched_tokens": 96, "max_model_len": 1280, "kv_cache_memory": "4MiB"}
    small_int8 = small | {"kv_cache_dtype": "int8"}
    cases: dict[str, Case] = {}
    for dtype, options in _BOTH.items():
        cases |= {
            f"long prompt in chunks, {dtype}": Case("llama long", options | small, [_LONG]),
            f"long prompt in chunks, KV in int8, {dtype}": Case(
                "llama long", options | small_int8, [_LONG]
            ),
            f"prefix hits, {dtype}": Case(
                "llama", options | {"enable_prefix_caching": True}, _PREFIXES
            ),
            f"prefix hits, windows, {dtype}": Case(
                "gemma2", options | {"enable_prefix_caching": True}, _PREFIXES
            ),
            f"chunks, windows, {dtype}": Case(
                "gemma3", options | {"max_num_batched_tokens": 16, "max_num_seqs": 4}
            ),
            f"strategies, {dtype}": Case("llama", options, [_STRATEGIES], kernels=_kernels(dtype)),
            f"grammars, {dtype}": Case(
                "llama",
                options | {"tokenizer": "quire-storyteller"},
                [_GUIDED],
                needs_grammars=True,
            ),
        }
    return cases


def _interpreted() -> dict[str, Case]:
    chosen = {
        "llama": _F32, "gemma2": _F32, "gemma3": _BF16, "gpt2": _BF16,
        "qwen3": _BF16 | {"kv_cache_dtype": "int8"}, "phi3": _F32 | {"quantization": "int4"},
        "olmo2": _F32 | {"kv_cache_dtype": "fp8"}, "gptq": _F32, "gpt oss": _F32,
        "qwen2 moe": _F32 | {"quantization": "int4"}, STACKED_MXFP4: _F32,
        "deepseek v3": _BF16,
    }  # fmt: skip
    return {
        f"{name}, interpreted": Case(name, options, [_FEW], ("triton",))
        for name, options in chosen.items()
    }


CASES: dict[str, Case] = _families() | _weights() | _caches() | _features() | _interpreted()


def start(case: Case, path: Path, kernels: str) -> LLM:
    """The engine of a case whose checkpoint has been written, on a back end."""
    common = {
        "kernels": kernels, "skip_tokenizer_init": "tokenizer" not in case.options,
        "enable_prefix_caching": False, "kv_cache_memory": "2MiB", "num_threads": 1,
        "max_num_seqs": 16,
    }  # fmt: skip
    return LLM(str(path), **{**common, **case.options})
