"""Activated adapters (aLoRA): used from their invocation on, with the model's own keys and values before
it, bit for bit, and for no other request behind it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import MakeLLM, write_adapter

from quire import LLM, LoRARequest, SamplingParams, TokensPrompt
from quire.core.adapters import Adapter
from quire.core.content import content_ids
from quire.errors import InvalidParameterError
from quire.models.declaration import DecoderSpec

INVOCATION = [7, 9, 11]
_RNG = random.Random(9)
BEFORE = [_RNG.randrange(20, 199) for _ in range(41)]
BEHIND = [_RNG.randrange(20, 199) for _ in range(6)]
PROMPT = [*BEFORE, *INVOCATION, *BEHIND]


@pytest.fixture
def adapters(spec: DecoderSpec, tmp_path: Path) -> list[LoRARequest]:
    """Two with the same invocation, and one that is used for all tokens."""
    settings: list[dict[str, Any]] = [{"alora_invocation_tokens": INVOCATION}] * 2 + [{}]
    return [
        LoRARequest(
            f"adapter-{number}",
            number + 1,
            str(write_adapter(tmp_path / str(number), spec, seed=number, strength=1.5, **each)),
        )
        for number, each in enumerate(settings)
    ]


def _answer(
    llm: LLM, prompt: list[int], adapter: LoRARequest | None, **params: Any
) -> tuple[Any, ...]:
    given = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 5, **params}
    [output] = llm.generate(
        TokensPrompt(prompt_token_ids=prompt),
        SamplingParams(**given),
        use_tqdm=False,
        lora_request=adapter,
    )
    assert output.error is None
    [answer] = output.outputs
    return tuple(answer.token_ids), answer.logprobs, output.num_cached_tokens


def test_what_the_model_computed_before_the_invocation_is_used_and_nothing_behind_it(
    make_llm: MakeLLM, adapters: list[LoRARequest]
) -> None:
    llm = make_llm(block_size=8)
    cold = {
        number: _answer(make_llm(block_size=8), PROMPT, adapter)
        for number, adapter in enumerate([*adapters[:2], None])
    }
    assert len({each[0] for each in cold.values()}) == 3 and not any(c[2] for c in cold.values())
    _answer(llm, BEFORE, None)
    for number, adapter in enumerate(adapters[:2]):
        tokens, logprobs, num_cached = _answer(llm, PROMPT, adapter)
        assert (tokens, logprobs) == cold[number][:2]
        assert num_cached == len(BEFORE), "to the token, and none of another adapter's"
    tokens, logprobs, num_cached = _answer(llm, PROMPT, None)
    assert (tokens, logprobs, num_cached) == (*cold[2][:2], len(BEFORE))
    tokens, logprobs, num_cached = _answer(llm, PROMPT, adapters[0])
    assert (tokens, logprobs) == cold[0][:2] and num_cached == len(PROMPT) - 1, "its own"
    assert _answer(llm, PROMPT, adapters[2])[2] == 0, "one that is used for all tokens"


@pytest.mark.slow_except("*max_num_batched_tokens*")
@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 9, "max_num_seqs": 9}, {"enable_prefix_caching": False},
    {"block_size": 4}, {"enable_chunked_prefill": False}, {"dtype": "bfloat16"},
    {"kernels": "reference"},
], ids=str)  # fmt: skip
def test_no_bit_depends_on_the_batch(
    make_llm: MakeLLM, adapters: list[LoRARequest], options: dict[str, Any]
) -> None:
    own = {name: options[name] for name in ("dtype", "kernels") if name in options}
    mixed = [adapters[0], None, adapters[1], adapters[2], adapters[0]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
    prompts = [TokensPrompt(prompt_token_ids=PROMPT)] * len(mixed)
    together = make_llm(**options).generate(prompts, params, use_tqdm=False, lora_request=mixed)
    for adapter, output in zip(mixed, together, strict=True):
        alone = _answer(make_llm(**own, num_threads=2), PROMPT, adapter)
        assert (tuple(output.outputs[0].token_ids), output.outputs[0].logprobs) == alone[:2]


def test_the_last_invocation_counts_and_a_prompt_without_one_is_refused(
    make_llm: MakeLLM, adapters: list[LoRARequest]
) -> None:
    llm = make_llm()
    twice = [*INVOCATION, *PROMPT]
    _answer(llm, twice[: len(INVOCATION) + len(BEFORE)], None)
    assert _answer(llm, twice, adapters[0])[2] == len(INVOCATION) + len(BEFORE)
    with pytest.raises(
        InvalidParameterError, match=r"lacks the tokens that activate.*\[7, 9, 11\]"
    ):
        _answer(llm, BEFORE, adapters[0])


def test_an_invocation_beyond_the_vocabulary_is_refused(
    make_llm: MakeLLM, spec: DecoderSpec, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", spec, alora_invocation_tokens=[5, 199])
    with pytest.raises(InvalidParameterError, match="has 199, and the model has 199 tokens"):
        _answer(make_llm(), PROMPT, LoRARequest("a", 1, str(folder)))


def test_what_stands_behind_an_invocation_is_told_apart_and_nothing_is_lost() -> None:
    one, other = Adapter("01" * 32, "", (5,)), Adapter("02" * 32, "", (5,))
    tokens = [3, 5, *range(6, 20)]
    assert one.start_in([5, 3, 5, 4]) == 2 and one.start_in([3]) is None
    assert Adapter("01" * 32, "").start_in([3]) == 0
    told = [each.content_at(1, content) for each in (one, other) for content in (5, 6)]
    assert len({each.digest for each in told}) == 4, "adapter and token both count"
    found = content_ids(tokens, told[:1])
    assert found is not None and found[1] < -(2**31)
    assert (found[0], *found[2:]) == (tokens[0], *tokens[2:]), "tokens still count"


@pytest.mark.slow
@pytest.mark.parametrize("behind", [0, 6])
def test_logits_equal_those_of_peft(
    make_llm: MakeLLM, model: Path, adapters: list[LoRARequest], behind: int
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    prompt = [*BEFORE, *INVOCATION, *BEHIND[:behind]]
    _, rows, _ = _answer(make_llm(max_logprobs=-1), prompt, adapters[0], max_tokens=1, logprobs=-1)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    theirs = peft.PeftModel.from_pretrained(base, adapters[0].lora_path).eval()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    found = torch.tensor([rows[0][token_id].logprob for token_id in range(len(expected))])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
