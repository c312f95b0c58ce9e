"""vLLM's options that are no fields of `EngineConfig` or `ApiConfig`: what each becomes here, as
two tables, the engine's and the server's.

Owns the translation of names and values, and nothing else: what an option does is said where it is
declared. An option is *renamed* (it exists here under another name), *ignored* (what it requests
has no counterpart: it is accepted, and a log line says why it changes nothing) or *absent* (it asks
for a feature that this version does not have: its neutral values are accepted, any other is refused
with what to do instead). Standard library only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from quire.errors import ConfigError, NotAvailableError

logger = logging.getLogger(__name__)


class ForeignOption(NamedTuple):
    """One option of vLLM's."""

    name: str
    kind: Literal["renamed", "ignored", "absent"]
    default: Any
    """What it is unless it is given."""
    text: str
    """The name here; or why it changes nothing; or what to do instead."""
    neutral: tuple[Any, ...] = ()
    """Further values that request nothing."""
    values: Mapping[Any, Any] = {}
    """Of a renamed option: its values, where they are called otherwise here."""
    read: Callable[[Any], Any] | None = None
    """Of a renamed option: what makes its value one of ours."""
    takes_text: bool = False
    """Whether a command line's word is the value as it stands, and each further one another."""

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off, so that a command line has `--no-` of it, too."""
        return isinstance(self.default, bool) or self.values.keys() == {True, False}

    def is_neutral(self, value: object) -> bool:
        """Test whether a value requests nothing."""
        return value is None or any(_same(value, each) for each in (self.default, *self.neutral))


def _renamed(
    name: str,
    ours: str,
    default: Any = None,
    values: Mapping[Any, Any] | None = None,
    **more: Any,
) -> ForeignOption:
    return ForeignOption(name, "renamed", default, ours, values=values or {}, **more)


def _as_keys(value: Any) -> str:
    """Keys of `QUIRE_API_KEYS`' form, where an equals sign would else end a name."""
    keys = [value] if isinstance(value, str) else list(value)
    if any(not key or "," in key for key in keys):
        raise ConfigError("api_key must be a key without commas; give api_key once for each")
    return ",".join(f"key-{number}={key}" for number, key in enumerate(keys, 1))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _ignored(text: str, **defaults: Any) -> list[ForeignOption]:
    return [ForeignOption(name, "ignored", default, text) for name, default in defaults.items()]


def _absent(text: str, *neutral: Any, **defaults: Any) -> list[ForeignOption]:
    return [
        ForeignOption(name, "absent", default, text, neutral) for name, default in defaults.items()
    ]


_TABLE: tuple[ForeignOption, ...] = (
    _renamed("gpu_memory_utilization", "memory_utilization", 0.9),
    _renamed("kv_cache_memory_bytes", "kv_cache_memory"),
    _renamed("swap_space", "kv_offloading_size"),
    _renamed("async_scheduling", "overlap", None, {True: "on", False: "off"}),
    *_ignored(
        "no code of a model folder is ever run, so there is none to trust", trust_remote_code=False
    ),
    *_ignored("there is no code to fetch", code_revision=None),
    *_ignored("the tokenizer is the one of tokenizer.json", tokenizer_mode="auto"),
    *_ignored("the form of a config is recognised", config_format="auto", model_impl="auto"),
    *_ignored(
        "it names the model on a server only (quire serve --served-model-name)",
        served_model_name=None,
    ),
    *_ignored(
        "how the model marks its reasoning is read off its chat template", reasoning_parser=""
    ),
    *_ignored("counters are kept always, see LLM.get_metrics()", disable_log_stats=False),
    *_ignored(
        "a log line per request is an option of the server (quire serve --json-logs)",
        disable_log_requests=False,
        enable_log_requests=False,
        max_log_len=None,
    ),
    *_ignored(
        "what is preempted is restored or computed again, whichever takes less time",
        preemption_mode=None,
    ),
    *_ignored(
        "the kernels are compiled ahead; enforce_eager alone decides on CUDA graphs",
        compilation_config=None,
        optimization_level=None,
        cudagraph_capture_sizes=None,
        max_cudagraph_capture_size=None,
        max_seq_len_to_capture=None,
        cuda_graph_sizes=None,
    ),
    *_ignored(
        "it belongs to a part that is built otherwise here",
        disable_custom_all_reduce=False,
        disable_async_output_proc=False,
        disable_cascade_attn=False,
        disable_hybrid_kv_cache_manager=False,
        disable_chunked_mm_input=False,
        use_v2_block_manager=True,
        use_tqdm_on_load=True,
        max_parallel_loading_workers=None,
        num_scheduler_steps=1,
        prefix_caching_hash_algo=None,
        multi_step_stream_outputs=True,
        ignore_patterns=None,
        safetensors_load_strategy=None,
        scheduler_reserve_full_isl=False,
        numa_bind=False,
        tokenizer_pool_size=0,
        num_lookahead_slots=0,
        ray_workers_use_nsight=False,
        pt_load_map_location="cpu",
        lora_extra_vocab_size=None,
        disable_nccl_for_dp_synchronization=None,
        enable_flashinfer_autotune=None,
        enable_layerwise_nvtx_tracing=False,
        renderer_num_workers=1,
        performance_mode="balanced",
        kv_sharing_fast_prefill=False,
        mm_encoder_tp_mode="weights",
        mm_shm_cache_max_object_size_mb=None,
        mm_processor_cache_type=None,
        allow_deprecated_quantization=False,
    ),
    *_ignored("reasoning is told apart wherever the chat template shows it", enable_reasoning=None),
    *_ignored("every token is sent as soon as it is there", stream_interval=1),
    *_ignored(
        "metrics are those of /metrics and LLM.get_metrics()",
        show_hidden_metrics_for_version=None,
        kv_cache_metrics=False,
        kv_cache_metrics_sample=None,
        cudagraph_metrics=False,
        enable_mfu_metrics=False,
        enable_logging_iteration_details=False,
        aggregate_engine_logging=False,
    ),
    *_ignored(
        "there is one compiler of grammars",
        structured_outputs_config=None,
        guided_decoding_backend=None,
    ),
    *_ignored(
        "images alone are read, whose memory is planned before the start (image_cache_memory)",
        mm_processor_cache_gb=None,
        skip_mm_profiling=False,
        language_model_only=False,
    ),
    *_absent(
        "say runner='pooling' and convert='embed' or 'classify'",
        "generate",
        "none",
        task="auto",
    ),
    _renamed("override_pooler_config", "pooler_config"),
    *_absent(
        "the weights stay in the memory of the device; use a smaller dtype or quantization",
        0,
        cpu_offload_gb=0.0,
        offload_group_size=0,
    ),
    *_absent("blocks are kept by the engine itself", "native", kv_offloading_backend=None),
    *_absent(
        "one engine uses one device",
        1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
    ),
    *_absent("experts stay with the rank that read them", enable_eplb=False),
    *_absent("name the adapter with the request", default_mm_loras=None),
    *_ignored(
        "adapters are kept in the compute dtype, on one device",
        lora_dtype=None,
        fully_sharded_loras=False,
    ),
    *_absent(
        'give speculative_config={"method": "suffix"}',
        {},
        speculative_model=None,
        num_speculative_tokens=None,
    ),
    *_absent(
        "leave it out",
        {},
        kv_events_config=None,
        ec_transfer_config=None,
        weight_transfer_config=None,
        additional_config=None,
        profiler_config=None,
        attention_config=None,
        model_loader_extra_config=None,
        worker_cls="auto",
        worker_extension_cls="",
        scheduler_cls=None,
        io_processor_plugin=None,
        enable_return_routed_experts=False,
        logits_processor_pattern=None,
    ),
    *_ignored("every engine can sleep", enable_sleep_mode=False),
    *_absent("give token ids or text", enable_prompt_embeds=False),
    *_absent(
        "give functions of one request each as SamplingParams(logits_processors=[...])",
        [],
        (),
        logits_processors=None,
    ),
    *_absent("give kv_cache_memory", num_gpu_blocks_override=None),
    *_absent("lower max_model_len to the window", disable_sliding_window=False),
    *_absent(
        "log in once with `hf auth login`; secrets are no options", True, False, hf_token=None
    ),
    *_absent(
        'give hf_overrides={"rope_scaling": {...}} or {"rope_theta": ...}',
        {},
        rope_scaling=None,
        rope_theta=None,
    ),
    *_absent("log-probabilities are of the model's own logits", logprobs_mode="raw_logprobs"),
    *_absent(
        "engines of one server are on one machine; start several behind `quire route`",
        1,
        "mp",
        False,
        data_parallel_size_local=None,
        data_parallel_start_rank=None,
        data_parallel_rank=None,
        data_parallel_address=None,
        data_parallel_rpc_port=None,
        data_parallel_backend=None,
        data_parallel_hybrid_lb=None,
        data_parallel_external_lb=None,
        nnodes=1,
    ),
    *_ignored("it says where other machines are", node_rank=0, master_addr="", master_port=0),
    *_absent("leave it out", "auto", mamba_cache_dtype=None, all2all_backend=None),
    *_absent(
        "leave it out",
        enable_dbo=False,
        enable_prompt_adapter=False,
        override_neuron_config=None,
        long_lora_scaling_factors=None,
        video_pruning_rate=None,
        interleave_mm_strings=False,
        media_io_kwargs=None,
        speculative_draft_tensor_parallel_size=None,
    ),
    *_absent("put the config.json into the model folder", hf_config_path=None),
    *_absent("the scales of KV rows are computed as they are written", calculate_kv_scales=False),
    *_absent(
        "set OTEL_EXPORTER_OTLP_ENDPOINT for quire serve",
        otlp_traces_endpoint=None,
        collect_detailed_traces=None,
    ),
)

_SERVER_TABLE: tuple[ForeignOption, ...] = (
    _renamed("tool_call_parser", "tool_parser", None, {"openai": "harmony"}),
    _renamed("api_key", "api_keys", read=_as_keys, takes_text=True),
    _renamed("allowed_origins", "allow_origin", read=_as_tuple),
    *_ignored(
        "what pages of the allowed origins need is allowed",
        allowed_methods=None,
        allowed_headers=None,
        allow_credentials=False,
    ),
    *_ignored("every answer has an x-request-id", enable_request_id_headers=False),
    *_ignored("/load says it always", enable_server_load_tracking=False),
    *_ignored("one process serves HTTP", disable_frontend_multiprocessing=False),
    *_ignored("no error has a stack", log_error_stack=False),
    *_ignored("a fingerprint is made of all that decides on bits", fingerprint_mode="full"),
    *_ignored("tools are offered wherever a request brings them", enable_auto_tool_choice=False),
    *_ignored(
        "the form of contents that a chat template takes is read off it",
        chat_template_content_format="auto",
    ),
    *_ignored("usage counts cached tokens always", enable_prompt_tokens_details=False),
    *_ignored(
        "logs are those of --json-logs",
        uvicorn_log_level="info",
        disable_uvicorn_access_log=False,
        disable_access_log_for_endpoints=None,
        log_config_file=None,
        enable_log_outputs=False,
        enable_log_deltas=True,
    ),
    *_ignored("there are no such pages", disable_fastapi_docs=False, enable_offline_docs=False),
    *_ignored(
        "lines and headers of a request have limits of their own",
        h11_max_incomplete_event_size=None,
        h11_max_header_count=None,
    ),
    *_absent(
        "put a proxy that speaks TLS before the server",
        ssl_keyfile=None,
        ssl_certfile=None,
        ssl_ca_certs=None,
        ssl_ciphers=None,
        ssl_cert_reqs=0,
        enable_ssl_refresh=False,
        uds=None,
    ),
    *_absent(
        'set stream_options={"include_usage": true} in the request',
        enable_force_include_usage=False,
    ),
    *_absent("set return_tokens_as_token_ids in the request", return_tokens_as_token_ids=False),
    *_absent("set chat_template_kwargs in the request", default_chat_template_kwargs=None),
    *_absent("set thinking_token_budget in the request", reasoning_config=None),
    *_absent("leave the tools out of the request", exclude_tools_when_tool_choice_none=False),
    *_absent("use the HTTP API", headless=False, grpc=False, tokens_only=False),
    *_absent("say --drain-timeout SECONDS", shutdown_timeout=None),
    *_absent("give --chat-template", trust_request_chat_template=False),
    *_absent("use /metrics, or OTEL_EXPORTER_OTLP_ENDPOINT", enable_per_request_metrics=False),
    *_absent("use /tokenize and /detokenize", enable_tokenizer_info_endpoint=False),
    *_absent("answers have the role that their API gives them", response_role="assistant"),
    *_absent(
        "code is not loaded by name; put a proxy before the server",
        [],
        "",
        middleware=None,
        tool_parser_plugin=None,
        reasoning_parser_plugin=None,
        tool_server=None,
    ),
    *_absent("start several servers behind `quire route`", 1, api_server_count=None),
)

FOREIGN_OPTIONS: Mapping[str, ForeignOption] = {each.name: each for each in _TABLE}
"""The engine's, by vLLM's name."""
FOREIGN_SERVER_OPTIONS: Mapping[str, ForeignOption] = {each.name: each for each in _SERVER_TABLE}
"""The server's, by vLLM's name."""

OTHER_VALUES: Mapping[str, Mapping[str, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "max_model_len": {"auto": None, "-1": None},
    "load_format": {"safetensors": "auto", "hf": "auto", "fastsafetensors": "auto"},
    "attention_backend": {
        "FLASH_ATTN": "flash-attention",
        "FLASHINFER": "flashinfer",
        "TRITON_ATTN": "triton",
        "CPU_ATTN": "auto",
        "TORCH_SDPA": "auto",
    },
    "reasoning_parser": {
        "": "auto",
        "deepseek_r1": "think",
        "glm45": "think",
        "qwen3": "think",
        "openai_gptoss": "harmony",
    },
}
"""Values of our own options that vLLM calls otherwise, by the text of the value."""

_SHORT_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmM])")
_FACTORS = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}


def translate(
    options: Mapping[str, Any], table: Mapping[str, ForeignOption] = FOREIGN_OPTIONS
) -> dict[str, Any]:
    """Return options under the names and values that they have here, by the engine's table or
    another. None everywhere means "you decide", and is dropped.

    Unknown names pass. Raises ConfigError for an option that is given twice, NotAvailableError for
    a feature that there is not.
    """
    translated: dict[str, Any] = {}
    for name, value in options.items():
        foreign = table.get(name)
        if foreign is None:
            value = _as_here(name, value)
            if value is not None:
                translated[name] = value
        elif foreign.kind != "renamed":
            _take_note(foreign, value)
        elif value is not None:
            if options.get(foreign.text) not in (None, "auto"):
                raise ConfigError(
                    f"{name} and {foreign.text} are the same option; give one of them"
                )
            translated[foreign.text] = (
                foreign.values.get(value, value) if foreign.read is None else foreign.read(value)
            )
    return translated


def _take_note(foreign: ForeignOption, value: object) -> None:
    if foreign.is_neutral(value):
        return
    if foreign.kind == "absent":
        raise NotAvailableError(
            f"{foreign.name}={_shown(value)} is not available in this version; {foreign.text}"
        )
    logger.warning("option %s has no effect: %s", foreign.name, foreign.text)


def _as_here(name: str, value: Any) -> Any:
    text = str(value)
    if name == "dtype":  # torch.bfloat16, known by its name without an import
        text = text.removeprefix("torch.")
        value = text if type(value).__name__ == "dtype" else value
    if text in OTHER_VALUES.get(name, {}):
        return OTHER_VALUES[name][text]
    if name == "max_model_len" and isinstance(value, str):
        return read_length(value)
    return value


def read_length(text: str) -> int:
    """Return a number of tokens as people write it: 8192, 8k (thousands), 8K (of 1,024)."""
    short = _SHORT_LENGTH.fullmatch(text)
    if short is not None:
        return int(float(short[1]) * _FACTORS[short[2]])
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"max_model_len={text!r} is no number of tokens; write 8192, 8k or 8K"
        ) from None


def _same(left: object, right: object) -> bool:
    """Equal, and not merely as True equals 1."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
