"""Scripts written for vLLM's offline interface, with `quire` where they import `vllm`: the calls of
its published examples.

Each test makes the calls of the examples that its name says, against the model that ships here.
What an example needs that this version does not have must be refused by one line that names it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    ModelRegistry,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from quire.engine.front.metrics import Counter, Gauge, Histogram, Vector
from quire.errors import InvalidParameterError, NotAvailableError, QuireError
from quire.sampling_params import GuidedDecodingParams, RequestOutputKind, StructuredOutputsParams
from quire.utils import FlexibleArgumentParser
from quire.weights.folder import resolve_model

MODEL = "quire-storyteller"
SMALL: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "16MiB", "max_num_seqs": 8}
PROMPTS = ["Once upon a time", "The old king", "A fox and a hen"]
CHAT = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What about?"},
    {"role": "user", "content": "Tell me a story about a fox."},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        model=MODEL,
        trust_remote_code=True,
        dtype="half",
        gpu_memory_utilization=0.5,
        swap_space=0,
        **SMALL,
    ) as llm:
        yield llm


def _parser() -> FlexibleArgumentParser:
    """As the examples make it: the engine's options, a default model, and options of their own."""
    parser = FlexibleArgumentParser(description="an example")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=MODEL)
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    return parser


def _arguments(*extra: str) -> list[str]:
    return [
        "--num-threads",
        "1",
        "--kv_cache_memory_bytes",
        str(16 << 20),
        "--max-num-seqs=8",
        *extra,
    ]


def test_basic_and_reproducibility(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(isinstance(output, RequestOutput) and output.outputs[0].text for output in outputs)
    again = llm.generate(PROMPTS, sampling_params=params, use_tqdm=False)
    assert [each.outputs[0].text for each in again] == [each.outputs[0].text for each in outputs]


def test_generate_from_a_command_line() -> None:
    args = vars(
        _parser().parse_args(
            _arguments("--max-tokens", "5", "--temperature", "0", "--trust-remote-code")
        )
    )
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    with LLM(**args) as llm:
        params = llm.get_default_sampling_params()
        params.max_tokens, params.temperature = max_tokens, temperature
        outputs = llm.generate(PROMPTS, params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [5] * 3
        assert llm.llm_engine.model_config.max_model_len == 512


def test_chat_and_chat_with_tools(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    [single] = llm.chat(CHAT, params, use_tqdm=False)
    several = llm.chat([CHAT] * 3, params, use_tqdm=True)
    assert {output.outputs[0].text for output in several} == {single.outputs[0].text}
    tools = [
        {
            "type": "function",
            "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    assert llm.chat(CHAT, params, use_tqdm=False, tools=tools, lora_request=None)[0].finished
    source = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    [other] = llm.chat(
        CHAT, params, use_tqdm=False, chat_template=source, chat_template_content_format="string"
    )
    assert other.prompt == "".join(f"{message['content']}\n" for message in CHAT)
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}],
        }
    ]
    [text] = llm.chat(
        parts, params, use_tqdm=False, chat_template=source, chat_template_content_format="string"
    )
    assert text.prompt == "Tell me\na story.\n"
    [openai] = llm.chat(CHAT, params, use_tqdm=False, chat_template_content_format="openai")
    assert openai.outputs[0].text == single.outputs[0].text
    [going_on] = llm.chat(
        [CHAT[1], {"role": "assistant", "content": "Once upon"}], params, use_tqdm=False,
        add_generation_prompt=False, continue_final_message=True,
    )  # fmt: skip
    assert going_on.prompt is not None and going_on.prompt.endswith("Once upon")


def test_prompts_of_text_and_of_tokens(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    token_ids = tokenizer.encode(PROMPTS[0])
    params = SamplingParams(temperature=0.0, max_tokens=6)
    forms: list[Any] = [
        TextPrompt(prompt=PROMPTS[0]),
        TokensPrompt(prompt_token_ids=token_ids),
        [token_ids],
    ]
    answers = [llm.generate(form, params, use_tqdm=False)[0].outputs[0].token_ids for form in forms]
    answers.append(
        llm.generate(prompt_token_ids=[token_ids], sampling_params=params)[0].outputs[0].token_ids
    )
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    [by_hand], [by_chat] = llm.generate(rendered, params), llm.chat(CHAT, params)
    assert answers == [answers[0]] * 4
    assert by_hand.outputs[0].token_ids == by_chat.outputs[0].token_ids
    assert (
        by_hand.prompt_token_ids
        == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    )


def test_prefix_caching_and_its_reset(llm: LLM) -> None:
    llm.reset_prefix_cache()
    params, prompt = SamplingParams(temperature=0, max_tokens=8), PROMPTS[0] * 10
    [first], [second] = llm.generate(prompt, params), llm.generate(prompt, params)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(second.prompt_token_ids) - 1
    assert llm.reset_prefix_cache()
    [third] = llm.generate(prompt, params)
    assert third.num_cached_tokens == 0
    assert {output.outputs[0].text for output in (first, second, third)} == {first.outputs[0].text}


def test_structured_outputs(llm: LLM) -> None:
    def answer(form: Any, **options: Any) -> str:
        params = SamplingParams(structured_outputs=form, max_tokens=50, **options)
        return llm.generate("The fox was", sampling_params=params)[0].outputs[0].text

    assert answer(StructuredOutputsParams(choice=["good", "bad"])) in ("good", "bad")
    assert answer(StructuredOutputsParams(regex=r"[a-z]{3}\n"), stop=["\n"]).isalpha()
    schema = {
        "type": "object",
        "properties": {"old": {"type": "boolean"}},
        "required": ["old"],
        "additionalProperties": False,
    }
    assert answer(StructuredOutputsParams(json=schema, disable_any_whitespace=True)) in (
        '{"old":true}',
        '{"old":false}',
    )
    assert answer(StructuredOutputsParams(grammar='start: "red" | "blue"')) in ("red", "blue")
    older = SamplingParams(
        guided_decoding=GuidedDecodingParams(choice=["yes", "no"], backend="xgrammar")
    )
    assert llm.generate("Is it?", older)[0].outputs[0].text in ("yes", "no")


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    outputs = llm.beam_search(
        [TextPrompt(prompt=PROMPTS[0]), TextPrompt(prompt=PROMPTS[1])], params, lora_request=None
    )
    for output in outputs:
        best = output.sequences[0]
        assert best.tokens == output.prompt_token_ids + best.token_ids
        assert best.cum_logprob == best.cumulative_logprob
        assert [each.cum_logprob for each in output.sequences] == sorted(
            (each.cum_logprob for each in output.sequences), reverse=True
        )


def test_the_engine_by_hand_with_a_reset_of_running_requests() -> None:
    """`llm_engine_example` and `reset_kv`: requests of all sorts, added between steps;
    a reset changes no answer."""

    def prompts() -> list[tuple[str, SamplingParams]]:
        return [
            (
                PROMPTS[0] * 5,
                SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=12),
            ),
            (
                PROMPTS[1],
                SamplingParams(
                    temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=20, seed=3
                ),
            ),
            (
                PROMPTS[2],
                SamplingParams(
                    n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1, max_tokens=20, seed=4
                ),
            ),
        ]

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine = LLMEngine.from_engine_args(
        EngineArgs.from_cli_args(parser.parse_args(["--model", MODEL, *_arguments()]))
    )

    def run(reset_at: int | None) -> dict[str, RequestOutput]:
        todo, finished, step = prompts(), {}, 0
        while todo or engine.has_unfinished_requests():
            if todo:
                engine.add_request(str(len(todo)), *todo.pop(0))
            if step == reset_at:
                assert engine.reset_prefix_cache(reset_running_requests=True)
            for output in engine.step():
                if isinstance(output, RequestOutput) and output.finished:
                    finished[output.request_id] = output
            step += 1
        return finished

    plain, reset = run(None), run(10)
    assert sorted(plain) == ["1", "2", "3"]
    for name, output in plain.items():
        assert [each.token_ids for each in output.outputs] == [
            each.token_ids for each in reset[name].outputs
        ]
        assert [each.logprobs for each in output.outputs] == [
            each.logprobs for each in reset[name].outputs
        ]
    engine.shutdown()


def test_async_streaming_and_pause_and_resume() -> None:
    args = AsyncEngineArgs(
        model=MODEL, enforce_eager=True, num_threads=1, kv_cache_memory_bytes=16 << 20
    )
    engine = AsyncLLM.from_engine_args(args)

    async def stream() -> str:
        text = ""
        params = SamplingParams(
            max_tokens=20, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA
        )
        async for output in engine.generate(
            request_id="stream", prompt=PROMPTS[0], sampling_params=params
        ):
            text += "".join(each.text for each in output.outputs)
        return text

    async def paused(mode: Any) -> tuple[int, RequestOutput]:
        """Tokens that came between pause and resume, and the last output."""
        params, num_tokens, is_held = (
            SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0),
            0,
            asyncio.Event(),
        )

        async def generate() -> RequestOutput:
            nonlocal num_tokens
            async for output in engine.generate(
                request_id="kept", prompt=PROMPTS[1], sampling_params=params
            ):
                num_tokens = len(output.outputs[0].token_ids)
                if num_tokens >= 3:
                    is_held.set()
            return output

        task = asyncio.create_task(generate())
        await is_held.wait()
        await engine.pause_generation(mode=mode)
        await asyncio.sleep(0)
        for _ in range(3):  # what was on its way has arrived after these
            await engine.check_health()
        before = num_tokens
        assert await engine.is_paused()
        await asyncio.sleep(0.2)
        num_meanwhile = num_tokens - before
        await engine.resume_generation()
        async with asyncio.timeout(60):
            return num_meanwhile, await task

    async def main() -> None:
        assert await stream() == await stream() != ""
        for mode in ("keep", "wait"):
            num_meanwhile, output = await paused(mode)
            assert num_meanwhile == 0 and len(output.outputs[0].token_ids) == 60, mode
        num_meanwhile, output = await paused("abort")
        assert output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) < 60
        with pytest.raises(InvalidParameterError, match="mode='nap' is unknown"):
            await engine.pause_generation(mode="nap")  # type: ignore[arg-type]
        assert await engine.reset_prefix_cache() and engine.is_running and not engine.errored

    try:
        asyncio.run(main())
    finally:
        engine.shutdown()


def test_metrics(llm: LLM) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
    seen: dict[str, float] = {}
    for metric in llm.get_metrics():
        assert metric.labels["model_name"] == MODEL
        if isinstance(metric, Gauge | Counter):
            seen[metric.name] = metric.value
        elif isinstance(metric, Vector):
            assert metric.values
        elif isinstance(metric, Histogram):
            assert metric.count == metric.buckets["+Inf"] > 0 and metric.sum > 0
    assert seen["vllm:generation_tokens"] >= 12 and seen["vllm:num_requests_running"] == 0
    assert {"vllm:prompt_tokens", "vllm:kv_cache_usage_perc", "vllm:num_preemptions"} <= set(seen)


def test_requests_that_wait_in_a_queue(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5)
    ids = [*llm.enqueue(PROMPTS[0], params), *llm.enqueue(PROMPTS[1:], params)]
    expected = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)]
    outputs = llm.wait_for_completion()
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.wait_for_completion() == []


def test_context_extension() -> None:
    scaling = {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
    }
    with LLM(model=MODEL, hf_overrides={"rope_parameters": scaling}, **SMALL) as llm:
        assert llm.llm_engine.model_config.max_model_len == 1024
        [output] = llm.chat(
            CHAT, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8), use_tqdm=False
        )
        assert output.outputs[0].token_ids
    with pytest.raises(QuireError, match="max_model_len=513 is beyond the 512 tokens"):
        LLM(model=MODEL, max_model_len=513, **SMALL)


def test_parameters_that_scripts_give(llm: LLM) -> None:
    params = SamplingParams.from_optional(
        n=1, temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1, flat_logprobs=True,
        extra_args={"mine": 1}, truncate_prompt_tokens=3, top_p=None, skip_clone=True,
        stream_interval=1,
    )  # fmt: skip
    [output] = llm.generate(PROMPTS[0] * 4, params)
    completion = output.outputs[0]
    assert len(output.prompt_token_ids) == 3
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    listed = llm.generate(
        {"prompt_token_ids": output.prompt_token_ids},
        dataclasses.replace(params, flat_logprobs=False),
    )[0]
    assert list(completion.logprobs) == listed.outputs[0].logprobs
    assert completion.logprobs[-1] == listed.outputs[0].logprobs[-1]
    assert len(completion.logprobs.token_ids) == sum(map(len, completion.logprobs))  # type: ignore[attr-defined]
    assert list(output.prompt_logprobs) == [each or {} for each in listed.prompt_logprobs]  # type: ignore[union-attr]
    assert completion.finished() and output.lora_request is None and output.encoder_prompt is None
    shorter = llm.generate(
        PROMPTS[0] * 4, tokenization_kwargs={"truncate_prompt_tokens": 5}, use_tqdm=False
    )
    assert len(shorter[0].prompt_token_ids) == 5


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("start_profile", "quire bench"),
        ("stop_profile", "quire bench"),
        ("apply_model", "compiled kernels"),
    ],
)
def test_methods_that_this_version_does_not_have_say_so_in_one_line(
    method: str, advice: str, llm: LLM
) -> None:
    with pytest.raises(NotAvailableError) as raised:
        getattr(llm, method)("x", level=1)
    assert str(raised.value).startswith(f"{method}() is not available in this version; ")
    assert advice in str(raised.value) and "\n" not in str(raised.value)


Call = Callable[[LLM], object]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}),
            "multi_modal_data: this model reads text alone",
        ),
        (lambda llm: llm.generate({"prompt_embeds": [1.0]}), "'prompt_embeds' is not available"),
        (
            lambda llm: llm.chat(CHAT, mm_processor_kwargs={"x": 1}),
            "mm_processor_kwargs is not available",
        ),
        (
            lambda llm: llm.generate("x", tokenization_kwargs={"stride": 2}),
            "tokenization_kwargs with 'stride' is not",
        ),
        (
            lambda llm: SamplingParams(trace_decode_token_ids=[1]),
            "trace_decode_token_ids=[1] is not available",
        ),
        (
            lambda llm: SamplingParams(prompt_logprob_start=3),
            "prompt_logprob_start=3 is not available",
        ),
        (
            lambda llm: BeamSearchParams(2, 2, structured_outputs={}),  # type: ignore[arg-type]
            "structured_outputs are not available for beam",
        ),
        (lambda llm: llm.embed("a"), "was loaded to generate text"),
        (
            lambda llm: ModelRegistry.register_model("x", object),
            "ModelRegistry.register_model() is not available",
        ),
        (lambda llm: LLM(MODEL, task="embed"), "task='embed' is not available"),
        (
            lambda llm: LLM(MODEL, speculative_config={"method": "medusa", "model": "x"}),
            "speculative_config: method 'medusa' is not available",
        ),
        (lambda llm: LLM(MODEL, default_mm_loras={"image": "x"}), "default_mm_loras"),
        (lambda llm: LLM(MODEL, enable_eplb=True), "enable_eplb=True is not available"),
        (
            lambda llm: LLM(MODEL, kv_transfer_config={"kv_role": "x"}),
            "kv_connector=None is not available",
        ),
        (
            lambda llm: LLM(MODEL, logits_processors=[object]),
            "SamplingParams(logits_processors=[...])",
        ),
        (
            lambda llm: LLM(MODEL, enable_prompt_embeds=True),
            "enable_prompt_embeds=True is not available",
        ),
        (
            lambda llm: LLM(MODEL, pipeline_parallel_size=65),
            "pipeline_parallel_size=65 is too many",
        ),
        (lambda llm: LLM(MODEL, data_parallel_size=65), "data_parallel_size=65 is too many"),
        (
            lambda llm: LLM(MODEL, chat_template="no-such-file"),
            "chat_template='no-such-file' is no file",
        ),
        (
            lambda llm: llm.chat(CHAT, chat_template_content_format="yaml"),
            "chat_template_content_format='yaml' is unknown",
        ),
        (lambda llm: llm.generate(), "give prompts, or prompt_token_ids"),
    ],
)
def test_what_an_example_needs_and_this_version_lacks_is_named(
    call: Call, message: str, llm: LLM
) -> None:
    with pytest.raises(QuireError) as raised:
        call(llm)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_half_precision_checkpoints_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = resolve_model(MODEL)
    for file in source.glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    tensors = load_file(source / "model.safetensors")
    save_file({name: each.half() for name, each in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answers = []
    for dtype in ("auto", "half", "bfloat16"):
        with LLM(str(tmp_path), dtype=dtype, **SMALL) as llm:
            assert llm.llm_engine.model_config.dtype == "bfloat16"
            [output] = llm.generate(
                PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False
            )
            answers.append(output.outputs[0].token_ids)
    assert answers == [answers[0]] * 3
    assert caplog.text.count("computing in bfloat16") == 2


def test_a_chat_template_may_be_given_for_all_chats(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    with LLM(MODEL, chat_template=path, **SMALL) as llm:
        [output] = llm.chat(CHAT[3:], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.prompt == "[Tell me a story about a fox.]"


def test_a_progress_bar_of_ones_own_is_called_as_tqdm_is(llm: LLM) -> None:
    calls: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            calls.append(options["total"])

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("closed")

        def update(self, num: int) -> None:
            calls.append(num)

    llm.generate(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=Bar)
    assert calls == [3, 1, 1, 1, "closed"]


def test_adapters_are_named_as_other_engines_name_them(llm: LLM) -> None:
    adapter = LoRARequest("sql", 1, "no-such-folder")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("sql", 1, "no-such-folder")
    assert LoRARequest("sql", 1, Path("no-such-folder")) == adapter
    with pytest.raises(QuireError, match="enable_lora=True"):
        llm.generate("x", lora_request=adapter)
    with pytest.raises(QuireError, match="enable_lora=True"):
        llm.chat(CHAT, lora_request=adapter)
    with LLM(MODEL, enable_lora=True, max_loras=1, max_lora_rank=64, max_cpu_loras=2) as served:
        with pytest.raises(QuireError, match="not the folder of an adapter"):
            served.generate("x", lora_request=adapter)
        with pytest.raises(QuireError, match="2 lora_requests for 1 prompts"):
            served.generate(["x"], lora_request=[adapter, None])
        with pytest.raises(QuireError, match="give a LoRARequest"):
            served.generate("x", lora_request="sql")  # type: ignore[arg-type]
        assert served.generate(["x"], lora_request=[None], use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1, "x"), "lora_name"),
        (("sql", 0, "x"), "lora_int_id"),
        (("sql", True, "x"), "lora_int_id"),
        (("sql", 1, ""), "lora_path"),
        (("sql", 1, "a\0b"), "lora_path"),
    ],
)
def test_adapters_that_are_none_are_refused(arguments: tuple[str, int, str], message: str) -> None:
    with pytest.raises(QuireError, match=message):
        LoRARequest(*arguments)
