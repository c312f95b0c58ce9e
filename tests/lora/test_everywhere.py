"""Adapters of embeddings, the head, biases, routers and experts: merged weights, PEFT's own files and
numbers, and no bit that depends on the batch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import (
    MOE,
    TINY,
    MakeLLM,
    merged,
    write_adapter,
    write_model,
    write_whole_adapter,
)
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams, TokensPrompt
from quire.core.speculation.drafters import Draft
from quire.core.speculation.speculator import Speculator
from quire.engine.loop.engine import Engine
from quire.errors import ConfigError, QuireError
from quire.kernels import cpu
from quire.lora import finite, weights
from quire.outputs import RequestOutput
from quire.weights.tensor_file import TensorFile

PROMPT = random.Random(3).choices(range(3, 199), k=21)
IS_NATIVE = not cpu.reasons_against("cpu", torch.float32)
BACK_ENDS = ["reference", *(["cpu"] if IS_NATIVE else [])]
QWEN2 = {**TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
TIED = {**TINY, "tie_word_embeddings": True}
MODELS = {"qwen2": QWEN2, "experts": MOE}


def _answers(llm: LLM, adapters: list[LoRARequest | None], **params: Any) -> list[RequestOutput]:
    given = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, "logprobs": 10}
    prompts = [TokensPrompt(prompt_token_ids=PROMPT)] * len(adapters)
    sampling = SamplingParams(**{**given, "prompt_logprobs": 3, **params})
    return llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)


def _numbers(output: RequestOutput) -> tuple[Any, ...]:
    assert output.error is None
    [answer] = output.outputs
    return answer.token_ids, answer.logprobs, output.prompt_logprobs


def _logprobs(llm: LLM, adapter: LoRARequest | None, prompt: list[int] = PROMPT) -> torch.Tensor:
    """Of the token behind a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    [output] = llm.generate(
        TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False, lora_request=adapter
    )
    [row] = output.outputs[0].logprobs or []
    return torch.tensor([row[token_id].logprob for token_id in range(len(row))])


def _options(config: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    has_experts = "num_experts" in config
    return {"model": str(folder), "max_logprobs": -1, "lora_experts": has_experts, **options}


@pytest.mark.slow_except("experts-cpu", "qwen2-reference")
@pytest.mark.parametrize("kernels", BACK_ENDS)
@pytest.mark.parametrize("name", MODELS)
def test_adapters_of_everything_equal_merged_weights(
    make_llm: MakeLLM, tmp_path: Path, name: str, kernels: str
) -> None:
    config, model = MODELS[name], tmp_path / "model"
    spec = write_model(model, config)
    llm = make_llm(**_options(config, model, kernels=kernels))
    plain = _logprobs(llm, None)
    for number, rank in enumerate((1, 4, 19)):
        folder = write_whole_adapter(tmp_path / str(rank), spec, rank=rank, seed=number)
        target = tmp_path / f"{rank}-merged"
        target.mkdir()
        weights = merged(load_file(model / "model.safetensors"), folder)
        save_file(weights, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(config))
        whole = make_llm(model=str(target), enable_lora=False, max_logprobs=-1, kernels=kernels)
        expected = _logprobs(whole, None)
        found = _logprobs(llm, LoRARequest(f"{rank}", number + 1, str(folder)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)
        assert (expected - plain).abs().max() > 0.1


@pytest.mark.slow_except("experts-float32")
@pytest.mark.parametrize("options", [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
], ids=lambda options: "-".join(options.values()))  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_depends_on_the_batch_nor_on_adapters_beside_it(
    make_llm: MakeLLM, tmp_path: Path, name: str, options: dict[str, str]
) -> None:
    config, model = MODELS[name], tmp_path / "model"
    spec = write_model(model, config)
    given = _options(config, model, **options)
    folders = [
        write_whole_adapter(tmp_path / f"{n}", spec, rank=rank, seed=n)
        for n, rank in enumerate((3, 16))
    ]
    folders.append(write_adapter(tmp_path / "plain", spec, rank=5, targets=("q_proj", "o_proj")))
    first, second, third = [LoRARequest(f"{n}", n + 1, str(f)) for n, f in enumerate(folders)]
    mixed: list[LoRARequest | None] = [first, None, second, third, None, first]
    together = _answers(make_llm(**given), mixed)
    chunked = _answers(make_llm(**given, max_num_batched_tokens=9, max_num_seqs=9), mixed)
    alone = make_llm(**given, enable_prefix_caching=False, max_loras=1, num_threads=2)
    for adapter, whole, parts in zip(mixed, together, chunked, strict=True):
        [expected] = _answers(alone, [adapter])
        assert _numbers(whole) == _numbers(expected) == _numbers(parts)
    [plain] = _answers(make_llm(**{**given, "enable_lora": False, "lora_experts": False}), [None])
    assert _numbers(together[1]) == _numbers(plain) == _numbers(together[-2])
    drawn = _answers(make_llm(**given), mixed, temperature=1.0, seed=5, logprobs=None)
    for adapter, whole in zip(mixed, drawn, strict=True):
        [expected] = _answers(alone, [adapter], temperature=1.0, seed=5, logprobs=None)
        assert _numbers(whole) == _numbers(expected)


class _Known:
    """Implements `Drafter`: some known answer, every third token of which is another."""

    def __init__(self, answers: list[list[int]]) -> None:
        self._answers = answers

    def draft(self, sequence: Any, most: int) -> Draft:
        done = list(sequence.output_token_ids)
        found = [each for each in self._answers if each[: len(done)] == done]
        tokens = found[0][len(done) :][:most] if found else []
        return Draft([each if place % 3 != 2 else 3 for place, each in enumerate(tokens)], 1)

    def end(self, sequence: Any) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_verified_with_the_head_that_an_adapter_changes(
    make_llm: MakeLLM, tmp_path: Path, name: str
) -> None:
    config, model = MODELS[name], tmp_path / "model"
    spec = write_model(model, config)
    folder = write_whole_adapter(tmp_path / "adapter", spec)
    adapters: list[LoRARequest | None] = [LoRARequest("all", 1, str(folder)), None] * 2
    given = _options(config, model)
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 0.7, "seed": 1}
    expected = _answers(make_llm(**given), adapters, **params)
    llm = make_llm(**given)
    assert isinstance(llm.engine, Engine)
    known = _Known([list(each.outputs[0].token_ids) for each in expected])
    llm.engine.scheduler.look_ahead = Speculator(known, 4)
    found = _answers(llm, adapters, **params)
    assert list(map(_numbers, found)) == list(map(_numbers, expected))
    stats = llm.engine.scheduler.stats
    assert 0 < sum(stats.num_right_by_place) < stats.num_run_tokens


def test_native_programs_give_the_bits_of_their_kernels_one_by_one(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not IS_NATIVE:
        pytest.skip("there are no native kernels")
    from quire.kernels.cpu.kernels import CpuKernels
    from quire.kernels.interpreter import Interpreter
    from quire.program.passes import select_wanted

    spec = write_model(tmp_path / "model", MOE)
    folder = write_whole_adapter(tmp_path / "adapter", spec)
    adapters: list[LoRARequest | None] = [LoRARequest("all", 1, str(folder)), None]
    given = _options(MOE, tmp_path / "model")
    found = {
        dtype: _answers(make_llm(**given, dtype=dtype), adapters)
        for dtype in ("float32", "bfloat16")
    }

    def one_by_one(self: Any, program: Any, weights: Any) -> Interpreter:
        return Interpreter(program, select_wanted(program, 16), weights, self)

    monkeypatch.setattr(CpuKernels, "compile", one_by_one)
    for dtype, outputs in found.items():
        expected = _answers(make_llm(**given, dtype=dtype), adapters)
        assert list(map(_numbers, outputs)) == list(map(_numbers, expected))


def test_experts_that_are_read_from_a_file_take_adapters(make_llm: MakeLLM, tmp_path: Path) -> None:
    if not IS_NATIVE:
        pytest.skip("there are no native kernels")
    spec = write_model(tmp_path / "model", MOE)
    folder = write_whole_adapter(tmp_path / "adapter", spec)
    adapters: list[LoRARequest | None] = [LoRARequest("all", 1, str(folder)), None]
    given = _options(MOE, tmp_path / "model", weights_cache=str(tmp_path / "cache"))
    expected = _answers(make_llm(**given), adapters)
    found = _answers(make_llm(**given, expert_memory="60KiB"), adapters)
    assert list(map(_numbers, found)) == list(map(_numbers, expected))


def _fused(factors: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What PEFT keeps of (down [rank, inputs], up [outputs, rank]) of all experts."""
    downs, ups = zip(*factors, strict=True)
    return torch.cat(downs), torch.stack(ups, dim=2).flatten(1)


def _write_experts(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> LoRARequest:
    folder.mkdir()
    given = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    named = {
        f"base_model.model.{name}": each.clone().contiguous() for name, each in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors")
    return LoRARequest(folder.name, 1, str(folder))


@pytest.mark.parametrize("inner", [48, 64])
def test_modules_and_tensors_of_all_releases_of_peft_give_the_same_bits(
    make_llm: MakeLLM, tmp_path: Path, inner: int
) -> None:
    """Older releases take the outputs of a tensor [experts, outputs, inputs] for its inputs."""
    model = tmp_path / "model"
    write_model(model, {**MOE, "moe_intermediate_size": inner})
    rng = torch.Generator().manual_seed(7)
    as_modules, recent, older = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        sizes = {"gate_up_proj": (64, 2 * inner), "down_proj": (inner, 64)}
        for name, (inputs, outputs) in sizes.items():
            factors = [
                (
                    torch.randn(3, inputs, generator=rng) * 0.2,
                    torch.randn(outputs, 3, generator=rng),
                )
                for _ in range(6)
            ]
            inside = ".base_layer" if name == "gate_up_proj" else ""
            down, up = _fused(factors)
            recent |= {f"{at}{inside}.lora_A.weight": down, f"{at}{inside}.lora_B.weight": up}
            down, up = _fused([(up.T, down.T) for down, up in factors])
            older |= {f"{at}{inside}.lora_A.weight": down, f"{at}{inside}.lora_B.weight": up}
            parts = ("gate_proj", "up_proj") if inside else ("down_proj",)
            for expert, (down, up) in enumerate(factors):
                for part, rows in zip(parts, up.chunk(len(parts)), strict=True):
                    as_modules[f"{at}.{expert}.{part}.lora_A.weight"] = down
                    as_modules[f"{at}.{expert}.{part}.lora_B.weight"] = rows
    targets = ["gate_proj", "up_proj", "down_proj"]
    named = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    llm = make_llm(**_options(MOE, model))
    expected = _logprobs(llm, _write_experts(tmp_path / "a", as_modules, target_modules=targets))
    given = _write_experts(tmp_path / "b", recent, **named, peft_version="0.21.2")
    assert torch.equal(_logprobs(llm, given), expected)
    assert (_logprobs(llm, None) - expected).abs().max() > 0.1
    given = _write_experts(tmp_path / "c", older, **named, peft_version="0.17.0")
    if inner == 64:  # as many outputs as inputs: the shapes do not tell
        with pytest.raises(QuireError, match="as many inputs as outputs"):
            _logprobs(llm, given)
    else:
        torch.testing.assert_close(_logprobs(llm, given), expected)


def test_experts_need_room_that_was_planned(make_llm: MakeLLM, tmp_path: Path) -> None:
    spec = write_model(tmp_path / "model", MOE)
    folder = write_whole_adapter(tmp_path / "adapter", spec)
    llm = make_llm(model=str(tmp_path / "model"))
    with pytest.raises(QuireError, match="serve the model with lora_experts=True"):
        _answers(llm, [LoRARequest("all", 1, str(folder))])
    write_model(tmp_path / "dense", TINY)
    with pytest.raises(ConfigError, match="has none; leave it out"):
        make_llm(model=str(tmp_path / "dense"), lora_experts=True)
    roomy = make_llm(model=str(tmp_path / "model"), lora_experts=True)
    planned = [each.engine.plan.adapters for each in (llm, roomy)]
    assert planned[0] is not None and planned[1] is not None
    assert planned[1].num_bytes > 2 * planned[0].num_bytes


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors: tensors.update({"base_model.model.model.norm.bias": torch.zeros(64)}), "norm.base_layer.bias"),
    (lambda tensors: tensors.update({"base_model.model.model.norm.weight": torch.zeros(64)}), "norm.weight"),
    (lambda tensors: tensors.pop("base_model.model.lm_head.lora_A.weight"), "lm_head there is lora_B alone"),
    (lambda tensors: tensors.pop("base_model.model.model.embed_tokens.lora_embedding_B"), "there is lora_embedding_A alone"),
    (lambda tensors: tensors.update({"base_model.model.lm_head.base_layer.weight": torch.ones(199, 64)}), "another lm_head"),
    (lambda tensors: tensors.update({"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(200, 64)}), "another model.embed_tokens"),
    (lambda tensors: tensors.update({"base_model.model.model.layers.0.mlp.up_proj.bias": torch.ones(96)}), "which has none in the model"),
], ids=["norm bias", "norm", "half a head", "half an embedding", "another head", "another vocabulary", "no such bias"])  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(
    make_llm: MakeLLM, tmp_path: Path, change: Any, message: str
) -> None:
    spec = write_model(tmp_path / "model", QWEN2)
    folder = write_whole_adapter(tmp_path / "adapter", spec)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    llm = make_llm(model=str(tmp_path / "model"))
    try:
        [output] = _answers(llm, [LoRARequest("bad", 1, str(folder))])
        text = str(output.error)
    except QuireError as error:
        text = str(error)
    assert message in text
    [plain] = _answers(llm, [None])
    assert plain.error is None


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_copies_of_a_table_are_compared_row_by_row(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spec = write_model(tmp_path / "model", QWEN2)
    table = load_file(tmp_path / "model" / "model.safetensors")[f"{name}.weight"]
    other = table.clone()
    other[-1, -1] += 1.0
    folders = [write_whole_adapter(tmp_path / each, spec) for each in ("own", "other")]
    for folder, copy in zip(folders, (table, other), strict=True):
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors[f"base_model.model.{name}.base_layer.weight"] = copy
        save_file(tensors, folder / "adapter_model.safetensors")
    largest, read_into = 0, TensorFile.read_into

    def noted(self: TensorFile, buffer: memoryview, start: int) -> None:
        nonlocal largest
        largest = max(largest, buffer.nbytes)
        read_into(self, buffer, start)

    llm = make_llm(model=str(tmp_path / "model"))
    monkeypatch.setattr(weights, "_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(finite, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(TensorFile, "read_into", noted)
    own, changed = _answers(
        llm, [LoRARequest(each.name, place, str(each)) for place, each in enumerate(folders, 1)]
    )
    assert own.error is None and f"another {name}" in str(changed.error)
    assert largest < table.nbytes / 2


def _randomised(model: Any, seed: int) -> None:
    """Everything that was trained, as training would leave it."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(values * (0.3 if "A" in name.split("lora_")[-1] else 0.1))


def _cases() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Configurations of transformers, and of PEFT."""
    base = {
        "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    experts = {**base, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    oss = {**base, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ends = ["q_proj", "embed_tokens", "lm_head"]
    square = {**experts, "moe_intermediate_size": 64}
    return {
        "ends": ("Qwen2", base, {"target_modules": ends}),
        "tied ends": ("Llama", {**base, "tie_word_embeddings": True}, {"target_modules": ends}),
        "scaled ends": ("Gemma2", base, {"target_modules": ["embed_tokens", "v_proj"]}),
        "all biases": ("Qwen2", base, {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
        "some biases": ("Qwen2", base, {"target_modules": ["k_proj"], "bias": "lora_only"}),
        "own biases": ("Llama", base, {"target_modules": ["q_proj", "gate_proj"], "lora_bias": True}),
        "experts": ("Qwen3Moe", experts, {"target_modules": ["q_proj"], "target_parameters": both}),
        "downs": ("Qwen3Moe", experts, {"target_modules": ["lm_head"], "target_parameters": both[1:]}),
        "router": ("Qwen3Moe", experts, {"target_modules": [], "target_parameters": ["gate.weight"]}),
        "square experts": ("Qwen3Moe", square, {"target_modules": [], "target_parameters": both}),
        "mixtral": ("Mixtral", {**base, "num_local_experts": 4}, {"target_modules": [], "target_parameters": both, "use_rslora": True}),
        "interleaved experts": ("GptOss", oss, {"target_modules": ["o_proj"], "target_parameters": both}),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # it says what it stores besides
@pytest.mark.parametrize("case", _cases())
def test_files_that_peft_writes_give_its_logits(
    make_llm: MakeLLM, tmp_path: Path, case: str
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    family, options, settings = _cases()[case]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**options)
    base = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    base.set_attn_implementation("eager")
    base.save_pretrained(tmp_path / "model")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    _randomised(theirs, 2)
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    has_experts = any("experts" in each for each in settings.get("target_parameters", []))
    llm = make_llm(
        model=str(tmp_path / "model"), max_logprobs=-1, dtype="float32", lora_experts=has_experts
    )
    found = _logprobs(llm, LoRARequest("theirs", 1, str(tmp_path / "adapter")))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (_logprobs(llm, None) - expected).abs().max() > 1e-3
