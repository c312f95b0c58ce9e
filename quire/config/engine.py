"""What the user wishes of an engine: one frozen record, checked as far as it can be without looking
at the model.

`None` and "auto" mean "you decide"; `quire.engine.plan.planning` turns wishes into decisions, each
with its reason. Nothing is read from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Self

from quire.common.kv_formats import KV_FORMATS, OTHER_NAMES
from quire.config.foreign import translate
from quire.config.limits import POLICIES
from quire.config.paths import checked_path
from quire.config.processes import DistributedSsl, check_processes
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.speculation import SpeculationConfig
    from quire.config.transfer import KVTransferConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy", "gguf")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "cpu", "triton", "reference")
SWITCHES = ("auto", "on", "off")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify", "reward")
ATTENTION_BACKENDS = ("auto", "triton", "flash-attention", "flashinfer")
EXECUTOR_BACKENDS = ("mp", "ray", "sockets", "uni")
QUANTIZATIONS = ("int8", "int4")
STORED_QUANTIZATIONS = {
    "awq": ("awq",),
    "awq_marlin": ("awq",),
    "gptq": ("gptq",),
    "gptq_marlin": ("gptq",),
    "fp8": ("fp8",),
    "compressed-tensors": ("compressed-tensors",),
    "gguf": ("gguf",),
}
"""What vLLM calls the quantization of a checkpoint, and the methods that its files may name."""
_NAMES = ("revision", "tokenizer_revision")
_PATHS = ("tokenizer", "download_dir", "generation_config", "weights_cache", "kv_cache_dir")
"""Of which some may be names of another kind, too."""

_LEAST = {
    "max_model_len": 1,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "num_threads": 1,
    "max_loras": 1,
    "max_lora_rank": 1,
    "max_cpu_loras": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
}
"""Whole numbers, each with the least that makes sense."""
_OF_ADAPTERS = frozenset({"max_loras", "max_lora_rank", "max_cpu_loras", "lora_experts"})
_MAX_TARGET_STEP_MS = 3_600_000


def _check_keys(name: str, value: Any) -> None:
    """Raise ConfigError for what no JSON object is, within others, too."""
    if not isinstance(value, dict | None):
        raise ConfigError(f"{name} must be a dict of the file's keys, not {type(value).__name__}")
    for key, each in (value or {}).items():
        if not isinstance(key, str):
            raise ConfigError(f"{name}: the key {key!r:.80} must be text, as keys of a file are")
        if isinstance(each, dict):
            _check_keys(name, each)


def _option(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


MAX_NUM_THREADS = 1024
"""More than any machine's cores would be of use to one engine,
and fewer than a system refuses to start."""
_MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of `LLM`, `AsyncLLM` and the command line: one declaration gives the field,
    the flag and its help."""

    model: str = _option(
        ..., "model folder, GGUF file, Hugging Face name, or the shipped model's name"
    )
    tokenizer: str | None = _option(None, "folder of another tokenizer than the model's own")
    revision: str | None = _option(
        None, "branch, tag or commit of a model that is downloaded from the hub"
    )
    tokenizer_revision: str | None = _option(
        None, "the same of a tokenizer that is downloaded by itself"
    )
    download_dir: str | None = _option(None, "folder for downloads; by default the hub's own cache")
    hf_overrides: Mapping[str, Any] | None = _option(
        None, 'keys that replace those of the model\'s config.json, such as {"rope_scaling": {...}}'
    )
    generation_config: str = _option(
        "auto",
        "where sampling defaults come from: auto is the model's generation_config.json, vllm "
        "none, else a folder with such a "
        "file",
    )
    override_generation_config: Mapping[str, Any] | None = _option(
        None, "keys that replace those of that file"
    )
    skip_tokenizer_init: bool = _option(False, "work on token ids alone, without a tokenizer")
    dtype: str = _option(
        "auto",
        "what to compute in; auto follows the checkpoint, float16 is computed in bfloat16",
        choices=DTYPES,
    )
    device: str = _option("auto", "where to compute; auto is the CPU as yet", choices=DEVICES)
    kernels: str = _option(
        "auto", "kernel back end; auto takes the best that works here", choices=KERNELS
    )
    platform: str | None = _option(
        None,
        "name of an installed package's device, whose kernels compute in place of those here; "
        "whatever is wrong with it is an error",
    )
    load_format: str = _option(
        "auto",
        "auto reads the weights, gguf those of a GGUF file, dummy makes them up",
        choices=LOAD_FORMATS,
    )
    max_model_len: int | None = _option(
        None, "longest sequence, prompt and output; by default what the model and the memory hold"
    )
    allow_long_context: bool = _option(
        False, "take a max_model_len beyond the context that the model was made for"
    )
    block_size: int | None = _option(None, "tokens in a KV block (default 16)")
    kv_cache_memory: int | str | None = _option(
        None, 'memory of the KV cache in bytes or as "512MiB"; by default decided from what is free'
    )
    populate_kv_cache: str = _option(
        "auto",
        "take the KV cache's memory from the system at the start, not when blocks are first "
        "used; auto does where "
        "kv_cache_memory is given",
        choices=SWITCHES,
    )
    memory_utilization: float = _option(
        0.9, "share of the free memory that weights, workspace and KV cache may take together"
    )
    max_num_seqs: int | None = _option(
        None, "sequences that run at once (default 256, on a GPU of 64 GiB or more 1024)"
    )
    max_num_batched_tokens: int | None = _option(None, "tokens computed in one step (default 2048)")
    target_step_ms: float | None = _option(
        None,
        "longest time that a step should take where outputs are streamed: long prompts are "
        "computed in pieces that fit, so "
        "that running streams do not stop; 0 sets no limit (default 200 on a CPU, 0 on a GPU "
        "and for LLM)",
    )
    max_num_partial_prefills: int | None = _option(
        None,
        (
            "prompts that may be under way at once; above 1, short ones are computed beside a "
            "long one (default 4)"
        ),
    )
    max_long_partial_prefills: int = _option(1, "of these, long ones that share a step")
    long_prefill_token_threshold: int = _option(
        0,
        (
            "prompts of more tokens count as long; 0 means those that take more than half of a "
            "step's room for prompts"
        ),
    )
    enable_prefix_caching: bool = _option(
        True, "keep the KV of finished requests for later ones that begin alike"
    )
    enable_chunked_prefill: bool = _option(
        True, "compute long prompts in pieces beside the decodes"
    )
    scheduling_policy: str = _option("fcfs", "order of service", choices=POLICIES)
    overlap: str = _option(
        "auto",
        "plan each step while the one before it is computed: same answers; auto does on a GPU",
        choices=SWITCHES,
    )
    enforce_eager: bool = _option(
        False,
        "launch every operation of every step, where small ones could be replayed as CUDA graphs",
    )
    num_threads: int | None = _option(
        None, "CPU threads; by default the physical cores this process may use"
    )
    batch_invariant: bool = _option(
        True,
        (
            "results never depend on who else is in the batch; off, a GPU may use libraries that "
            "are faster for many rows"
        ),
    )
    attention_backend: str = _option(
        "auto",
        "whose attention a GPU computes with: auto takes the kernels here",
        choices=ATTENTION_BACKENDS,
    )
    seed: int = _option(0, "from which the seeds of requests without one of their own are derived")
    max_logprobs: int = _option(
        20, "most alternatives a request may ask for per token; -1 allows the whole vocabulary"
    )
    quantization: str | None = _option(
        None,
        "weights and activations as integers: quantizes floating-point weights while they "
        "are loaded; int4 has 8 bit "
        "activations. Quantized checkpoints are recognised without it",
        choices=QUANTIZATIONS,
        also=tuple(STORED_QUANTIZATIONS),
    )
    weights_cache: str | None = _option(
        None,
        (
            "folder that keeps the packed weights of a quantized model, so that its next start "
            "only reads them"
        ),
    )
    expert_memory: int | str | None = _option(
        None,
        'memory of a mixture\'s experts in bytes or as "8GiB"; the others are read from a file in '
        "weights_cache when they are chosen, with the same answers. By default all are in memory",
    )
    kv_cache_dtype: str = _option(
        "auto",
        (
            "what the KV cache stores: auto is the compute dtype; int8 and fp8 take about half "
            "of bfloat16"
        ),
        choices=("auto", *KV_FORMATS, *OTHER_NAMES),
    )
    kv_cache_dir: str | None = _option(
        None,
        "folder that keeps the KV of prompts and answers, for later runs and other processes: "
        "what was computed once is read, with the same bits",
    )
    kv_disk_size: int | str | None = _option(
        None, 'most that kv_cache_dir takes, in bytes or as "10GiB", which it is by default'
    )
    kv_offloading_size: float | None = _option(
        None,
        "GiB of host memory that keep KV of which the pool has lost its blocks, as of preempted "
        "requests",
    )
    kv_offloading_dtype: str = _option(
        "auto",
        "what kv_offloading_size stores: auto is what the KV cache does; int8 and fp8 take about "
        "half of bfloat16, and what they give back has other bits than what was computed",
        choices=("auto", "int8", "fp8"),
    )
    kv_transfer_config: Mapping[str, Any] | None = _option(
        None,
        "compute prompts for other engines, or have others compute them: "
        '{"kv_connector": "TcpConnector", "kv_role": "kv_producer"}, and more keys of vLLM\'s',
    )
    when_asleep: str = _option(
        "wait",
        "what becomes of requests that arrive while the engine sleeps: they wait until it wakes, "
        "as long as their deadlines let them, or are refused",
        choices=("wait", "refuse"),
    )
    enable_lora: bool = _option(
        False, "serve low-rank adapters (LoRA) beside the model, chosen request by request"
    )
    max_loras: int | None = _option(
        None,
        "adapters that running requests may use at once; by default 8, or max_cpu_loras if lower",
    )
    max_lora_rank: int = _option(16, "highest rank of an adapter, at most 512")
    max_cpu_loras: int | None = _option(
        None, "adapters kept in memory, used or not; by default as many as max_loras"
    )
    lora_experts: bool = _option(
        False,
        "adapters may change the experts of mixtures, too, for which they are given memory",
    )
    tensor_parallel_size: int = _option(
        1,
        "processes of this machine that each hold a part of every matrix; same answers to the bit",
    )
    enable_expert_parallel: bool = _option(
        False,
        "with tensor_parallel_size, give each process whole experts of a mixture, in place of a "
        "part of every expert",
    )
    pipeline_parallel_size: int = _option(
        1,
        "processes of this machine that each hold some of the layers, or groups of them with "
        "tensor_parallel_size; same answers to the bit",
    )
    data_parallel_size: int = _option(
        1,
        "engines of the model behind one front, each with all of its weights: requests go where "
        "their beginning is cached and least is in flight",
    )
    distributed_executor_backend: str | type | None = _option(  # noqa: RUF009  # a field
        None,
        "how the processes of one model are run: mp starts them on this machine, where they share "
        "memory, sockets likewise, with connections in its place, ray on the nodes of a Ray "
        "cluster, uni is one alone; in Python also an executor's class",
        choices=EXECUTOR_BACKENDS,
        takes_class=True,
    )
    ray_placement_group: str | None = _option(
        None,
        "name of the placement group for the processes but the first; by default the current one, "
        "or else one of their own",
    )
    distributed_ssl: Mapping[str, Any] | None = _option(
        None,
        "files with which processes of one model encrypt their connections and know one another: "
        '{"ssl_certfile": ..., "ssl_keyfile": ..., "ssl_ca_file": ...}',
    )
    distributed_timeout_seconds: float = _option(
        10.0, "a process of the model that gives no sign of life for so long is replaced"
    )
    speculative_config: Mapping[str, Any] | None = _option(
        None,
        "draft tokens and compute several of a sequence at once, with the same answers: "
        '{"method": "suffix"}, and more keys of vLLM\'s',
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = _option(
        None, 'most images of a request, as {"image": 4}; 16 by default, 0 takes none'
    )
    mm_processor_kwargs: Mapping[str, Any] | None = _option(
        None,
        "settings of the model's preprocessor_config.json to replace, as "
        '{"min_pixels": 3136, "max_pixels": 1003520}',
    )
    image_cache_memory: int | str | None = _option(
        None,
        'memory of encoded images in bytes or as "512MiB"; by default for as many as a request '
        "may have, 64 MiB at least",
    )
    allowed_local_media_path: str = _option(
        "", "folder whose files requests may name as file: URLs of images; none by default"
    )
    allowed_media_domains: tuple[str, ...] = _option(
        (), "host from which images are fetched by http and https (repeatable); none by default"
    )
    runner: str = _option(
        "auto",
        "what the model is for: generate makes text, pooling vectors or classes; auto follows its "
        "files",
        choices=RUNNERS,
    )
    convert: str = _option(
        "auto",
        "what a model of texts is to make besides: vectors (embed) or classes (classify, reward); "
        "auto follows its files",
        choices=CONVERSIONS,
    )
    pooler_config: Mapping[str, Any] | None = _option(
        None, 'how to pool where the model does not say: {"pooling_type": "CLS", "LAST" or "MEAN"}'
    )

    @classmethod
    def from_options(cls, model: str, options: Mapping[str, Any]) -> Self:
        """Return the config of `model` with `options`; ConfigError names an unknown one
        and what it may have meant."""
        known = [item.name for item in fields(cls)]
        options = translate(options)
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, 1)
                hint = (
                    f"did you mean {close[0]!r}?"
                    if close
                    else f"known options: {', '.join(known[1:])}"
                )
                raise ConfigError(f"unknown option {name!r}; {hint}")
        return cls(model=model, **options)

    @property
    def num_processes(self) -> int:
        """That compute one model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def quantize_to(self) -> str | None:
        """What weights are to be quantized to while they are loaded;
        None leaves them as the checkpoint has them."""
        return self.quantization if self.quantization in QUANTIZATIONS else None

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r} must be the name or folder of a model")
        object.__setattr__(self, "allowed_media_domains", self._domains())
        for name in _PATHS:
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked_path(name, given))
        self._check_choices()
        self._check_numbers()
        self._check_available()

    def _domains(self) -> tuple[str, ...]:
        given = self.allowed_media_domains
        if not isinstance(given, list | tuple) or not all(isinstance(x, str) for x in given):
            raise ConfigError(f"allowed_media_domains={given!r} must be a list of host names")
        return tuple(given)

    def _check_choices(self) -> None:
        for item in fields(self):
            choices = item.metadata.get("choices")
            value = getattr(self, item.name)
            is_class = isinstance(value, type) and item.metadata.get("takes_class", False)
            if (
                choices is not None
                and not is_class
                and value
                not in (
                    item.default,
                    *choices,
                    *item.metadata.get("also", ()),
                )
            ):
                raise ConfigError(
                    f"{item.name}={value!r} is not available; choose "
                    f"{' or '.join(map(repr, choices))}"
                )
            if isinstance(item.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{item.name}={value!r} must be True or False")
            if str(item.type).startswith("Mapping"):
                _check_keys(item.name, value)
            if (
                item.name in _NAMES
                and not (isinstance(value, str) and value)
                and value is not item.default
            ):
                raise ConfigError(f"{item.name}={value!r} must be text")

    def _check_numbers(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")
            most = MAX_NUM_THREADS if name == "num_threads" else _MAX_INTEGER
            if value is not None and value > most:
                shown = value if value.bit_length() < 64 else "that"
                raise ConfigError(
                    f"{name}={shown} is too many: at most {most} are possible; leave it out, "
                    "or give fewer"
                )
        self._check_target()
        size = self.kv_offloading_size
        if size is not None and (
            not isinstance(size, int | float) or isinstance(size, bool) or not 0 <= size < 2**20
        ):
            raise ConfigError(
                f"kv_offloading_size={size!r} must be a number of GiB, such as 4 or 0.5"
            )
        if (
            not isinstance(self.memory_utilization, int | float)
            or not 0.0 < self.memory_utilization <= 1.0
        ):
            raise ConfigError(
                f"memory_utilization={self.memory_utilization!r} must be above 0 and at most 1"
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed={self.seed!r} must be an integer")
        if not isinstance(self.max_logprobs, int) or self.max_logprobs < -1:
            raise ConfigError(
                f"max_logprobs={self.max_logprobs!r} must be an integer of at least -1"
            )

    def _check_target(self) -> None:
        target = self.target_step_ms
        if target is None:
            return
        if (
            not isinstance(target, int | float)
            or isinstance(target, bool)
            or not 0.0 <= target <= _MAX_TARGET_STEP_MS
        ):
            raise ConfigError(
                f"target_step_ms={target!r} must be a number of milliseconds up to "
                f"{_MAX_TARGET_STEP_MS}, or 0"
            )
        if target and not self.enable_chunked_prefill:
            raise ConfigError(
                f"target_step_ms={target!r} needs chunked prefill, without which a prompt is "
                "computed in one step; enable "
                "chunked prefill, or leave the target out"
            )

    @property
    def ssl(self) -> DistributedSsl | None:
        """`distributed_ssl`, judged; None where nothing is encrypted."""
        given = self.distributed_ssl
        return None if given is None else DistributedSsl.from_mapping(given)

    @property
    def executor_class(self) -> type | None:
        """`distributed_executor_backend`, where it is a class."""
        given = self.distributed_executor_backend
        return given if isinstance(given, type) else None

    @property
    def speculation(self) -> SpeculationConfig | None:
        """`speculative_config`, judged; None where nothing is drafted."""
        if self.speculative_config is None:
            return None
        from quire.config.speculation import SpeculationConfig

        return SpeculationConfig.from_mapping(self.speculative_config)

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """`kv_transfer_config`, judged; None where nothing is transferred."""
        if self.kv_transfer_config is None:
            return None
        from quire.config.transfer import KVTransferConfig

        return KVTransferConfig.from_mapping(self.kv_transfer_config)

    def _check_platform(self) -> None:
        if self.platform is None:
            return
        if not isinstance(self.platform, str) or not self.platform:
            raise ConfigError(f"platform={self.platform!r} must be a name")
        others = {
            f"device={self.device!r}": self.device == "cuda",
            f"kernels={self.kernels!r}": self.kernels != "auto",
            f"expert_memory={self.expert_memory!r}": self.expert_memory is not None,
            f"tensor_parallel_size={self.tensor_parallel_size}": self.tensor_parallel_size > 1,
            f"pipeline_parallel_size={self.pipeline_parallel_size}": (
                self.pipeline_parallel_size > 1
            ),
        }
        for name, is_given in others.items():
            if is_given:
                raise ConfigError(
                    f"{name} is not available with platform={self.platform!r}; leave one of them "
                    "out"
                )

    def _check_available(self) -> None:
        if self.speculation is not None and not self.batch_invariant:
            raise ConfigError(
                "speculative_config needs batch_invariant: without it, a draft could change an "
                "answer; leave one of them out"
            )
        self._check_adapters()
        self._check_platform()
        if self.kv_transfer is not None and self.data_parallel_size > 1:
            raise ConfigError(
                f"kv_transfer_config is one engine's, and data_parallel_size="
                f"{self.data_parallel_size} are several; start as many servers, each with a kv_port"
            )
        if self.expert_memory is not None and self.weights_cache is None:
            raise ConfigError(
                f"expert_memory={self.expert_memory!r} needs weights_cache, too: the folder for "
                "the file that all experts are in"
            )
        check_processes(self)

    def _check_adapters(self) -> None:
        """Refuse room for adapters where none are served."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _OF_ADAPTERS and value != item.default and not self.enable_lora:
                raise ConfigError(
                    f"{item.name}={value!r} has no effect without adapters; give enable_lora=True, "
                    "too, or leave it out"
                )
