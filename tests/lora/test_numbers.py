"""What is computed with adapters: merged weights, PEFT's own, and no bit that depends on the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, TINY, MakeLLM, merged, write_adapter, write_model
from safetensors.torch import load_file, save_file

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams, TokensPrompt
from quire.kernels import cpu
from quire.models.declaration import DecoderSpec
from quire.outputs import RequestOutput

RANKS = (1, 2, 4, 8, 16, 64, 128, 256)
PROMPT = random.Random(3).choices(range(3, 199), k=21)
IS_NATIVE = not cpu.reasons_against("cpu", torch.float32)
BACK_ENDS = ["reference", *(["cpu"] if IS_NATIVE else [])]


def _write_adapters(folder: Path, spec: DecoderSpec) -> list[LoRARequest]:
    """Eight adapters of all kinds of settings, so strong that none of them could be left out."""
    settings: list[dict[str, Any]] = [
        {},
        {"use_rslora": True},
        {"targets": ("q_proj", "v_proj")},
        {"targets": ("gate_proj",)},
        {"rank_pattern": {"q_proj": 3, "model.layers.1.mlp.down_proj": 7}},
        {"alpha_pattern": {"layers.0.self_attn.o_proj": 5, "up_proj": 40.5}},
        {"targets": ("o_proj", "down_proj", "k_proj")},
        {"dtype": torch.bfloat16},
    ]
    found = []
    for number, (rank, each) in enumerate(zip(RANKS, settings, strict=True)):
        path = write_adapter(folder / str(number), spec, rank=rank, seed=number, **each)
        found.append(LoRARequest(f"adapter-{number}", number + 1, str(path)))
    return found


def _answers(llm: LLM, adapters: list[LoRARequest | None], **params: Any) -> list[RequestOutput]:
    given = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 10}
    prompts = [TokensPrompt(prompt_token_ids=PROMPT)] * len(adapters)
    sampling = SamplingParams(**{**given, "prompt_logprobs": 3, **params})
    return llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)


def _numbers(output: RequestOutput) -> tuple[Any, ...]:
    assert output.error is None
    [answer] = output.outputs
    return answer.token_ids, answer.logprobs, output.prompt_logprobs


def _merged_answer(make_llm: MakeLLM, model: Path, folder: Path, **options: Any) -> RequestOutput:
    """Of the model whose weights hold the adapter, without any."""
    target = folder.parent / f"{folder.name}-merged"
    target.mkdir(exist_ok=True)
    save_file(merged(load_file(model / "model.safetensors"), folder), target / "model.safetensors")
    (target / "config.json").write_text((model / "config.json").read_text())
    [output] = _answers(make_llm(model=str(target), enable_lora=False, **options), [None])
    return output


def _close(found: RequestOutput, expected: RequestOutput) -> None:
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    left, right = found.outputs[0].logprobs, expected.outputs[0].logprobs
    assert left is not None and right is not None
    for mine, theirs in zip(left, right, strict=True):
        for token_id in mine.keys() & theirs.keys():
            assert mine[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=2e-4)
        assert len(mine.keys() & theirs.keys()) >= 9


@pytest.mark.slow_except("cpu")
@pytest.mark.parametrize("kernels", BACK_ENDS)
def test_eight_adapters_in_one_batch_equal_merged_weights(
    make_llm: MakeLLM, model: Path, spec: DecoderSpec, tmp_path: Path, kernels: str
) -> None:
    adapters = _write_adapters(tmp_path, spec)
    found = _answers(make_llm(kernels=kernels), [*adapters, None])
    assert len({tuple(each.outputs[0].token_ids) for each in found}) >= 7
    assert [each.lora_request for each in found] == [*adapters, None]
    assert [each.outputs[0].lora_request for each in found] == [*adapters, None]
    for adapter, output in zip(adapters, found, strict=False):
        _close(output, _merged_answer(make_llm, model, Path(adapter.lora_path), kernels=kernels))
    [base] = _answers(make_llm(enable_lora=False, kernels=kernels), [None])
    assert _numbers(found[-1]) == _numbers(base)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    ],
    ids=["phi3", "qwen2", "qwen3"],
)
def test_families_with_fused_weights_biases_and_head_norms_equal_merged_weights(
    make_llm: MakeLLM, tmp_path: Path, config: dict[str, Any]
) -> None:
    spec = write_model(tmp_path / "model", {**TINY, **config})
    targets = ("qkv_proj", "gate_up_proj", "o_proj") if config["model_type"] == "phi3" else ALL
    folder = write_adapter(tmp_path / "adapter", spec, targets=targets)
    adapter = LoRARequest("adapter", 1, str(folder))
    found, base = _answers(make_llm(model=str(tmp_path / "model")), [adapter, None])
    assert found.outputs[0].token_ids != base.outputs[0].token_ids
    _close(found, _merged_answer(make_llm, tmp_path / "model", folder))


@pytest.mark.slow
def test_logits_equal_those_of_peft_unmerged(
    make_llm: MakeLLM, model: Path, spec: DecoderSpec, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    adapters = _write_adapters(tmp_path, spec)
    outputs = _answers(make_llm(max_logprobs=-1), [*adapters], max_tokens=1, logprobs=-1)
    for adapter, output in zip(adapters, outputs, strict=True):
        base = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        theirs = peft.PeftModel.from_pretrained(base, adapter.lora_path).eval()
        with torch.no_grad():
            expected = theirs(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
        [row] = output.outputs[0].logprobs or []
        found = torch.tensor([row[token_id].logprob for token_id in range(len(expected))])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow_except("bfloat16-int8")
@pytest.mark.parametrize("options", [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "float32", "quantization": "int4"},
], ids=lambda options: "-".join(options.values()))  # fmt: skip
def test_no_bit_depends_on_the_batch_nor_on_adapters_beside_it(
    make_llm: MakeLLM, spec: DecoderSpec, tmp_path: Path, options: dict[str, str]
) -> None:
    adapters = _write_adapters(tmp_path, spec)
    mixed: list[LoRARequest | None] = [adapters[0], None, *adapters[1:], None, adapters[0]]
    together = _answers(make_llm(**options), mixed)
    chunked = _answers(make_llm(**options, max_num_batched_tokens=9, max_num_seqs=9), mixed)
    alone = make_llm(**options, enable_prefix_caching=False, max_loras=1, num_threads=2)
    for adapter, whole, parts in zip(mixed, together, chunked, strict=True):
        [expected] = _answers(alone, [adapter])
        assert _numbers(whole) == _numbers(expected) == _numbers(parts)
    [plain] = _answers(make_llm(**options, enable_lora=False), [None])
    assert _numbers(together[1]) == _numbers(plain) == _numbers(together[-2])


def test_prompts_so_long_that_few_tokens_are_wanted_keep_their_bits(
    make_llm: MakeLLM, spec: DecoderSpec, tmp_path: Path
) -> None:
    adapters: list[LoRARequest | None] = [*_write_adapters(tmp_path, spec)[:3], None]
    whole = _answers(make_llm(), adapters, prompt_logprobs=None)
    every = _answers(make_llm(), adapters)
    for left, right in zip(whole, every, strict=True):
        assert _numbers(left)[:2] == _numbers(right)[:2]


@pytest.mark.slow
def test_native_programs_give_the_bits_of_their_kernels_one_by_one(
    make_llm: MakeLLM, spec: DecoderSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not IS_NATIVE:
        pytest.skip("there are no native kernels")
    from quire.kernels.cpu.kernels import CpuKernels
    from quire.kernels.interpreter import Interpreter
    from quire.program.passes import select_wanted

    adapters: list[LoRARequest | None] = [*_write_adapters(tmp_path, spec), None]
    found = {dtype: _answers(make_llm(dtype=dtype), adapters) for dtype in ("float32", "bfloat16")}

    def one_by_one(self: Any, program: Any, weights: Any) -> Interpreter:
        return Interpreter(program, select_wanted(program, 16), weights, self)

    monkeypatch.setattr(CpuKernels, "compile", one_by_one)
    for dtype, outputs in found.items():
        expected = _answers(make_llm(dtype=dtype), adapters)
        assert list(map(_numbers, outputs)) == list(map(_numbers, expected))


def test_sequences_that_fork_and_beams_use_their_requests_adapter(
    make_llm: MakeLLM, model: Path, spec: DecoderSpec, tmp_path: Path
) -> None:
    adapter = _write_adapters(tmp_path, spec)[3]
    llm = make_llm()
    several = _answers(llm, [adapter], n=3, temperature=0.9, seed=7, prompt_logprobs=None)
    alone = make_llm(enable_prefix_caching=False)
    again = _answers(alone, [adapter], n=3, temperature=0.9, seed=7, prompt_logprobs=None)
    assert [each.token_ids for each in several[0].outputs] == [
        each.token_ids for each in again[0].outputs
    ]
    beams = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    prompt = [TokensPrompt(prompt_token_ids=PROMPT)]
    [with_adapter] = llm.beam_search(prompt, beams, lora_request=adapter)
    [without] = llm.beam_search(prompt, beams)
    assert with_adapter.sequences[0].tokens != without.sequences[0].tokens


def test_kv_is_shared_within_a_version_and_never_across(
    make_llm: MakeLLM, spec: DecoderSpec, tmp_path: Path
) -> None:
    first, second = _write_adapters(tmp_path, spec)[:2]
    llm = make_llm()
    for adapter in (None, first, second):
        [cold] = _answers(llm, [adapter], prompt_logprobs=None)
        [warm] = _answers(llm, [adapter], prompt_logprobs=None)
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 20)
        assert _numbers(cold) == _numbers(warm)
